"""Attention patterns as predicates on slots, and the masks they become.

Slots are positions on any axis whose blocks begin at multiples of the block length; see `folding_lex.py`.
"""

import torch


def visible(pattern: str, block: int | None, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Tell which keys a query sees.

    Args:
        pattern: `"blockwise"`, `"sliding"` or `"full"`.
        block: Block length for blockwise attention, window for sliding attention, unused for full attention.
        query: Slots of the queries, shape `(..., query)`.
        key: Slots of the keys, shape `(..., key)`.

    Returns:
        Boolean tensor, shape `(..., query, key)`: causal, and in the same or the previous block (LEX paper, §3.3), or
        less than `block` tokens away, or no further condition.
    """
    query, key = query[..., :, None], key[..., None, :]
    causal = key <= query
    if block is None or pattern == "full":
        return causal
    if pattern == "blockwise":
        return causal & (key // block >= query // block - 1)
    return causal & (query - key < block)


def attention_mask(
    seen: torch.Tensor | None, bias: torch.Tensor | None, implementation: str, dtype: torch.dtype
) -> torch.Tensor | None:
    """Put a pattern and a position bias into the form an attention function takes.

    Args:
        seen: Boolean, shape `(query, key)` or `(batch, query, key)`; `None` if every key is seen.
        bias: Shape `(heads, query, key)` or `(batch, heads, query, key)`, or `None`.
        implementation: Name of the attention function; sdpa takes booleans, others take what is added to scores.
        dtype: Type of the scores.

    Returns:
        Shape `(batch or 1, heads or 1, query, key)`, or `None` if there is nothing to mask and nothing to add.
    """
    if seen is not None:
        seen = seen[..., None, :, :] if seen.dim() == 3 else seen[None, None]
    if bias is not None:
        bias = (bias if bias.dim() == 4 else bias[None]).to(dtype)
    if seen is None:
        return bias
    if bias is None:
        if implementation == "sdpa":
            return seen
        bias = torch.zeros((), dtype=dtype, device=seen.device)
    return torch.where(seen, bias, torch.finfo(dtype).min)
