"""The LEX Transformer: GPT-medium's pre-LayerNorm decoder with xPos and blockwise causal attention."""

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Unpack

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
    GradientCheckpointingLayer,
)
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel, slice_logits_to_keep
from transformers.utils import TransformersKwargs, can_return_tuple, logging
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .batch_lex import (
    PACKED,
    Rows,
    as_tensor,
    check_mask,
    check_past,
    check_positions,
    check_unpacked,
    require,
)
from .cache_lex import LexCache
from .configuration_lex import LexConfig
from .folding_lex import CHUNK, AttentionPlan, ChunkedPlan, Fold, UniformPlan
from .linear_lex import LexLinear
from .loss_lex import chunked_causal_loss
from .positions_lex import SCHEMES, PositionScheme
from .static_cache_lex import LexStaticCache, static_plan, usable_cache

logger = logging.get_logger(__name__)

_MLP_TOKENS = 1024  # that a feed-forward layer takes at once, where it takes them in parts


def eager_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend by the textbook, and return the weights.

    Args:
        module: The attention module; tells whether dropout is on.
        query: Shape `(batch, heads, query, head_dim)`.
        key: Shape `(batch, heads, key, head_dim)`.
        value: As `key`.
        attention_mask: What is added to the scores, broadcastable to `(batch, heads, query, key)`, or `None`.
        scaling: Factor on the scores.
        dropout: Probability with which a weight is dropped.
        kwargs: Unused; part of transformers' interface.

    Returns:
        Outputs, shape `(batch, query, heads, head_dim)`, and weights, shape `(batch, heads, query, key)`.
    """
    scores = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    exact = torch.float64 if scores.dtype == torch.float64 else torch.float32
    weights = nn.functional.softmax(scores, dim=-1, dtype=exact).to(query.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights


class LexMLP(nn.Module):
    """The feed-forward layer."""

    def __init__(self, config: LexConfig) -> None:
        super().__init__()
        self.up_proj = LexLinear(config.hidden_size, config.intermediate_size)
        self.down_proj = LexLinear(config.intermediate_size, config.hidden_size)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Map `(batch, sequence, hidden_size)` to the same shape."""
        if not self._takes_parts(hidden_states):
            return self.down_proj(self.act_fn(self.up_proj(hidden_states)))
        # The widest states of all: of a long text they would be new memory in every layer, which takes time to map.
        output = torch.empty_like(hidden_states, memory_format=torch.contiguous_format)
        parts, places = (states.flatten(0, 1).split(_MLP_TOKENS) for states in (hidden_states, output))
        for part, place in zip(parts, places, strict=True):
            place.copy_(self.down_proj(self.act_fn(self.up_proj(part))))
        return output

    def _takes_parts(self, states: torch.Tensor) -> bool:
        """Whether to take the tokens in parts: many, on a CPU, without gradients, and the weights at hand."""
        if torch.compiler.is_compiling() or torch.is_grad_enabled():  # a compiler must not be asked for sizes
            return False
        is_here = states.device.type == self.up_proj.weight.device.type == "cpu"
        return is_here and states.shape[0] * states.shape[1] > _MLP_TOKENS


class LexAttention(nn.Module):
    """Multi-head attention along the plan of its pattern."""

    def __init__(self, config: LexConfig, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.scaling = self.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        self.is_causal = True
        self.q_proj = LexLinear(config.hidden_size, config.hidden_size)
        self.k_proj = LexLinear(config.hidden_size, config.hidden_size)
        self.v_proj = LexLinear(config.hidden_size, config.hidden_size)
        self.o_proj = LexLinear(config.hidden_size, config.hidden_size)

    def forward(
        self,
        hidden_states: torch.Tensor,
        plan: AttentionPlan,
        implementation: str,
        past_key_values: Cache | None = None,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend.

        Args:
            hidden_states: Shape `(batch, sequence, hidden_size)`.
            plan: The plan of this forward pass for the pattern of this layer.
            implementation: Name of the attention function; looking it up in the config of every layer takes time.
            past_key_values: The cache, or `None`.
            output_attentions: Whether to return weights (with eager attention only).
            kwargs: Passed on to the attention function.

        Returns:
            Shape `(batch, sequence, hidden_size)`, and weights, shape `(batch, heads, sequence, slots)`, or `None`.
        """
        batch, length, _ = hidden_states.shape
        shape, rows = (batch, length, -1, self.head_dim), plan.rows
        projections = (self.q_proj, self.k_proj, self.v_proj)
        query, key, value = (rows.align(project(hidden_states).view(shape).transpose(1, 2)) for project in projections)
        query, key = plan.turn(query, key)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx, plan)
        output, weights = plan.attend(self._function(implementation, kwargs), query, key, value, output_attentions)
        output = rows.restore(output)
        if weights is not None:
            # The output is made of the very weights that are returned, so that gradients reach them.
            weights, value = _by_column(rows.restore(weights), value, plan.key_order(value.shape[2]))
            output = weights @ value
        return self.o_proj(output.transpose(1, 2).reshape(batch, length, -1)), weights

    def _function(
        self, implementation: str, kwargs: dict[str, Any]
    ) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]]:
        """The attention function of that name in the form that plans call."""
        interface = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward)
        dropout = self.attention_dropout if self.training else 0.0

        def attend(
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            mask: torch.Tensor | None,
            causal: bool,
        ) -> tuple[torch.Tensor, torch.Tensor | None]:
            if implementation == "flex_attention" and mask is not None:
                # It takes what is added to scores under this name, and the mask without heads.
                kwargs["position_bias"] = mask.expand(*query.shape[:3], key.shape[2])
                mask = None
            output, weights = interface(
                self,
                query,
                key,
                value,
                mask,
                scaling=self.scaling,
                dropout=dropout,
                is_causal=causal,
                **kwargs,
            )
            # flex_attention returns log-sum-exps in this place.
            return output.transpose(1, 2), weights if weights is not None and weights.dim() == 4 else None

        return attend


def _by_column(
    weights: torch.Tensor, value: torch.Tensor, order: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Bring weights, `(batch, heads, query, slots)`, and values of slots into the order of keys that users see."""
    if order is None:
        return weights, value
    index = order.to(value.device)[:, None]
    return weights.take_along_dim(index[:, :, None], dim=3), value.take_along_dim(index[..., None], dim=2)


class LexDecoderLayer(GradientCheckpointingLayer):
    """A pre-LayerNorm decoder layer."""

    def __init__(self, config: LexConfig, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = LexAttention(config, layer_idx)
        self.mlp = LexMLP(config)
        self.input_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.post_attention_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(
        self,
        hidden_states: torch.Tensor,
        *masks: torch.Tensor | None,
        plan: AttentionPlan | ChunkedPlan,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Map `(batch, sequence, hidden_size)` to the same shape.

        Args:
            hidden_states: Shape `(batch, sequence, hidden_size)`.
            masks: If given, those of the plan.
            plan: The plan for the pattern of this layer. Attention and feed-forward layer are called once, or with
                a [`ChunkedPlan`] once for each chunk.
            kwargs: See [`LexAttention.forward`].
        """
        if isinstance(plan, ChunkedPlan):
            return self._read_chunks(hidden_states, plan, **kwargs)
        if masks and isinstance(plan, UniformPlan):
            plan = replace(plan, masks=masks)
        return self._read(hidden_states, plan, **kwargs)

    def _read_chunks(
        self, hidden_states: torch.Tensor, plan: ChunkedPlan, past_key_values: Cache | None = None, **kwargs: Any
    ) -> torch.Tensor:
        # States of a whole long text would be new memory in every operation: more of it, and more time.
        cache = LexCache(self.self_attn.config) if past_key_values is None else past_key_values
        output = torch.empty_like(hidden_states)
        chunks = zip(hidden_states.split(plan.chunk, 1), output.split(plan.chunk, 1), plan.plans, strict=True)
        for chunk, place, part in chunks:
            place.copy_(self._read(chunk, part, past_key_values=cache, **kwargs))
        return output

    def _read(self, hidden_states: torch.Tensor, plan: AttentionPlan, **kwargs: Any) -> torch.Tensor:
        attended, _ = self.self_attn(self.input_layernorm(hidden_states), plan, **kwargs)
        dropping = self.dropout.training  # a call that does nothing takes time, too
        hidden_states = hidden_states + (self.dropout(attended) if dropping else attended)
        transformed = self.mlp(self.post_attention_layernorm(hidden_states))
        return hidden_states + (self.dropout(transformed) if dropping else transformed)


class LexPreTrainedModel(PreTrainedModel):
    """What all LEX models share: configuration, initialisation, and what transformers may do with them."""

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
        self.positions = SCHEMES[config.position_embedding_type](config)
        self.dropout = nn.Dropout(config.hidden_dropout)
        self.layers = nn.ModuleList([LexDecoderLayer(config, index) for index in range(config.num_hidden_layers)])
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
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
        inputs_embeds = self._embed(input_ids, inputs_embeds)
        batch = inputs_embeds.shape[0]
        cache = usable_cache(past_key_values, self.config, len(self.layers))
        # A compiler cannot tell whether position_ids pack rows; if they do, that is in training.
        maybe_packed = torch.compiler.is_compiling() and self.training and position_ids is not None
        if use_cache and cache is None and not maybe_packed:
            cache = LexCache(self.config)
        own = self._own_layers()
        _check_cache(cache, own[0], batch)
        rows = self._rows(inputs_embeds, attention_mask, position_ids, cache, own[0])
        if rows.document is not None:
            if past_key_values is not None:
                raise ValueError(PACKED)
            cache = None
        if self.positions.adds_to_embeddings and own[0] == 0:
            inputs_embeds = self.positions.embed(
                inputs_embeds, self._positions(rows, cache, position_ids, inputs_embeds)
            )
        kwargs.setdefault("output_attentions", self.config.output_attentions)
        returns_weights = self.config._attn_implementation == "eager"
        if kwargs["output_attentions"] and not returns_weights and not torch.compiler.is_compiling():
            logger.warning_once(
                f"output_attentions: no attention weights are returned, because {self.config._attn_implementation!r} "
                "attention has none. Load the model with attn_implementation='eager'."
            )
        in_chunks = not kwargs["output_attentions"] and self._is_read_in_chunks(inputs_embeds)
        plans = self._plans(rows, cache, inputs_embeds, own, in_chunks)
        kwargs["implementation"] = self.config._attn_implementation
        hidden_states = self.dropout(inputs_embeds)
        for layer, pattern in zip(self.layers, self.config.layer_patterns, strict=False):
            plan = plans.get(pattern)
            # Re-entrant checkpointing only sees gradients of arguments that are tensors; learned biases have some.
            checkpointed = self.training and self.gradient_checkpointing
            masks = plan.masks if checkpointed and isinstance(plan, UniformPlan) else ()
            hidden_states = layer(hidden_states, *masks, plan=plan, past_key_values=cache, **kwargs)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states), past_key_values=cache)

    def _embed(self, input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None) -> torch.Tensor:
        """Embed the tokens, after checking them."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Pass exactly one of input_ids and inputs_embeds.")
        given = inputs_embeds if input_ids is None else input_ids
        assert given is not None
        if given.shape[0] == 0 or given.shape[1] == 0:
            raise ValueError(f"The input is empty: its shape is {tuple(given.shape)}; pass at least one token.")
        if input_ids is None:
            return given
        # On an accelerator the check would wait for the device in every step; there the kernel itself asserts.
        if input_ids.device.type == "cpu" and not torch.compiler.is_compiling():
            low, high = int(input_ids.min()), int(input_ids.max())
            if low < 0 or high >= self.embed_tokens.num_embeddings:
                raise ValueError(
                    f"input_ids hold {low if low < 0 else high}; the vocabulary has ids 0 to "
                    f"{self.embed_tokens.num_embeddings - 1}. Does the tokenizer belong to this model?"
                )
        return self.embed_tokens(input_ids)

    def _positions(
        self, rows: Rows, cache: Cache | None, position_ids: torch.Tensor | None, like: torch.Tensor
    ) -> torch.Tensor:
        """Absolute positions, for schemes that know them: those given, or counted from a text's first token."""
        if position_ids is not None:
            return position_ids
        before = torch.zeros(like.shape[0], dtype=torch.long, device=like.device)
        if cache is not None and cache.layers[0].is_initialized:
            before = as_tensor(cache.layers[0].lengths, like.device)
        return rows.positions(before, like.shape[1])

    def _rows(
        self,
        like: torch.Tensor,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        cache: Cache | None,
        first: int,
    ) -> Rows:
        """Check what describes the batch, and read its layout; `first` is the first layer that is here."""
        (batch, length, _), layer = like.shape, None if cache is None else cache.layers[first]
        # Guesses are taken back by number, so a compiler has to break its graph for a cache that records them.
        as_tensors = torch.compiler.is_compiling() and (layer is None or not layer.record_past)
        if cache is not None and not as_tensors and not cache.is_compileable:
            for each in cache.layers:
                each.settle()
        if position_ids is not None:
            check_positions(position_ids, batch, length)
        before = None if layer is None else layer.columns
        if attention_mask is not None:
            check_mask(attention_mask, batch, length, before if isinstance(before, int) else None)
            if layer is not None and layer.is_initialized and attention_mask.shape[1] > length:
                check_past(attention_mask[:, :-length], layer.lengths, layer.padding)
        if as_tensors and layer is not None:
            if attention_mask is None:
                attention_mask = torch.ones((batch, length), dtype=torch.bool, device=like.device)
            if position_ids is not None:
                check_unpacked(position_ids, attention_mask)
                position_ids = None
        rows = Rows.of(batch, length, attention_mask, position_ids, before, as_tensors)
        if layer is None and rows.real is not None:
            empty = rows.counts.index(0) if isinstance(rows.counts, list) and 0 in rows.counts else None
            which = "A row" if empty is None else f"Row {empty}"
            require(rows.real.any(dim=1).all(), f"{which} of attention_mask has no 1: a row needs at least one token.")
        return rows

    def _own_layers(self) -> list[int]:
        """Indices of the layers that are here: in pipeline parallelism, others stand in for those elsewhere."""
        layers = zip(range(self.config.num_hidden_layers), self.layers, strict=False)
        return [index for index, layer in layers if not isinstance(layer, nn.Identity)]

    def _plans(
        self, rows: Rows, cache: Cache | None, like: torch.Tensor, own: list[int], in_chunks: bool
    ) -> dict[str, AttentionPlan | ChunkedPlan]:
        """Plan this forward pass, once for each attention pattern in use."""
        patterns, length = self.config.layer_patterns, like.shape[1]
        first = {patterns[index]: index for index in reversed(own)}
        plans: dict[str, AttentionPlan | ChunkedPlan] = {}
        for pattern, index in first.items():
            block = self.config.attention_span(pattern)
            fold = Fold(pattern, block, self.positions, self.config._attn_implementation, self.tp_mesh)
            layer = None if cache is None else cache.layers[index]
            if layer is not None and layer.is_compileable:
                plans[pattern] = static_plan(fold, rows, layer, length, like)
                continue
            fills, most = ([], None) if layer is None else (layer.fills, layer.columns)
            if isinstance(rows.counts, torch.Tensor) and isinstance(fills, list) and fills:
                fills = as_tensor(fills, like.device)
            chunked = in_chunks and (layer is None or layer.takes_chunks)
            plan = fold.chunked_plan(rows, fills, length, like) if chunked else None
            plans[pattern] = plan or fold.plan(rows, fills, length, like, most)
        return plans

    def _is_read_in_chunks(self, states: torch.Tensor) -> bool:
        """Whether layers may read chunk by chunk: many tokens, on a CPU, without gradients, the weights at hand."""
        if torch.compiler.is_compiling() or torch.is_grad_enabled():  # a compiler must not be asked for sizes
            return False
        if states.device.type != "cpu" or states.shape[0] * states.shape[1] <= CHUNK:
            return False
        return all(weight.device.type == "cpu" for weight in self.layers.parameters())

    @torch.no_grad()
    def position_bias(self, query_positions: torch.Tensor, key_positions: torch.Tensor) -> torch.Tensor:
        """Return what the position scheme adds to attention scores.

        Args:
            query_positions: Positions of queries, shape `(query,)`.
            key_positions: Positions of keys, shape `(key,)`.

        Returns:
            Shape `(heads, query, key)`; zeros for schemes that do not act on scores.
        """
        num_positions = int(max(query_positions.max(), key_positions.max())) + 1
        dtype = torch.promote_types(self.embed_tokens.weight.dtype, torch.float32)
        bias = self.positions(query_positions, key_positions, num_positions, dtype)
        if bias is not None:
            return bias
        shape = (self.config.num_attention_heads, len(query_positions), len(key_positions))
        return torch.zeros(shape, dtype=dtype, device=query_positions.device)


def _check_memory(config: LexConfig) -> None:
    """Refuse sizes that this machine cannot hold, before memory is taken for them.

    Raises:
        ValueError: If the parameters take more than all memory of the machine.
    """
    if torch.get_default_device().type != "cpu" or is_deepspeed_zero3_enabled() or not hasattr(os, "sysconf"):
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


def _check_cache(cache: Cache | None, first: int, batch: int) -> None:
    rows = batch if cache is None or not cache.layers[first].is_initialized else cache.layers[first].batch_size
    if rows != batch:
        raise ValueError(f"past_key_values holds {rows} texts and the input has {batch} rows; they must be as many.")


class LexForCausalLM(LexPreTrainedModel, GenerationMixin):
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
            logits_to_keep: Number of last positions to compute logits for (0: all), or the positions themselves.
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
            logits = self.lm_head(slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep))
        if labels is not None and logits is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def position_bias(self, query_positions: torch.Tensor, key_positions: torch.Tensor) -> torch.Tensor:
        """Return what the position scheme adds to attention scores; see [`LexModel.position_bias`]."""
        return self.model.position_bias(query_positions, key_positions)

    def _prepare_cache_for_generation(
        self,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        """Give `generate` a LEX cache; caches it cannot replace are refused."""
        mask = model_kwargs.get("attention_mask")
        if mask is not None and not (empty := mask.any(dim=1)).all():
            row = int((~empty).nonzero()[0])
            raise ValueError(f"Row {row} of attention_mask has no 1: a prompt needs at least one token.")
        if generation_config.prefill_chunk_size is not None and model_kwargs.get("inputs_embeds") is not None:
            # transformers would read the ids instead; one pass gives the tokens that pieces would.
            logger.warning_once("prefill_chunk_size has no effect on inputs_embeds: they are read in one pass.")
            generation_config.prefill_chunk_size = None
        wanted = generation_config.cache_implementation or "dynamic"
        wanted = _DEPRECATED_CACHES.get(wanted, wanted)
        if wanted not in CACHE_IMPLEMENTATIONS:
            raise ValueError(
                f"cache_implementation={wanted!r} is not available: LEX generates with its own cache, which already "
                f"has a constant size. Use one of {CACHE_IMPLEMENTATIONS}, or leave it unset."
            )
        cache = model_kwargs.get("past_key_values")
        if cache is not None:
            super()._prepare_cache_for_generation(
                generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
            )
            model_kwargs["past_key_values"] = usable_cache(cache, self.config, len(self.model.layers))
        elif generation_config.use_cache is not False:
            length = max(max_cache_length, generation_config.max_cache_len or 0)
            model_kwargs["past_key_values"] = self._new_cache(wanted, length)
            if generation_config.is_assistant:  # its guesses are taken back
                model_kwargs["past_key_values"].activate_past_recording()

    def _new_cache(self, implementation: str, length: int) -> Cache:
        """Make a cache for `generate`; one of static length has the longest of all so far, so compilers meet one."""
        offloading = implementation.startswith("offloaded")
        if offloading and self.device.type == "cpu":
            raise ValueError(
                f"cache_implementation={implementation!r} moves the cache off an accelerator, and the model is on the "
                "CPU: leave cache_implementation unset, or use 'static'."
            )
        if not implementation.endswith("static"):
            return LexCache(self.config, offloading=offloading)
        self._previous_max_cache_length = max(length, getattr(self, "_previous_max_cache_length", 0))
        return LexStaticCache(self.config, self._previous_max_cache_length, offloading=offloading)

    @staticmethod
    def create_masks_for_generate(
        config: LexConfig,
        inputs_embeds: torch.Tensor,
        attention_mask: torch.Tensor | None,
        past_key_values: Cache | None = None,
        is_first_iteration: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor | None:
        """Keep of the mask what belongs to the new tokens: with a static cache, its shape must not change.

        Args:
            config: Configuration of the model.
            inputs_embeds: A tensor of shape `(batch, sequence, any)`.
            attention_mask: Shape `(batch, tokens read + sequence)`, or `None`.
            past_key_values: The static cache.
            is_first_iteration: Whether `generate` begins; later masks are made by itself.
            kwargs: Unused; part of transformers' interface.

        Raises:
            ValueError: If the mask does not fit what the cache has read.
        """
        if attention_mask is None:
            return None
        length = inputs_embeds.shape[1]
        for layer in past_key_values.layers if past_key_values is not None and is_first_iteration else ():
            if layer.is_initialized and attention_mask.shape[1] > length:
                check_past(attention_mask[:, :-length], layer.lengths, layer.padding)
                break
        return attention_mask[:, -length:]

    def get_compiled_call(self, compile_config: Any) -> Callable[..., Any]:
        """Return the forward pass, compiled for single tokens; longer inputs are laid out by their length, eagerly."""
        compiled = super().get_compiled_call(compile_config)

        def call(*args: Any, **kwargs: Any) -> Any:
            given = kwargs.get("input_ids") if kwargs.get("inputs_embeds") is None else kwargs["inputs_embeds"]
            is_step = given is not None and given.shape[1] == 1
            return (compiled if is_step else self)(*args, **kwargs)

        return call

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse paged caches.

        Raises:
            NotImplementedError: Always; says what to use.
        """
        raise NotImplementedError(
            "Continuous batching pages the cache, and a page knows no blocks of LEX. The cache of a LEX model has a "
            "constant size, so nothing is won by paging: call generate() with a left-padded batch."
        )


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


CACHE_IMPLEMENTATIONS = ("dynamic", "static", "offloaded", "offloaded_static")
# Names that transformers still takes for static caches.
_DEPRECATED_CACHES = {
    "sliding_window": "static",
    "hybrid": "static",
    "hybrid_chunked": "static",
    "offloaded_hybrid": "offloaded_static",
    "offloaded_hybrid_chunked": "offloaded_static",
}

AUTO_MAP = {
    "AutoConfig": "configuration_lex.LexConfig",
    "AutoModel": "modeling_lex.LexModel",
    "AutoModelForCausalLM": "modeling_lex.LexForCausalLM",
    "AutoModelForSequenceClassification": "modeling_lex.LexForSequenceClassification",
    "AutoModelForTokenClassification": "modeling_lex.LexForTokenClassification",
    "AutoModelForQuestionAnswering": "modeling_lex.LexForQuestionAnswering",
}
