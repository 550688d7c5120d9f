"""States in the slots of a pair of blocks."""

import torch
import torch.nn.functional as F


def spread(states: torch.Tensor, slots: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    """Append each row's states to its part of a text, from its own slot on.

    Args:
        states: Shape `(batch, heads, sequence, head_dim)`.
        slots: Slot of each row's first state, shape `(batch,)`.
        text: What stands in the first slots, shape `(batch, heads, slots, head_dim)`.

    Returns:
        Shape `(batch, heads, slots + sequence, head_dim)`.
    """
    index = slots[:, None] + torch.arange(states.shape[2], device=states.device)
    text = F.pad(text, (0, 0, 0, states.shape[2]))
    return text.scatter(2, index[:, None, :, None].expand_as(states), states)


def append(stored: torch.Tensor, states: torch.Tensor, fill: int) -> torch.Tensor:
    """Append new states to the first `fill` slots that are stored."""
    return torch.cat((stored[:, :, :fill], states), dim=2) if fill else states


def take(states: torch.Tensor, slot: torch.Tensor, width: int) -> torch.Tensor:
    """Return the states in the given slots, `(slots,)` or `(batch, slots)`; `width` says how many they are."""
    if slot.dim() == 1:
        return states.narrow(2, 0, width)
    return states.take_along_dim(slot[:, None, :, None], dim=2)
