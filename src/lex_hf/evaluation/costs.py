"""What it costs a model to read a text: bytes of keys and values, time of prefill and of decoding."""

import inspect
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

STEPS = 16  # tokens that are decoded


@dataclass(frozen=True)
class Costs:
    """Costs of reading a text.

    Attributes:
        cache_bytes: Keys and values in the cache after the text.
        prefill_seconds: Time to read the text but for its last `STEPS` tokens: in one pass, or in pieces if that is
            faster.
        decode_seconds: Time of each of these, one at a time.
    """

    cache_bytes: int
    prefill_seconds: float
    decode_seconds: float

    def fastest(self, other: "Costs | None") -> "Costs":
        """Return these costs, with the shorter times of two rounds."""
        if other is None:
            return self
        prefill = min(self.prefill_seconds, other.prefill_seconds)
        return Costs(self.cache_bytes, prefill, min(self.decode_seconds, other.decode_seconds))


def measure_costs(model: PreTrainedModel, new_cache: Callable[[], Cache], text: Tensor, piece: int) -> Costs:
    """Read a text once in one pass and once in pieces, and time it.

    Times are wall-clock times of one round; let systems take turns over several rounds, and keep the fastest.

    Args:
        model: The model; gradients are off.
        new_cache: Returns an empty cache.
        text: Token ids, int64, shape `(tokens,)`, more than `STEPS`.
        piece: Tokens of a piece.
    """
    head, tail = text[None, :-STEPS], text[None, -STEPS:].split(1, dim=1)
    times = []
    for pieces in ((head,), head.split(piece, dim=1)):
        cache = new_cache()
        times.append(_timed(model, pieces, cache))
    decode = _timed(model, tail, cache) / STEPS
    return Costs(cache_bytes(cache), min(times), decode)


def _timed(model: PreTrainedModel, pieces: Sequence[Tensor], cache: Cache) -> float:
    options = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    start = time.perf_counter()
    for piece in pieces:
        last = model(input_ids=piece, past_key_values=cache, use_cache=True, **options).logits[0, -1, 0]
    float(last)  # waits for an accelerator
    return time.perf_counter() - start


def cache_bytes(cache: Cache) -> int:
    """Bytes of the keys and values of a cache."""
    return sum(map(layer_bytes, cache.layers))


def layer_bytes(layer: Any) -> int:
    """Bytes of the keys and values of a layer of a cache."""
    states = [getattr(layer, name, None) for name in ("keys", "values")]
    states += getattr(layer, "sinks", None) or ()
    return sum(each.numel() * each.element_size() for each in states if each is not None)
