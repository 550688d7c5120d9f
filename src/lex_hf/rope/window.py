"""A sliding window for layers with full attention, in a model's own attention: by masks, and by the cache."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicSlidingWindowLayer
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    eager_mask,
    sliding_window_causal_mask_function,
)

from lex_hf.rope import probe
from lex_hf.rope.reader import ModelFunction

_MASKED = ("eager", "sdpa")


class WindowLayer(DynamicSlidingWindowLayer):
    """Keys and values of the last `sliding_window - 1` tokens, of a layer whose mask is made as for full attention."""

    is_sliding = False


@contextmanager
def reading_window(model: PreTrainedModel, window: int) -> Iterator[Callable[[], Cache]]:
    """Let layers with full attention see a sliding window while the context lasts.

    Args:
        model: A causal language model that attends through transformers' attention interface.
        window: Number of tokens that a query sees, its own included. Shorter windows of layers stay.

    Yields:
        A function that returns an empty cache, which keeps no more than the model sees.

    Raises:
        ValueError: If the model attends by a function that takes no masks, or does not attend through the interface.
    """
    implementation = model.config.get_text_config()._attn_implementation
    if implementation not in _MASKED:
        raise ValueError(
            f"The attention function {implementation!r} takes no mask of a window; load the model with "
            "attn_implementation='sdpa'."
        )
    function = ModelFunction(implementation)
    seen = probe.examine(model, function.of)
    if not seen.modules or seen.unmasked or not seen.is_causal:
        raise ValueError(f"{type(model).__name__} does not take masks from transformers' functions for causal masks.")
    masks = ALL_MASK_ATTENTION_FUNCTIONS.get(implementation, eager_mask)

    def mask(*args: Any, **kwargs: Any) -> Any:
        own = kwargs.get("local_size")
        if own is not None and own <= window:
            return masks(*args, **kwargs)
        changed = {"mask_function": sliding_window_causal_mask_function(window), "local_size": window}
        return masks(*args, **{**kwargs, **changed})

    def attend(module: Any, *args: Any, **kwargs: Any) -> Any:
        return function.of(module)(module, *args, **kwargs)

    def new_cache() -> Cache:
        cache = DynamicCache(config=model.config.get_text_config())
        for index, own in seen.windows.items():
            if own is None or own > window:
                cache.layers[index] = WindowLayer(sliding_window=window)
        return cache

    with probe.reading_as(model, mask, attend):
        yield new_cache
