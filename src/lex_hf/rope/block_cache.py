"""The cache of a model that was made blockwise: transformers' own, with layers of two blocks."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
    StaticCache,
)

from lex_hf.model.batch_lex import Batch
from lex_hf.model.cache_layer_lex import LexCacheLayer
from lex_hf.model.masking_lex import FullPattern
from lex_hf.model.versions_lex import cache_classes
from lex_hf.rope.turns import Turn, Turns


class BlockCacheLayer(LexCacheLayer):
    """Keys and values of a layer, two blocks for each row; the batch that is read is laid down before each pass.

    Attributes:
        batch: Layout of the tokens that are being read.
        turns: How sinks are turned, in what is stored as keys and as values; `None` if there are none.
        sinks: Keys and values of the sinks as they came, shape `(batch, num_key_value_heads, sinks, head_dim)`. Those
            in storage are turned to stand just before the pair of blocks, whenever that moves (StreamingLLM,
            arXiv 2309.17453, §3.2).
    """

    batch: Batch | None = None
    turns: tuple[Turn, Turn] | None = None
    sinks: tuple[torch.Tensor, torch.Tensor] | None = None

    # transformers takes the size of sliding windows' masks from the first layer that says so.
    is_sliding = False

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new tokens and return all keys and values that their attention needs.

        Args:
            key_states: Rotated keys in the order of columns, shape
                `(batch, num_key_value_heads, sequence, head_dim)`.
            value_states: Values, same shape but for the last axis.
            args: Unused; part of transformers' interface.
            kwargs: Unused.

        Returns:
            As [`LexCacheLayer.update`].
        """
        batch = self.batch
        assert batch is not None, "a cache of blocks is read by the model that it was made for"
        return super().update(batch.align(key_states), batch.align(value_states), batch, None)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate the storage; see [`LexCacheLayer.lazy_initialization`]."""
        super().lazy_initialization(key_states, value_states)
        if self.pattern.sinks:
            begin = self.pattern.sinks
            with torch.inference_mode(False):
                self.sinks = self.keys[:, :, :begin].clone(), self.values[:, :, :begin].clone()
            self._pin()

    def _states(self) -> list[torch.Tensor]:
        return [*super()._states(), *(self.sinks or ())]

    def _keep_sinks(self, key: torch.Tensor, value: torch.Tensor) -> None:
        for sinks, states in zip(self.sinks or (), (key, value), strict=False):
            new = sinks[:, :, self.fill : self.fill + states.shape[2]]
            new.copy_(states.detach()[:, :, : new.shape[2]])

    def _with_sinks(
        self, keys: torch.Tensor, values: torch.Tensor, fills: torch.Tensor, first: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.sinks is None:
            return keys, values
        is_new = (torch.arange(self.pattern.sinks, device=keys.device) >= fills[:, None])[:, None, :, None]
        whole = []
        for index, states in enumerate((keys, values)):
            new, rest = states.tensor_split([self.pattern.sinks], dim=2)
            new = torch.where(is_new, new, self.sinks[index])
            self.sinks[index].copy_(new.detach())
            whole.append(torch.cat((self.turned(index, new, first[:, None]), rest), dim=2))
        return whole[0], whole[1]

    def _write_sink(self, key: torch.Tensor, value: torch.Tensor, batch: Batch) -> None:
        if self.sinks is None:
            return
        assert isinstance(batch.before, torch.Tensor)
        sinks = torch.arange(self.pattern.sinks, device=key.device)
        is_new = batch.before[:, None] == sinks
        first = self.pattern.pair_starts(batch.before)[:, None]
        # Where a row has padding, its slot is written again when its token comes.
        for index, (states, storage) in enumerate(((key, self.keys), (value, self.values))):
            kept = self.sinks[index]
            kept.copy_(torch.where(is_new[:, None, :, None], states.detach(), kept))
            storage.narrow(2, 0, len(sinks)).copy_(self.turned(index, kept, first))

    def turned(self, index: int, states: torch.Tensor, distance: torch.Tensor) -> torch.Tensor:
        """Return keys or values as they were if their tokens stood later in the text.

        Args:
            index: 0 for what is stored as keys, 1 for what is stored as values.
            states: Shape `(batch, num_key_value_heads, keys, head_dim)`.
            distance: By how many tokens, shape `(batch or 1, keys or 1)`.
        """
        assert self.turns is not None, "a pattern with sinks comes with a way to turn them"
        return self.turns[index](states, distance)

    def _place_sinks(self, first: int) -> None:
        if self.sinks is None:
            return
        distance = torch.full((1, 1), first, device=self.keys.device)
        for index, storage in enumerate((self.keys, self.values)):
            storage[:, :, : self.pattern.sinks] = self.turned(index, self.sinks[index], distance)

    def _map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        if self.sinks is not None:
            self.sinks = function(self.sinks[0]), function(self.sinks[1])
        super()._map(function)


class HybridBlockCacheLayer(BlockCacheLayer, LinearAttentionLayer):
    """Two blocks, and the states of convolutions and recurrences of a layer that has both.

    Args:
        number_of_states: How many states of each kind the layer has.
        args: As [`BlockCacheLayer`].
    """

    supports_early_init = False  # of the states, nothing is known before the first pass

    def __init__(self, number_of_states: int, *args: Any) -> None:
        BlockCacheLayer.__init__(self, *args)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Allocate the storage of keys and values, which come by place, or of states, which come by name."""
        (BlockCacheLayer if args else LinearAttentionLayer).lazy_initialization(self, *args, **kwargs)

    @property
    def is_croppable(self) -> bool:
        """True if there are no recurrences, of which nothing can be taken back."""
        return LinearAttentionLayer.is_croppable.fget(self)

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last tokens of every row."""
        LinearAttentionLayer.crop(self, tokens_to_remove)
        BlockCacheLayer.crop(self, tokens_to_remove)

    def reset(self) -> None:
        """Forget everything that was read."""
        LinearAttentionLayer.reset(self)
        BlockCacheLayer.reset(self)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Let row b continue the text of row `beam_idx[b]`."""
        LinearAttentionLayer.reorder_cache(self, beam_idx)
        BlockCacheLayer.reorder_cache(self, beam_idx)


def adopt(cache: Any, patterns: Mapping[int, FullPattern], owner: str, turns: Mapping[int, Turns]) -> Cache:
    """Return a cache of transformers whose layers of these indices are of two blocks: as it is, or replaced if empty.

    Args:
        cache: What was passed as `past_key_values`.
        patterns: Attention pattern by index of the layer.
        owner: Name of the model, which its layers remember.
        turns: How sinks are turned, by index of the layer; empty if there are none.

    Raises:
        ValueError: If the cache holds states that were stored otherwise, was made for another model, or is of a kind
            whose layers cannot be replaced.
    """
    if not isinstance(cache, Cache):
        raise ValueError(
            f"past_key_values is a {type(cache).__name__}; pass a DynamicCache, or None to have one made."
        )
    # A layer without a cache of its own attends to what another layer's cache returned.
    patterns = {index: pattern for index, pattern in patterns.items() if not _is_dummy(cache, index)}
    origin = (("model", owner),)
    found = [cache.layers[index] if index < len(cache.layers) else None for index in patterns]
    if any(isinstance(layer, LexCacheLayer) for layer in found):
        for index, layer in zip(patterns, found, strict=True):
            _check(layer, index, patterns[index], origin)
        return cache
    if not isinstance(cache, (DynamicCache, StaticCache)) or cache.get_seq_length() > 0:
        raise ValueError(
            f"past_key_values is a {type(cache).__name__} that holds {int(cache.get_seq_length())} tokens; a model "
            "with blocks continues only from a cache that it filled itself. Pass an empty DynamicCache, or None to "
            "have one made."
        )
    if cache.layer_class_to_replicate is not None:
        cache.layers += [cache.layer_class_to_replicate() for _ in range(len(cache.layers), max(patterns) + 1)]
    for index, pattern in patterns.items():
        old = cache.layers[index]
        room = old.max_cache_len if isinstance(cache, StaticCache) else None
        if isinstance(old, LinearAttentionCacheLayerMixin):
            cache.layers[index] = HybridBlockCacheLayer(old.number_of_states, pattern, origin, room)
        else:
            cache.layers[index] = BlockCacheLayer(pattern, origin, room)
        if index in turns:
            cache.layers[index].turns = turns[index].stored
    return cache


def _is_dummy(cache: Cache, index: int) -> bool:
    return index < len(cache.layers) and isinstance(cache.layers[index], cache_classes("DummyLayer"))


def _check(layer: Any, index: int, pattern: FullPattern, origin: tuple[tuple[str, Any], ...]) -> None:
    if not isinstance(layer, BlockCacheLayer) or layer.origin != origin:
        raise ValueError(
            f"past_key_values was filled by another model, or by this one with other blocks (layer {index}): read the "
            "text again with past_key_values=None."
        )
    # The same object, most often: a compiler that takes numbers for symbols cannot compare others.
    if layer.pattern is not pattern and layer.pattern != pattern:
        raise ValueError(
            f"past_key_values has blocks of {layer.block} tokens and {layer.pattern.sinks} sinks in layer {index}, "
            f"and this model blocks of {pattern.block} and {pattern.sinks} sinks: read the text again with "
            "past_key_values=None."
        )
