"""The language-modelling loss without the logits of all tokens at once."""

from typing import Any

import torch
from torch import nn

IGNORED = -100


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
    all layers of a small model. PyTorch's chunked linear cross entropy never holds more than a piece of them.

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
    total: torch.Tensor = nn.functional.linear_cross_entropy(
        hidden_states.flatten(0, 1),
        weight,
        shift_labels.flatten().to(hidden_states.device),
        reduction="mean" if num_items_in_batch is None else "sum",
        options=nn.LinearCrossEntropyOptions(),
    )
    if isinstance(num_items_in_batch, torch.Tensor):
        num_items_in_batch = num_items_in_batch.to(total.device)
    return total if num_items_in_batch is None else total / num_items_in_batch
