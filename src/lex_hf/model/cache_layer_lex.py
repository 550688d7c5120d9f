"""A layer of the generation cache: two blocks of keys and values, however long the text.

While all rows have read equally many tokens, it holds a *pair of blocks*, `2h` slots. The first block of a text fills
slots 0 … h - 1, the second slots h … 2h - 1. When a further token comes to a full pair, the second block moves to the
first place and the token goes to slot h; so the keys that a query meets lie side by side, and nothing is masked.

Where rows differ, and in a preallocated cache, the same two blocks are a *ring*: token p of a text is in slot
p mod 2h, nothing ever moves, and a mask says what a query meets. One compiled graph serves every step.

Keys are stored rotated for their absolute position. What xPos scales is relative to a block: keys of the previous
block are multiplied by constants, when they move to the first place of a pair, or in a ring by way of the query.
Full attention is one block without an end, in storage that doubles when it is full.

A pattern may have *sinks*, the first tokens of a text, which lie in the slots before the blocks and stay. What else
happens to them is up to layers that know how keys are rotated.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from transformers.cache_utils import CacheLayerMixin

from .batch_lex import Batch, Counts, as_tensor, by_row
from .masking_lex import ENDLESS, FullPattern
from .rotation_lex import scaled
from .slots_lex import append, spread, take
from .versions_lex import removed_by

ROLLBACK = 256  # tokens that can be taken back over borders of blocks while the past is recorded

COUNTS = ("lengths", "padding", "columns")

Origin = tuple[tuple[str, Any], ...]


class LexCacheLayer(CacheLayerMixin):
    """Keys and values of one layer: two blocks for each row.

    Args:
        pattern: The attention pattern of the layer.
        origin: Names and values of the fields that decide how keys are stored.
        max_cache_len: Number of tokens that full attention has room for, in a preallocated cache; `None` for a cache
            that grows as it needs to.

    Attributes:
        keys: Shape `(batch, num_key_value_heads, slots, head_dim)`, with `2h` slots, or as many as full attention has
            room for.
        values: As `keys`.
        lengths: Number of tokens that have been read, padding not counted. A number while all rows have read equally
            many, and the storage is a pair of blocks; otherwise, and if preallocated, a tensor, and it is a ring.
        fill: Slots of the pair of blocks in use.
        padding: Checksum of the columns that were read as padding.
        columns: Number of columns of input read, padding included; if preallocated, a tensor without axes.
        record_past: Whether to remember what moves of blocks change, for [`LexCacheLayer.crop`].
        past: If so, keys and values of the pair of blocks at the last crop and of all tokens since, as they were
            written, and what scales keys of a block that becomes the previous one.
        takes_pieces: Whether `update` may be called several times in one forward pass.
    """

    takes_pieces = True

    def __init__(self, pattern: FullPattern, origin: Origin = (), max_cache_len: int | None = None) -> None:
        super().__init__()
        self.pattern = pattern
        self.origin = origin
        self.max_cache_len = max_cache_len
        self.fill = 0
        self.lengths: Counts = 0
        self.padding: Counts = 0
        self.columns: Counts = 0
        if max_cache_len is not None:
            self.lengths, self.padding, self.columns = (torch.zeros((), dtype=torch.long) for _ in range(3))
        self.record_past = False
        self.past: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None = None

    @property
    def block(self) -> int | None:
        """Length of a block in tokens; `None` for full attention."""
        return self.pattern.block

    @property
    def is_preallocated(self) -> bool:
        """True if all tensors are allocated once and stay where they are."""
        return self.max_cache_len is not None

    is_compileable = is_preallocated  # whether `generate` compiles the steps that use it

    @property
    def is_sliding(self) -> bool:
        """True if memory is bounded."""
        return self.block is not None

    @property
    def slots(self) -> int | None:
        """Number of slots of the storage; `None` if it grows."""
        return self.pattern.slots or self.max_cache_len

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate the storage.

        Args:
            key_states: Shape `(batch, num_key_value_heads, sequence, head_dim)`.
            value_states: As `key_states`.
        """
        self.dtype, self.device = key_states.dtype, key_states.device
        batch, heads, _, width = key_states.shape
        size = (batch, heads, self.slots or 0)
        with torch.inference_mode(False):  # so that a text begun in inference mode may be continued outside of it
            self.keys = torch.zeros((*size, width), dtype=self.dtype, device=self.device)
            self.values = torch.zeros((*size, value_states.shape[3]), dtype=self.dtype, device=self.device)
            if self.is_preallocated:
                # Copies of each layer's own tensors: equal constants of a compiled graph would become one tensor.
                lengths, padding, columns = map(self._count, COUNTS)
                self.lengths, self.padding = (
                    count.to(self.device).expand(batch).clone() for count in (lengths, padding)
                )
                self.columns = columns.to(self.device)
        self._pin()
        self.is_initialized = True

    def _count(self, name: str) -> torch.Tensor:
        count = getattr(self, name)
        assert isinstance(count, torch.Tensor)
        return count

    def _pin(self) -> None:
        """Mark the tensors that stay where they are; otherwise CUDA graphs cannot be replayed."""
        self.batch_size = self.keys.shape[0]
        if self.is_preallocated and not torch.compiler.is_compiling():
            for tensor in (*self._states(), self.lengths, self.padding, self.columns):
                torch._dynamo.mark_static_address(tensor)

    def _states(self) -> list[torch.Tensor]:
        """All keys and values in storage."""
        return [self.keys, self.values]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new tokens and return all keys and values that their attention needs.

        The cached states are constants: no gradient flows into earlier calls.

        Args:
            key_states: Rotated keys, those of each row first, shape
                `(batch, num_key_value_heads, sequence, head_dim)`.
            value_states: Values, same shape.
            args: The [`Batch`], and what scales keys of a block that becomes the previous one (`Rotation.decay`).
            kwargs: Unused; part of transformers' interface.

        Returns:
            Keys and values, shape `(batch, num_key_value_heads, slots, head_dim)`: slots 0, 1, … of the text that
            begins with the pair of blocks in the cache; for single tokens of rows that differ, the ring. They may be
            views of the storage.
        """
        batch, decay = args
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._check_states(key_states)
        if isinstance(batch.before, int):
            states = self._append(key_states, value_states, batch, decay)
        elif batch.length == 1:
            states = self._write_token(key_states, value_states, batch)
        else:
            states = self._append_by_row(key_states, value_states, batch, decay)
        self._advance(batch)
        return states

    def tokens_read(self, batch: int, length: int, device: torch.device) -> Counts:
        """Return the number of tokens that were read before `length` new columns of a batch.

        Args:
            batch: Number of rows.
            length: Number of columns of new tokens.
            device: Where these are.
        """
        if not self.is_preallocated:
            return self.lengths
        if self.is_initialized:
            return self._count("lengths").clone()  # a preallocated cache counts in place
        return torch.zeros(batch, dtype=torch.long, device=device) if length == 1 else 0

    def _check_states(self, key: torch.Tensor) -> None:
        """Check that new keys are like those in the storage; another model or another autocast gives others."""
        held = (self.keys.shape[1], self.keys.shape[3], self.dtype)
        new = (key.shape[1], key.shape[3], key.dtype)
        if held != new:
            raise ValueError(
                f"past_key_values holds {held[0]} heads of {held[1]} in {held[2]}, and this model has {new[0]} of "
                f"{new[1]} in {new[2]}: the cache was filled by another model, or in another dtype. Read the text "
                "again with past_key_values=None."
            )

    def _append(
        self, key: torch.Tensor, value: torch.Tensor, batch: Batch, decay: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store tokens of rows that have read equally many, after the pair of blocks."""
        assert isinstance(batch.before, int)
        self._make_room(decay)
        end, first = self.fill + batch.length, batch.before - self.fill
        self._reserve(end)
        self._remember(key, value, batch, decay)
        counts = batch.counts
        self._keep_sinks(key, value)
        if self.is_preallocated or isinstance(counts, torch.Tensor):
            keys, values = append(self.keys, key, self.fill), append(self.values, value, self.fill)
            ends = self.fill + as_tensor(counts, batch.size, key.device)
            self.store_ring(keys.detach(), values.detach(), ends, first, decay)
            return keys, values
        if end <= self.keys.shape[2] and not (torch.is_grad_enabled() and key.requires_grad):
            self.keys.narrow(2, self.fill, batch.length).copy_(key)
            self.values.narrow(2, self.fill, batch.length).copy_(value)
            keys, values = self.keys.narrow(2, 0, end), self.values.narrow(2, 0, end)
        else:
            keys, values = append(self.keys, key, self.fill), append(self.values, value, self.fill)
            self._store_pair(keys.detach(), values.detach(), self.fill + counts, first, decay)
        self.fill = self.pattern.slots_in_use(self.fill + counts)
        return keys, values

    def _append_by_row(
        self, key: torch.Tensor, value: torch.Tensor, batch: Batch, decay: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store several tokens of rows that have read different numbers of them: the blocks as a pair, then these."""
        assert isinstance(batch.before, torch.Tensor)
        fills = self.pattern.next_slots(batch.before)
        width = self.width_before(batch)
        self._reserve(width + batch.length)
        first = batch.before - fills
        slot = torch.arange(width, device=key.device)
        slot = self.pattern.ring_slots(slot + first[:, None] * (slot >= self.pattern.sinks))
        keys, values = (
            spread(new, fills, take(stored, slot, width)) for new, stored in ((key, self.keys), (value, self.values))
        )
        keys, values = self._with_sinks(keys, values, fills, first)
        if decay is not None and self.block is not None:
            previous = scaled(keys[:, :, : self.block], decay)
            is_stored = torch.arange(self.block, device=key.device) < fills[:, None]
            previous = torch.where(is_stored[:, None, :, None], previous, keys[:, :, : self.block])
            keys = torch.cat((previous, keys[:, :, self.block :]), dim=2)
        self.store_ring(keys.detach(), values.detach(), fills + batch.counts, first, decay)
        return keys, values

    def width_before(self, batch: Batch) -> int:
        """Return an upper bound of the slots that rows use before new tokens, after room was made."""
        if self.block is not None:
            return self.pattern.sinks + 2 * self.block - 1
        return int(self.columns) if self.max_cache_len is None else self.max_cache_len - batch.length

    def _write_token(self, key: torch.Tensor, value: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Store one token for each row in the ring; a row without a token keeps its state."""
        assert isinstance(batch.before, torch.Tensor)
        end = self.width_before(batch) + 1
        self._reserve(end)
        row, slot = torch.arange(batch.size, device=key.device), self.pattern.ring_slots(batch.before)
        stored = []
        self._write_sink(key, value, batch)
        for storage, states in ((self.keys, key), (self.values, value)):
            new = states[:, :, 0].detach()
            if batch.real is not None:
                new = torch.where(batch.real[:, -1, None, None], new, storage[row, :, slot])
            storage[row, :, slot] = new
            if torch.is_grad_enabled() and states.requires_grad:
                storage = storage.scatter(2, slot[:, None, None, None].expand_as(states), states)
            stored.append(storage)
        return stored[0].narrow(2, 0, end), stored[1].narrow(2, 0, end)

    def _reserve(self, slots: int) -> None:
        """Grow the storage to at least `slots` slots, if it grows."""
        if self.slots is not None or slots <= self.keys.shape[2]:
            return
        extra = max(slots, 2 * self.keys.shape[2], 64) - self.keys.shape[2]
        with torch.inference_mode(False):  # as for the first allocation
            self.keys, self.values = F.pad(self.keys, (0, 0, 0, extra)), F.pad(self.values, (0, 0, 0, extra))

    def _keep_sinks(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Note the sinks among tokens that come to rows that have read equally many."""

    def _with_sinks(
        self, keys: torch.Tensor, values: torch.Tensor, fills: torch.Tensor, first: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Note the sinks among new tokens, and turn those of each row, whose pair of blocks has moved by `first`."""
        return keys, values

    def _write_sink(self, key: torch.Tensor, value: torch.Tensor, batch: Batch) -> None:
        """Note new tokens that are sinks, one for each row, and turn those of each row to its pair of blocks."""

    def _place_sinks(self, first: int) -> None:
        """Turn sinks to stand before a pair of blocks that begins `first` tokens after the first one."""

    def _make_room(self, decay: torch.Tensor | None) -> None:
        """Move the second block to the first place if the pair is full."""
        if self.block is None or self.fill != self.slots:
            return
        self.fill -= self.block
        begin = self.pattern.sinks
        self.keys[:, :, begin : self.fill] = scaled(self.keys[:, :, self.fill :], decay)
        self.values[:, :, begin : self.fill] = self.values[:, :, self.fill :]
        assert isinstance(self.lengths, int)
        self._place_sinks(self.lengths - self.fill)

    def _store_pair(
        self, keys: torch.Tensor, values: torch.Tensor, end: int, first: int, decay: torch.Tensor | None
    ) -> None:
        """Store the last pair of blocks of a text, and its sinks.

        Args:
            keys: Keys of slots 0, 1, …, shape `(batch, num_key_value_heads, slots, head_dim)`.
            values: As `keys`.
            end: Number of slots that the text fills.
            first: How many tokens after the first pair of blocks of the text this one begins.
            decay: What scales keys of a block that becomes the previous one.
        """
        start, begin = end - self.pattern.slots_in_use(end), self.pattern.sinks
        for storage, states in ((self.keys, keys), (self.values, values)):
            pair = states[:, :, start + begin : start + storage.shape[2]]
            storage[:, :, begin : begin + pair.shape[2]] = pair
        if start:
            assert self.block is not None
            previous = keys[:, :, start + begin : start + begin + self.block]
            self.keys[:, :, begin : begin + self.block] = scaled(previous, decay)
        self._place_sinks(first + start)

    def store_ring(
        self, keys: torch.Tensor, values: torch.Tensor, ends: torch.Tensor, first: Counts, decay: torch.Tensor | None
    ) -> None:
        """Store the last two blocks of each row's text as a ring.

        Args:
            keys: Keys of slots 0, 1, …, those of the first block scaled as in a previous block, shape
                `(batch, num_key_value_heads, slots, head_dim)`.
            values: As `keys`.
            ends: Number of slots that each row's text fills, shape `(batch,)`.
            first: How many tokens after the first pair of blocks of the text this one begins.
            decay: What scales keys of a block that becomes the previous one.
        """
        if self.block is None:
            ring_keys, ring_values = keys, values
        else:
            sinks, ring = torch.arange(self.slots or 0, device=keys.device).tensor_split([self.pattern.sinks])
            last = ends[:, None] - 1
            slot = (last - (last + by_row(first) - ring) % (2 * self.block)).clamp(min=self.pattern.sinks)
            slot = torch.cat((sinks.expand(len(slot), -1), slot), dim=1).clamp(max=keys.shape[2] - 1)
            ring_keys, ring_values = take(keys, slot, slot.shape[1]), take(values, slot, slot.shape[1])
            if decay is not None:
                is_scaled = (slot < self.block)[:, None, :, None]
                ring_keys = torch.where(is_scaled, scaled(ring_keys, 1 / decay), ring_keys)
        self.keys.narrow(2, 0, ring_keys.shape[2]).copy_(ring_keys)
        self.values.narrow(2, 0, ring_values.shape[2]).copy_(ring_values)

    def _remember(self, key: torch.Tensor, value: torch.Tensor, batch: Batch, decay: torch.Tensor | None) -> None:
        """Note new tokens before they are written, if rows have as many; of a long text, only its end."""
        if not self.record_past or isinstance(batch.counts, torch.Tensor):
            self.past = None
            return
        keys, values = self.keys[:, :, : self.fill], self.values[:, :, : self.fill]
        if self.past is not None:
            keys, values, _ = self.past
        keys = torch.cat((keys, key.detach()[:, :, : batch.counts]), dim=2)
        values = torch.cat((values, value.detach()[:, :, : batch.counts]), dim=2)
        block, begin = self.block or keys.shape[2], self.pattern.sinks
        surplus = (keys.shape[2] - ROLLBACK - (self.slots or 2 * block)) // block * block
        if surplus > 0:
            # What lands in the slots of sinks is none: those are kept apart, and placed anew by `_store_pair`.
            keys, values = keys[:, :, surplus:].clone(), values[:, :, surplus:].clone()
            keys[:, :, begin : begin + block] = scaled(keys[:, :, begin : begin + block], decay)
        self.past = keys, values, decay

    def _advance(self, batch: Batch) -> None:
        """Count the tokens that were read."""
        self._set_counts(self.lengths + batch.counts, self.padding + batch.padding, self.columns + batch.length)

    def _set_counts(self, *counts: Counts) -> None:
        """Set lengths, padding and columns; in place if preallocated."""
        for name, count in zip(COUNTS, counts, strict=True):
            if self.is_preallocated:
                self._count(name).copy_(torch.as_tensor(count))
            else:
                setattr(self, name, count)

    def nbytes(self) -> int:
        """Return the bytes of the storage, counted from the tensors themselves."""
        tensors = [tensor for tensor in (*self._states(), *(self.past or ())) if tensor is not None]
        return sum(tensor.untyped_storage().nbytes() for tensor in tensors)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many keys the next `query_length` tokens meet, and how many are no longer kept."""
        if self.is_preallocated:
            return self.slots or 0, 0
        columns = int(self.columns)
        kept = self.fill if isinstance(self.lengths, int) else self.pattern.slots_in_use(int(self.lengths.max()))
        return kept + query_length, columns - kept

    def get_seq_length(self) -> int:
        """Return the number of columns read, padding included; if preallocated a tensor, as transformers has it."""
        return self.columns if self.is_initialized else 0  # type: ignore[return-value]

    def get_max_length(self) -> int:
        """Return the number of tokens that preallocated full attention has room for, or -1 if there is no limit."""
        return self.max_cache_len if self.max_cache_len is not None and self.block is None else -1

    get_max_cache_shape = get_max_length  # its name before transformers 5.13

    def reset(self) -> None:
        """Forget everything that was read; the storage is kept."""
        if self.is_preallocated and self.is_initialized:
            for states in self._states():
                states.zero_()
        self._set_counts(0, 0, 0)
        self.fill, self.past = 0, None

    def activate_past_recording(self) -> None:
        """Remember what is read from now on, so that [`LexCacheLayer.crop`] can go back over borders of blocks."""
        self.record_past = not self.is_preallocated

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last tokens of every row, exactly.

        Within the block that is being filled any number can be taken back. To go back over borders of blocks,
        [`LexCacheLayer.activate_past_recording`] must have been called before the tokens were read; it is enough for
        all that was read since the last crop, at most `ROLLBACK` tokens.

        Raises:
            ValueError: If `tokens_to_remove` is positive (before transformers 5.14, it may be: the tokens to keep), or
                the tokens reach back past the blocks that are kept.
        """
        removed = removed_by(tokens_to_remove, int(self.columns))
        if removed > (spare := self._croppable()):
            self._restore_past(removed, spare)
        elif isinstance(self.lengths, int):
            self.fill -= removed
        self._set_counts(self.lengths - removed, self.padding, self.columns - removed)
        self.past = None

    def _croppable(self) -> int:
        """Tokens that rows can give back and still hold the block before the one their next token falls into."""
        if isinstance(self.lengths, int):
            return self.fill if self.fill == self.lengths else self.fill - self._previous()
        if not self.is_initialized:
            return 0
        in_block = (self.lengths - self.pattern.sinks - 1) % (self.block or ENDLESS) + 1
        return int(torch.where(self.lengths <= (self.pattern.slots or ENDLESS), self.lengths, in_block).min())

    def _previous(self) -> int:
        """Slots before the block that is being filled, which hold what cannot be taken back."""
        return self.pattern.sinks + (self.block or 0)

    def _restore_past(self, removed: int, spare: int) -> None:
        """Store the pair of blocks in which the remembered text ends without its last tokens."""
        known = 0
        if self.past is not None:
            # The first block that is remembered only serves as the one before, unless it is the first of the text.
            known = self.past[0].shape[2]
            known -= 0 if known == self.lengths else self._previous()
        if self.past is None or removed > known:
            hint = "make a LexCache and " if self.is_preallocated else ""
            raise ValueError(
                f"crop(-{removed}): the block that these tokens followed is no longer in the cache, which can give "
                f"back at most {max(spare, known, 0)} tokens now. To be able to take back more, {hint}call "
                "activate_past_recording() before reading them, with rows of one length."
            )
        keys, values, decay = self.past
        end = keys.shape[2] - removed
        assert isinstance(self.lengths, int)
        self._store_pair(keys, values, end, self.lengths - keys.shape[2], decay)
        self.fill = self.pattern.slots_in_use(end)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Let row b continue the text of row `beam_idx[b]`; in place if preallocated."""
        if not self.is_preallocated:
            self.batch_select_indices(beam_idx)
        elif self.is_initialized:
            for tensor in (*self._states(), *map(self._count, ("lengths", "padding"))):
                tensor.copy_(tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows `indices`, in that order."""
        self._map(lambda states: states[indices.to(states.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times."""
        self._map(lambda states: states.repeat_interleave(repeats, dim=0))

    def _map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply a function of rows to all states, in new storage."""
        if not self.is_initialized:
            return
        self.keys, self.values = function(self.keys), function(self.values)
        self.lengths, self.padding = (
            function(counts) if isinstance(counts, torch.Tensor) else counts for counts in (self.lengths, self.padding)
        )
        if self.past is not None:
            self.past = function(self.past[0]), function(self.past[1]), self.past[2]
        self._pin()
