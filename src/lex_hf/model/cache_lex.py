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

from .batch_lex import Counts, Rows, added, as_tensor
from .configuration_lex import LexConfig
from .positions_lex import rotate

ROLLBACK = 256  # tokens that can be taken back over borders of blocks while the past is recorded


def fill_of(end: Any, block: int | None) -> Any:
    """Return the slots in use once a text that ends before slot `end` has kept its last pair of blocks only.

    Args:
        end: A number, or a tensor of numbers.
        block: Block length; `None` for full attention.
    """
    if block is None:
        return end
    if isinstance(end, torch.Tensor):
        return torch.where(end <= 2 * block, end, block + (end - 1) % block + 1)
    return end if end <= 2 * block else block + (end - 1) % block + 1


def shifted(keys: torch.Tensor, shift: torch.Tensor | None) -> torch.Tensor:
    """Turn keys of the second block of a pair, `(..., head_dim)`, into keys of the first."""
    return keys if shift is None else rotate(keys, shift)


Origin = tuple[tuple[str, Any], ...]


def origins(config: LexConfig) -> list[tuple[int | None, Origin]]:
    """Return for each layer its block length, and the fields that decide how its keys are stored."""
    kind = config.position_embedding_type
    fields = {
        "rope": ("rope_theta",),
        "xpos": ("rope_theta", "xpos_gamma", "xpos_scale_base", "xpos_rotation", "xpos_scale"),
    }
    shared = (("position_embedding_type", kind), *((name, getattr(config, name)) for name in fields.get(kind, ())))
    spans = [(pattern, config.attention_span(pattern)) for pattern in config.layer_patterns]
    return [(span, (("attention_pattern", pattern), ("block length", span), *shared)) for pattern, span in spans]


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
        origin: What the layer was made for, see [`origins`].
        keys: Shape `(batch, num_heads, slots, head_dim)`.
        values: As `keys`.
        fills: Number of slots in use in each row; the next token goes to the next one. A tensor while a compiled
            forward pass runs, as are the two below.
        lengths: Number of tokens each row has read, padding not counted.
        padding: Checksum of the columns that each row has read as padding.
        columns: Number of columns of input read so far, padding included.
        record_past: Whether to remember what moves of blocks change, for [`LexCacheLayer.crop`].
        past: If so, keys and values of the pair of blocks at the last crop and of all tokens since, as
            [`LexCacheLayer.keep`] takes them.
        takes_chunks: Whether a layer may call `update` several times in one forward pass.
    """

    is_compileable = False
    takes_chunks = True

    def __init__(self, block: int | None, origin: Origin = ()) -> None:
        super().__init__()
        self.block = block
        self.origin = origin
        self.fills: Any = []  # Counts
        self.lengths: Any = []
        self.padding: Any = []
        self.columns = 0
        self.record_past = False
        self.past: tuple[torch.Tensor, torch.Tensor] | None = None
        self.shift: torch.Tensor | None = None

    @property
    def is_sliding(self) -> bool:
        """Whether memory is bounded."""
        return self.block is not None

    def settle(self) -> None:
        """Turn counts that a compiled forward pass left as tensors into numbers."""
        if isinstance(self.fills, torch.Tensor):
            self.fills, self.lengths, self.padding = (
                as_tensor(counts, self.device).tolist() for counts in (self.fills, self.lengths, self.padding)
            )

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate the storage for states of shape `(batch, num_heads, sequence, head_dim)`."""
        self.dtype, self.device = key_states.dtype, key_states.device
        batch, heads, _, width = key_states.shape
        slots = 0 if self.block is None else 2 * self.block
        with torch.inference_mode(False):  # so that a text begun in inference mode may be continued outside of it
            self.keys = torch.zeros((batch, heads, slots, width), dtype=self.dtype, device=self.device)
            self.values = torch.zeros_like(self.keys)
        self.batch_size = batch
        self.fills, self.lengths, self.padding = [0] * batch, [0] * batch, [0] * batch
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
        check_states(self, key_states)
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
        block = self.block
        if block is None:
            return
        if isinstance(self.fills, torch.Tensor):
            full = self.fills == 2 * block
            for storage, turn in ((self.keys, shift), (self.values, None)):
                first, second = storage[:, :, :block], storage[:, :, block:]
                first.copy_(torch.where(full[:, None, None, None], shifted(second, turn), first))
            self.fills = torch.where(full, block, self.fills)
            return
        rows = [row for row, fill in enumerate(self.fills) if fill == 2 * block]
        if not rows:
            return
        # A plain slice where possible: an index would copy the storage of all rows.
        which = slice(None) if len(rows) == len(self.fills) else torch.tensor(rows, device=self.keys.device)
        self.keys[which, :, :block] = shifted(self.keys[which, :, block:], shift)
        self.values[which, :, :block] = self.values[which, :, block:]
        for row in rows:
            self.fills[row] = block

    def keep(self, keys: torch.Tensor, values: torch.Tensor, ends: Counts, shift: torch.Tensor | None) -> None:
        """Store the last pair of blocks of each row.

        Args:
            keys: Keys of slots 0, 1, …, those past the first pair turned for the second block of their own pair.
            values: As `keys`, shape `(batch, num_heads, slots, head_dim)`.
            ends: Number of slots that each row fills.
            shift: As for [`LexCacheLayer.make_room`].
        """
        block = self.block or 0
        if block and (isinstance(ends, torch.Tensor) or len({_start(end, block) for end in ends}) > 1):
            starts = _start(as_tensor(ends, keys.device), block)
            for storage, states, turn in ((self.keys, keys, shift), (self.values, values, None)):
                storage.copy_(self._pairs(states, starts, turn))
            return
        start = _start(ends[0], block) if block else 0
        for storage, states, turn in ((self.keys, keys, shift), (self.values, values, None)):
            pair = states[:, :, start : start + storage.shape[2]]
            storage[:, :, : pair.shape[2]] = pair
            if start and turn is not None:
                storage[:, :, :block] = shifted(pair[:, :, :block], turn)

    def _pairs(self, states: torch.Tensor, starts: torch.Tensor, shift: torch.Tensor | None) -> torch.Tensor:
        """Return the pair of blocks that begins at slot `starts[b]` of each row."""
        slots = torch.arange(self.keys.shape[2], device=states.device)
        index = (starts[:, None] + slots).clamp(max=states.shape[2] - 1)
        pairs = states.take_along_dim(index[:, None, :, None], dim=2)
        if shift is None:
            return pairs
        first = pairs[:, :, : self.block]
        first = torch.where(starts[:, None, None, None] > 0, shifted(first, shift), first)
        return torch.cat((first, pairs[:, :, self.block :]), dim=2)

    def remember(self, keys: torch.Tensor, values: torch.Tensor, counts: Counts, shift: torch.Tensor | None) -> None:
        """Note new tokens of all rows, which continue at one slot, before they are written.

        Rows that then end at different slots have no common past: nothing is kept of them.

        Of a long text only the end is kept: enough to take back `ROLLBACK` tokens.
        """
        if not self.record_past or isinstance(counts, torch.Tensor) or len(set(counts)) > 1:
            self.past = None
            return
        known = self.past or (self.keys[:, :, : self.fills[0]], self.values[:, :, : self.fills[0]])
        new = (keys.detach()[:, :, : counts[0]], values.detach()[:, :, : counts[0]])
        keys, values = (torch.cat(pair, dim=2) for pair in zip(known, new, strict=True))
        block, self.shift = self.block or 0, shift
        surplus = (keys.shape[2] - ROLLBACK - 2 * block) // block * block if block else 0
        if surplus > 0:
            keys, values = keys[:, :, surplus:].clone(), values[:, :, surplus:].clone()
            keys[:, :, :block] = shifted(keys[:, :, :block], shift)
        self.past = keys, values

    def advance(self, rows: Rows, columns: int) -> None:
        """Record that the tokens of `rows` were read, in `columns` columns of input."""
        ends = added(self.fills, rows.counts)
        self.fills = (
            [fill_of(end, self.block) for end in ends] if isinstance(ends, list) else fill_of(ends, self.block)
        )
        self.lengths = added(self.lengths, rows.counts)
        self.padding = added(self.padding, rows.padding)
        self.columns += columns

    def nbytes(self) -> int:
        """Return the bytes of the storage, counted from the tensors themselves."""
        tensors = [tensor for tensor in (self.keys, self.values, *(self.past or ())) if tensor is not None]
        return sum(tensor.untyped_storage().nbytes() for tensor in tensors)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many keys the next `query_length` tokens meet, and how many are gone."""
        self.settle()
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
        self.fills, self.lengths, self.padding = ([0] * len(self.fills) for _ in range(3))
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
        self.settle()
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
        if indices.dtype == torch.bool:
            indices = indices.nonzero().flatten()
        self._map(lambda states: states[indices.to(states.device)], indices.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times."""
        if not self.is_initialized:
            return
        rows = [row for row in range(len(self.fills)) for _ in range(repeats)]
        self._map(lambda states: states.repeat_interleave(repeats, dim=0), rows)

    def _map(self, function: Callable[[torch.Tensor], torch.Tensor], rows: list[int]) -> None:
        """Apply a function of rows to all states; afterwards row b is what row `rows[b]` was."""
        # Counts that are tensors stay so: as numbers, every step of a compiled search would be a graph of its own.
        self.fills, self.lengths, self.padding = (
            counts[rows] if isinstance(counts, torch.Tensor) else [counts[row] for row in rows]
            for counts in (self.fills, self.lengths, self.padding)
        )
        self.keys, self.values = function(self.keys), function(self.values)
        self.batch_size = self.keys.shape[0]
        if self.past is not None:
            self.past = function(self.past[0]), function(self.past[1])


def check_states(layer: CacheLayerMixin, key: torch.Tensor) -> None:
    """Check that new keys are like those that a layer holds; another model or another autocast gives others.

    Raises:
        ValueError: If the number of heads, their width or the dtype differs.
    """
    held, new = (layer.keys.shape[1], layer.keys.shape[3], layer.dtype), (key.shape[1], key.shape[3], key.dtype)
    if held != new:
        raise ValueError(
            f"past_key_values holds {held[0]} heads of {held[1]} in {held[2]}, and this model has {new[0]} of "
            f"{new[1]} in {new[2]}: the cache was filled by another model, or in another dtype. Read the text again "
            "with past_key_values=None."
        )


def _start(end: Any, block: int) -> Any:
    """Return the first slot of the last pair of blocks of a text that ends before slot `end`, a number or a tensor."""
    start = ((end - 1) // block - 1) * block
    return start.clamp(min=0) if isinstance(end, torch.Tensor) else max(start, 0)


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
        layers = [LexCacheLayer(span, origin) for span, origin in origins(config)]
        super().__init__(layers=layers, offloading=offloading)

    def nbytes(self) -> int:
        """Return the bytes that all layers occupy."""
        return sum(self.nbytes_by_layer())

    def nbytes_by_layer(self) -> list[int]:
        """Return the bytes that each layer occupies; only those of full attention grow with the text."""
        return [layer.nbytes() for layer in self.layers]
