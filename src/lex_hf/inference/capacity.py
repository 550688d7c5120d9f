"""Rows that a device holds, and the tokens per second that its bandwidth allows, computed from a configuration alone.

A model is built without storage. What a LEX model keeps of a text follows from its attention patterns; any other model
reads three tokens, also without storage, with transformers' own cache, whose layers then have the shapes that count.
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from lex_hf.errors import plain
from lex_hf.model.masking_lex import ENDLESS, FullPattern
from lex_hf.model.versions_lex import cache_classes
from lex_hf.rope.blockwise import pattern_of, training_length_of

LENGTHS = (8_192, 131_072, 1_048_576)  # tokens of a text, for caches that grow
SHARE = 0.9  # of the memory, for weights and caches
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}

HOW_IT_IS_COUNTED = (
    f"Weights and rows take {SHARE:.0%} of the memory; the rest is for activations and workspaces. A step writes one "
    "token in each row. It reads once the cache of each row and all weights, also those of experts that no token "
    "chose, and of parts for images or sound; of embeddings that are not the head as well, it reads next to nothing. "
    "Tokens per second are an upper bound: arithmetic, overhead of kernels and the reading of prompts are not counted."
)

_READ = 3  # tokens that a model reads without storage
_DUMMY = cache_classes("DummyLayer")  # of a layer that attends to what another one keeps, or to nothing
_COUNTED = cache_classes(
    "DynamicLayer",
    "DynamicSlidingWindowLayer",
    "LinearAttentionLayer",
    "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer",
)


@dataclass(frozen=True)
class Rows:
    """Rows of one cache."""

    tokens: int | None  # of the text in a row; `None` if any number takes as many bytes
    row_bytes: int
    rows: int  # that fit into the memory beside the weights
    tokens_per_second: float | None  # of all these rows together; `None` if none fits
    tokens_per_second_alone: float | None  # of one row; `None` if none fits


@dataclass(frozen=True)
class Capacity:
    """Bytes of a model and of its rows on one device, and the tokens per second that its bandwidth allows."""

    parameters: int
    dtype: str
    weights_bytes: int
    weights_read: int  # bytes of weights that a step reads
    device_memory: int  # bytes
    bandwidth: float  # bytes per second
    is_lex: bool
    attention: str | None  # patterns of the layers if some read in blocks, else `None`
    blocks: tuple[Rows, ...]  # with blocks or windows; empty if no layer has them
    full: tuple[Rows, ...]  # the same model with full attention, or as transformers has it, at each length

    @property
    def weights_fit(self) -> bool:
        """True if the weights leave memory for rows."""
        return self.weights_bytes < room(self.device_memory)

    def to_dict(self) -> dict[str, Any]:
        """Return all numbers, as JSON can hold them."""
        return asdict(self) | {"share_of_memory": SHARE, "method": HOW_IT_IS_COUNTED}


@dataclass(frozen=True)
class LayerBytes:
    """Bytes that a layer keeps of one row.

    Attributes:
        fixed: Bytes that do not depend on the text.
        token: Bytes of one token.
        limit: Most tokens that are kept; `None` for all.
    """

    fixed: int = 0
    token: int = 0
    limit: int | None = None

    def at(self, tokens: int) -> int:
        """Return the bytes of a text of so many tokens."""
        return self.fixed + self.token * (tokens if self.limit is None else min(tokens, self.limit))

    def in_blocks(self, pattern: FullPattern) -> "LayerBytes":
        """Return the bytes with two blocks, which are allocated with the first token, and the sinks as they came."""
        assert pattern.slots is not None
        return LayerBytes(self.fixed + self.token * (pattern.slots + pattern.sinks))


def room(device_memory: int) -> int:
    """Return the bytes of a device that weights and rows may take."""
    return int(device_memory * SHARE)


def capacity(
    config: Any,
    *,
    device_memory: int,
    bandwidth: float,
    dtype: str | torch.dtype | None = None,
    blockwise: int | Literal["auto"] | None = None,
    sinks: int = 0,
    lengths: Sequence[int] = LENGTHS,
    trust_remote_code: bool = False,
) -> Capacity:
    """Compute how many rows a device holds and the tokens per second that its bandwidth allows; no weights are needed.

    Args:
        config: Configuration of a causal language model, LEX or another one of transformers.
        device_memory: Bytes of the device.
        bandwidth: Bytes that it reads per second.
        dtype: Dtype of the weights and the cache, or its name; `None` or `"auto"` takes that of the configuration, or
            float32 if there is none.
        blockwise: Training length with which a model with rotary positions is made to read in blocks, in tokens;
            `"auto"` takes it from the configuration. Whether the model can is found out only when it is loaded, see
            [`lex_hf.blockwise`].
        sinks: Tokens at the start of a text that a model that reads in blocks sees from everywhere.
        lengths: Tokens of a text in each row, at which caches that grow are counted.
        trust_remote_code: Whether code that comes with the model may run.

    Raises:
        ValueError: If the memory or bandwidth is not positive, the dtype is unknown, the weights are quantised, the
            model cannot be made from its configuration, blocks do not fit it, or it has a cache of its own kind.

    Example:
        >>> from lex_hf import LexConfig
        >>> from lex_hf.inference.capacity import capacity
        >>> found = capacity(LexConfig(), device_memory=80 * 2**30, bandwidth=3.35e12)
        >>> found.blocks[0].row_bytes, found.full[0].row_bytes
        (201326592, 1610612736)
    """
    _check_numbers(device_memory, bandwidth, lengths)
    _check_kind(config, blockwise, sinks)
    kind = _dtype(config, dtype)
    model = _without_storage(config, kind, trust_remote_code)
    if config.model_type == "lex":
        attention, blocks, full = _of_lex(config, kind)
    else:
        full = _layers(model)
        attention, blocks = None, []
        if blockwise is not None:
            length = training_length_of(model.config.get_text_config(), None if blockwise == "auto" else blockwise)
            attention, blocks = "blockwise", _in_blocks(full, length, pattern_of(length, sinks), type(model).__name__)
    weights = {id(each): each for each in model.parameters()}.values()
    size, read = sum(each.nbytes for each in weights), sum(each.nbytes for each in _read_weights(model))

    def rows(layers: Sequence[LayerBytes], tokens: int | None) -> Rows:
        row = sum(layer.at(ENDLESS if tokens is None else tokens) for layer in layers)
        return _rows(row, tokens, size, read, device_memory, bandwidth)

    grows = any(layer.token and layer.limit is None for layer in blocks)
    return Capacity(
        parameters=sum(each.numel() for each in weights),
        dtype=str(kind).removeprefix("torch."),
        weights_bytes=size,
        weights_read=read,
        device_memory=device_memory,
        bandwidth=bandwidth,
        is_lex=config.model_type == "lex",
        attention=attention,
        blocks=tuple(rows(blocks, tokens) for tokens in (lengths if grows else (None,))) if blocks else (),
        full=tuple(rows(full, tokens) for tokens in lengths),
    )


def _check_numbers(device_memory: int, bandwidth: float, lengths: Sequence[int]) -> None:
    for name, value in (("device_memory", device_memory), ("bandwidth", bandwidth)):
        if not 0 < value < float("inf"):
            raise ValueError(f"{name} = {value}: it must be a positive number of bytes.")
    if not all(isinstance(tokens, int) and tokens >= 1 for tokens in lengths):
        raise ValueError(f"lengths = {lengths}: each must be a number of tokens, at least 1.")


def _check_kind(config: Any, blockwise: Any, sinks: int) -> None:
    if sinks and blockwise is None:
        raise ValueError(f"sinks = {sinks}: only a model that reads in blocks has sinks; give blockwise as well.")
    if blockwise is not None and config.model_type == "lex":
        raise ValueError("A LEX model has blocks of its own: leave blockwise out.")
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(
            "The weights are quantised, and their bytes do not follow from the configuration: take the model that "
            "they were quantised from."
        )


def _dtype(config: Any, given: str | torch.dtype | None) -> torch.dtype:
    """Return the dtype of weights and cache: the one given, or that of the configuration, or float32.

    Raises:
        ValueError: If it is none of [`DTYPES`].
    """
    if given is None or given == "auto":
        given = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None) or torch.float32
    found = DTYPES.get(str(given).removeprefix("torch."))
    if found is None:
        raise ValueError(f"dtype = {str(given)!r}: it must be one of {', '.join(DTYPES)}, or 'auto'.")
    return found


def _without_storage(config: Any, dtype: torch.dtype, trust_remote_code: bool) -> PreTrainedModel:
    """Make a model on the device "meta".

    Raises:
        ValueError: If there is no such model, or its sizes are impossible.
    """
    is_remote = trust_remote_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not is_remote:
        raise ValueError(
            f"The configuration is a {type(config).__name__}, and transformers has no causal language model for it."
        )
    # Eager attention is everywhere; the configuration may name one that is not here, or that of another model.
    options = {"dtype": dtype, "trust_remote_code": trust_remote_code, "attn_implementation": "eager"}
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(copy.deepcopy(config), **options)
    except Exception as error:  # impossible sizes make any model raise anything
        raise ValueError(f"A model of this configuration cannot be made: {plain(error)}") from error
    return model.eval()


def _of_lex(config: Any, dtype: torch.dtype) -> tuple[str | None, list[LayerBytes], list[LayerBytes]]:
    """Return the attention patterns of a LEX model, and the bytes of its layers, with them and with full attention."""
    full = LayerBytes(token=2 * config.num_attention_heads * config.head_dim * dtype.itemsize)
    patterns = config.patterns
    if all(pattern.block is None for pattern in patterns):
        return None, [], [full] * len(patterns)
    own = [full if pattern.block is None else full.in_blocks(pattern) for pattern in patterns]
    return " + ".join(sorted({pattern.name for pattern in patterns})), own, [full] * len(patterns)


def _layers(model: PreTrainedModel) -> list[LayerBytes]:
    """Return the bytes of the layers of a model of transformers with its own cache.

    Raises:
        ValueError: If it does not read without storage, or keeps something else than is counted here.
    """
    found = _read(model).layers
    unknown = sorted({type(layer).__name__ for layer in found if type(layer) not in (*_COUNTED, *_DUMMY)})
    layers = [] if unknown else [_layer(layer) for layer in found]
    unused = [index for index, layer in enumerate(layers) if not layer.at(1) and type(found[index]) not in _DUMMY]
    if unknown or unused or not layers:
        what = f"keeps its past in a {unknown[0]}" if unknown else f"keeps nothing in layers {unused} of its cache"
        raise ValueError(f"The cache of {type(model).__name__} cannot be counted: the model {what}.")
    return layers


def _ignore(*args: Any) -> None:
    """Do nothing."""


def _read(model: PreTrainedModel) -> DynamicCache:
    """Let a model read a few tokens without storage, and return its cache."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):  # some look for padding among the tokens, to warn of it
            module.warn_if_padding_and_no_attention_mask = _ignore
    cache = DynamicCache(config=model.config.get_text_config())
    try:
        if hasattr(model, "set_experts_implementation"):  # the others look at which experts tokens chose
            model.set_experts_implementation("batched_mm")
        with torch.no_grad(), torch.device("meta"):
            model(input_ids=torch.zeros(1, _READ, dtype=torch.long), past_key_values=cache, use_cache=True)
    except Exception as error:  # code that was not written for this raises anything
        raise ValueError(
            f"The cache of {type(model).__name__} cannot be counted: the model does not read without its weights "
            f"({type(error).__name__}: {plain(error)})."
        ) from error
    return cache


def _layer(layer: Any) -> LayerBytes:
    """Return the bytes that a layer of a `DynamicCache` keeps of one row."""
    states = [getattr(layer, name, None) for name in ("keys", "values")]
    pair = [each for each in states if isinstance(each, torch.Tensor) and each.numel()]
    known = {id(each) for each in pair}
    fixed = sum(each.nbytes for each in _tensors(layer) if id(each) not in known)
    token = sum(each.nbytes // each.shape[2] for each in pair)
    return LayerBytes(fixed, token, getattr(layer, "sliding_window", None) if pair else None)


def _tensors(layer: Any) -> Iterator[torch.Tensor]:
    """Yield all tensors of rows that a layer of a cache keeps, e.g. states of convolutions and recurrences."""
    for value in vars(layer).values():
        several = value.values() if isinstance(value, dict) else [value]
        yield from (each for each in several if isinstance(each, torch.Tensor) and each.dim())


def _in_blocks(full: Sequence[LayerBytes], length: int, pattern: FullPattern, name: str) -> list[LayerBytes]:
    """Return the bytes of layers of which those that see more than the training length read in blocks."""
    chosen = [bool(layer.token) and (layer.limit is None or layer.limit > length) for layer in full]
    if not any(chosen):
        raise ValueError(
            f"No layer of this {name} sees more tokens than its training length of {length}: it reads texts of any "
            "length as it is. Leave blockwise out."
        )
    return [layer.in_blocks(pattern) if is_chosen else layer for layer, is_chosen in zip(full, chosen, strict=True)]


def _read_weights(model: PreTrainedModel) -> list[nn.Parameter]:
    """Return the weights that a step reads as a whole: all but embeddings, of which it takes a row for each token."""
    found: dict[int, nn.Parameter] = {}
    for module in model.modules():
        if not isinstance(module, nn.Embedding):  # a head that shares the embedding has it, too
            found |= {id(each): each for each in module.parameters(recurse=False)}
    return list(found.values())


def _rows(
    row_bytes: int, tokens: int | None, weights: int, weights_read: int, device_memory: int, bandwidth: float
) -> Rows:
    rows = max(0, room(device_memory) - weights) // row_bytes

    def speed(count: int) -> float | None:
        return count * bandwidth / (weights_read + count * row_bytes) if rows else None

    return Rows(tokens, row_bytes, rows, speed(rows), speed(1))
