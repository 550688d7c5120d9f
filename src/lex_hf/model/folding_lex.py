"""How one forward pass lays its tokens out, so that no query ever meets a key outside its pair of blocks.

A *plan* is made once per forward pass and attention pattern, and used by every layer. Slots 0 … 2h - 1 are the pair of
blocks at the start of the text (or the pair the cache holds), and the text runs on from there: slot s belongs to block
s div h. Three parts of a text are attended separately:

* the *head*: what still falls into the first pair. For a text no longer than l this is all, and it is plain causal
  attention (LEX paper, §3.3: blockwise attention only differs beyond l);
* the *blocks*: whole blocks, folded into the batch dimension, each with the keys of its own and the previous block;
* the *tail*: the last, incomplete block.

Within a pair, a key's slot is relative to the pair. So a key is turned for its own block, and turned again by
constants when it serves as the previous one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from .batch_lex import Counts, Rows, added, as_tensor
from .cache_lex import LexCacheLayer, Writer, fill_of, shifted
from .masking_lex import attention_mask, visible
from .positions_lex import Movable, PositionScheme, Rotation, rotate

CHUNK = 2048  # tokens of a batch that a layer reads at once, where it reads chunk by chunk

# (query, key, value, mask, is_causal) -> (output, weights or None); states are (batch, heads, sequence, head_dim).
AttentionFunction = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, bool],
    tuple[torch.Tensor, torch.Tensor | None],
]


class AttentionPlan(Writer, Protocol):
    """The plan of one forward pass for one attention pattern.

    States are `(batch, heads, sequence, head_dim)`, the real tokens of each row first ([`Rows.align`]).
    """

    @property
    def rows(self) -> Rows:
        """Layout of the batch."""
        ...

    @property
    def rotation(self) -> Rotation | None:
        """Factors that turn queries and keys."""
        ...

    def key_order(self, width: int) -> torch.Tensor | None:
        """Return the slot of each key in the order that users see ([`Rows.key_order`]); `None` if it is that of slots.

        Args:
            width: Number of slots.
        """
        ...

    def turn(self, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Turn queries and keys for their slots."""
        ...

    def attend(
        self,
        function: AttentionFunction,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        dense: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend.

        Args:
            function: The attention function.
            query: New queries, turned.
            key: Keys of slots 0, 1, …: what `write` returned, or without a cache the new keys, turned.
            value: As `key`.
            dense: Whether to return the weights, which takes queries × slots of memory.

        Returns:
            Outputs, like `query`, and weights, shape `(batch, heads, sequence, slots)`, or `None`.
        """
        ...


@dataclass(frozen=True)
class Fold:
    """What planning needs to know of a model and one of its attention patterns.

    Attributes:
        pattern: Name of the attention pattern.
        block: Its block length; `None` for full attention.
        scheme: The position scheme.
        implementation: Name of the attention function, which decides on the form of masks.
        tp_mesh: The processes that share out the heads of a layer; `None` if each has all of them.
    """

    pattern: str
    block: int | None
    scheme: PositionScheme
    implementation: str
    tp_mesh: Any = None

    def bias(self, query: torch.Tensor, key: torch.Tensor, num_slots: int, like: torch.Tensor) -> torch.Tensor | None:
        """The position bias of this process's heads between these slots, all less than `num_slots`."""
        bias = self.scheme(query, key, num_slots, torch.promote_types(like.dtype, torch.float32))
        return bias if bias is None or self.tp_mesh is None else _own_heads(bias, self.tp_mesh)

    @property
    def is_flash(self) -> bool:
        """Whether the attention function is one of flash attention: no masks, but causality from the last key back."""
        return "flash" in self.implementation

    def mask(self, seen: torch.Tensor | None, bias: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor | None:
        """What the attention function takes for the keys seen and the position bias.

        Raises:
            ValueError: If it takes no masks.
        """
        if self.is_flash and (seen is not None or bias is not None):
            what = type(self.scheme).__name__ if bias is not None else f"{self.pattern} attention in this batch"
            raise ValueError(
                f"{self.implementation} takes no mask, and {what} needs one. It serves xPos and other schemes without "
                "a bias, blockwise or full, without packing, and rows of one length when a cache is continued. Load "
                "the model with attn_implementation='sdpa'."
            )
        return attention_mask(seen, bias, self.implementation, like.dtype)

    def next_slot(self, fill: int) -> int:
        """Return the slot of the token after `fill` slots in use: a full pair makes room for the next block first."""
        return self.block if self.block is not None and fill == 2 * self.block else fill

    def plan(
        self, rows: Rows, fills: Counts, length: int, like: torch.Tensor, most: int | None = None
    ) -> AttentionPlan:
        """Plan a forward pass.

        Args:
            rows: Layout of the batch.
            fills: Slots of the cache that each row has in use; empty without a cache.
            length: Number of columns of new tokens.
            like: A tensor whose device and dtype are those of the states.
            most: An upper bound of `fills`, for full attention if they are a tensor.
        """
        if isinstance(fills, torch.Tensor):
            if self.block is not None:
                fills, most = torch.where(fills == 2 * self.block, self.block, fills), 2 * self.block - 1
            assert most is not None
        else:
            fills = [self.next_slot(fill) for fill in fills] or [0]
            most = max(fills)
            if min(fills) == most:
                return UniformPlan.make(self, rows, most, length, like)
            fills = as_tensor(fills, like.device)
        if length == 1:
            return RaggedStep.make(self, rows, fills, most, like)
        return RaggedPlan.make(self, rows, fills, most, length, like)

    def chunked_plan(self, rows: Rows, fills: Counts, length: int, like: torch.Tensor) -> "ChunkedPlan | None":
        """Plan to read a long text chunk by chunk; arguments as for [`Fold.plan`].

        Returns:
            `None` where that is no gain: for a text no longer than a chunk, rows that differ or are packed, and full
            attention.
        """
        if self.block is None or rows.real is not None or rows.document is not None:
            return None
        if isinstance(fills, torch.Tensor) or len(set(fills)) > 1:
            return None
        # Whole blocks, so that all chunks but the first begin at one slot and share a plan.
        chunk = max(CHUNK // len(rows.counts) // self.block, 1) * self.block
        return None if length <= chunk else ChunkedPlan.make(self, rows, (*fills, 0)[0], chunk, length, like)


@dataclass(frozen=True)
class UniformPlan(Movable):
    """All rows continue at the same slot: views and whole blocks, no gathering.

    Attributes:
        block: Length of the folded blocks; `None` without any.
        rows: Layout of the batch.
        fill: Slots in use before this forward pass.
        head: Number of tokens in the head; `blocks` and `tail` likewise.
        first_key: First slot the head sees.
        masks: Masks of head, blocks and tail, `None` where all keys are seen or `causal` says it.
        causal: Whether head, blocks and tail are plain causal attention, which attention functions do on their own:
            every key is seen but those after the query, and the last key is that of the last query.
        rotation: Factors that turn queries and keys.
    """

    block: int | None
    rows: Rows
    fill: int
    head: int
    blocks: int
    tail: int
    first_key: int
    masks: tuple[torch.Tensor | None, ...]
    causal: tuple[bool, ...]
    rotation: Rotation | None

    @classmethod
    def make(cls, fold: Fold, rows: Rows, fill: int, length: int, like: torch.Tensor) -> "UniformPlan":
        """Divide `length` new tokens, which continue at slot `fill`, into head, blocks and tail."""
        block = fold.block
        # Blocks of packed documents begin anywhere in a row, so a query may look back over two of the row's own.
        if block is not None and rows.document is not None and fold.pattern == "blockwise":
            block = 2 * block
        head = length if block is None or length <= 2 * block - fill else 2 * block - fill
        blocks, tail = (0, 0) if block is None else ((length - head) // block, (length - head) % block)
        first_key = max(0, fill + 1 - (block or 0)) if fold.pattern == "sliding" and head == 1 else 0
        masks, causal = _uniform_masks(fold, rows, block, (fill, head, blocks, tail), first_key, like)
        slots = _in_pair(torch.arange(fill, fill + length, device=like.device), block)
        rotation = fold.scheme.rotation(slots, max(fill + head, 2 * (block or 0)), block, like)
        return cls(block, rows, fill, head, blocks, tail, first_key, masks, causal, rotation)

    def key_order(self, width: int) -> torch.Tensor | None:
        """Return the slot of each key in the order that users see."""
        if self.rows.inverse is None:
            return None
        fills = self.rows.inverse.new_full((self.rows.inverse.shape[0],), self.fill)
        return self.rows.key_order(fills, width, self.rows.inverse.shape[1])

    def turn(self, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Turn queries and keys for their slots."""
        return _turn(query, key, self.rotation)

    def write(self, layer: LexCacheLayer, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Put new keys and values into a layer's cache; return slots 0, 1, … up to the last new token."""
        shift, end = _shift(self.rotation), self.fill + self.head
        layer.make_room(shift)
        layer.reserve(end)
        layer.remember(key, value, self.rows.counts, shift)
        outgrown = key.shape[2] > self.head
        if outgrown or (torch.is_grad_enabled() and key.requires_grad):
            keys, values = _behind(layer.keys, key, self.fill), _behind(layer.values, value, self.fill)
            ends = added([self.fill] * key.shape[0], self.rows.counts)
            layer.keep(keys.detach(), values.detach(), ends, shift)
        else:
            layer.keys.narrow(2, self.fill, self.head).copy_(key)
            layer.values.narrow(2, self.fill, self.head).copy_(value)
            keys, values = layer.keys.narrow(2, 0, end), layer.values.narrow(2, 0, end)
        layer.advance(self.rows, key.shape[2])
        return keys, values

    def attend(
        self,
        function: AttentionFunction,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        dense: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend in head, blocks and tail."""
        keys = self.fill + self.head - self.first_key
        parts = [
            function(
                query.narrow(2, 0, self.head),
                key.narrow(2, self.first_key, keys),
                value.narrow(2, self.first_key, keys),
                self.masks[0],
                self.causal[0],
            )
        ]
        if self.blocks or self.tail:
            assert self.block is not None
            parts += self._attend_blocks(function, query[:, :, self.head :], key, value, self.block)
        output = parts[0][0]
        if len(parts) > 1:  # joined as attention functions leave them, so that the output projection need not copy
            output = torch.cat([part[0].transpose(1, 2) for part in parts], dim=1).transpose(1, 2)
        return output, self._dense_weights([part[1] for part in parts], key.shape[2]) if dense else None

    def _attend_blocks(
        self,
        function: AttentionFunction,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        block: int,
    ) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """Attend in whole blocks and in the tail; `key` and `value` start at slot 0."""
        key, value, whole = key[:, :, block:], value[:, :, block:], self.blocks * block
        previous = shifted(key[:, :, : whole + (block if self.tail else 0)], _shift(self.rotation))
        batch, parts = query.shape[0], []
        if self.blocks:
            keys = torch.cat((_folded(previous[:, :, :whole], block), _folded(key[:, :, block:], block, whole)), dim=2)
            # Windows of two blocks, one block apart: of a single text a view, without a copy.
            values = value[:, :, : whole + block].unfold(2, 2 * block, block).permute(0, 2, 1, 4, 3).flatten(0, 1)
            output, weights = function(_folded(query, block, whole), keys, values, self.masks[1], self.causal[1])
            output = output.unflatten(0, (batch, -1)).transpose(1, 2).flatten(2, 3)
            parts.append((output, None if weights is None else weights.unflatten(0, (batch, -1))))
        if self.tail:
            keys = torch.cat((previous[:, :, whole:], key[:, :, block + whole :]), dim=2)
            parts.append(function(query[:, :, whole:], keys, value[:, :, whole:], self.masks[2], self.causal[2]))
        return parts

    def _dense_weights(self, parts: list[torch.Tensor | None], slots: int) -> torch.Tensor | None:
        """Spread the weights of head, blocks and tail over a query × key matrix."""
        first = parts[0]
        if first is None or (len(parts) == 1 and self.first_key == 0):
            return first
        dense = first.new_zeros((*first.shape[:2], self.head + self.blocks * (self.block or 0) + self.tail, slots))
        dense[:, :, : self.head, self.first_key : self.first_key + first.shape[3]] = first
        query, block = self.head, self.block or 0
        folded = parts[1].unbind(1) if self.blocks and parts[1] is not None else ()
        for part in (*folded, *(parts[-1:] if self.tail else ())):
            assert part is not None
            key = (self.fill + query) // block * block - block
            dense[:, :, query : query + part.shape[2], key : key + part.shape[3]] = part
            query += part.shape[2]
        return dense


@dataclass(frozen=True)
class ChunkedPlan:
    """A layer reads a long text chunk by chunk: each goes on after what the layer's cache holds of those before it.

    Attributes:
        chunk: Number of columns in each chunk; the last may have fewer.
        plans: The plan of each chunk; chunks that begin and end at the same slots share theirs.
    """

    chunk: int
    plans: tuple[UniformPlan, ...]

    @classmethod
    def make(cls, fold: Fold, rows: Rows, fill: int, chunk: int, length: int, like: torch.Tensor) -> "ChunkedPlan":
        """Divide `length` new tokens of each row, which go on after slot `fill`, into chunks."""
        plans: list[UniformPlan] = []
        made: dict[tuple[int, int], UniformPlan] = {}
        for start in range(0, length, chunk):
            fill, size = fold.next_slot(fill), min(chunk, length - start)
            if (fill, size) not in made:
                made[fill, size] = UniformPlan.make(fold, Rows([size] * len(rows.counts)), fill, size, like)
            plans.append(made[fill, size])
            fill = fill_of(fill + size, fold.block)
        return cls(chunk, tuple(plans))


def _uniform_masks(
    fold: Fold,
    rows: Rows,
    block: int | None,
    parts: tuple[int, int, int, int],
    first_key: int,
    like: torch.Tensor,
) -> tuple[tuple[torch.Tensor | None, ...], tuple[bool, ...]]:
    """Masks of head, blocks and tail, and which of them are plain causal attention, for which they have none."""
    fill, head, blocks, tail = parts
    num_slots = max(fill + head, 2 * (block or 0)) if blocks or tail else fill + head
    slots = torch.arange(num_slots, device=like.device)
    query, key = slots[fill : fill + head], slots[first_key : fill + head]
    bias, unpacked = fold.bias(query, key, num_slots, like), rows.document is None
    whole = fold.pattern != "sliding" or fold.block is None or fill + head <= fold.block
    # Only sdpa counts the keys that a query sees from the first one, so it knows no past.
    known = fold.is_flash or (fold.implementation == "sdpa" and fill == 0)
    causal = [False, False, False]
    if known and whole and unpacked and bias is None and head > 1:  # never a comparison that a compiler leaves open
        causal[0] = True
    seen = None if causal[0] or head == 1 else _seen(fold, rows, query, key, slice(fill, fill + head))
    masks = [None if causal[0] else fold.mask(seen, bias, like), None, None]
    start = fill + head
    for part, (size, count) in enumerate(((block or 0, blocks), (tail, min(tail, 1))), start=1):
        if block is not None and count:
            query, key = slots[block : block + size], slots[: block + size]
            bias = fold.bias(query, key, num_slots, like)
            causal[part] = fold.is_flash and fold.pattern == "blockwise" and unpacked and bias is None
            if not causal[part]:
                seen = _seen_folded(fold, rows, query, key, (start, size, count, block))
                masks[part] = fold.mask(seen, bias, like)
            start += size * count
    return tuple(masks), tuple(causal)


def _own_heads(bias: torch.Tensor, tp_mesh: Any) -> torch.Tensor:
    """Of a bias `(..., num_heads, query, key)`, the heads of this process; gradients come from all of them."""
    from torch.distributed.tensor import DTensor, Replicate, Shard  # not every build of PyTorch has them

    whole = DTensor.from_local(bias, tp_mesh, [Replicate()], run_check=False)
    return whole.redistribute(placements=[Shard(bias.dim() - 3)]).to_local()


def _seen(fold: Fold, rows: Rows, query: torch.Tensor, key: torch.Tensor, columns: slice) -> torch.Tensor:
    """Which keys the head sees: by slot, or for packed rows by document and position in it."""
    if rows.document is None or rows.position is None:
        return visible(fold.pattern, fold.block, query, key)
    document, position = rows.document[:, columns], rows.position[:, columns]
    same = document[:, :, None] == document[:, None, :]
    return same & visible(fold.pattern, fold.block, position, position)


def _seen_folded(
    fold: Fold, rows: Rows, query: torch.Tensor, key: torch.Tensor, columns: tuple[int, int, int, int]
) -> torch.Tensor:
    """The same for `count` blocks of `size` queries from column `start`, each with the `block` keys before it."""
    if rows.document is None or rows.position is None:
        return visible(fold.pattern, fold.block, query, key)
    start, size, count, block = columns
    stop = start + size * count
    query_column = torch.arange(start, stop, device=query.device).view(count, size)
    key_column = query_column[:, :1] - block + torch.arange(block + size, device=query.device)
    document, position = (
        (table[:, query_column].flatten(0, 1), table[:, key_column].flatten(0, 1))
        for table in (rows.document, rows.position)
    )
    same = document[0][:, :, None] == document[1][:, None, :]
    return same & visible(fold.pattern, fold.block, *position)


@dataclass(frozen=True)
class RaggedStep(Movable):
    """Rows continue at different slots, by one token: in place, with a mask.

    Attributes:
        rows: Layout of the batch.
        slots: Slot of each row's token, shape `(batch,)`.
        end: Number of slots that any row uses.
        mask: Mask over slots 0 … end - 1.
        rotation: Factors that turn queries and keys.
    """

    rows: Rows
    slots: torch.Tensor
    end: int
    mask: torch.Tensor | None
    rotation: Rotation | None

    @classmethod
    def make(cls, fold: Fold, rows: Rows, slots: torch.Tensor, most: int, like: torch.Tensor) -> "RaggedStep":
        """Plan one token for each row, the one of row b at `slots[b]`, which is at most `most`."""
        end = most + 1
        query, key = slots[:, None], torch.arange(end, device=like.device)
        mask = fold.mask(visible(fold.pattern, fold.block, query, key), fold.bias(query, key, end, like), like)
        rotation = fold.scheme.rotation(query, end, fold.block, like)
        return cls(rows, slots, end, mask, rotation)

    def key_order(self, width: int) -> torch.Tensor | None:
        """Return the slot of each key in the order that users see."""
        return self.rows.key_order(self.slots, width, 1)

    def turn(self, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Turn queries and keys for their slots."""
        return _turn(query, key, self.rotation)

    def write(self, layer: LexCacheLayer, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Put each row's token at its slot; return all slots in use."""
        layer.make_room(_shift(self.rotation))
        layer.reserve(self.end)
        layer.past = None  # rows at different slots have no common one
        row = torch.arange(len(self.slots), device=self.slots.device)
        with torch.no_grad():
            layer.keys[row, :, self.slots] = key[:, :, 0]
            layer.values[row, :, self.slots] = value[:, :, 0]
        layer.advance(self.rows, 1)
        keys, values = layer.keys[:, :, : self.end], layer.values[:, :, : self.end]
        if torch.is_grad_enabled() and key.requires_grad:
            index = self.slots[:, None, None, None].expand_as(key)
            return keys.scatter(2, index, key), values.scatter(2, index, value)
        return keys, values

    def attend(
        self,
        function: AttentionFunction,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        dense: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend to all slots in use, each row to its own."""
        output, weights = function(query, key, value, self.mask, False)
        return output, weights if dense else None


@dataclass(frozen=True)
class RaggedPlan(Movable):
    """Rows continue at different slots, by several tokens: what they hold and the new tokens become one text.

    Every row's slots begin with its pair of blocks in the cache, so the blocks of all rows lie side by side although
    their new tokens do not, and the text can be folded as one that begins at slot 0. Up to 2h queries of each row are
    computed for nothing; a batch that is prefilled in one pass never comes here.

    Full attention has no blocks to fold: there, the new queries alone meet the slots of the whole text.

    Attributes:
        block: Block length; `None` for full attention.
        rows: Layout of the batch.
        fills: Slots that each row has in use, shape `(batch,)`.
        most: An upper bound of `fills`.
        slots: Slot of each new token, shape `(batch, sequence)`.
        text: The plan for the slots as one text; `None` for full attention.
        mask: For full attention, the mask over the slots of the text.
        rotation: Factors that turn the new queries and keys.
    """

    block: int | None
    rows: Rows
    fills: torch.Tensor
    most: int
    slots: torch.Tensor
    text: UniformPlan | None
    mask: torch.Tensor | None
    rotation: Rotation | None

    @classmethod
    def make(
        cls, fold: Fold, rows: Rows, fills: torch.Tensor, most: int, length: int, like: torch.Tensor
    ) -> "RaggedPlan":
        """Plan `length` columns of new tokens, those of row b from slot `fills[b]` on, which is at most `most`."""
        slots = fills[:, None] + torch.arange(length, device=like.device)
        end = most + length
        bound = end if fold.block is None else 2 * fold.block
        rotation = fold.scheme.rotation(_in_pair(slots, fold.block), bound, fold.block, like)
        if fold.block is None:
            key = torch.arange(end, device=like.device)
            mask = fold.mask(visible(fold.pattern, None, slots, key), fold.bias(slots, key, end, like), like)
            return cls(None, rows, fills, most, slots, None, mask, rotation)
        text = UniformPlan.make(fold, Rows([end] * like.shape[0]), 0, end, like)
        return cls(fold.block, rows, fills, most, slots, text, None, rotation)

    def key_order(self, width: int) -> torch.Tensor | None:
        """Return the slot of each key in the order that users see."""
        return self.rows.key_order(self.fills, width, self.slots.shape[1])

    def turn(self, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Turn queries and keys for their slots."""
        return _turn(query, key, self.rotation)

    def write(self, layer: LexCacheLayer, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Append new keys and values to those of each row; return the slots of the whole text."""
        shift = _shift(self.rotation)
        layer.make_room(shift)
        layer.reserve(self.most + key.shape[2] if self.block is None else 0)
        layer.past = None  # rows at different slots have no common one
        keys, values = self._spread(key, layer.keys), self._spread(value, layer.values)
        layer.keep(keys.detach(), values.detach(), added(self.fills, self.rows.counts), shift)
        layer.advance(self.rows, key.shape[2])
        return keys, values

    def _spread(self, states: torch.Tensor, stored: torch.Tensor | None = None) -> torch.Tensor:
        """Put states at their slots, after what is stored, in a new tensor."""
        batch, heads, length, width = states.shape
        if stored is None:
            text = states.new_zeros((batch, heads, self.most + length, width))
        else:
            text = torch.nn.functional.pad(stored[:, :, : self.most], (0, 0, 0, length))
        return text.scatter(2, self.slots[:, None, :, None].expand_as(states), states)

    def attend(
        self,
        function: AttentionFunction,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        dense: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend in the whole text; return what belongs to the new tokens."""
        if self.text is None:
            output, weights = function(query, key, value, self.mask, False)
            return output, weights if dense else None
        output, weights = self.text.attend(function, self._spread(query), key, value, dense)
        index = self.slots[:, None, :, None]
        return output.take_along_dim(index, dim=2), None if weights is None else weights.take_along_dim(index, dim=2)


def _in_pair(slots: torch.Tensor, block: int | None) -> torch.Tensor:
    """Slots relative to the pair of blocks in which a token is the newest."""
    return slots if block is None else torch.where(slots < 2 * block, slots, block + slots % block)


def _turn(query: torch.Tensor, key: torch.Tensor, rotation: Rotation | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn queries and keys, `(batch, heads, sequence, head_dim)`."""
    if rotation is None:
        return query, key
    return rotate(query, _for_heads(rotation.query)), rotate(key, _for_heads(rotation.key))


def _for_heads(factors: torch.Tensor) -> torch.Tensor:
    """Factors of each row get an axis for the heads."""
    return factors[:, None] if factors.dim() == 4 else factors


def _shift(rotation: Rotation | None) -> torch.Tensor | None:
    return None if rotation is None else rotation.shift


def _behind(stored: torch.Tensor, states: torch.Tensor, fill: int) -> torch.Tensor:
    """Put new states behind the first `fill` slots that are stored."""
    return torch.cat((stored[:, :, :fill], states), dim=2) if fill else states


def _folded(states: torch.Tensor, block: int, length: int | None = None) -> torch.Tensor:
    """Move whole blocks into the batch dimension: `(batch * blocks, heads, block, head_dim)`."""
    return states[:, :, :length].unflatten(2, (-1, block)).transpose(1, 2).flatten(0, 1)
