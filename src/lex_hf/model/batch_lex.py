"""The layout of a batch: which columns hold tokens, which document they belong to, and how far each row has been read.

A number for all rows is an `int`; where rows differ, or under `torch.compile`, it is a tensor with a number for each
row. With numbers, a forward pass takes the shortest way; with tensors, every row goes its own way, and a compiled
graph does not depend on the values of a mask.
"""

from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
import torch.nn.functional as F
from transformers.cache_utils import CacheLayerMixin

Counts = int | torch.Tensor
"""A number that holds for all rows, or a tensor of shape `(batch,)` with a number for each."""

NOT_BINARY = "attention_mask holds values other than 0 and 1; it must be 1 for tokens and 0 for padding."
PACKED = (
    "position_ids start again within a row, so it packs several documents, and a cache holds one: pass no "
    "past_key_values, or one document in each row."
)
UNREAD = (
    "attention_mask does not fit what the cache has read: a token that was read cannot become padding afterwards, nor "
    "padding a token. Pass the mask that the tokens were read with, followed by that of the new tokens; or read the "
    "whole text again with past_key_values=None."
)


@dataclass(frozen=True)
class Movable:
    """Base of objects made once per forward pass, for layers that may lie on several devices."""

    def to(self, device: Any, **kwargs: Any) -> Self:
        """Return a copy with all tensors on `device`; accelerate calls this where a model is spread over devices."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: _moved(value, device, kwargs) for name, value in values.items()})


def _moved(value: Any, device: Any, options: dict[str, Any]) -> Any:
    if isinstance(value, tuple):
        return tuple(_moved(each, device, options) for each in value)
    return value.to(device, **options) if isinstance(value, torch.Tensor | Movable) else value


@dataclass(frozen=True)
class Batch(Movable):
    """Where the tokens of a batch are, and what was read before them.

    Attributes:
        size: Number of rows.
        length: Number of columns of new tokens.
        counts: Number of new tokens.
        before: Number of tokens read before.
        order: Column of the i-th token of each row, then those of the padding, shape `(batch, sequence)`; `None` if
            every row already begins with its tokens.
        inverse: The inverse of `order`.
        document: Number of the document each token belongs to, shape `(batch, sequence)`; `None` if no row holds more
            than one.
        position: Position of each token in its document, same shape; `None` as above.
        real: Which columns hold tokens, shape `(batch, sequence)`; `None` if all do.
        padding: [`checksum`] of the columns that hold none; 0 if all do, or without a cache.
    """

    size: int
    length: int
    counts: Counts
    before: Counts = 0
    order: torch.Tensor | None = None
    inverse: torch.Tensor | None = None
    document: torch.Tensor | None = None
    position: torch.Tensor | None = None
    real: torch.Tensor | None = None
    padding: Counts = 0

    @classmethod
    def of(
        cls,
        states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        layer: CacheLayerMixin | None,
    ) -> "Batch":
        """Check what transformers passes to a model, and read the layout of the batch from it.

        Args:
            states: Embedded tokens, shape `(batch, sequence, hidden_size)`.
            attention_mask: 1 for tokens, 0 for padding, shape `(batch, at least sequence)`; the last `sequence`
                columns are these tokens. `None` means that all are.
            position_ids: Shape `(batch or 1, sequence)`, or `None`. Where they do not go up by one, another document
                begins, unless there is padding, whose positions mean nothing.
            layer: A [`LexCacheLayer`] that the tokens continue, or `None`.

        Raises:
            ValueError: If mask or positions have a wrong shape, do not fit what the cache has read, or leave a row
                without any token. A compiled graph raises a RuntimeError.
        """
        batch, length, _ = states.shape
        if position_ids is not None:
            check_positions(position_ids, batch, length)
        if attention_mask is not None:
            check_mask(attention_mask, batch, length, layer)
        # Tokens are rolled back by number, so a compiler has to break its graph for a cache that records its past.
        as_tensors = torch.compiler.is_compiling() and (layer is None or not layer.record_past)
        real, starts = _marks(states, attention_mask, position_ids)
        if not as_tensors:
            real = None if real is None or real.all() else real
            starts = None if starts is None or not starts.any() else starts
        elif layer is not None:
            real, starts = _marks_of_one_document(states, real, starts)
        document, position = (None, None) if starts is None else _documents(starts.expand(batch, -1))
        before = 0 if layer is None else layer.tokens_read(batch, length, states.device)
        if real is None:
            return cls(batch, length, length, before, document=document, position=position)
        counts: Counts = real.sum(dim=1)
        if layer is None:
            _check_tokens(real)
        padding = 0 if layer is None else checksum(~real, layer.columns)
        is_sorted = length == 1 or (not as_tensors and bool((real[:, 1:] <= real[:, :-1]).all()))
        order, inverse = (None, None) if is_sorted else _real_first(real)
        # Rows with equally many tokens are read together, wherever their padding is.
        if not as_tensors and isinstance(before, int) and bool((counts == counts[0]).all()):  # type: ignore[index]
            counts = int(counts[0])  # type: ignore[index]
        return cls(batch, length, counts, before, order, inverse, document, position, real, padding)

    def pieces(self, size: int) -> list["Batch"]:
        """Return the layouts of consecutive pieces of `size` columns; the batch has no padding and is not packed."""
        starts = range(0, self.length, size)
        lengths = [min(size, self.length - start) for start in starts]
        return [
            replace(self, length=length, counts=length, before=self.before + start)
            for start, length in zip(starts, lengths, strict=True)
        ]

    def positions(self, device: torch.device) -> torch.Tensor:
        """Return the position of the i-th token of each row in its text, shape `(sequence,)` or `(batch, sequence)`.

        Where documents are packed, positions count on over all of them.
        """
        return by_row(self.before) + torch.arange(self.length, device=device)

    def positions_by_column(self, device: torch.device) -> torch.Tensor:
        """Return the position of the token in each column in its own text, shape `(batch or 1, sequence)`.

        Padding repeats the position of another token.
        """
        if self.position is not None:
            return self.position
        rank = torch.arange(self.length, device=device)[None] if self.inverse is None else self.inverse
        last = (as_tensor(self.counts, self.size, device) - 1).clamp(min=0)
        return by_row(self.before) + torch.minimum(rank, last[:, None])

    def align(self, states: torch.Tensor) -> torch.Tensor:
        """Move the tokens of each row to its front.

        Args:
            states: Shape `(batch, num_heads, sequence, head_dim)`.

        Returns:
            A tensor like `states`.
        """
        return states if self.order is None else states.gather(2, self.order[:, None, :, None].expand_as(states))

    def restore(self, states: torch.Tensor) -> torch.Tensor:
        """Undo [`Batch.align`]; shapes as there."""
        return states if self.inverse is None else states.gather(2, self.inverse[:, None, :, None].expand_as(states))

    def key_order(self, fills: torch.Tensor, width: int) -> torch.Tensor:
        """Return the slot of each key, ordered by columns.

        First come the keys that were cached, those of all rows side by side at their newest ones: a row that has
        fewer of them begins with slots that it does not use. Then come the new tokens in the order of their columns.

        Args:
            fills: Slots in use before the new tokens, shape `(batch,)`.
            width: Number of slots; `width - length` of them may be in use.

        Returns:
            Shape `(batch, width)`.
        """
        rank = torch.arange(self.length - width, self.length, device=fills.device).expand(self.size, -1)
        cached, new = rank[:, : width - self.length], rank[:, width - self.length :]
        return (fills[:, None] + torch.cat((cached, new if self.inverse is None else self.inverse), dim=1)) % width


def as_tensor(counts: Counts, size: int, device: torch.device) -> torch.Tensor:
    """Return counts as a tensor of shape `(size,)`."""
    if isinstance(counts, torch.Tensor):
        return counts
    return torch.full((size,), counts, device=device)


def by_row(counts: Counts) -> Counts:
    """Return counts as a column, which is added to positions of shape `(sequence,)` or `(batch, sequence)`."""
    return counts[:, None] if isinstance(counts, torch.Tensor) else counts


def require(holds: torch.Tensor, message: str) -> None:
    """Raise a ValueError unless `holds`; a compiled graph raises a RuntimeError instead.

    Args:
        holds: Boolean tensor without axes.
        message: The message of the error.
    """
    if torch.compiler.is_compiling():
        torch._assert_async(holds, message)
    elif not holds:
        raise ValueError(message)


def check_mask(attention_mask: torch.Tensor, batch: int, length: int, layer: CacheLayerMixin | None) -> None:
    """Check shape and values of a mask, and that it fits what a cache has read.

    Args:
        attention_mask: What was passed.
        batch: Number of rows.
        length: Number of columns of new tokens.
        layer: A [`LexCacheLayer`] that the tokens continue, or `None`. The mask of a preallocated cache may also
            cover the new tokens alone.

    Raises:
        ValueError: If the shape is wrong, a value is neither 0 nor 1, or the mask of the tokens read is another one.
    """
    read = 0 if layer is None else layer.columns
    shape = tuple(attention_mask.shape)
    total = length + read if isinstance(read, int) else max(length, *shape[-1:])
    if shape != (batch, total):
        raise ValueError(
            f"attention_mask has the shape {shape}; it must be (batch, tokens) = ({batch}, {total}), 1 for tokens and "
            "0 for padding. LEX makes its own causal masks."
        )
    new = attention_mask[:, -length:]
    require(((new == 0) | (new == 1)).all(), NOT_BINARY)
    if layer is not None and layer.is_initialized and attention_mask.shape[1] > length:
        check_past(attention_mask[:, :-length], layer)


def check_past(past: torch.Tensor, layer: CacheLayerMixin) -> None:
    """Check that a mask says of the columns that a cache has read what it said when they were read.

    Args:
        past: The mask of these columns, shape `(batch, columns)`.
        layer: A [`LexCacheLayer`].

    Raises:
        ValueError: If it does not.
    """
    skipped = past == 0
    read = past.shape[1] - skipped.sum(dim=1)
    lengths, padding = (as_tensor(counts, past.shape[0], past.device) for counts in (layer.lengths, layer.padding))
    if not torch.compiler.is_compiling() and not torch.equal(read, lengths):
        row = int((read != lengths).nonzero()[0])
        raise ValueError(f"Row {row}: {int(read[row])} tokens now, {int(lengths[row])} when they were read. {UNREAD}")
    require(((read == lengths) & (checksum(skipped, 0) == padding)).all(), UNREAD)


def checksum(skipped: torch.Tensor, start: Counts) -> torch.Tensor:
    """Return a number for each row that shows which columns are padding; sums of such numbers are those of the whole.

    Args:
        skipped: Which columns are padding, boolean, shape `(batch, columns)`.
        start: Number of the first column; a tensor without axes in a compiled graph.

    Returns:
        Shape `(batch,)`.
    """
    # Pseudo-random numbers below 2^31 for each column; no product or sum leaves 64 bits.
    number = (torch.arange(skipped.shape[1], device=skipped.device) + start + 1) * 48271 % 2147483647
    return torch.where(skipped, number * number % 2147483629, 0).sum(dim=1)


def check_positions(position_ids: torch.Tensor, batch: int, length: int) -> None:
    """Check the shape of `position_ids`.

    Raises:
        ValueError: If it is wrong.
    """
    shape = tuple(position_ids.shape)
    if shape not in ((batch, length), (1, length)):
        raise ValueError(
            f"position_ids have the shape {shape}; it must be (batch, tokens) = ({batch}, {length}) or (1, {length}): "
            "one position for each of the new tokens."
        )


def _marks(
    states: torch.Tensor, attention_mask: torch.Tensor | None, position_ids: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return which columns hold tokens, and at which columns after the first another document begins, if given."""
    length = states.shape[1]
    real = None if attention_mask is None else attention_mask[:, -length:] != 0
    if position_ids is None or length == 1:
        return real, None
    starts = position_ids[:, 1:] != position_ids[:, :-1] + 1
    return real, starts if real is None else starts & real.all()


def _marks_of_one_document(
    states: torch.Tensor, real: torch.Tensor | None, starts: torch.Tensor | None
) -> tuple[torch.Tensor, None]:
    """Return marks that are the same in every graph, which asserts that no other document begins."""
    if starts is not None:
        torch._assert_async(~starts.any(), PACKED)
    return torch.ones(states.shape[:2], dtype=torch.bool, device=states.device) if real is None else real, None


def _check_tokens(real: torch.Tensor) -> None:
    """Check that every row holds a token."""
    filled = real.any(dim=1)
    if torch.compiler.is_compiling():
        torch._assert_async(filled.all(), "A row of attention_mask has no 1: a row needs at least one token.")
    elif not filled.all():
        row = int((~filled).nonzero()[0])
        raise ValueError(f"Row {row} of attention_mask has no 1: a row needs at least one token.")


def _real_first(real: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the order of columns that puts tokens first, and its inverse."""
    order = torch.argsort(~real, dim=1, stable=True)
    return order, order.argsort(dim=1)


def _documents(starts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Number the documents of packed rows and the positions in them; `starts` is of columns 1, 2, …."""
    starts = F.pad(starts, (1, 0))
    column = torch.arange(starts.shape[1], device=starts.device).expand_as(starts)
    return starts.cumsum(dim=1), column - torch.where(starts, column, 0).cummax(dim=1).values
