"""The language-modelling loss without the logits of all tokens at once."""

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from .versions_lex import HAS_CHUNKED_LOSS

IGNORED = -100
CHUNK = 512  # tokens whose logits exist at once


def chunked_causal_loss(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    num_items_in_batch: int | torch.Tensor | None = None,
    shift_labels: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Compute what transformers' causal loss computes, from hidden states, a piece of the tokens at a time.

    Logits of N tokens take N × vocab_size numbers, and their gradient as many again: for GPT-2's vocabulary, more than
    all layers of a small model. PyTorch's chunked linear cross entropy never holds more than a piece of them; where
    PyTorch has none, before 2.13, the logits of each piece are computed again for its gradient.

    Args:
        hidden_states: Output of the decoder, shape `(batch, sequence, hidden_size)`.
        weight: Weight of the language-modelling head, shape `(vocab_size, hidden_size)`.
        labels: Shape `(batch, sequence)`; the token that follows is the target, -100 is not counted.
        num_items_in_batch: Divide the sum of losses by this, as `Trainer` wants it; by default the mean is taken.
        shift_labels: Targets themselves, shape `(batch, sequence)`, in place of `labels`.
        kwargs: Unused; what transformers passes to losses.

    Returns:
        The loss in nats per token.
    """
    if shift_labels is None:
        shift_labels = nn.functional.pad(labels, (0, 1), value=IGNORED)[..., 1:]
    targets = shift_labels.flatten().to(hidden_states.device)
    total = _loss(hidden_states.flatten(0, 1), weight, targets, "mean" if num_items_in_batch is None else "sum")
    if isinstance(num_items_in_batch, torch.Tensor):
        num_items_in_batch = num_items_in_batch.to(total.device)
    return total if num_items_in_batch is None else total / num_items_in_batch


def _loss(states: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, reduction: str) -> torch.Tensor:
    """Cross entropy of states of shape `(tokens, hidden_size)`: the mean or the sum."""
    if HAS_CHUNKED_LOSS:
        options = nn.LinearCrossEntropyOptions()
        return nn.functional.linear_cross_entropy(states, weight, targets, reduction=reduction, options=options)
    pieces = zip(states.split(CHUNK), targets.split(CHUNK), strict=True)
    total = sum(checkpoint(_sum_of_losses, piece, weight, wanted, use_reentrant=False) for piece, wanted in pieces)
    return total / (targets != IGNORED).sum() if reduction == "mean" else total


def _sum_of_losses(states: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    logits = nn.functional.linear(states, weight).float()
    return nn.functional.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
