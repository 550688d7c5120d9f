"""What a model does with masks and caches, found out by letting it read a few tokens."""

import itertools
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, and_masks, causal_mask_function, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lex_hf.model.versions_lex import HYBRIDS_TAKE_BACK, cache_classes

_NUMBERS = itertools.count()
_DUMMY = cache_classes("DummyLayer")
_HYBRIDS = ("LinearAttentionAndFullAttentionLayer", "LinearAttentionAndSlidingWindowAttentionLayer")
_REPLACEABLE = cache_classes("DynamicLayer", "DynamicSlidingWindowLayer", *(_HYBRIDS if HYBRIDS_TAKE_BACK else ()))


@dataclass(frozen=True)
class _Mask:
    """What a layer gets in the place of a mask: the mask, and for which layers it was made."""

    mask: Any
    window: int | None = None
    is_causal: bool = True

    def __getitem__(self, index: Any) -> "_Mask":
        """Keep all queries: some models drop those of which no logits are wanted, and here all are."""
        return self


@dataclass
class Probe:
    """What was seen while a model read.

    Attributes:
        windows: By index of the layer, the number of tokens that it sees; `None` for full attention.
        modules: Attention modules in the order in which they attended.
        unmasked: Attention modules that got no mask, or one that they made themselves.
        is_causal: Whether all masks are causal ones, without exceptions for some tokens.
    """

    windows: dict[int, int | None] = field(default_factory=dict)
    modules: list[nn.Module] = field(default_factory=list)
    unmasked: list[nn.Module] = field(default_factory=list)
    is_causal: bool = True


def examine(model: PreTrainedModel, function: Callable[..., Any]) -> Probe:
    """Let a model read a few tokens, and note how its layers attend.

    Args:
        model: The model; it is left as it was.
        function: Returns the attention function that a module calls by itself.
    """
    probe = Probe()
    implementation = model.config.get_text_config()._attn_implementation
    masks = ALL_MASK_ATTENTION_FUNCTIONS.get(implementation, eager_mask)

    masked: list[int | None] = []

    def mask(*args: Any, **kwargs: Any) -> _Mask:
        own, window = masks(*args, **kwargs), kwargs.get("local_size")
        masked.append(window)
        is_causal = window is not None or kwargs.get("mask_function") is causal_mask_function
        return _Mask(own, window, is_causal and not kwargs.get("use_vmap"))

    def attend(module: nn.Module, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
        if isinstance(attention_mask, _Mask):
            probe.modules.append(module)
            probe.is_causal &= attention_mask.is_causal
            index = getattr(module, "layer_idx", None)
            probe.windows[-1 if index is None else index] = attention_mask.window
            attention_mask = attention_mask.mask
        else:
            probe.unmasked.append(module)
        return function(module)(module, query, key, value, attention_mask, **kwargs)

    with reading_as(model, mask, attend), torch.no_grad(), evaluating(model):
        try:
            model(input_ids=tokens(model, 4), use_cache=False)
        except Exception:
            # With a mask and before any attention: then the model's own code works on masks.
            if not masked or probe.modules or probe.unmasked:
                raise
    return probe


@contextmanager
def reading_as(model: PreTrainedModel, mask: Callable[..., Any], attend: Callable[..., Any]) -> Iterator[None]:
    """Make two functions the attention implementation of a model while the context lasts."""
    config, name = model.config.get_text_config(), new_name()
    before = config._attn_implementation
    register(name, mask, attend)
    config._attn_implementation_internal = name
    try:
        yield
    finally:
        config._attn_implementation_internal = before
        forget(name)


def new_name() -> str:
    """Return a name for the attention implementation of one model, which no other has."""
    return f"lex_hf_blockwise_{next(_NUMBERS)}"


def register(name: str, mask: Callable[..., Any], attend: Callable[..., Any]) -> None:
    """Let transformers find two functions by a name: one that makes masks, and one that attends."""
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, mask)


def forget(name: str) -> None:
    """Undo [`register`]; a name that is not registered is left alone."""
    for registry in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
        registry._global_mapping.pop(name, None)


def tokens(model: PreTrainedModel, count: int) -> torch.Tensor:
    """Return a few token ids that a model knows, shape `(1, count)`."""
    size = model.get_input_embeddings().weight.shape[0]
    return (torch.arange(1, count + 1, device=model.device) * 7919 % size)[None]


@contextmanager
def evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Put every module into evaluation mode, and those that were training back afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def logits_of_blocks(
    model: PreTrainedModel,
    ids: torch.Tensor,
    block: int,
    layers: Collection[int],
    bound: int,
    function: Callable[..., Any],
) -> torch.Tensor:
    """Compute the logits of blockwise attention by a dense mask, in the model's own attention.

    Args:
        model: The model.
        ids: Shape `(1, tokens)`.
        block: Length of a block.
        layers: Indices of the layers that read in blocks.
        bound: Longest window of a layer that keeps its own attention.
        function: As of [`examine`].
    """
    implementation = model.config.get_text_config()._attn_implementation
    masks = ALL_MASK_ATTENTION_FUNCTIONS.get(implementation, eager_mask)

    def in_blocks(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return key // block >= query // block - 1

    def mask(*args: Any, **kwargs: Any) -> _Mask:
        own, window = masks(*args, **kwargs), kwargs.get("local_size")
        if window is not None and window <= bound:
            return _Mask((own, own))
        dense = {"mask_function": and_masks(causal_mask_function, in_blocks), "allow_is_causal_skip": False}
        return _Mask((own, masks(*args, **{**kwargs, **dense, "local_size": None})))

    def attend(module: nn.Module, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
        chosen = attention_mask.mask[module.layer_idx in layers]
        return function(module)(module, query, key, value, chosen, **kwargs)

    with reading_as(model, mask, attend), torch.no_grad(), evaluating(model):
        return model(input_ids=ids, use_cache=False).logits


def states_at(
    model: PreTrainedModel, count: int, distance: int, function: Callable[..., Any]
) -> dict[int, list[torch.Tensor]]:
    """Return what each layer has of a text that begins further on: keys to attend to, keys and values that it stores.

    A layer that attends to what another one stores has the first alone.

    Args:
        model: The model; it is left as it was.
        count: Number of tokens.
        distance: Position of the first one.
        function: As of [`examine`].
    """
    states: dict[int, list[torch.Tensor]] = {}
    cache = DynamicCache(config=model.config.get_text_config())

    def attend(module: nn.Module, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
        layer: Any = module.layer_idx
        states[layer] = [key]
        return function(module)(module, query, key, value, attention_mask, **kwargs)

    masks = ALL_MASK_ATTENTION_FUNCTIONS.get(model.config.get_text_config()._attn_implementation, eager_mask)
    positions = torch.arange(distance, distance + count, device=model.device)[None]
    with reading_as(model, masks, attend), torch.no_grad(), evaluating(model):
        model(input_ids=tokens(model, count), position_ids=positions, use_cache=True, past_key_values=cache)
    for index in states:
        if index < len(cache.layers) and not isinstance(cache.layers[index], _DUMMY):
            states[index] += [cache.layers[index].keys, cache.layers[index].values]
    return states


def check_cache(model: PreTrainedModel, layers: Collection[int]) -> str | None:
    """Return what keeps layers from having a cache of two blocks; `None` if nothing does."""
    cache = DynamicCache(config=model.config.get_text_config())
    with torch.no_grad(), evaluating(model):
        model(input_ids=tokens(model, 4), use_cache=True, past_key_values=cache)
    kept: dict[int, Any] = {index: cache.layers[index] if index < len(cache.layers) else None for index in layers}
    for index, layer in kept.items():
        if type(layer) not in (*_REPLACEABLE, *_DUMMY) or not layer.is_initialized:
            return f"layer {index} keeps its past in a {type(layer).__name__}"
    if all(isinstance(layer, _DUMMY) for layer in kept.values()):
        return f"layers {list(kept)} attend to what other layers keep"
    return None
