"""Attention patterns as objects.

Slots are positions on any axis whose blocks begin at multiples of the block length; see `attention_lex.py`.
"""

from dataclasses import dataclass

import torch

ENDLESS = 2**60  # tokens of the one block of full attention


@dataclass(frozen=True)
class FullPattern:
    """Causal attention: a query sees all keys up to its own.

    Attributes:
        block: Number of tokens in a block: a query meets keys of its own and the previous block only. `None` for full
            attention, which has no blocks.
        sinks: Number of tokens at the start of a text that every later query meets as well. Blocks begin after them.
    """

    block: int | None = None
    sinks: int = 0
    name = "full"

    @property
    def slots(self) -> int | None:
        """Number of slots of the sinks and a pair of blocks; `None` for full attention."""
        return None if self.block is None else self.sinks + 2 * self.block

    def slots_in_use(self, tokens: int) -> int:
        """Return the number of slots that a text of `tokens` tokens fills."""
        if self.slots is None or tokens <= self.slots:
            return tokens
        assert self.block is not None
        return self.slots - self.block + (tokens - self.slots - 1) % self.block + 1

    def next_slot(self, fill: int) -> int:
        """Return the slot of the next token after `fill` slots in use: a full pair makes room for it first."""
        return fill - (self.block or 0) * (fill == self.slots)

    def next_slots(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the slot of each row's next token, with a number of tokens read for each row."""
        block = self.block or ENDLESS
        second = self.sinks + block
        return torch.where(tokens < second + block, tokens, second + (tokens - second) % block)

    def ring_slots(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the slot of token p of a text in a ring of two blocks, which begins after the sinks."""
        # The remainder has the sign of its number, so that sinks stay where they are.
        return self.sinks + torch.fmod(tokens - self.sinks, 2 * (self.block or ENDLESS))

    def pair_starts(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return how far a pair of blocks has moved since the start of the text when token p comes, in tokens."""
        return tokens - self.next_slots(tokens)

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
        """Return which keys a query sees: causal, and in the same or the previous block, or sinks."""
        query_block, key_block = ((slots - self.sinks) // self.block for slots in (query, key))
        # Sinks are near wherever they are; the numbers of blocks are few, and masks are large.
        key_block = torch.where(key < self.sinks, query_block.amax(), key_block)
        return super().visible(query, key).logical_and_(key_block[..., None, :] >= (query_block - 1)[..., None])

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
