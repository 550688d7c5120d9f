"""Attention patterns as objects.

Slots are positions on any axis whose blocks begin at multiples of the block length; see `attention_lex.py`.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class FullPattern:
    """Causal attention: a query sees all keys up to its own.

    Attributes:
        block: Number of tokens in a block: a query meets keys of its own and the previous block only. `None` for full
            attention, which has no blocks.
    """

    block: int | None = None
    name = "full"

    def visible(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Return which keys a query sees.

        Args:
            query: Slots of the queries, shape `(..., query)`.
            key: Slots of the keys, shape `(..., key)`.

        Returns:
            Boolean tensor, shape `(..., query, key)`.
        """
        return key[..., None, :] <= query[..., :, None]

    def first_key(self, slot: int) -> int:
        """Return the first slot that a query in `slot`, one of the first pair of blocks, sees."""
        return 0

    def is_causal(self, slots: int) -> bool:
        """Return whether queries see all keys before them among the first `slots` slots, at most a pair of blocks."""
        return True

    @property
    def packed_block(self) -> int | None:
        """Length of the blocks of a row in which packed documents, and so their own blocks, begin anywhere."""
        return self.block


@dataclass(frozen=True)
class BlockwisePattern(FullPattern):
    """Blockwise causal attention (LEX paper, §3.3): a query sees its own and the previous block."""

    block: int
    name = "blockwise"

    def visible(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Return which keys a query sees: causal, and in the same or the previous block."""
        return super().visible(query, key) & (
            (key // self.block)[..., None, :] >= (query // self.block - 1)[..., None]
        )

    @property
    def packed_block(self) -> int:
        """Twice the block: a query may look back over two of the row's own."""
        return 2 * self.block


@dataclass(frozen=True)
class SlidingPattern(FullPattern):
    """Sliding-window attention: a query sees the last `block` tokens, its own included.

    A window of w tokens never reaches past the previous block of w.
    """

    block: int
    name = "sliding"

    def visible(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Return which keys a query sees: causal, and less than `block` tokens away."""
        return super().visible(query, key) & (query[..., :, None] - key[..., None, :] < self.block)

    def first_key(self, slot: int) -> int:
        """Return the first slot of the window that ends in `slot`."""
        return max(0, slot + 1 - self.block)

    def is_causal(self, slots: int) -> bool:
        """Return whether the window holds all of the slots."""
        return slots <= self.block


PATTERNS: dict[str, type[FullPattern]] = {
    pattern.name: pattern for pattern in (BlockwisePattern, SlidingPattern, FullPattern)
}
