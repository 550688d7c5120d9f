"""The static cache: the same two blocks in tensors that never move, with counts that a compiler does not look at.

Made for `generate(..., cache_implementation="static")` and `torch.compile`: one graph serves every step, over any
number of borders of blocks. The blocks form a *ring* of 2h slots, token p of a text in slot p mod 2h, so that nothing
is moved at a border. Every key is stored turned as in the second block of a pair; the query is turned twice, once for
the half of the ring that holds its own block and once for the half that holds the previous one.
"""

from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, StaticCache

from .batch_lex import Rows, as_tensor
from .cache_lex import LexCacheLayer, Origin, check_states, fill_of, origins, shifted
from .configuration_lex import LexConfig
from .folding_lex import AttentionFunction, AttentionPlan, Fold
from .masking_lex import attention_mask, visible
from .positions_lex import Movable, Rotation, rotate


class LexStaticCacheLayer(CacheLayerMixin):
    """Keys and values of one layer in a ring of two blocks.

    Attributes:
        block: Length of a block in tokens; `None` for full attention.
        origin: What the layer was made for, see [`origins`].
        keys: Shape `(batch, num_heads, slots, head_dim)`, with 2h slots, or `max_cache_len` for full attention.
        values: As `keys`.
        positions: Number of tokens each row has read, shape `(batch,)`.
        padding: Checksum of the columns that each row has read as padding, shape `(batch,)`.
        columns: Number of columns of input read so far, padding included; a tensor without axes.
    """

    is_compileable = True
    record_past = False

    def __init__(self, block: int | None, max_cache_len: int, origin: Origin = ()) -> None:
        super().__init__()
        self.block = block
        self.origin = origin
        self.max_cache_len = max_cache_len
        self.positions, self.padding, self.columns = (torch.zeros((), dtype=torch.long) for _ in range(3))

    @property
    def is_sliding(self) -> bool:
        """Whether memory does not depend on `max_cache_len`."""
        return self.block is not None

    @property
    def lengths(self) -> torch.Tensor:
        """Number of tokens each row has read, shape `(batch,)`, as [`LexCacheLayer`] has them."""
        return self.positions

    @property
    def slots(self) -> int:
        """Number of slots of the storage."""
        return self.max_cache_len if self.block is None else 2 * self.block

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate the storage for states of shape `(batch, num_heads, sequence, head_dim)`."""
        self.dtype, self.device = key_states.dtype, key_states.device
        batch, heads, _, width = key_states.shape
        with torch.inference_mode(False):
            self.keys = torch.zeros((batch, heads, self.slots, width), dtype=self.dtype, device=self.device)
            self.values = torch.zeros_like(self.keys)
            # Copies of tensors that each layer has for itself: where a compiled graph allocates, equal constants would
            # become one tensor, and all layers would count in it.
            self.columns = self.columns.to(self.device)
            self.positions, self.padding = (
                count.to(self.device).expand(batch).clone() for count in (self.positions, self.padding)
            )
        self._pin()
        self.is_initialized = True

    def _pin(self) -> None:
        """Tell compilers that the tensors stay where they are; without it, no graph of a GPU can be replayed."""
        self.batch_size = self.keys.shape[0]
        if not torch.compiler.is_compiling():
            for tensor in (self.keys, self.values, self.positions, self.padding, self.columns):
                torch._dynamo.mark_static_address(tensor)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take in new tokens and return what their attention needs, as the plan in `args` says."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        check_states(self, key_states)
        plan: Any = args[0]
        return plan.write(self, key_states, value_states)

    def pair(self, shift: torch.Tensor | None) -> LexCacheLayer:
        """Return the ring as a pair of blocks, in a cache layer of its own.

        Full attention has no blocks; the storage itself is returned.

        Args:
            shift: Factors that move a key back by one block, or `None` if the scheme does not turn keys.
        """
        layer = LexCacheLayer(self.block)
        layer.dtype, layer.device, layer.is_initialized = self.dtype, self.device, True
        layer.keys, layer.values = self.keys, self.values
        layer.lengths, layer.padding, layer.fills = self.positions, self.padding, fill_of(self.positions, self.block)
        if not torch.compiler.is_compiling():
            layer.settle()
        if self.block is not None:
            order = self._order()
            layer.keys = _first_turned(_in_halves(self.keys, order), self.block, shift)
            layer.values = _in_halves(self.values, order)
        return layer

    def store(self, pair: LexCacheLayer, shift: torch.Tensor | None) -> None:
        """Take back what [`LexStaticCacheLayer.pair`] returned, after new tokens were written to it."""
        self.positions.copy_(as_tensor(pair.lengths, self.device))
        self.padding.copy_(as_tensor(pair.padding, self.device))
        if self.block is not None:
            order = self._order()
            # What attention will read are views of the pair: it must stay as it is.
            keys = _first_turned(pair.keys, self.block, None if shift is None else _inverse(shift))
            self.keys.copy_(_in_halves(keys, order))
            self.values.copy_(_in_halves(pair.values, order))

    def _order(self) -> torch.Tensor:
        """Return which half of the ring holds the first, and the second block of each row's pair, `(batch, 2)`.

        The order is its own inverse.
        """
        newest = (self.positions - 1).clamp(min=0) // (self.block or 1)
        first = torch.where(newest > 0, (newest - 1) % 2, 0)
        return torch.stack((first, 1 - first), dim=1)

    def nbytes(self) -> int:
        """Return the bytes of the storage, counted from the tensors themselves."""
        return sum(0 if tensor is None else tensor.untyped_storage().nbytes() for tensor in (self.keys, self.values))

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many keys attention meets, used or not, and that none is left out before them."""
        return self.slots, 0

    def get_seq_length(self) -> int:
        """Return the number of columns read so far; a tensor, as transformers' static layers do."""
        return self.columns if self.is_initialized else 0  # type: ignore[return-value]

    def get_max_length(self) -> int:
        """Return the number of tokens that full attention has room for, or -1: a text may have any length."""
        return self.max_cache_len if self.block is None else -1

    def reset(self) -> None:
        """Forget everything that was read; the storage is kept."""
        if self.is_initialized:
            for tensor in (self.keys, self.values, self.positions, self.padding, self.columns):
                tensor.zero_()

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last tokens of every row, within the block that is being filled.

        Raises:
            ValueError: If `tokens_to_remove` is positive, or the tokens reach back past the blocks that are kept.
        """
        removed = abs(tokens_to_remove)
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): give the number of tokens to remove as a negative number.")
        lengths = self.positions.tolist() if self.is_initialized else []
        spare = min((self._croppable(length) for length in lengths), default=0)
        if removed > spare:
            raise ValueError(
                f"crop(-{removed}): a static cache can give back at most {spare} tokens now; a LexCache with "
                "activate_past_recording() gives back more."
            )
        if removed:
            self.positions.sub_(removed)
            self.columns.sub_(removed)

    def _croppable(self, length: int) -> int:
        """Tokens a row can give back and still hold the block before the one its next token falls into."""
        whole = self.block is None or length <= 2 * self.block
        return length if whole else (length - 1) % (self.block or 1) + 1

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Let row b continue the text of row `beam_idx[b]`, in place."""
        if self.is_initialized:
            for tensor in (self.keys, self.values, self.positions, self.padding):
                tensor.copy_(tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows `indices`, in that order; the storage is a new one."""
        self._map(lambda tensor: tensor[indices.to(tensor.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times; the storage is a new one."""
        self._map(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def _map(self, function: Any) -> None:
        if self.is_initialized:
            self.keys, self.values = function(self.keys), function(self.values)
            self.positions, self.padding = function(self.positions), function(self.padding)
            self._pin()


class LexStaticCache(Cache):
    """A [`LexCache`] for compiled decoding; `generate(..., cache_implementation="static")` makes one.

    With blockwise and sliding attention it has the size of a `LexCache` and serves texts of any length.

    Args:
        config: Configuration of the model.
        max_cache_len: Number of tokens that layers with full attention have room for.
        offloading: Whether layers with full attention wait in the memory of the host; needs an accelerator.

    Example:
        >>> import torch
        >>> from lex_hf import LexConfig, LexForCausalLM, LexStaticCache
        >>> model = LexForCausalLM(LexConfig(num_hidden_layers=1)).eval()
        >>> cache = LexStaticCache(model.config, max_cache_len=2048)
        >>> output = model(torch.tensor([[1, 2, 3]]), past_key_values=cache)
        >>> int(cache.get_seq_length())
        3
    """

    def __init__(self, config: LexConfig, max_cache_len: int, offloading: bool = False) -> None:
        layers = [LexStaticCacheLayer(span, max_cache_len, origin) for span, origin in origins(config)]
        super().__init__(layers=layers, offloading=offloading)

    def nbytes(self) -> int:
        """Return the bytes that all layers occupy."""
        return sum(layer.nbytes() for layer in self.layers)


def usable_cache(cache: Cache | None, config: LexConfig, num_layers: int) -> Cache | None:
    """Return `cache` with LEX layers: as it is, or, if it is an empty one of transformers, with its layers replaced.

    Args:
        cache: What was passed as `past_key_values`.
        config: Configuration of the model.
        num_layers: Number of layers that the model has, of which `config.num_hidden_layers` are in use.

    Raises:
        ValueError: If the cache already holds states that LEX layers did not store, or was made for another model.
    """
    if cache is None:
        return None
    if not isinstance(cache, Cache):
        raise ValueError(f"past_key_values is a {type(cache).__name__}; pass a LexCache, or None to have one made.")
    layers, expected = cache.layers, origins(config)
    if layers and all(hasattr(layer, "origin") for layer in layers):
        # An assistant that exits early uses the first layers of a longer cache.
        if len(layers) not in (len(expected), num_layers):
            raise ValueError(
                f"past_key_values was made for a model with {len(layers)} layers, and this one has {num_layers}."
            )
        _check_origin([layer.origin for layer in layers], [origin for _, origin in expected])
        return cache
    if not isinstance(cache, (DynamicCache, StaticCache)) or cache.get_seq_length() > 0:
        raise ValueError(
            f"past_key_values is a {type(cache).__name__} that holds {cache.get_seq_length()} tokens; LEX continues "
            "only from its own cache. Pass a LexCache, an empty DynamicCache, or None to have one made."
        )
    if isinstance(cache, StaticCache):
        length = cache.get_max_length()
        cache.layers = [LexStaticCacheLayer(block, length, origin) for block, origin in expected]
    else:
        cache.layers = [LexCacheLayer(block, origin) for block, origin in expected]
        cache.layer_class_to_replicate = None
    return cache


def _check_origin(found: list[Origin], expected: list[Origin]) -> None:
    """Check that layers were made for a model with these patterns and positions."""
    for index, (one, other) in enumerate(zip(found, expected, strict=False)):
        if one != other:
            changes = [
                f"{name} = {value!r}, not {dict(other).get(name)!r}"
                for name, value in one
                if (name, value) not in other
            ]
            raise ValueError(
                f"past_key_values was made for a model with other attention patterns or positions: layer {index} has "
                f"{'; '.join(changes) or 'others'}."
            )


def static_plan(fold: Fold, rows: Rows, layer: LexStaticCacheLayer, length: int, like: torch.Tensor) -> AttentionPlan:
    """Plan a forward pass over `length` columns with a static cache.

    Args:
        fold: What planning needs to know.
        rows: Layout of the batch.
        layer: The cache of one of the layers that the plan is for.
        length: Number of columns of new tokens.
        like: A tensor whose device and dtype are those of the states, with a row for each text.

    Raises:
        ValueError: If full attention has no room for the tokens.
    """
    fresh = torch.zeros(like.shape[0], dtype=torch.long, device=like.device)
    positions = layer.positions if layer.is_initialized else fresh
    if layer.block is None:
        _check_room(positions, length, layer.max_cache_len)
    if length == 1:
        return StaticStep.make(fold, rows, positions, layer.slots, like)
    if not layer.is_initialized:
        return StaticRead(fold.plan(rows, [], length, like), rows)
    fills = fill_of(positions, layer.block)
    if not torch.compiler.is_compiling():
        fills = fills.tolist()
    return StaticRead(fold.plan(rows, fills, length, like, layer.max_cache_len - length), rows)


def _check_room(positions: torch.Tensor, length: int, room: int) -> None:
    """Check that full attention has room for all new tokens; padding takes its place as well."""
    message = f"The static cache has room for {room} tokens of full attention"
    hint = ": make it with a larger max_cache_len, which counts padding too."
    if torch.compiler.is_compiling():
        torch._assert_async((positions.max() + length <= room), message + hint)
    elif (end := int(positions.max()) + length) > room:
        raise ValueError(f"{message}, and the text has {end}{hint}")


@dataclass(frozen=True)
class StaticStep(Movable):
    """One token for each row, wherever its text stands.

    Attributes:
        rows: Layout of the batch; a row without a real token keeps its state.
        slots: Slot of each row's token in the ring, shape `(batch,)`.
        halves: Number of parts of the storage whose keys meet a query of their own: 2, or 1 for full attention.
        mask: What is added to scores, shape `(batch, 1 or heads, 1, slots)`.
        rotation: Factors that turn a query for each half, shape `(batch, 1, halves, head_dim / 2, 2)`, and keys.
    """

    rows: Rows
    slots: torch.Tensor
    halves: int
    mask: torch.Tensor | None
    rotation: Rotation | None

    @classmethod
    def make(cls, fold: Fold, rows: Rows, positions: torch.Tensor, num_slots: int, like: torch.Tensor) -> "StaticStep":
        """Plan the tokens at `positions`, shape `(batch,)`, in a storage of `num_slots` slots."""
        block, ring = fold.block, torch.arange(num_slots, device=like.device)
        if block is None:
            slots = positions.clone()  # the cache counts on in place
            query, key = slots[:, None], ring.expand(len(slots), -1)
            turned, halves, stored, exists = query, 1, query, key <= query
        else:
            slots, offset = positions % (2 * block), positions % block
            own = torch.arange(2, device=like.device) == (positions // block % 2)[:, None]
            query = stored = (offset + block)[:, None]
            turned, halves = torch.where(own, query, query + block), 2
            key = (ring.view(2, block) % block + block * own[:, :, None]).flatten(1)
            exists = (own | (positions >= block)[:, None]).repeat_interleave(block, dim=1)
        bound = num_slots if block is None else 3 * block
        seen = visible(fold.pattern, block, query, key) & exists[:, None]
        bias = fold.bias(query, key, num_slots, like)
        mask = attention_mask(seen, bias, "eager", like.dtype)
        rotation = fold.scheme.rotation(torch.cat((turned, stored), dim=1), bound, block, like)
        if rotation is not None:
            rotation = Rotation(rotation.query[:, None, :halves], rotation.key[:, None, halves:], rotation.shift)
        return cls(rows, slots, halves, mask, rotation)

    def key_order(self, width: int) -> torch.Tensor | None:
        """Return the slot of each key in the order that users see: those of the ring up to the new token's."""
        return self.rows.key_order(self.slots, width, 1)

    def turn(self, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Turn queries, once for each half, shape `(batch, heads, halves, head_dim)`, and keys."""
        if self.rotation is None:
            return query.expand(-1, -1, self.halves, -1), key
        return rotate(query, self.rotation.query), rotate(key, self.rotation.key)

    def write(
        self, layer: LexStaticCacheLayer, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Put each row's token at its slot; return the storage."""
        row, real = torch.arange(len(self.slots), device=key.device), self.rows.real
        for storage, states in ((layer.keys, key), (layer.values, value)):
            new = states[:, :, 0].detach()
            if real is not None:
                new = torch.where(real[:, -1, None, None], new, storage[row, :, self.slots])
            storage[row, :, self.slots] = new
        layer.positions.add_(1 if real is None else real[:, -1])
        if self.rows.padding is not None:
            layer.padding.add_(as_tensor(self.rows.padding, key.device))
        layer.columns.add_(1)
        return layer.keys, layer.values

    def attend(
        self,
        function: AttentionFunction,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        dense: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend by the textbook; the attention functions of transformers know one query for all keys only."""
        scores = key.unflatten(2, (self.halves, -1)) @ query[..., None]
        scores = scores.flatten(2)[:, :, None] * query.shape[-1] ** -0.5
        scores = scores if self.mask is None else scores + self.mask
        exact = torch.promote_types(scores.dtype, torch.float32)
        weights = torch.nn.functional.softmax(scores, dim=-1, dtype=exact).to(value.dtype)
        return weights @ value, weights if dense else None


@dataclass(frozen=True)
class StaticRead(Movable):
    """Several tokens: the ring is laid out as a pair of blocks, read as by any other cache, and laid back.

    Attributes:
        plan: The plan for the pair of blocks.
        rows: Layout of the batch.
    """

    plan: AttentionPlan
    rows: Rows

    @property
    def rotation(self) -> Rotation | None:
        """Factors that turn queries and keys."""
        return self.plan.rotation

    def key_order(self, width: int) -> torch.Tensor | None:
        """Return the slot of each key in the order that users see."""
        return self.plan.key_order(width)

    def turn(self, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Turn queries and keys for their slots."""
        return self.plan.turn(query, key)

    def write(
        self, layer: LexStaticCacheLayer, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Put new keys and values into a layer's cache; return slots 0, 1, … up to the last new token."""
        shift = None if self.rotation is None else self.rotation.shift
        pair = layer.pair(shift)
        keys, values = self.plan.write(pair, key, value)
        layer.store(pair, shift)
        layer.columns.add_(key.shape[2])
        return keys, values

    def attend(
        self,
        function: AttentionFunction,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        dense: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend as the plan for the pair does."""
        return self.plan.attend(function, query, key, value, dense)


def _in_halves(states: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Copy the two halves of `(batch, heads, 2h, head_dim)` in the order given for each row, `(batch, 2)`."""
    return states.unflatten(2, (2, -1)).take_along_dim(order[:, None, :, None, None], dim=2).flatten(2, 3)


def _first_turned(keys: torch.Tensor, block: int, factors: torch.Tensor | None) -> torch.Tensor:
    """Return keys, `(batch, heads, 2h, head_dim)`, with those of the first half turned."""
    return torch.cat((shifted(keys[:, :, :block], factors), keys[:, :, block:]), dim=2)


def _inverse(factors: torch.Tensor) -> torch.Tensor:
    """1 / z of complex numbers stored as (real, imaginary) pairs."""
    conjugate = factors * factors.new_tensor([1.0, -1.0])
    return conjugate / factors.square().sum(dim=-1, keepdim=True)
