"""The generation cache: two blocks of keys and values for each layer, however long the text.

A row's cache is a *pair of blocks*, `2h` slots. The first block of a text fills slots 0 … h - 1, the second slots
h … 2h - 1. When a further token comes to a full pair, the second block moves to the first place and the token goes
to slot h. Keys are stored as they enter attention, turned for their slot; the move is a turn by constants, once every
h tokens, and nothing is ever recomputed. Sliding attention is the same with blocks as long as the window. Full
attention is one block without an end, whose storage grows by doubling.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from .configuration_lex import LexConfig
from .positions_lex import rotate

ROLLBACK = 256  # tokens that can be taken back over borders of blocks while the past is recorded


def fill_of(end: int, block: int | None) -> int:
    """Return the slots in use once a text that ends before slot `end` has kept its last pair of blocks only."""
    if block is None or end <= 2 * block:
        return end
    return block + (end - 1) % block + 1


def shifted(keys: torch.Tensor, shift: torch.Tensor | None) -> torch.Tensor:
    """Turn keys of the second block of a pair, `(..., head_dim)`, into keys of the first."""
    return keys if shift is None else rotate(keys, shift)


class Writer(Protocol):
    """What a cache layer needs of a plan (`folding_lex.py`): to be told where new states go."""

    def write(
        self, layer: "LexCacheLayer", key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Put new keys and values into a layer's cache; return slots 0, 1, … up to the last new token.

        Args:
            layer: The layer's cache.
            key: New keys, turned for their slots, shape `(batch, num_heads, sequence, head_dim)`.
            value: New values, same shape.
        """
        ...


class LexCacheLayer(CacheLayerMixin):
    """Keys and values of one layer: a pair of blocks for each row.

    Attributes:
        block: Length of a block in tokens; `None` for full attention.
        keys: Shape `(batch, num_heads, slots, head_dim)`.
        values: As `keys`.
        fills: Number of slots in use in each row; the next token goes to the next one.
        lengths: Number of real tokens each row has read, padding not counted.
        record_past: Whether to remember what moves of blocks change, for [`LexCacheLayer.crop`].
        past: If so, keys and values of the pair of blocks at the last crop and of all tokens since, as
            [`LexCacheLayer.keep`] takes them.
        takes_chunks: Whether a layer may call `update` several times in one forward pass.
    """

    is_compileable = False
    takes_chunks = True

    def __init__(self, block: int | None) -> None:
        super().__init__()
        self.block = block
        self.fills: list[int] = []
        self.lengths: list[int] = []
        self.columns = 0
        self.record_past = False
        self.past: tuple[torch.Tensor, torch.Tensor] | None = None
        self.shift: torch.Tensor | None = None

    @property
    def is_sliding(self) -> bool:
        """Whether memory is bounded."""
        return self.block is not None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate the storage for states of shape `(batch, num_heads, sequence, head_dim)`."""
        self.dtype, self.device = key_states.dtype, key_states.device
        batch, heads, _, width = key_states.shape
        slots = 0 if self.block is None else 2 * self.block
        with torch.inference_mode(False):  # so that a text begun in inference mode may be continued outside of it
            self.keys = torch.zeros((batch, heads, slots, width), dtype=self.dtype, device=self.device)
            self.values = torch.zeros_like(self.keys)
        self.batch_size, self.fills, self.lengths = batch, [0] * batch, [0] * batch
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take in new tokens and return all keys and values that their attention needs.

        The cached states are constants: no gradient flows into earlier calls.

        Args:
            key_states: Keys turned for their slots, shape `(batch, num_heads, sequence, head_dim)`.
            value_states: Values, same shape.
            args: The [`AttentionPlan`] of the forward pass.
            kwargs: Unused; part of transformers' interface.

        Returns:
            Keys and values of slots 0, 1, … of every row, shape `(batch, num_heads, slots, head_dim)`; without
            gradients and within one pair of blocks they are a view of the storage.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        plan: Writer = args[0]
        return plan.write(self, key_states, value_states)

    def reserve(self, slots: int) -> None:
        """Make room for `slots` slots; only full attention ever needs more than it has."""
        if slots <= self.keys.shape[2]:
            return
        extra = max(slots, 2 * self.keys.shape[2], 64) - self.keys.shape[2]
        self.keys = torch.nn.functional.pad(self.keys, (0, 0, 0, extra))
        self.values = torch.nn.functional.pad(self.values, (0, 0, 0, extra))

    def make_room(self, shift: torch.Tensor | None) -> None:
        """Move the second block to the first place in every row whose pair is full.

        Args:
            shift: Factors that move a key back by one block, or `None` if the scheme does not turn keys.
        """
        rows = [row for row, fill in enumerate(self.fills) if self.block and fill == 2 * self.block]
        if not rows or self.block is None:
            return
        # A plain slice where possible: an index would copy the storage of all rows.
        which = slice(None) if len(rows) == len(self.fills) else torch.tensor(rows, device=self.keys.device)
        self.keys[which, :, : self.block] = shifted(self.keys[which, :, self.block :], shift)
        self.values[which, :, : self.block] = self.values[which, :, self.block :]
        for row in rows:
            self.fills[row] = self.block

    def keep(self, keys: torch.Tensor, values: torch.Tensor, ends: list[int], shift: torch.Tensor | None) -> None:
        """Store the last pair of blocks of each row.

        Args:
            keys: Keys of slots 0, 1, …, those past the first pair turned for the second block of their own pair.
            values: As `keys`, shape `(batch, num_heads, slots, head_dim)`.
            ends: Number of slots that each row fills.
            shift: As for [`LexCacheLayer.make_room`].
        """
        block = self.block or 0
        starts = [0 if end <= 2 * block or not block else ((end - 1) // block - 1) * block for end in ends]
        for storage, states, turn in ((self.keys, keys, shift), (self.values, values, None)):
            if len(set(starts)) > 1:
                storage.copy_(self._pairs(states, starts, turn))
                continue
            pair = states[:, :, starts[0] : starts[0] + storage.shape[2]]
            storage[:, :, : pair.shape[2]] = pair
            if starts[0] and turn is not None:
                storage[:, :, :block] = shifted(pair[:, :, :block], turn)

    def _pairs(self, states: torch.Tensor, starts: list[int], shift: torch.Tensor | None) -> torch.Tensor:
        """Take the pair of blocks that begins at slot `starts[b]` of each row."""
        slots = torch.arange(self.keys.shape[2], device=states.device)
        index = torch.tensor(starts, device=states.device)[:, None] + slots
        pairs = states.take_along_dim(index.clamp(max=states.shape[2] - 1)[:, None, :, None], dim=2)
        moved = [row for row, start in enumerate(starts) if start]
        pairs[moved, :, : self.block] = shifted(pairs[moved, :, : self.block], shift)
        return pairs

    def remember(
        self, keys: torch.Tensor, values: torch.Tensor, counts: list[int], shift: torch.Tensor | None
    ) -> None:
        """Note new tokens of all rows, which continue at one slot, before they are written.

        Rows that then end at different slots have no common past: nothing is kept of them.

        Of a long text only the end is kept: enough to take back `ROLLBACK` tokens.
        """
        if not self.record_past or min(counts) < keys.shape[2]:
            self.past = None
            return
        known = self.past or (self.keys[:, :, : self.fills[0]], self.values[:, :, : self.fills[0]])
        keys, values = (torch.cat(pair, dim=2) for pair in zip(known, (keys.detach(), values.detach()), strict=True))
        block, self.shift = self.block or 0, shift
        surplus = (keys.shape[2] - ROLLBACK - 2 * block) // block * block if block else 0
        if surplus > 0:
            keys, values = keys[:, :, surplus:].clone(), values[:, :, surplus:].clone()
            keys[:, :, :block] = shifted(keys[:, :, :block], shift)
        self.past = keys, values

    def advance(self, counts: list[int], columns: int) -> None:
        """Record that row b has read `counts[b]` more tokens, in `columns` columns of input."""
        ends = (fill + count for fill, count in zip(self.fills, counts, strict=True))
        self.fills = [fill_of(end, self.block) for end in ends]
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        self.columns += columns

    def nbytes(self) -> int:
        """Return the bytes of the storage, counted from the tensors themselves."""
        tensors = [tensor for tensor in (self.keys, self.values, *(self.past or ())) if tensor is not None]
        return sum(tensor.untyped_storage().nbytes() for tensor in tensors)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many keys the next `query_length` tokens meet, and how many are gone."""
        kept = max(self.fills, default=0)
        return kept + query_length, self.columns - kept

    def get_seq_length(self) -> int:
        """Return the number of columns read so far, padding included, as transformers counts them."""
        return self.columns

    def get_max_length(self) -> int:
        """Return -1: a text may have any length."""
        return -1

    def reset(self) -> None:
        """Forget everything that was read; the storage is kept."""
        self.fills, self.lengths = [0] * len(self.fills), [0] * len(self.lengths)
        self.columns, self.past = 0, None

    def activate_past_recording(self) -> None:
        """Remember what is read from now on, so that [`LexCacheLayer.crop`] can go back over borders of blocks."""
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last tokens of every row, exactly.

        Within the block that is being filled any number can be taken back. To go back over borders of blocks,
        [`LexCacheLayer.activate_past_recording`] must have been called before the tokens were read; it is enough for
        all that was read since the last crop, at most `ROLLBACK` tokens.

        Raises:
            ValueError: If `tokens_to_remove` is positive, or the tokens reach back past the blocks that are kept.
        """
        removed = abs(tokens_to_remove)
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): give the number of tokens to remove as a negative number.")
        if removed <= min((self._croppable(row) for row in range(len(self.fills))), default=0):
            self.fills = [fill - removed for fill in self.fills]
        else:
            self._restore_past(removed)
        self.lengths = [length - removed for length in self.lengths]
        self.columns -= removed
        self.past = None

    def _croppable(self, row: int) -> int:
        """Tokens a row can give back and still hold the block before the one its next token falls into."""
        fill = self.fills[row]
        return fill if fill == self.lengths[row] else fill - (self.block or 0)

    def _restore_past(self, removed: int) -> None:
        """Store the pair of blocks in which the remembered text ends without its last tokens."""
        rows, known = range(len(self.fills)), 0 if self.past is None else self.past[0].shape[2]
        # The first block that is remembered only serves as the one before, unless it is the first of the text.
        spare = min(known if known == length else known - (self.block or 0) for length in self.lengths)
        if self.past is None or removed > spare:
            raise ValueError(
                f"crop(-{removed}): the block that these tokens followed is no longer in the cache, which can give "
                f"back at most {max(spare, *map(self._croppable, rows), 0)} tokens now. To be able to take back more, "
                "call activate_past_recording() before reading them, with rows of one length."
            )
        ends = [known - removed for _ in rows]
        self.keep(*self.past, ends, self.shift)
        self.fills = [fill_of(end, self.block) for end in ends]

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Let row b continue the text of row `beam_idx[b]`."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows `indices`, in that order."""
        if not self.is_initialized:
            return
        self._map(lambda states: states[indices.to(states.device)])
        if indices.dtype == torch.bool:
            indices = indices.nonzero().flatten()
        self.fills = [self.fills[row] for row in indices.tolist()]
        self.lengths = [self.lengths[row] for row in indices.tolist()]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times."""
        if not self.is_initialized:
            return
        self._map(lambda states: states.repeat_interleave(repeats, dim=0))
        self.fills = [fill for fill in self.fills for _ in range(repeats)]
        self.lengths = [length for length in self.lengths for _ in range(repeats)]

    def _map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply a function of rows to all states."""
        self.keys, self.values = function(self.keys), function(self.values)
        self.batch_size = self.keys.shape[0]
        if self.past is not None:
            self.past = function(self.past[0]), function(self.past[1])


class LexCache(Cache):
    """The cache of a LEX model; `generate` and a forward pass with `use_cache=True` make one on their own.

    Memory is `2 · layers · batch · 2h · hidden_size` elements for blockwise attention, from the first token to the
    millionth (2h = l by default), and twice the window in place of 2h for sliding attention. A layer with full
    attention grows with the text.

    Args:
        config: Configuration of the model.
        offloading: Whether layers with full attention wait in the memory of the host; needs an accelerator.

    Example:
        >>> from lex_hf import LexCache, LexConfig
        >>> cache = LexCache(LexConfig())
        >>> cache.nbytes()  # nothing is allocated before the first token
        0
    """

    def __init__(self, config: LexConfig, offloading: bool = False) -> None:
        layers = [LexCacheLayer(config.attention_span(name)) for name in config.layer_patterns]
        super().__init__(layers=layers, offloading=offloading)

    def nbytes(self) -> int:
        """Return the bytes that all layers occupy."""
        return sum(self.nbytes_by_layer())

    def nbytes_by_layer(self) -> list[int]:
        """Return the bytes that each layer occupies; only those of full attention grow with the text."""
        return [layer.nbytes() for layer in self.layers]
