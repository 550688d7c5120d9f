"""Attention functions: those of transformers, in the one form that plans call, and the reference."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .linear_lex import runs_plainly
from .versions_lex import flex_takes_biases

PART = 2**20  # numbers of keys or values that are brought into float32 at once: what a cache of a CPU holds
_ALIKE = 0.75  # share of the slots that rows need of those of the longest one, from which on they attend at once
HALVES = (torch.bfloat16, torch.float16)
# Queries `(batch, num_heads, query, head_dim)` -> what is added to their scores at distances 0, 1, …, shape
# `(batch, num_heads, query, distances)`.
OfQueries = Callable[[torch.Tensor], torch.Tensor]

_ACTS = ("position_bias", "softcap", "cache")  # options on which sdpa acts, or which it refuses


class AttentionFunction:
    """An attention function of transformers, with what it takes for masks.

    Args:
        implementation: Its name, as in `config._attn_implementation`.
    """

    def __init__(self, implementation: str) -> None:
        self.implementation = implementation
        self.takes_masks = "flash" not in implementation
        # One call for a query in each row; other functions gain nothing, or take no mask.
        self.suits_single_queries = implementation == "sdpa"

    def of(self, module: nn.Module) -> Any:
        """Return the function itself, for an attention module."""
        return ALL_ATTENTION_FUNCTIONS.get_interface(self.implementation, eager_attention_forward)

    def masks_later_keys(self, is_square: bool) -> bool:
        """Return whether the function itself hides keys after their query.

        Flash attention aligns the last query with the last key; sdpa counts from the first, so it needs as many keys
        as queries.

        Args:
            is_square: Whether there are as many keys as queries.
        """
        return not self.takes_masks or (self.implementation == "sdpa" and is_square)

    def mask(
        self, seen: torch.Tensor | None, bias: torch.Tensor | None, dtype: torch.dtype, names: tuple[str, str]
    ) -> torch.Tensor | None:
        """Return what the function takes for the keys that are seen and a position bias.

        Args:
            seen: Boolean, shape `(query, key)` or `(batch, query, key)`; `None` if every key is seen.
            bias: Shape `(num_heads, query, key)` or `(batch, num_heads, query, key)`, or `None`.
            dtype: Dtype of the scores.
            names: What needs a mask for the keys that are seen, and for the bias; for the error.

        Returns:
            Shape `(batch or 1, num_heads or 1, query, key)`, boolean or what is added to scores, or `None` if there
            is nothing to mask and nothing to add.

        Raises:
            ValueError: If it takes no masks, or no biases.
        """
        if bias is not None:
            self.check_bias(names[True])
        elif seen is not None:
            self._check_mask(names[False])
        if seen is not None and bias is None and self.implementation == "sdpa":
            return _for_all_heads(seen)
        return additive_mask(seen, bias, dtype)

    def check_bias(self, name: str) -> None:
        """Check that the function takes biases of each head.

        Args:
            name: What needs one.

        Raises:
            ValueError: If it takes none.
        """
        self._check_mask(name)
        if self.implementation == "flex_attention" and not flex_takes_biases():
            raise ValueError(
                f"{name} needs a bias for each head, which flex_attention of this version of transformers does "
                "not take: load the model with attn_implementation='sdpa', or install a newer transformers."
            )

    def _check_mask(self, name: str) -> None:
        if not self.takes_masks:
            raise ValueError(
                f"{self.implementation} takes no mask, and {name} needs one. It serves xPos and other schemes without "
                "a bias, blockwise or full attention, without packing. Load the model with "
                "attn_implementation='sdpa'."
            )

    def __call__(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        causal: bool,
        ends: Sequence[int] | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Apply attention.

        Args:
            module: The attention module.
            query: Shape `(batch, num_heads, query, head_dim)`.
            key: Shape `(batch, num_key_value_heads, key, head_dim)`.
            value: As `key`.
            mask: What [`AttentionFunction.mask`] returned.
            causal: Whether the function has to hide keys after their query.
            ends: How many of the first keys of each row are not masked, if that is known; the others need no reading.
            kwargs: `scaling`, `dropout`, and what else the function takes.

        Returns:
            Outputs, shape `(batch, num_heads, query, head_dim)`, and weights, shape
            `(batch, num_heads, query, key)`, or `None`.
        """
        if self.implementation == "flex_attention" and mask is not None:
            if flex_takes_biases():  # what is added to scores, under this name, and the mask without heads
                kwargs["position_bias"], mask = mask.expand(*query.shape[:3], key.shape[2]), None
            else:
                mask = mask.expand(query.shape[0], *mask.shape[1:])
        if self.implementation == "sdpa" and not causal and suits_rows(query, key, value, ends, **kwargs):
            return attend_by_row(query, key, value, mask, ends, scaling=kwargs["scaling"]), None
        output, weights = self.of(module)(module, query, key, value, mask, is_causal=causal, **kwargs)
        # flex_attention returns log-sum-exps in this place.
        return output.transpose(1, 2), weights if weights is not None and weights.dim() == 4 else None


def additive_mask(seen: torch.Tensor | None, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """Return what is added to scores; arguments and result as for [`AttentionFunction.mask`]."""
    added = None if bias is None else bias.reshape(-1, *bias.shape[-3:]).to(dtype)
    if seen is None:
        return added
    zero = torch.zeros((), dtype=dtype, device=seen.device)
    return torch.where(_for_all_heads(seen), zero if added is None else added, torch.finfo(dtype).min)


def biased(
    mask: torch.Tensor | None, of_queries: OfQueries | None, query: torch.Tensor, distance: torch.Tensor | None
) -> torch.Tensor | None:
    """Return a mask with what queries add to their scores, or the mask alone if they add nothing.

    Args:
        mask: Boolean, or what is added to scores, broadcastable to `(batch, num_heads, query, key)`; or `None`.
        of_queries: What queries add at distances 0, 1, …; `None` if nothing.
        query: Shape `(batch, num_heads, query, head_dim)`.
        distance: Which of these distances each key has, int64, shape `(query, key)` or `(batch, query, key)`.

    Returns:
        Shape `(batch, num_heads, query, key)`, added to scores; or the mask.
    """
    if of_queries is None or distance is None:
        return mask
    by_distance = of_queries(query)
    bias = by_distance.gather(-1, _for_all_heads(distance).expand(*by_distance.shape[:3], -1))
    if mask is None or mask.dtype != torch.bool:
        return bias if mask is None else mask + bias
    return torch.where(mask, bias, torch.finfo(bias.dtype).min)


def suits_rows(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ends: Sequence[int] | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> bool:
    """Return whether [`attend_by_row`] serves a call and is faster than one product for all rows.

    Products of single queries in half precision are slow on CPUs: PyTorch has no kernel of their shape, and takes two
    to three times as long as with keys and values that are first brought into float32. And of rows that have read
    different numbers of tokens, it would read all slots (`benchmarks/README.md`).

    Args:
        query: Shape `(batch, num_heads, query, head_dim)`.
        key: Shape `(batch, num_key_value_heads, key, head_dim)`.
        value: As `key`.
        ends: See [`attend_by_row`].
        scaling: Factor on the scores.
        dropout: Probability with which a weight becomes zero.
        options: What else an attention function is called with.
    """
    # In this order: reading sizes under a compiler would specialise the graph.
    if not runs_plainly(query, key, value) or query.shape[2] != 1 or (ends is None and query.dtype not in HALVES):
        return False
    return scaling is not None and not dropout and all(options.get(name) is None for name in _ACTS)


def attend_by_row(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    ends: Sequence[int] | None = None,
    *,
    scaling: float,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend with one query in each row, row after row, in float32 or float64.

    Keys and values in half precision are brought into float32 a few heads at a time. Rows that need about as many
    slots attend at once, over those that the longest one needs.

    Args:
        query: Shape `(batch, num_heads, 1, head_dim)`.
        key: Shape `(batch, num_key_value_heads, key, head_dim)`.
        value: As `key`.
        mask: Boolean, or what is added to scores, broadcastable to `(batch, num_heads, 1, key)`; or `None`.
        ends: How many of the first keys of each row to read; all by default. The others must be masked.
        scaling: Factor on the scores.
        scales: What a query is multiplied by for each equal part of the keys, shape `(batch, 1, parts, head_dim)`;
            `None` if it meets all as it is.

    Returns:
        Shape `(batch, num_heads, 1, head_dim of values)`, dtype of `query`.
    """
    batch, heads, slots, _ = key.shape
    exact = torch.promote_types(query.dtype, torch.float32)
    # What is small is computed for all rows at once: here, calls take as long as what they do.
    asked = (query.squeeze(2).unflatten(1, (heads, -1)).to(exact) * scaling)[:, :, :, None]
    asked = (asked if scales is None else asked * scales[:, :, None]).permute(0, 1, 3, 4, 2)
    added = None if mask is None else mask.expand(batch, query.shape[1], 1, slots).unflatten(1, (heads, -1)).squeeze(3)
    are_alike = ends is not None and sum(ends) >= _ALIKE * batch * max(ends)
    if are_alike and ends is not None and added is not None and query.dtype == exact:
        end = max(ends)
        output = _attended(key[:, :, :end], value[:, :, :end], asked, added[..., :end], slots)
        return output.flatten(1, 2)[:, :, None]
    outputs = []
    for row in range(batch):
        end = slots if ends is None else ends[row]
        size = max(1, PART // (end * key.shape[3]))  # heads of keys in a part
        for first in range(0, heads, size):
            part = slice(first, first + size)
            keys, values = (states[row, part, :end].to(exact) for states in (key, value))
            rest = None if added is None else added[row, part, :, :end]
            outputs.append(_attended(keys, values, asked[row, part], rest, slots))
    return torch.cat(outputs).view(*query.shape[:3], -1).to(query.dtype)


def _attended(
    key: torch.Tensor, value: torch.Tensor, query: torch.Tensor, mask: torch.Tensor | None, slots: int
) -> torch.Tensor:
    """Attend with the queries of one row, or of several; shapes as for [`_scores`], and `(..., heads, group, key)`."""
    scores = _scores(key, query, slots)
    return (scores if mask is None else _masked(scores, mask)).softmax(dim=-1) @ value


def _masked(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return scores + mask if mask.dtype != torch.bool else scores.masked_fill(~mask, torch.finfo(scores.dtype).min)


def _scores(key: torch.Tensor, query: torch.Tensor, slots: int) -> torch.Tensor:
    """Multiply keys with queries, of which there is one for each equal part of all slots.

    Args:
        key: The first keys, shape `(..., heads, key, head_dim)`.
        query: Shape `(..., heads, parts, head_dim, group)`.
        slots: Number of slots.

    Returns:
        Shape `(..., heads, group, key)`.
    """
    width = slots // query.shape[-3]
    if key.shape[-2] <= width:
        return (key @ query[..., 0, :, :]).transpose(-1, -2)
    parts = zip(key.split(width, dim=-2), query.unbind(-3), strict=False)
    return torch.cat([keys @ queries for keys, queries in parts], dim=-2).transpose(-1, -2)


def _for_all_heads(seen: torch.Tensor) -> torch.Tensor:
    """Bring `(query, key)` or `(batch, query, key)` into the shape `(1 or batch, 1, query, key)`."""
    return seen.reshape(-1, 1, *seen.shape[-2:])


def eager_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reference attention in plain PyTorch, which returns the weights.

    Args:
        module: The attention module.
        query: Shape `(batch, num_heads, query, head_dim)`.
        key: Shape `(batch, num_key_value_heads, key, head_dim)`.
        value: As `key`.
        attention_mask: What is added to the scores, broadcastable to `(batch, num_heads, query, key)`, or `None`.
        scaling: Factor on the scores.
        dropout: Probability with which a weight becomes zero.
        kwargs: Unused; part of transformers' interface.

    Returns:
        Outputs, shape `(batch, query, num_heads, head_dim)`, and weights, shape `(batch, num_heads, query, key)`.
    """
    if (groups := query.shape[1] // key.shape[1]) > 1:
        key, value = (states.repeat_interleave(groups, dim=1) for states in (key, value))
    scores = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = attention_weights(scores, query.dtype, dropout)
    return (weights @ value).transpose(1, 2).contiguous(), weights


def attention_weights(scores: torch.Tensor, dtype: torch.dtype, dropout: float) -> torch.Tensor:
    """Return softmax of scores over the last axis, computed in float32 at least, with dropout.

    Args:
        scores: Shape `(..., key)`.
        dtype: Dtype of the result.
        dropout: Probability with which a weight becomes zero.
    """
    weights = nn.functional.softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(dtype)
    return nn.functional.dropout(weights, p=dropout)
