"""Segments of equal length, taken from texts in turn."""

from collections.abc import Sequence

import torch
from torch import Tensor


def segments_in_turn(documents: Sequence[Sequence[int]], length: int) -> list[Sequence[int]]:
    """Cut texts, as token ids, into segments of `length` tokens, first their beginnings; the rest is dropped."""
    starts = range(0, max(map(len, documents)), length)
    return [text[start : start + length] for start in starts for text in documents if start + length <= len(text)]


def take_segments(documents: Sequence[Sequence[int]], length: int, count: int) -> Tensor:
    """Take the first `count` of [`segments_in_turn`], shape `(segments, length)`.

    Raises:
        ValueError: If the texts hold fewer.
    """
    whole = segments_in_turn(documents, length)
    if len(whole) < count:
        raise ValueError(
            f"The texts hold {len(whole)} segments of {length} tokens, {count} were requested: give more text, or a "
            "smaller --length or --segments."
        )
    return torch.tensor(whole[:count])
