"""The systems that are compared: LEX, the models a user would pick instead, and the floor under all of them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import psutil
import torch
from settings import Settings
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    Cache,
    DynamicCache,
    GPTNeoXConfig,
    LlamaConfig,
    LlamaModel,
    MistralConfig,
    PreTrainedConfig,
)
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast

from lex_hf import LexCache, LexConfig, LexModel, blockwise
from lex_hf.model.masking_lex import BlockwisePattern
from lex_hf.model.modeling_lex import CHUNK

_ENDLESS = 2**20  # no model is to end before the benchmark does


class DenseMaskBCA(nn.Module):
    """Blockwise causal attention as it can be had without LEX: Llama, its sliding cache of `l`, and a mask.

    The mask over all queries and keys is made by transformers' public function, once for each forward pass.
    """

    def __init__(self, model: LlamaModel, block: int) -> None:
        super().__init__()
        self.model = model
        self.block = block

    @property
    def config(self) -> PreTrainedConfig:
        """Configuration of the model inside."""
        return self.model.config

    def mask(self, inputs_embeds: Tensor, past_key_values: Cache | None) -> Tensor | None:
        """Return which keys each new token sees, `(1, 1, query, key)`."""
        block = self.block

        def in_reach(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return query // block - key // block <= 1

        return create_causal_mask(self.config, inputs_embeds, None, past_key_values, and_mask_function=in_reach)

    def forward(self, inputs_embeds: Tensor, past_key_values: Cache | None = None, **kwargs: Any) -> Any:
        """Read `(batch, sequence, hidden_size)`."""
        mask = self.mask(inputs_embeds, past_key_values)
        return self.model(inputs_embeds=inputs_embeds, attention_mask=mask, past_key_values=past_key_values, **kwargs)


class LinearLayers(nn.Module):
    """The floor: the linear layers, norms and activations of a model, without its attention.

    Queries and keys are computed and thrown away; values go straight to the output projection. LEX and Llama call all
    of them by the same names.

    Args:
        model: The model.
        chunk: Number of tokens that it reads at once on a CPU; `None` for all.
    """

    def __init__(self, model: LexModel | LlamaModel, chunk: int | None) -> None:
        super().__init__()
        self.layers, self.norm, self.chunk = model.layers, model.norm, chunk

    def forward(self, inputs_embeds: Tensor, **kwargs: Any) -> BaseModelOutputWithPast:
        """Map `(batch, sequence, hidden_size)` to the same shape."""
        chunk = self.chunk if inputs_embeds.device.type == "cpu" and self.chunk else inputs_embeds.shape[1]
        states = [self._read(part) for part in inputs_embeds.split(chunk, dim=1)]
        return BaseModelOutputWithPast(last_hidden_state=states[0] if len(states) == 1 else torch.cat(states, dim=1))

    def _read(self, hidden_states: Tensor) -> Tensor:
        for layer in cast("list[Any]", self.layers):
            attention, states = layer.self_attn, layer.input_layernorm(hidden_states)
            attention.q_proj(states)
            attention.k_proj(states)
            hidden_states = hidden_states + attention.o_proj(attention.v_proj(states))
            hidden_states = hidden_states + layer.mlp(layer.post_attention_layernorm(hidden_states))
        return cast("Tensor", self.norm(hidden_states))


@dataclass(frozen=True)
class System:
    """One row of every table.

    Attributes:
        description: What it is, in a few words.
        build: Makes the model, without a head, with random weights.
        keys: Number of keys that the new token of a text meets, itself included; from the tokens read before it.
        mask_bytes: Memory for each pair of a query and a key, where a mask over all of them is made: for booleans, the
            numbers that an attention function makes of them, and what the mask is computed from.
        has_window: Whether it is the peer with the window of LEX, which may take longer than the others.
    """

    description: str
    build: Callable[[Settings], nn.Module]
    keys: Callable[[Settings, int], int]
    mask_bytes: int = 0
    has_window: bool = False


def lex_config(settings: Settings, **fields: Any) -> LexConfig:
    """The configuration of LEX; `fields` are added."""
    return LexConfig(
        **_shape(settings),
        intermediate_size=settings.intermediate_size,
        training_length=settings.training_length,
        bos_token_id=settings.vocab_size - 1,
        eos_token_id=settings.vocab_size - 1,
        **fields,
    )


def random_model(settings: Settings, config: PreTrainedConfig, kind: Any = AutoModel) -> Any:
    """Make a model with random weights, in evaluation mode; `kind` is the Auto class that gives it a head, or none."""
    with torch.device(settings.device):
        return kind.from_config(config, dtype=settings.torch_dtype, attn_implementation="sdpa").eval()


def _lex(settings: Settings) -> nn.Module:
    return random_model(settings, lex_config(settings))


def _without_positions(settings: Settings) -> nn.Module:
    return random_model(settings, lex_config(settings, position_embedding_type="none"))


def _linear(settings: Settings) -> nn.Module:
    return LinearLayers(random_model(settings, lex_config(settings)), CHUNK)


def _linear_llama(settings: Settings) -> nn.Module:
    return LinearLayers(_llama(settings), None)


def _gpt_neox(settings: Settings) -> nn.Module:
    config = GPTNeoXConfig(
        **_shape(settings), intermediate_size=settings.intermediate_size, max_position_embeddings=_ENDLESS
    )
    return random_model(settings, config)


def _llama(settings: Settings, **fields: Any) -> Any:
    return random_model(settings, LlamaConfig(**_gated_shape(settings), **fields))


def _blockwise_llama(settings: Settings) -> nn.Module:
    # What makes it blockwise compares logits, so it needs a head for a while.
    whole = random_model(settings, LlamaConfig(**_gated_shape(settings)), AutoModelForCausalLM)
    return blockwise(whole, settings.training_length).model


def _mistral(settings: Settings) -> nn.Module:
    config = MistralConfig(**_gated_shape(settings), sliding_window=settings.training_length)
    return random_model(settings, config)


def _dense_mask(settings: Settings) -> nn.Module:
    window = {
        "layer_types": ["sliding_attention"] * settings.layers,
        "sliding_window": settings.training_length,
    }
    return DenseMaskBCA(_llama(settings, **window), settings.block)


def _shape(settings: Settings) -> dict[str, Any]:
    return {
        "vocab_size": settings.vocab_size,
        "hidden_size": settings.hidden_size,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": settings.num_heads,
    }


def _gated_shape(settings: Settings) -> dict[str, Any]:
    return {
        **_shape(settings),
        "num_key_value_heads": settings.num_heads,
        "intermediate_size": settings.gated_intermediate_size,
        "max_position_embeddings": _ENDLESS,
    }


def _all_keys(settings: Settings, read: int) -> int:
    return read + 1


def _keys_in_window(settings: Settings, read: int) -> int:
    return min(read + 1, settings.training_length)


def _keys_in_pair(settings: Settings, read: int) -> int:
    return BlockwisePattern(settings.block).slots_in_use(read + 1)


def _no_keys(settings: Settings, read: int) -> int:
    return 0


SYSTEMS: dict[str, System] = {
    "lex": System("LEX: xPos and blockwise causal attention", _lex, _keys_in_pair),
    "gpt_neox": System("transformers GPT-NeoX, full attention", _gpt_neox, _all_keys),
    "llama": System("transformers Llama, full attention", _llama, _all_keys),
    "blockwise_llama": System("transformers Llama, made blockwise by lex_hf", _blockwise_llama, _keys_in_pair),
    "mistral": System(
        "transformers Mistral, sliding window of l", _mistral, _keys_in_window, mask_bytes=1 + 4, has_window=True
    ),
    "dense_mask": System(
        "transformers Llama, blockwise causal by a mask, sliding cache of l",
        _dense_mask,
        _keys_in_window,
        mask_bytes=1 + 4 + 2 * 8,
    ),
    "linear": System("the linear layers of LEX alone, the floor", _linear, _no_keys),
    "linear_llama": System("the linear layers of Llama alone, the floor of blockwise_llama", _linear_llama, _no_keys),
}
WITHOUT_POSITIONS = System("LEX with position_embedding_type none", _without_positions, _keys_in_pair)
IN_BLOCKS = ("lex", "blockwise_llama")
FLOORS = ("linear", "linear_llama")
OWN = (*IN_BLOCKS, *FLOORS)  # never left out


def new_cache(model: Any) -> Cache | None:
    """Make the cache that the model itself would make; the linear layers have none.

    A model that was made blockwise gives the `DynamicCache` layers of its own before it reads anything into it.
    """
    if isinstance(model, LinearLayers):
        return None
    return LexCache(model.config) if isinstance(model, LexModel) else DynamicCache(config=model.config)


def held_bytes(cache: Cache | None) -> int | None:
    """Bytes of memory that hold the keys and values of a cache, in use or not; `None` without a cache."""
    if cache is None:
        return None
    return sum(states.untyped_storage().nbytes() for layer in cache.layers for states in (layer.keys, layer.values))


def linear_weights(model: nn.Module) -> int:
    """Count the numbers in the matrices of all linear layers: each is one multiplication and addition per token."""
    return sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))


def weight_bytes(model: nn.Module) -> int:
    """Count the bytes of all weights that every token needs, which is all but embeddings."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    return sum(weight.nbytes for weight in model.parameters() if id(weight) not in tables)


def cache_bytes(settings: Settings, keys: float) -> float:
    """Bytes of the keys and values of so many tokens in all layers."""
    return 2 * settings.layers * keys * settings.hidden_size * settings.torch_dtype.itemsize


def attention_flops(settings: Settings, keys: float) -> float:
    """Floating-point operations of one token's attention to so many keys, in all layers."""
    return 4 * settings.layers * keys * settings.hidden_size


def free_memory(settings: Settings) -> int:
    """Bytes of memory that nobody uses now."""
    return psutil.virtual_memory().available if settings.device == "cpu" else torch.cuda.mem_get_info()[0]


def why_not(settings: Settings, system: System, length: int, earlier: dict[int, float]) -> str | None:
    """Say why a peer does not prefill `length` tokens; `None` if it does.

    Args:
        settings: Settings.
        system: The peer.
        length: Tokens.
        earlier: Seconds it took at shorter lengths.
    """
    mask = length**2 * system.mask_bytes
    if mask > free_memory(settings) / 2:
        return f"its mask would take {mask / 2**30:.0f} GiB"
    limit = settings.window_call_limit if system.has_window else settings.call_limit
    if earlier and (expected := extrapolated(earlier, length)) > limit:
        return f"one call would take about {expected:.0f} s"
    return None


def extrapolated(seconds: dict[int, float], length: int) -> float:
    """Continue times at several lengths, at least one, to a larger length.

    Times are a·n + b·n² through the last two lengths; after a single one, b = 0.
    """
    (*_, (before, early), (last, late)) = [(0, 0.0), *sorted(seconds.items())]
    if before == 0:
        return late / last * length
    quadratic = max(0.0, (late / last - early / before) / (last - before))
    return length * (late / last + quadratic * (length - last))
