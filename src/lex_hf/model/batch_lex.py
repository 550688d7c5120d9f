"""The layout of a batch: which columns hold tokens, which document they belong to, and what a cache has read of them.

Eager code reads the counts of tokens from masks as numbers, and takes the shortest way for rows that are alike. A
compiled graph must not depend on the values of a mask: there, counts stay tensors, and every row goes its own way.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .positions_lex import Movable

Counts = list[int] | torch.Tensor
"""A number for each row: known numbers, or a tensor of shape `(batch,)` where a compiler must not look at them."""

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


def require(holds: torch.Tensor, message: str) -> None:
    """Raise a ValueError unless `holds`, one boolean; a compiled graph raises a RuntimeError instead.

    Args:
        holds: Boolean tensor without axes.
        message: The message of the error.
    """
    if torch.compiler.is_compiling():
        torch._assert_async(holds, message)
    elif not holds:
        raise ValueError(message)


def check_mask(attention_mask: torch.Tensor, batch: int, length: int, read: int | None) -> None:
    """Check shape and values of a mask.

    Args:
        attention_mask: What was passed.
        batch: Number of rows.
        length: Number of columns of new tokens.
        read: Number of columns that the cache has read; `None` if that is a tensor (static cache). The mask of a
            static cache may also cover the new tokens alone.

    Raises:
        ValueError: If the shape is wrong, or a value is neither 0 nor 1.
    """
    shape = tuple(attention_mask.shape)
    total = max(length, shape[-1]) if read is None and shape else length + (read or 0)
    if shape != (batch, total):
        raise ValueError(
            f"attention_mask has the shape {shape}; it must be (batch, tokens) = ({batch}, {total}), 1 for tokens and "
            "0 for padding. LEX makes its own causal masks."
        )
    if attention_mask.dtype != torch.bool:
        new = attention_mask[:, -length:]
        require(((new == 0) | (new == 1)).all(), NOT_BINARY)


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


def check_unpacked(position_ids: torch.Tensor, attention_mask: torch.Tensor) -> None:
    """Check in a compiled graph, which cannot look at them, that `position_ids` go up by one where nothing is padded.

    Raises:
        RuntimeError: When the graph runs, if they do not.
    """
    length = position_ids.shape[1]
    if length > 1:
        starts = (position_ids[:, 1:] != position_ids[:, :-1] + 1).any()
        torch._assert_async(~(starts & (attention_mask[:, -length:] != 0).all()), PACKED)


def check_past(past: torch.Tensor, lengths: Counts, padding: Counts) -> None:
    """Check that a mask says of the columns that a cache has read what it said when they were read.

    Args:
        past: The mask of these columns, shape `(batch, columns)`.
        lengths: Number of tokens that each row has read.
        padding: Checksum of the columns that were padding ([`checksum`]).

    Raises:
        ValueError: If it does not.
    """
    skipped = past == 0
    read = past.shape[1] - skipped.sum(dim=1)
    if torch.compiler.is_compiling() or isinstance(lengths, torch.Tensor):
        lengths, padding = as_tensor(lengths, past.device), as_tensor(padding, past.device)
        require(((read == lengths) & (checksum(skipped, 0) == padding)).all(), UNREAD)
        return
    known = read.tolist()
    if known != lengths:
        row = next(index for index, (now, then) in enumerate(zip(known, lengths, strict=True)) if now != then)
        raise ValueError(f"Row {row}: {known[row]} tokens now, {lengths[row]} when they were read. {UNREAD}")
    if min(known) < past.shape[1] and checksum(skipped, 0).tolist() != padding:
        raise ValueError(UNREAD)


def checksum(skipped: torch.Tensor, start: int | torch.Tensor) -> torch.Tensor:
    """Return a number for each row that shows which columns are padding, shape `(batch,)`; sums may be added.

    Args:
        skipped: Which columns are padding, boolean, shape `(batch, columns)`.
        start: Number of the first column.
    """
    # Pseudo-random numbers below 2^31 for each column; no product or sum leaves 64 bits.
    number = (torch.arange(skipped.shape[1], device=skipped.device) + start + 1) * 48271 % 2147483647
    return torch.where(skipped, number * number % 2147483629, 0).sum(dim=1)


@dataclass(frozen=True)
class Rows(Movable):
    """Where the tokens of a batch are, and which document they belong to.

    Attributes:
        counts: Number of tokens in each row.
        order: Column of the i-th token of each row, then those of the padding, shape `(batch, sequence)`; `None` if
            every row already begins with its tokens.
        inverse: The inverse of `order`.
        document: Number of the document each token belongs to, shape `(batch, sequence)`; `None` if no row holds more
            than one.
        position: Position of each token in its document, same shape; `None` as above.
        real: Which columns hold tokens, shape `(batch, sequence)`; `None` if all do.
        padding: [`checksum`] of the columns that hold none; `None` if all do, or without a cache.
    """

    counts: Counts
    order: torch.Tensor | None = None
    inverse: torch.Tensor | None = None
    document: torch.Tensor | None = None
    position: torch.Tensor | None = None
    real: torch.Tensor | None = None
    padding: Counts | None = None

    @classmethod
    def of(
        cls,
        batch: int,
        length: int,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        before: int | torch.Tensor | None = None,
        as_tensors: bool = False,
    ) -> "Rows":
        """Read the layout of a batch from what transformers passes to a model.

        Args:
            batch: Number of rows.
            length: Number of columns.
            attention_mask: 1 for tokens, 0 for padding, shape `(batch, at least length)`; the last `length` columns
                are these tokens. `None` means that all are.
            position_ids: Shape `(batch or 1, length)`, or `None`. Where they do not go up by one, another document
                begins, unless there is padding, whose positions mean nothing.
            before: Number of columns that a cache has read before these; `None` without a cache.
            as_tensors: Whether no value may be looked at: counts are then tensors, and nothing is left out because it
                would change nothing.
        """
        real = None if attention_mask is None else attention_mask[:, -length:] != 0
        starts = None if position_ids is None or length == 1 else position_ids[:, 1:] != position_ids[:, :-1] + 1
        if as_tensors:
            starts = starts if real is None or starts is None else starts & real.all()
        else:
            real = None if real is None or real.all() else real
            starts = None if real is not None or starts is None or not starts.any() else starts
        document, position = (None, None) if starts is None else _documents(starts.expand(batch, -1))
        if real is None:
            return cls([length] * batch, document=document, position=position)
        counts, padding = real.sum(dim=1), None if before is None else checksum(~real, before)
        is_sorted = length == 1 or (not as_tensors and bool((real[:, 1:] <= real[:, :-1]).all()))
        order, inverse = (None, None) if is_sorted else _real_first(real)
        if as_tensors:
            return cls(counts, order, inverse, document, position, real, padding)
        return cls(counts.tolist(), order, inverse, real=real, padding=None if padding is None else padding.tolist())

    def positions(self, before: torch.Tensor, length: int) -> torch.Tensor:
        """Return the position of each token in its own text, shape `(batch, length)`; padding repeats another's.

        Args:
            before: Number of tokens that each row has read before, shape `(batch,)`.
            length: Number of columns.
        """
        if self.position is not None:
            return self.position
        rank = torch.arange(length, device=before.device) if self.inverse is None else self.inverse
        last = (as_tensor(self.counts, before.device) - 1).clamp(min=0)
        return before[:, None] + torch.minimum(rank, last[:, None])

    def align(self, states: torch.Tensor) -> torch.Tensor:
        """Bring the tokens of each row to its front, `(batch, heads, sequence, head_dim)`."""
        return states if self.order is None else states.gather(2, self.order[:, None, :, None].expand_as(states))

    def restore(self, states: torch.Tensor) -> torch.Tensor:
        """Undo [`Rows.align`]."""
        return states if self.inverse is None else states.gather(2, self.inverse[:, None, :, None].expand_as(states))

    def key_order(self, fills: torch.Tensor, width: int, length: int) -> torch.Tensor:
        """Return the slot of each key, ordered by columns, shape `(batch, width)`.

        First come the keys that were cached, those of all rows side by side at their newest ones: a row that has
        fewer of them begins with slots that it does not use. Then come the new tokens in the order of their columns.

        Args:
            fills: Slots in use before the new tokens, shape `(batch,)`.
            width: Number of slots; `width - length` of them may be in use.
            length: Number of columns of new tokens.
        """
        rank = torch.arange(length - width, length, device=fills.device).expand(len(fills), -1)
        cached, new = rank[:, : width - length], rank[:, width - length :]
        return (fills[:, None] + torch.cat((cached, new if self.inverse is None else self.inverse), dim=1)) % width


def as_tensor(counts: Counts, device: torch.device) -> torch.Tensor:
    """Return counts as a tensor of shape `(batch,)`."""
    return counts if isinstance(counts, torch.Tensor) else torch.tensor(counts, device=device)


def added(counts: Counts, more: Counts | None) -> Counts:
    """Return the sum for each row."""
    if more is None:
        return counts
    if isinstance(counts, list) and isinstance(more, list):
        return [one + other for one, other in zip(counts, more, strict=True)]
    device = counts.device if isinstance(counts, torch.Tensor) else more.device  # type: ignore[union-attr]
    return as_tensor(counts, device) + as_tensor(more, device)


def _real_first(real: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the order of columns that puts tokens first, and its inverse."""
    order = torch.argsort(~real, dim=1, stable=True)
    return order, order.argsort(dim=1)


def _documents(starts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Number the documents of packed rows and the positions in them; `starts` is of columns 1, 2, …."""
    starts = F.pad(starts, (1, 0))
    column = torch.arange(starts.shape[1], device=starts.device).expand_as(starts)
    return starts.cumsum(dim=1), column - torch.where(starts, column, 0).cummax(dim=1).values
