"""The rows of a running batch: one preallocated cache, in which each row is the cache of one text.

A row has a constant size and stands at its own place of its own text, so texts come and go without a page table. Rows
in use are the first ones; a step reads and writes these, and no others.
"""

import copy
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from lex_hf.inference.caches import new_cache
from lex_hf.model.cache_layer_lex import LexCacheLayer


class Rows:
    """Caches of up to `size` texts, side by side.

    Args:
        model: A LEX model, or one that [`lex_hf.blockwise`] made.
        room: Number of tokens of a text that layers with full attention have room for.

    Attributes:
        size: Number of rows; 0 before [`Rows.allocate`].
        row_bytes: Bytes of one row.

    Raises:
        ValueError: If layers keep caches of another kind.
    """

    def __init__(self, model: PreTrainedModel, room: int) -> None:
        self.model, self.room, self.size = model, room, 0
        self.cache = new_cache(model, room)
        _check_layers(self.cache)
        self._decays = [_decay(model, *layer) for layer in enumerate(self.cache.layers)]
        self._parts: dict[int, Cache] = {}
        # The shapes of keys and values are the model's own business: read a token, and look.
        token = torch.zeros((1, 1), dtype=torch.long, device=model.device)
        with torch.no_grad():
            model(input_ids=token, past_key_values=self.cache, use_cache=True)
        self.row_bytes = sum(layer.nbytes() for layer in self.cache.layers)

    def allocate(self, size: int) -> None:
        """Allocate the storage of `size` rows."""
        self.cache = self._empty(size)
        self.size, self._parts = size, {}

    def _empty(self, size: int) -> Cache:
        cache = new_cache(self.model, self.room)
        for layer, sample in zip(cache.layers, self.cache.layers, strict=True):
            states = (each[:1, :, :1].expand(size, -1, -1, -1) for each in (sample.keys, sample.values))
            layer.lazy_initialization(*states)
        return cache

    def first(self, count: int) -> Cache:
        """Return the first rows as a cache of their own, which shares their storage."""
        if count not in self._parts:
            self._parts[count] = self._part(0, count)
        return self._parts[count]

    def _part(self, start: int, end: int) -> Cache:
        part = copy.copy(self.cache)
        part.layers = [_narrowed(layer, start, end) for layer in self.cache.layers]
        return part

    def put(self, row: int, cache: Cache) -> None:
        """Let a row continue the text that a cache of one text holds, which stays as it is."""
        for target, source, decay in zip(self._part(row, row + 1).layers, cache.layers, self._decays, strict=True):
            _copy(source, target, decay)

    def move(self, source: int, target: int) -> None:
        """Let row `target` continue the text of row `source`."""
        self.put(target, self._part(source, source + 1))

    def taken(self, row: int) -> Cache:
        """Return a copy of the cache of one row."""
        copied = self._empty(1)
        for source, target in zip(self._part(row, row + 1).layers, copied.layers, strict=True):
            _copy(source, target, None)
        return copied

    def release(self) -> None:
        """Give the memory back."""
        self.size, self.cache, self._parts = 0, new_cache(self.model, self.room), {}


def _check_layers(cache: Cache) -> None:
    others = sorted({type(layer).__name__ for layer in cache.layers if not isinstance(layer, LexCacheLayer)})
    if others:
        raise ValueError(
            f"Continuous batching needs a cache whose rows stand at places of their own, and layers of this model "
            f"keep a {', '.join(others)}, for windows or recurrences: call generate() with a left-padded batch."
        )


def _decay(model: Any, index: int, layer: LexCacheLayer) -> torch.Tensor | None:
    """Return what keys of a layer are multiplied by when their block becomes the previous one; `None` for nothing."""
    if layer.block is None or model.config.model_type != "lex":
        return None
    nowhere = torch.zeros(1, device=model.device)
    return model.base_model.scheme(index).rotation(nowhere, nowhere, layer.block, model.dtype).decay


def _narrowed(layer: LexCacheLayer, start: int, end: int) -> LexCacheLayer:
    """Return a layer of some of the rows, in the same storage."""
    part: Any = copy.copy(layer)
    for name in ("keys", "values", "lengths", "padding"):
        setattr(part, name, getattr(layer, name)[start:end])
    if getattr(layer, "sinks", None) is not None:
        part.sinks = tuple(states[start:end] for states in layer.sinks)
    part._pin()
    return part


def _copy(source: LexCacheLayer, target: LexCacheLayer, decay: torch.Tensor | None) -> None:
    """Let the only row of a preallocated layer continue the text of the only row of any other."""
    lengths: Any = target.lengths
    if isinstance(source.lengths, int):
        fill, first = source.fill, source.lengths - source.fill
        states = (source.keys[:, :, :fill], source.values[:, :, :fill])
        ends = torch.full((1,), fill, device=target.keys.device)
        if target.block is None:  # of blocks, all slots are written
            target.keys.zero_(), target.values.zero_()
        target.store_ring(*states, ends, first, decay)
        lengths.fill_(source.lengths)
    else:
        end = min(source.keys.shape[2], target.keys.shape[2])
        target.keys[:, :, :end], target.values[:, :, :end] = source.keys[:, :, :end], source.values[:, :, :end]
        lengths.copy_(source.lengths)
    for mine, others in zip(getattr(target, "sinks", None) or (), getattr(source, "sinks", None) or (), strict=True):
        mine.copy_(others)
