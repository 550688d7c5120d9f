"""The layout of a forward pass in blocks: no query ever meets a key outside its pair of blocks.

A *plan* is made once per forward pass and attention pattern, and used by every layer. There are two: a [`Fold`] of
many tokens (or one, where rows have read equally many), and a [`Step`] of one token for rows that differ. Slots
0 … 2h - 1 are the pair of blocks at the start of the text, or the pair that the cache holds, and the text continues in
the slots after it: slot s belongs to block s div h. A fold attends separately in three parts of a text:

* the *head*: what still falls into the first pair. For a text no longer than l this is all, and it is plain causal
  attention (LEX paper, §3.3: blockwise attention only differs beyond l);
* the *blocks*: whole blocks, folded into the batch dimension, each with the keys of its own and the previous block;
* the *tail*: the last, incomplete block.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from .batch_lex import Batch, Movable
from .cache_layer_lex import LexCacheLayer
from .folding_lex import Turn, folded, unfolded, unturned, windows, with_sinks
from .functions_lex import (
    AttentionFunction,
    OfQueries,
    additive_mask,
    attend_by_row,
    attention_weights,
    biased,
    suits_rows,
)
from .linear_lex import runs_plainly
from .masking_lex import FullPattern
from .rotation_lex import Rotation, scaled
from .scheme_lex import PositionScheme
from .slots_lex import spread

# (query, key, value, mask, is_causal, scaling=, dropout=) -> (output, weights or None), with states of the shape
# (batch, heads, sequence, head_dim): an `AttentionFunction` whose module is given.
Attend = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]


@dataclass(frozen=True)
class Planner:
    """A maker of plans for one attention pattern.

    Attributes:
        pattern: The attention pattern.
        scheme: The position scheme.
        function: The attention function, which decides on the form of masks.
        dtype: Dtype of the states.
        device: Where they are.
        tp_mesh: The processes that share out the heads of a layer; `None` if each has all of them.
        log_length: Number of tokens from which on scores grow with the logarithm of the position where attention is
            full; `None` if they do not.
    """

    pattern: FullPattern
    scheme: PositionScheme
    function: AttentionFunction
    dtype: torch.dtype
    device: torch.device
    tp_mesh: Any = None
    log_length: int | None = None

    def plan(self, pieces: list[Batch], layer: LexCacheLayer | None) -> "list[Fold | Step]":
        """Plan a forward pass.

        Args:
            pieces: Layout of the batch, or of consecutive pieces of a text that rows read side by side.
            layer: The cache of a layer with this pattern, or `None`.

        Raises:
            ValueError: If the attention function, the position scheme or the cache cannot serve the batch.
        """
        if layer is not None and layer.block is None and layer.max_cache_len is not None:
            _check_room(pieces[0], layer.max_cache_len)
        if layer is not None and isinstance(pieces[0].before, torch.Tensor):
            (batch,) = pieces
            return [Step.make(self, batch, layer) if batch.length == 1 else self._fold_by_row(batch, layer)]
        fill = 0 if layer is None else layer.fill
        folds: list[Fold] = []
        for piece in pieces:
            fill = self.pattern.next_slot(fill)
            alike = [fold for fold in folds if (fold.fill, fold.batch.length) == (fill, piece.length)]
            folds.append(self._continued(alike[0], piece) if alike else self._fold(piece, fill))
            fill = self.pattern.slots_in_use(fill + piece.length)
        return list(folds)

    def _continued(self, alike: "Fold", piece: Batch) -> "Fold":
        """Plan a later piece of a text, whose tokens lie in the same slots: masks and factors are shared."""
        assert isinstance(piece.before, int)
        assert isinstance(alike.batch.before, int)
        distance = piece.before - alike.batch.before
        return replace(alike, batch=piece, rotation=self.scheme.advance(alike.rotation, distance))

    def _fold(self, batch: Batch, fill: int) -> "Fold":
        """Plan the tokens of rows that have read equally many, from slot `fill` on."""
        assert isinstance(batch.before, int)
        self.scheme.check_length(batch.before + batch.length, self.pattern.block, self.dtype)
        block = self.pattern.block if batch.document is None else self.pattern.packed_block
        slots = torch.arange(fill, fill + batch.length, device=self.device)
        return Fold.divide(self, batch, block, fill, batch.length, self.rotation(batch, slots, block))

    def _fold_by_row(self, batch: Batch, layer: LexCacheLayer) -> "Fold":
        """Plan several tokens of rows that have read different numbers of them.

        Every row's slots begin with its pair of blocks, so the blocks of all rows lie side by side although their new
        tokens do not, and the text can be folded as one that begins at slot 0; up to 2h queries of each row are
        computed for nothing. Full attention has no blocks to fold: there, the new queries alone meet all slots.
        """
        assert isinstance(batch.before, torch.Tensor)
        fills, width = self.pattern.next_slots(batch.before), layer.width_before(batch)
        end, slots = width + batch.length, fills[:, None] + torch.arange(batch.length, device=self.device)
        self.scheme.check_length(end, layer.block, self.dtype)
        rotation = self.rotation(batch, slots, layer.block)
        if layer.block is not None:
            return Fold.divide(self, batch, layer.block, 0, end, rotation, fills)
        key = torch.arange(end, device=self.device)
        mask = self.mask(self.pattern.visible(slots, key), self.bias(slots, key, end))
        part, distance = (0, batch.length, 1, 0, 0), self.distance(slots, key)
        return Fold(batch, width, (part,), (mask,), (False,), (distance,), (None,), rotation, fills)

    def rotation(self, batch: Batch, slots: torch.Tensor, block: int | None) -> Rotation:
        """Return the rotation of new tokens.

        Args:
            batch: Layout of the batch.
            slots: Slot of each token, shape `(sequence,)` or `(batch, sequence)`.
            block: Length of the blocks in which slots are counted.
        """
        positions = batch.positions(self.device)
        if block is None:
            rotation = self.scheme.rotation(positions, positions, block, self.dtype)
            if self.log_length is None or self.pattern.block is not None:
                return rotation
            own = positions if batch.position is None else batch.position
            return replace(rotation, temperature=_temperature(own, self.log_length, self.dtype))
        offsets = slots % block - block * (slots < block)
        return self.scheme.rotation(positions, offsets.expand(positions.shape), block, self.dtype)

    def bias(self, query: torch.Tensor, key: torch.Tensor, num_slots: int) -> torch.Tensor | None:
        """Return the position bias of this process's heads.

        Args:
            query: Slots of queries, shape `(..., query)`.
            key: Slots of keys, shape `(..., key)`.
            num_slots: An upper bound of all slots, exclusive.

        Returns:
            Shape `(..., num_heads, query, key)`, or `None` if the scheme has none.
        """
        bias = self.scheme(query, key, num_slots, torch.promote_types(self.dtype, torch.float32))
        return bias if bias is None or self.tp_mesh is None else _own_heads(bias, self.tp_mesh)

    def distance(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
        """Return which of the vectors of distances each key has; `None` if there are none.

        Args:
            query: Slots of queries, shape `(..., query)`.
            key: Slots of keys, shape `(..., key)`.
        """
        if self.scheme.num_vectors is None:
            return None
        self.function.check_bias(type(self.scheme).__name__)
        return (query[..., :, None] - key[..., None, :]).clamp(0, self.scheme.num_vectors - 1)

    def mask(self, seen: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor | None:
        """Return what the attention function takes, see [`AttentionFunction.mask`]."""
        names = (f"{self.pattern.name} attention in this batch", type(self.scheme).__name__)
        return self.function.mask(seen, bias, self.dtype, names)


@dataclass(frozen=True)
class Fold(Movable):
    """The plan of many tokens: views and whole blocks, no gathering where rows have read equally many.

    Attributes:
        batch: Layout of the batch.
        fill: Slots in use before the first query.
        parts: Head, blocks and tail, as far as there are any, each as its first query, the number of queries in a
            block, the number of blocks, the slot of the first key, and how many of the first slots stand before it as
            sinks. Keys go up to the own one of the last query.
        masks: Mask of each part, shape `(batch or 1, num_heads or 1, query, key)`, where several blocks are rows of
            the batch; `None` where all keys are seen or `causal` says it.
        causal: Whether the attention function hides keys after their query by itself, in each part.
        distances: [`Planner.distance`] of each part, shape `(query, key)` or `(batch, query, key)`.
        scales: What the keys of each part are multiplied by, shape `(key, head_dim)`; `None` if they stay as they are.
        rotation: What queries and keys are rotated by.
        fills: Slots of each row in use, shape `(batch,)`, where they differ.
    """

    batch: Batch
    fill: int
    parts: tuple[tuple[int, int, int, int, int], ...]
    masks: tuple[torch.Tensor | None, ...]
    causal: tuple[bool, ...]
    distances: tuple[torch.Tensor | None, ...]
    scales: tuple[torch.Tensor | None, ...]
    rotation: Rotation
    fills: torch.Tensor | None = None

    @classmethod
    def divide(
        cls,
        planner: Planner,
        batch: Batch,
        block: int | None,
        fill: int,
        length: int,
        rotation: Rotation,
        fills: torch.Tensor | None = None,
    ) -> "Fold":
        """Divide `length` tokens, which continue at slot `fill`, into head, blocks and tail."""
        block, sinks = block or fill + length, planner.pattern.sinks  # full attention is one block
        # Not min(): of a length that is a symbol, a compiler then knows which it is, and that nothing is left.
        room = sinks + 2 * block - fill
        head = length if length <= room else room
        blocks, tail = (length - head) // block, (length - head) % block
        parts = [
            (0, head, 1, planner.pattern.first_key(fill), 0),
            (head, block, blocks, sinks + block, sinks),
            (head + blocks * block, tail, 1, sinks + block + blocks * block, sinks),
        ]
        parts = [part for part in parts if part[1] and part[2]]
        # In the head all exponents count from one place; any other block counts from itself.
        scales = [rotation.scales(block, size) if start else None for start, size, *_ in parts]
        masks, causal, distances = zip(*(_mask(planner, batch, fill, *part) for part in parts), strict=True)
        return cls(batch, fill, tuple(parts), masks, causal, distances, tuple(scales), rotation, fills)

    def key_order(self, width: int) -> torch.Tensor | None:
        """Return the slot of each key in the order that users see; `None` if it is that of slots.

        See [`Batch.key_order`].

        Args:
            width: Number of slots.
        """
        if self.fills is not None:
            return self.batch.key_order(self.fills, width)
        if self.batch.inverse is None:
            return None
        return self.batch.key_order(self.batch.inverse.new_full((self.batch.size,), self.fill), width)

    def attend(
        self,
        function: Attend,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        dense: bool,
        turn: Turn | None = None,
        of_queries: OfQueries | None = None,
        **options: float,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Apply attention to head, blocks and tail.

        Args:
            function: The attention function.
            query: Rotated queries, shape `(batch, num_heads, sequence, head_dim)`.
            key: Keys of slots 0, 1, …: those that the cache returned, or without a cache the new ones, shape
                `(batch, num_key_value_heads, slots, head_dim)`.
            value: As `key`.
            dense: Whether to return the weights, which takes queries × slots of memory.
            turn: How keys of sinks come to stand before another block; `None` if there are none.
            of_queries: What queries add to their scores; `None` if the position scheme gives nothing.
            options: `scaling`, the factor on the scores, and `dropout`, the probability with which a weight becomes
                zero.

        Returns:
            Outputs, like `query`, and weights, shape `(batch, num_heads, sequence, slots)`, or `None`.
        """
        function = partial(function, **options)
        if self.fills is None or self.fill:
            return self._attend(function, query, key, value, dense, turn, of_queries)
        # Over the slots of the whole text, in which every row has its queries at its own place.
        blank = query.new_zeros((*query.shape[:2], key.shape[2] - query.shape[2], query.shape[3]))
        query = spread(query, self.fills, blank)
        output, weights = self._attend(function, query, key, value, dense, turn, of_queries)
        index = (self.fills[:, None] + torch.arange(self.batch.length, device=query.device))[:, None, :, None]
        return output.take_along_dim(index, dim=2), None if weights is None else weights.take_along_dim(index, dim=2)

    def _attend(
        self,
        function: Attend,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        dense: bool,
        turn: Turn | None,
        of_queries: OfQueries | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        outputs, weights = [], []
        plans = zip(self.parts, self.masks, self.causal, self.distances, self.scales, strict=True)
        for part, mask, causal, distance, scales in plans:
            start, size, count, first_key, sinks = part
            before = self.fill + start - first_key
            queries = folded(query.narrow(2, start, size * count), count)
            keys, values = (
                windows(states.narrow(2, first_key, before + size * count), before, count) for states in (key, value)
            )
            keys = scaled(keys, scales)
            if sinks:
                assert turn is not None
                keys, values = with_sinks(keys, key, part, turn), with_sinks(values, value, part, unturned)
            added = biased(mask, of_queries, queries, distance)
            output, of_part = function(queries, keys, values, added, causal)
            del keys, values  # copies, where they were scaled or folded
            # As attention functions leave it, so that the output projection need not copy.
            outputs.append(unfolded(output.transpose(1, 2), count))
            weights.append(of_part)
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
        return output.transpose(1, 2), self._dense_weights(weights, query.shape[2], key.shape[2]) if dense else None

    def _dense_weights(self, weights: list[torch.Tensor | None], queries: int, slots: int) -> torch.Tensor | None:
        """Spread the weights of all parts over a query × key matrix."""
        if weights[0] is None:
            return None
        dense = weights[0].new_zeros((self.batch.size, weights[0].shape[1], queries, slots))
        for (start, size, count, first_key, sinks), part in zip(self.parts, weights, strict=True):
            assert part is not None
            for index, block in enumerate(part.unflatten(0, (-1, count)).unbind(1)):
                query, key = (place + index * size for place in (start, first_key))
                dense[:, :, query : query + size, :sinks] = block[..., :sinks]
                dense[:, :, query : query + size, key : key + block.shape[3] - sinks] = block[..., sinks:]
        return dense


def _mask(
    planner: Planner, batch: Batch, fill: int, start: int, size: int, count: int, first_key: int, sinks: int
) -> tuple[torch.Tensor | None, bool, torch.Tensor | None]:
    """Return the mask of a part of a fold, whether it is plain causal attention instead, and distances."""
    before = fill + start - first_key + sinks
    slots = torch.arange(before + size, device=planner.device)
    bias, distance = planner.bias(slots[before:], slots, before + size), planner.distance(slots[before:], slots)
    if batch.document is not None:
        seen = _seen_in_documents(planner.pattern, batch, before, start, size, count)
        return planner.mask(seen, bias), False, distance
    if start + size == 1:
        return planner.mask(None, bias), False, distance
    is_plain = planner.pattern.is_causal(before + size) and bias is None and distance is None
    if is_plain and planner.function.masks_later_keys(is_square=before == 0):
        return None, True, distance
    return planner.mask(planner.pattern.visible(slots[before:], slots), bias), False, distance


def _seen_in_documents(
    pattern: FullPattern, batch: Batch, before: int, start: int, size: int, count: int
) -> torch.Tensor:
    """Return which keys of packed rows are seen in `count` blocks, each with the `before` columns before it."""
    document, position = batch.document, batch.position
    assert document is not None
    assert position is not None
    first = start + size * torch.arange(count, device=document.device)[:, None]
    query = first + torch.arange(size, device=document.device)
    key = first + torch.arange(-before, size, device=document.device)
    same = document[:, query, None] == document[:, key][:, :, None]
    return (same & pattern.visible(position[:, query], position[:, key])).flatten(0, 1)


@dataclass(frozen=True)
class Step(Movable):
    """The plan of one token for each row, wherever its text stands, with a cache that is a ring.

    Attributes:
        batch: Layout of the batch.
        slots: Slot of each row's token in the ring, shape `(batch,)`.
        masks: What is added to scores, shape `(batch, num_heads or 1, 1, slots)`.
        distance: [`Planner.distance`] of the slots, shape `(batch, 1, slots)`.
        rotation: What queries and keys are rotated by.
        scales: What a query is multiplied by for each half of the ring, shape `(batch, 1, 2, head_dim)`; `None` if
            keys of both are scaled alike.
        is_direct: Whether to call the attention function. Those of transformers take one query for all keys, so they
            cannot serve two halves.
        ends: How many of the first slots of each row it needs, where that is known: in steps that run now, on a CPU.
    """

    batch: Batch
    slots: torch.Tensor
    masks: tuple[torch.Tensor | None, ...]
    distance: torch.Tensor | None
    rotation: Rotation
    scales: torch.Tensor | None
    is_direct: bool
    ends: tuple[int, ...] | None = None

    @classmethod
    def make(cls, planner: Planner, batch: Batch, layer: LexCacheLayer) -> "Step":
        """Plan the tokens after those that each row has read."""
        assert isinstance(batch.before, torch.Tensor)
        positions, block = batch.before, layer.block
        if block is None:
            end = layer.width_before(batch) + 1
            planner.scheme.check_length(end, block, planner.dtype)
            slots, query, key = positions, positions[:, None], torch.arange(end, device=planner.device)
            seen, bound, own = planner.pattern.visible(query, key), end, None
        else:
            sinks, bound = planner.pattern.sinks, planner.pattern.sinks + 2 * block
            slots, place = planner.pattern.ring_slots(positions), positions - sinks
            query = (place % block + block + sinks)[:, None]
            own = torch.arange(2, device=planner.device) == (place // block % 2)[:, None]
            key = torch.arange(2 * block, device=planner.device).view(2, block) % block + block * own[:, :, None]
            key = key.flatten(1) + sinks
            exists = (own | (place >= block)[:, None]).repeat_interleave(block, dim=1)
            query = torch.where(place[:, None] < 0, positions[:, None], query)
            key = torch.cat((torch.arange(sinks, device=planner.device).expand(batch.size, -1), key), dim=1)
            exists = torch.cat((exists.new_ones((batch.size, sinks)), exists), dim=1)
            seen = planner.pattern.visible(query, key) & exists[:, None]
        mask = additive_mask(seen, planner.bias(query, key, bound), planner.dtype)
        rotation = planner.rotation(batch, query, block)
        scales = None
        if own is not None and rotation.decay is not None:
            scales = torch.where(own[:, :, None], 1.0, rotation.decay)[:, None]
        is_direct = scales is None and planner.function.suits_single_queries
        ends = _ends(positions, planner.pattern) if runs_plainly(positions) else None
        return cls(batch, slots, (mask,), planner.distance(query, key), rotation, scales, is_direct, ends)

    def key_order(self, width: int) -> torch.Tensor | None:
        """Return the slot of each key in the order that users see: those of the ring up to the new token's."""
        return self.batch.key_order(self.slots, width)

    def attend(
        self,
        function: Attend,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        dense: bool,
        turn: Turn | None = None,
        of_queries: OfQueries | None = None,
        **options: float,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Apply attention; arguments and results as for [`Fold.attend`], `key` and `value` are the ring's."""
        mask = biased(self.masks[0], of_queries, query, self.distance)
        if self.is_direct:
            return function(query, key, value, mask, False, ends=self.ends, **options)
        if not dense and suits_rows(query, key, value, self.ends, **options):
            scaling, scales = options["scaling"], self.scales
            return attend_by_row(query, key, value, mask, self.ends, scaling=scaling, scales=scales), None
        halves, heads = 1 if self.scales is None else 2, key.shape[1]
        queries = scaled(query.expand(-1, -1, halves, -1), self.scales).unflatten(1, (heads, -1))
        scores = key.unflatten(2, (halves, -1)) @ queries.permute(0, 1, 3, 4, 2)
        scores = scores.flatten(2, 3).transpose(2, 3).flatten(1, 2)[:, :, None] * options["scaling"] + mask
        weights = attention_weights(scores, value.dtype, options["dropout"])
        output = weights.squeeze(2).unflatten(1, (heads, -1)) @ value
        return output.flatten(1, 2)[:, :, None], weights


def _temperature(positions: torch.Tensor, length: int, dtype: torch.dtype) -> torch.Tensor:
    """max(1, ln(n) / ln(l)) for a query that sees n tokens, shape `(batch or 1, 1, sequence, 1)`."""
    exact = torch.promote_types(dtype, torch.float32)
    factor = ((positions + 1).to(exact).log() / math.log(length)).clamp(min=1)
    return factor.view(-1, 1, positions.shape[-1], 1)


def _ends(positions: torch.Tensor, pattern: FullPattern) -> tuple[int, ...]:
    """Return how many of the first slots of a ring each row needs for its token."""
    if pattern.block is None:
        return tuple((positions + 1).tolist())
    ring, ends = 2 * pattern.block, []
    for position in positions.tolist():
        place = position - pattern.sinks
        # While the own block is the first half of the ring, the previous one is the second half.
        is_whole = place >= ring and place % ring < pattern.block
        ends.append(pattern.sinks + (ring if is_whole else place % ring + 1 if place >= 0 else place + 1))
    return tuple(ends)


def _check_room(batch: Batch, room: int) -> None:
    """Check that preallocated full attention has room for all new tokens; padding takes its place as well."""
    message = f"The static cache has room for {room} tokens of full attention"
    hint = ": make it with a larger max_cache_len, which counts padding too."
    before = batch.before
    if torch.compiler.is_compiling() and isinstance(before, torch.Tensor):
        torch._assert_async((before.max() + batch.length <= room), message + hint)
    elif (end := (before if isinstance(before, int) else int(before.max())) + batch.length) > room:
        raise ValueError(f"{message}, and the text has {end}{hint}")


def _own_heads(bias: torch.Tensor, tp_mesh: Any) -> torch.Tensor:
    """Of a bias `(..., num_heads, query, key)`, the heads of this process; gradients come from all of them."""
    from torch.distributed.tensor import DTensor, Replicate, Shard  # not every build of PyTorch has them

    whole = DTensor.from_local(bias, tp_mesh, [Replicate()], run_check=False)
    return whole.redistribute(placements=[Shard(bias.dim() - 3)]).to_local()
