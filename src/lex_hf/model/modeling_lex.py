"""The LEX Transformer: GPT-medium's pre-LayerNorm decoder with xPos and blockwise causal attention."""

import os
from typing import Any, Unpack

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
)
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import TransformersKwargs, can_return_tuple, logging
from transformers.utils.output_capturing import capture_outputs

# Every file is imported here, in this form: older versions of transformers copy only what they find so in this file.
from .attention_lex import Fold, Planner, Step
from .batch_lex import PACKED, Batch
from .biases_lex import BiasScheme as BiasScheme
from .cache_layer_lex import LexCacheLayer
from .cache_lex import LexCache
from .configuration_lex import LexConfig
from .fields_lex import require as require
from .folding_lex import Turn as Turn
from .functions_lex import AttentionFunction
from .generation_lex import LexGenerationMixin
from .layers_lex import LexAttention, LexDecoderLayer
from .linear_lex import LexLinear, suits_parts
from .loss_lex import chunked_causal_loss
from .masking_lex import FullPattern
from .positions_lex import make_schemes
from .rotation_lex import Rotation as Rotation
from .scheme_lex import PositionScheme
from .slots_lex import append as append
from .versions_lex import record_past as record_past

logger = logging.get_logger(__name__)

CHUNK = 2048  # tokens of a batch that a layer reads at once, where it reads a long text in pieces


class LexPreTrainedModel(PreTrainedModel):
    """Base of all LEX models: configuration, initialisation, and the features of transformers that they support."""

    config: LexConfig
    config_class = LexConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["LexDecoderLayer"]  # noqa: RUF012 - transformers declares these so
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = {"hidden_states": LexDecoderLayer, "attentions": LexAttention}  # noqa: RUF012

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialise one module."""
        super()._init_weights(module)
        if isinstance(module, PositionScheme):
            module.reset_parameters()

    @classmethod
    def maybe_distribute_model(cls, model: Any, distributed_config: Any, mesh_manager: Any) -> Any:
        """Distribute a model that is being loaded, and note who shares out the heads, for biases on scores."""
        model = super().maybe_distribute_model(model, distributed_config, mesh_manager)
        if mesh_manager is not None and distributed_config.tp_size > 1:
            model.base_model.tp_mesh = mesh_manager.get_mesh("tp")
        return model

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        """Save weights, configuration, and the code that loading without lex_hf needs."""
        # transformers enters only the class that is saved; the others are in the same files.
        self.config.auto_map = dict(AUTO_MAP)
        return super().save_pretrained(save_directory, *args, **kwargs)


class LexModel(LexPreTrainedModel):
    """The decoder without a head.

    Attributes:
        tp_mesh: The processes that share out the heads of every layer, if it was loaded in tensor parallel.
    """

    _auto_class = "AutoModel"
    tp_mesh: Any = None

    def __init__(self, config: LexConfig) -> None:
        super().__init__(config)
        config.validate()
        _check_memory(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.positions = make_schemes(config)
        self.dropout = nn.Dropout(config.hidden_dropout)
        self.layers = nn.ModuleList([LexDecoderLayer(config, index) for index in range(config.num_hidden_layers)])
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],  # type: ignore[misc]
    ) -> BaseModelOutputWithPast:
        """Read tokens.

        Args:
            input_ids: Shape `(batch, sequence)`.
            attention_mask: 1 for real tokens and 0 for padding, wherever it stands; shape `(batch, sequence)`, or
                with a cache `(batch, tokens read + sequence)`. A row gives what it would give alone.
            position_ids: Shape `(batch or 1, sequence)`. Needed only for packed rows: where they do not go up by one,
                another document begins, which sees nothing of the one before. Where they start matters to sinusoidal
                and learned positions alone; blocks are always counted from the first token of a text.
            inputs_embeds: Shape `(batch, sequence, hidden_size)`, in place of `input_ids`.
            past_key_values: A [`LexCache`]; the tokens continue the text it holds.
            use_cache: Whether to return a cache; `config.use_cache` by default. Packed rows have none.
            kwargs: `output_hidden_states`, `output_attentions` (eager attention only), `return_dict`, and what the
                attention function takes. Attention weights have the shape `(batch, heads, sequence, keys)`: first the
                keys of the cache that are kept, oldest first, so that the newest of every row is the last of them,
                and then the new tokens by column. A row that keeps fewer keys than another begins with zeros. With a
                static cache and a single token, `keys` is the number of its slots.

        Raises:
            ValueError: For ids outside of the vocabulary, empty input, rows of padding only, or a mask, positions or
                a cache that do not fit.
        """
        hidden_states = self._embed(input_ids, inputs_embeds)
        patterns = self.config.patterns
        cache = LexCache.adopt(past_key_values, patterns, self.config.key_fields, len(self.layers))
        # A compiler cannot tell whether position_ids pack rows; if they do, that is in training.
        maybe_packed = torch.compiler.is_compiling() and self.training and position_ids is not None
        if self._uses_cache(use_cache) and cache is None and not maybe_packed:
            cache = LexCache(self.config)
        own = self._own_layers()
        layer = None if cache is None else cache.layers[own[0]]
        _check_rows(layer, hidden_states.shape[0])
        batch = Batch.of(hidden_states, attention_mask, position_ids, layer)
        if batch.document is not None:
            if past_key_values is not None:
                raise ValueError(PACKED)
            cache = None
        if self.scheme(0).adds_to_embeddings and own[0] == 0:
            positions = batch.positions_by_column(hidden_states.device) if position_ids is None else position_ids
            hidden_states = self.scheme(0).embed(hidden_states, positions)
        if kwargs.setdefault("output_attentions", self.config.output_attentions):
            self._warn_without_weights()
        function = AttentionFunction(self.config._attn_implementation)
        are_recorded = kwargs["output_attentions"] or kwargs.get(
            "output_hidden_states", self.config.output_hidden_states
        )
        kinds = list(zip(self.config.layer_patterns, self.config.layer_schemes, strict=True))
        first = {kinds[index]: index for index in reversed(own)}
        plans = self._plans(first, patterns, batch, cache, hidden_states, function, in_pieces=not are_recorded)
        hidden_states = self.dropout(hidden_states)
        for layer, kind in zip(self.layers, kinds, strict=False):
            hidden_states = self._read(layer, hidden_states, plans.get(kind, []), cache, function=function, **kwargs)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states), past_key_values=cache)

    def _read(
        self,
        layer: nn.Module,
        hidden_states: torch.Tensor,
        plans: list[Fold | Step],
        cache: Cache | None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Apply one layer, to the whole input or, without gradients, to one piece after the other, in place."""
        if len(plans) <= 1:
            plan = plans[0] if plans else None
            # Re-entrant checkpointing only sees gradients of arguments that are tensors; learned biases have some.
            masks = plan.masks if plan is not None and self.training and self.gradient_checkpointing else ()
            return layer(hidden_states, *masks, plan=plan, past_key_values=cache, **kwargs)
        # States of a whole long text would be new memory in every operation: more of it, and more time.
        cache = LexCache(self.config) if cache is None else cache
        for plan, piece in zip(plans, hidden_states.split([plan.batch.length for plan in plans], 1), strict=True):
            piece.copy_(layer(piece, plan=plan, past_key_values=cache, **kwargs))
        return hidden_states

    def _uses_cache(self, use_cache: bool | None) -> bool:
        """Return whether to make a cache; layers that are computed again for gradients would write to it again."""
        use_cache = self.config.use_cache if use_cache is None else use_cache
        if use_cache and self.training and self.gradient_checkpointing:
            if not torch.compiler.is_compiling():
                logger.warning_once("use_cache=True has no effect on training with gradient checkpointing.")
            return False
        return bool(use_cache)

    def _warn_without_weights(self) -> None:
        if self.config._attn_implementation != "eager" and not torch.compiler.is_compiling():
            logger.warning_once(
                f"output_attentions: no attention weights are returned, because {self.config._attn_implementation!r} "
                "attention has none. Load the model with attn_implementation='eager'."
            )

    def _embed(self, input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None) -> torch.Tensor:
        """Embed the tokens, after checking them."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Pass exactly one of input_ids and inputs_embeds.")
        given = inputs_embeds if input_ids is None else input_ids
        assert given is not None
        if 0 in given.shape[:2]:
            raise ValueError(f"The input is empty: its shape is {tuple(given.shape)}; pass at least one token.")
        if input_ids is None:
            return given.clone()  # layers may write to it
        # On an accelerator the check would wait for the device in every step; there the kernel itself asserts.
        if input_ids.device.type == "cpu" and not torch.compiler.is_compiling():
            _check_ids(input_ids, self.embed_tokens.num_embeddings)
        return self.embed_tokens(input_ids)

    def _own_layers(self) -> list[int]:
        """Indices of the layers that are here: in pipeline parallelism, others stand in for those elsewhere."""
        layers = zip(range(self.config.num_hidden_layers), self.layers, strict=False)
        return [index for index, layer in layers if not isinstance(layer, nn.Identity)]

    def _plans(
        self,
        first: dict[tuple[str, str], int],
        patterns: list[FullPattern],
        batch: Batch,
        cache: Cache | None,
        states: torch.Tensor,
        function: AttentionFunction,
        in_pieces: bool,
    ) -> dict[tuple[str, str], list[Fold | Step]]:
        """Plan this forward pass, once for each kind of layer: its pieces, of which most inputs are one.

        `first` gives the first layer with each attention pattern and position scheme, by their names, in whose cache
        it reads what came before.
        """
        in_pieces = in_pieces and suits_parts(states, CHUNK, self.layers) and not any(map(_is_observed, self.layers))
        plans: dict[tuple[str, str], list[Fold | Step]] = {}
        for kind, index in first.items():
            pattern, layer = patterns[index], None if cache is None else cache.layers[index]
            planner = Planner(
                pattern,
                self.scheme(index),
                function,
                states.dtype,
                states.device,
                self.tp_mesh,
                self.config.training_length if self.config.full_attention_log_scaling else None,
            )
            plans[kind] = planner.plan(_pieces(batch, layer, pattern.block) if in_pieces else [batch], layer)
        return plans

    def scheme(self, layer: int) -> PositionScheme:
        """Return the position scheme of a layer."""
        found = self.positions
        if isinstance(found, nn.ModuleDict):
            found = found[self.config.layer_schemes[layer]]
        assert isinstance(found, PositionScheme)
        return found

    @torch.no_grad()
    def position_bias(
        self, query_positions: torch.Tensor, key_positions: torch.Tensor, layer: int = 0
    ) -> torch.Tensor:
        """Return what the position scheme adds to attention scores.

        Args:
            query_positions: Positions of queries, shape `(query,)`.
            key_positions: Positions of keys, shape `(key,)`.
            layer: Index of the layer; they differ where `config.position_embedding_type` is a list.

        Returns:
            Shape `(heads, query, key)`; zeros for schemes that do not act on scores.

        Raises:
            ValueError: If it depends on the queries, not on their positions alone.
        """
        if self.scheme(layer).num_vectors is not None:
            raise ValueError(
                f"position_embedding_type = {self.config.layer_schemes[layer]!r} adds what depends on the queries: "
                "there is no bias by position. measure_resolution shows what scores are at each distance."
            )
        num_positions = int(max(query_positions.max(), key_positions.max())) + 1
        dtype = torch.promote_types(self.embed_tokens.weight.dtype, torch.float32)
        bias = self.scheme(layer)(query_positions, key_positions, num_positions, dtype)
        if bias is not None:
            return bias
        shape = (self.config.num_attention_heads, len(query_positions), len(key_positions))
        return torch.zeros(shape, dtype=dtype, device=query_positions.device)


def _check_memory(config: LexConfig) -> None:
    """Refuse sizes that this machine cannot hold, before memory is taken for them.

    Raises:
        ValueError: If the parameters take more than all memory of the machine.
    """
    if torch.empty(0).device.type != "cpu" or is_deepspeed_zero3_enabled() or not hasattr(os, "sysconf"):
        return
    needed = config.num_parameters() * torch.get_default_dtype().itemsize
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > there:
        raise ValueError(
            f"A model with hidden_size = {config.hidden_size}, num_hidden_layers = {config.num_hidden_layers}, "
            f"intermediate_size = {config.intermediate_size} and vocab_size = {config.vocab_size} takes "
            f"{needed / 2**30:,.1f} GiB, and this machine has {there / 2**30:.1f} GiB: choose smaller sizes, or make "
            "it on the device 'meta'."
        )


def _check_ids(input_ids: torch.Tensor, vocab_size: int) -> None:
    """Check that ids are in the vocabulary."""
    for extreme in (int(input_ids.min()), int(input_ids.max())):
        if not 0 <= extreme < vocab_size:
            raise ValueError(
                f"input_ids hold {extreme}; the vocabulary has ids 0 to {vocab_size - 1}. Does the tokenizer belong "
                "to this model?"
            )


def _is_observed(module: nn.Module) -> bool:
    """Return whether hooks of a user, who expects whole states, are registered on a module."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return any(getattr(hook, "__module__", "") != capture_outputs.__module__ for hook in hooks)


def _at(states: torch.Tensor, positions: int | torch.Tensor) -> torch.Tensor:
    """Return the states at the last positions, or at these of all rows or of each."""
    if isinstance(positions, int):
        return states[:, slice(-positions, None)]
    if positions.dim() == 2 and positions.dtype != torch.bool:
        return states.take_along_dim(positions[..., None], dim=1)
    return states[:, positions] if positions.dim() == 1 else states[positions]


def _check_rows(layer: LexCacheLayer | None, batch: int) -> None:
    """Check that a cache holds as many texts as the input has rows."""
    if layer is not None and layer.is_initialized and layer.batch_size != batch:
        raise ValueError(
            f"past_key_values holds {layer.batch_size} texts and the input has {batch} rows; they must be as many."
        )


def _pieces(batch: Batch, layer: LexCacheLayer | None, block: int | None) -> list[Batch]:
    """Divide a long text into pieces, where rows are alike and blocks bound what a piece needs of those before it."""
    if block is None or not isinstance(batch.before, int) or batch.real is not None or batch.document is not None:
        return [batch]
    if layer is not None and (layer.is_preallocated or not layer.takes_pieces):
        return [batch]
    # Whole blocks, so that all pieces but the first begin at one slot.
    return batch.pieces(max(CHUNK // batch.size // block, 1) * block)


class LexForCausalLM(LexGenerationMixin, LexPreTrainedModel):
    """The decoder with a language-modelling head."""

    _auto_class = "AutoModelForCausalLM"
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    _tp_plan = {"lm_head": "colwise_gather_output"}  # noqa: RUF012
    _pp_plan = {"lm_head": (["hidden_states"], ["logits"])}  # noqa: RUF012
    _fsdp_plan = {"lm_head": "keep_full_weight"}  # noqa: RUF012

    def __init__(self, config: LexConfig) -> None:
        super().__init__(config)
        self.model = LexModel(config)
        self.lm_head = LexLinear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Unpack[TransformersKwargs],  # type: ignore[misc]
    ) -> CausalLMOutputWithPast:
        """Predict the next token at every position.

        Args:
            input_ids: Shape `(batch, sequence)`.
            attention_mask: See [`LexModel.forward`], like all that is not listed here.
            position_ids: See [`LexModel.forward`].
            past_key_values: See [`LexModel.forward`].
            inputs_embeds: See [`LexModel.forward`].
            labels: Shape `(batch, sequence)`; the token that follows is the target, -100 is not counted.
            use_cache: See [`LexModel.forward`].
            logits_to_keep: Number of last positions to compute logits for (0: all), or the positions themselves, shape
                `(positions,)`, or by row `(batch, positions)`; or as booleans `(batch, sequence)`, of which the logits
                have the shape `(positions, vocab_size)`.
            kwargs: See [`LexModel.forward`]; `num_items_in_batch` goes to the loss.

        Returns:
            `loss` (mean cross entropy in nats per token, if `labels` are given), `logits` of shape
            `(batch, positions, vocab_size)` (`None` in training with `config.chunked_loss`), `past_key_values`,
            `hidden_states`, `attentions`.
        """
        outputs = self.model(
            input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            past_key_values=past_key_values,
            use_cache=use_cache,
            **kwargs,
        )
        loss, logits = None, None
        if labels is not None and self.training and self.config.chunked_loss:
            loss = chunked_causal_loss(outputs.last_hidden_state, self.lm_head.weight, labels, **kwargs)
        else:
            logits = self.lm_head(_at(outputs.last_hidden_state, logits_to_keep))
        if labels is not None and logits is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def position_bias(
        self, query_positions: torch.Tensor, key_positions: torch.Tensor, layer: int = 0
    ) -> torch.Tensor:
        """Return what the position scheme adds to attention scores; see [`LexModel.position_bias`]."""
        return self.model.position_bias(query_positions, key_positions, layer)


# The generic classes make their decoder by AutoModel, which does not know a model that was loaded as remote code; so
# each head makes its own.
class LexForSequenceClassification(GenericForSequenceClassification, LexPreTrainedModel):
    """The decoder with a linear head on the last token of each text: logits of shape `(batch, num_labels)`."""

    _auto_class = "AutoModelForSequenceClassification"

    def __init__(self, config: LexConfig) -> None:
        PreTrainedModel.__init__(self, config)
        self.num_labels = config.num_labels
        self.model = LexModel(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()


class LexForTokenClassification(GenericForTokenClassification, LexPreTrainedModel):
    """The decoder with a linear head on every token: logits of shape `(batch, sequence, num_labels)`."""

    _auto_class = "AutoModelForTokenClassification"

    def __init__(self, config: LexConfig) -> None:
        PreTrainedModel.__init__(self, config)
        self.num_labels = config.num_labels
        self.model = LexModel(config)
        self.dropout = nn.Dropout(config.hidden_dropout)
        self.score = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()


class LexForQuestionAnswering(GenericForQuestionAnswering, LexPreTrainedModel):
    """The decoder with a head for the start and the end of an answer: two logits for every token."""

    _auto_class = "AutoModelForQuestionAnswering"

    def __init__(self, config: LexConfig) -> None:
        PreTrainedModel.__init__(self, config)
        self.model = LexModel(config)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.post_init()


AUTO_MAP = {
    "AutoConfig": "configuration_lex.LexConfig",
    "AutoModel": "modeling_lex.LexModel",
    "AutoModelForCausalLM": "modeling_lex.LexForCausalLM",
    "AutoModelForSequenceClassification": "modeling_lex.LexForSequenceClassification",
    "AutoModelForTokenClassification": "modeling_lex.LexForTokenClassification",
    "AutoModelForQuestionAnswering": "modeling_lex.LexForQuestionAnswering",
}
