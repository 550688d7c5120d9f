"""Positions of pairs of a query and a key, region by region, in ways to read that change them.

A way divides the pairs of a text into regions. Within a region, queries have positions of their own and keys have
positions of their own, and what counts is the difference. A pair that is in no region is not seen. Each way here keeps
all differences below the training length; it is defined by its paper, and written down without regard to speed.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

Positions = Callable[[torch.Tensor], torch.Tensor]
"""Positions of tokens by their places in the text, counted from 0."""


@dataclass(frozen=True)
class Region:
    """Pairs whose scores are computed at the same positions.

    Attributes:
        holds: Whether the pairs of queries and keys at these places belong to the region; the two tensors broadcast.
            Keys after their query are left out whatever it says.
        query: Positions of queries.
        key: Positions of keys.
    """

    holds: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    query: Positions
    key: Positions

    def seen(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Return whether queries see keys in this region, shape `(queries, keys)`, by their places."""
        query, key = query[:, None], key[None, :]
        return self.holds(query, key) & (key <= query)


def _place(places: torch.Tensor) -> torch.Tensor:
    return places


def smallest_group(window: int, training_length: int, longest: int) -> int:
    """Return the smallest group with which Self-Extend reads a text without positions beyond the training length.

    Args:
        window: Neighbour window in tokens, less than the training length.
        training_length: Positions that the model knows.
        longest: Length of the text in tokens.
    """
    group = 1
    while (longest - 1) // group + window - window // group >= training_length:
        group += 1
    return group


def self_extend(window: int, group: int) -> tuple[Region, ...]:
    """Return the regions of Self-Extend (arXiv 2401.01325, §3.2, Eq. 3 and 4).

    Keys less than `window` tokens back are at their true distance. Of those further back, the key j is at ⌊j / group⌋
    and the query i at ⌊i / group⌋ + window - ⌊window / group⌋: distances continue where the window ends.

    Args:
        window: Neighbour window w_n in tokens.
        group: Size G_s of groups in tokens.
    """
    shift = window - window // group
    return (
        Region(lambda query, key: query - key < window, _place, _place),
        Region(
            lambda query, key: query - key >= window,
            lambda places: places // group + shift,
            lambda places: places // group,
        ),
    )


def dual_chunk(chunk: int, training_length: int) -> tuple[Region, ...]:
    """Return the regions of Dual Chunk Attention (arXiv 2402.17463, §3).

    Keys are at their places within their chunk. A query at place r of its chunk is at r for keys of that chunk
    (intra), at min(chunk + r, training length - 1) for those of the chunk before (successive), and at training
    length - 1 for all earlier ones (inter).

    Args:
        chunk: Length s of a chunk in tokens, less than the training length; the local window w is the difference.
        training_length: c, in tokens.
    """

    def within(places: torch.Tensor) -> torch.Tensor:
        return places % chunk

    def apart(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return query // chunk - key // chunk

    last = training_length - 1
    return (
        Region(lambda query, key: apart(query, key) == 0, within, within),
        Region(
            lambda query, key: apart(query, key) == 1, lambda places: (within(places) + chunk).clamp(max=last), within
        ),
        Region(lambda query, key: apart(query, key) > 1, lambda places: torch.full_like(places, last), within),
    )


def streaming(sinks: int, window: int) -> tuple[Region, ...]:
    """Return the regions of StreamingLLM (arXiv 2309.17453, §3.2): the first tokens and a window behind the query.

    Positions are those within the cache: the first tokens, then the window, without the gap between them. Distances in
    the window are therefore true; that to the first tokens no longer grows when the cache is full.

    Args:
        sinks: Number of first tokens of a text that stay.
        window: Number of newest tokens that stay, the query's own included.
    """
    last = sinks + window - 1
    return (
        Region(lambda query, key: (key >= sinks) & (query - key < window), _place, _place),
        Region(lambda query, key: (key < sinks) & (query >= key), lambda places: places.clamp(max=last), _place),
    )
