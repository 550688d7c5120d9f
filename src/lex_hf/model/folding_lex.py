"""Folding of states: blocks become rows of the batch, each with the keys that its queries see."""

from collections.abc import Callable

import torch

# (key, distance) -> key: rotated keys `(batch, heads, keys, head_dim)` as if their tokens stood so many tokens later,
# shape `(batch or 1, keys or 1)`.
Turn = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def with_sinks(
    states: torch.Tensor, text: torch.Tensor, part: tuple[int, int, int, int, int], turn: Turn
) -> torch.Tensor:
    """Put the sinks, the first slots of a text, before the keys or values of each block of a part."""
    _, size, count, first_key, sinks = part
    distances = first_key - sinks + size * torch.arange(count, device=text.device)
    kept = text[:, :, :sinks].repeat_interleave(count, dim=0)
    return torch.cat((turn(kept, distances.repeat(len(text))[:, None]), states), dim=2)


def unturned(states: torch.Tensor, distance: torch.Tensor) -> torch.Tensor:
    """Leave states, as values and keys that are not rotated, where they are."""
    return states


def windows(states: torch.Tensor, before: int, count: int) -> torch.Tensor:
    """Return each block with the `before` slots before it, `(batch * count, heads, before + block, head_dim)`.

    Windows that overlap: of a single text a view, without a copy.
    """
    if count == 1:
        return states
    size = (states.shape[2] - before) // count
    return states.unfold(2, before + size, size).permute(0, 2, 1, 4, 3).flatten(0, 1)


def folded(states: torch.Tensor, count: int) -> torch.Tensor:
    """Move `count` blocks into the batch dimension: `(batch * count, heads, block, head_dim)`."""
    return states if count == 1 else states.unflatten(2, (count, -1)).transpose(1, 2).flatten(0, 1)


def unfolded(states: torch.Tensor, count: int) -> torch.Tensor:
    """Undo the folding of `count` blocks of outputs, `(batch, count * block, heads, head_dim)`."""
    return states if count == 1 else states.unflatten(0, (-1, count)).flatten(1, 2)
