"""What older versions of transformers and PyTorch lack or do otherwise, as far as models and caches are concerned."""

import inspect
from functools import cache

import torch
from torch import nn
from transformers import cache_utils
from transformers.cache_utils import Cache
from transformers.generation import GenerationMode
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

# transformers before 5.14: layers with attention and states have one state of each kind, and cannot take tokens back.
HYBRIDS_TAKE_BACK = "number_of_states" in inspect.signature(cache_utils.LinearAttentionLayer.__init__).parameters

# PyTorch before 2.13: a loss that never holds all logits.
HAS_CHUNKED_LOSS = hasattr(nn.functional, "linear_cross_entropy")

# transformers before 5.14: `generate` tells no cache to remember what it may take back, and gives `crop` the length
# to keep.
_TELLS_CACHES = hasattr(Cache, "activate_past_recording")
_CROPS_TO_LENGTH = "tokens_to_remove" not in inspect.signature(Cache.crop).parameters


def cache_classes(*names: str) -> tuple[type, ...]:
    """Return those of the classes of transformers' caches that this version has, for `isinstance`."""
    return tuple(getattr(cache_utils, name) for name in names if hasattr(cache_utils, name))


def removed_by(given: int | torch.Tensor, length: int) -> int:
    """Return how many tokens `crop(given)` takes back from a text of this length.

    Args:
        given: What `crop` was called with: tokens to remove, as a negative number; before transformers 5.14 also the
            number of tokens to keep, as a positive one.
        length: Tokens that the cache has read.

    Raises:
        ValueError: If `given` is positive, and this version of transformers does not call `crop` so.
    """
    given = int(given)  # transformers 5.14 gives a tensor
    if given <= 0:
        return -given
    if not _CROPS_TO_LENGTH:
        raise ValueError(f"crop({given}): give the number of tokens to remove as a negative number.")
    return max(length - given, 0)


def takes_back(generation_mode: GenerationMode) -> bool:
    """Return whether `generate` will take back guesses without having told the cache."""
    return generation_mode == GenerationMode.ASSISTED_GENERATION and not _TELLS_CACHES


@cache
def flex_takes_biases() -> bool:
    """Return whether transformers' flex attention adds a bias for each head to scores; else it ignores one."""
    return "position_bias" in inspect.signature(ALL_ATTENTION_FUNCTIONS["flex_attention"]).parameters


def is_checkpointing(model: nn.Module) -> bool:
    """Return whether layers of a model of transformers are computed again for gradients."""
    name = "activation" if hasattr(model, "is_activation_checkpointing") else "gradient"
    return bool(getattr(model, f"is_{name}_checkpointing"))


def record_past(past_key_values: Cache) -> None:
    """Let a cache remember what it reads, so that tokens can be taken back."""
    for layer in past_key_values.layers:
        if hasattr(layer, "activate_past_recording"):
            layer.activate_past_recording()


def is_recording_past(past_key_values: Cache) -> bool:
    """Return whether any layer of a cache has been told to remember what it reads."""
    return any(getattr(layer, "record_past", False) for layer in past_key_values.layers)
