"""Attention that the first tokens of a text draw: attention sinks (StreamingLLM, arXiv 2309.17453, §3.1).

Weights of softmax add up to 1, also where a head finds nothing to attend to. Trained models give what is left to the
first token, which every query sees. If that token leaves the window, the weights of all others change.
"""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lex_hf.evaluation.loading import evaluating
from lex_hf.rope.blockwise import attending_with

_FIRST = 4  # a text's first 1/4 is looked at, by the queries of the rest


def attention_to_first_tokens(model: PreTrainedModel, input_ids: Tensor) -> Tensor:
    """Measure how much attention each of the first tokens of a text draws.

    The queries are those after the first quarter of a text, so that each of them sees every token of that quarter.

    Args:
        model: A causal language model that returns the weights of all its layers; it runs in evaluation mode and is
            left as it was.
        input_ids: Texts of equal length, at most the training length of the model, at least 4 tokens, without padding,
            shape `(texts, sequence)`.

    Returns:
        Mean weight over queries and texts, of each place of the first quarter of a text, float64, shape
        `(layers, heads, sequence // 4)`. Evenly spread attention would give [`even_share`] to each place.

    Raises:
        ValueError: If the shape of the input is another one, or the model returns no weights of all keys.
    """
    if input_ids.dim() != 2 or not len(input_ids) or input_ids.shape[1] < _FIRST:
        raise ValueError(
            f"input_ids has the shape {tuple(input_ids.shape)}; give texts of equal length, at least one, of at least "
            f"{_FIRST} tokens: (texts, sequence)."
        )
    first = input_ids.shape[1] // _FIRST
    with torch.no_grad(), evaluating(model), attending_with(model, "eager"):
        rows = [_weights(model, row[None])[:, :, first:, :first].mean(dim=2) for row in input_ids.to(model.device)]
    return torch.stack(rows).mean(dim=0)


def even_share(length: int) -> float:
    """Return what [`attention_to_first_tokens`] gives for queries that attend to all keys alike.

    Args:
        length: Length of the texts in tokens, at least 4.

    Example:
        >>> from lex_hf.evaluation.first_tokens import even_share
        >>> round(even_share(128), 4)
        0.0143
    """
    seen = torch.arange(length // _FIRST + 1, length + 1, dtype=torch.float64)
    return float((1 / seen).mean())


def _weights(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Attention weights of all layers for a text, float64, shape `(layers, heads, query, key)`."""
    found = getattr(model(input_ids=ids, use_cache=False, output_attentions=True), "attentions", None) or [None]
    if any(each is None or each.shape[-2:] != (ids.shape[1],) * 2 for each in found):
        raise ValueError(
            f"{type(model).__name__} returns no attention weights of all keys: each of its layers must have softmax "
            "attention."
        )
    return torch.cat([each.double().cpu() for each in found])
