"""The generation cache of a LEX model; its layers are in `cache_layer_lex.py`."""

from typing import Any

from transformers.cache_utils import Cache, DynamicCache, StaticCache

from .cache_layer_lex import LexCacheLayer, Origin
from .masking_lex import FullPattern
from .versions_lex import record_past


class LexCache(Cache):
    """The cache of a LEX model; `generate` and a forward pass with `use_cache=True` make one on their own.

    Memory is `2 · layers · batch · 2h · hidden_size` elements for blockwise attention, from the first token to the
    millionth (2h = l by default), and twice the window in place of 2h for sliding attention. A layer with full
    attention grows with the text.

    Args:
        config: Configuration of the model.
        offloading: Whether layers with full attention wait in the memory of the host; needs an accelerator.
        max_cache_len: If given, all memory is allocated once, for compiled decoding, and full attention has room for
            that many tokens; see [`LexStaticCache`].

    Raises:
        ValueError: If the configuration is of another model.

    Example:
        >>> from lex_hf import LexCache, LexConfig
        >>> cache = LexCache(LexConfig())
        >>> cache.nbytes()  # nothing is allocated before the first token
        0
    """

    def __init__(self, config: Any, offloading: bool = False, max_cache_len: int | None = None) -> None:
        if not hasattr(config, "key_fields"):
            raise ValueError(
                f"config is a {type(config).__name__}: a LexCache is for LEX models. For a model that blockwise made, "
                "take the cache that it returns with use_cache=True, or DynamicCache(config=model.config)."
            )
        super().__init__(layers=_new_layers(config.patterns, config.key_fields, max_cache_len), offloading=offloading)

    @staticmethod
    def adopt(cache: Cache | None, patterns: list[FullPattern], key_fields: Origin, num_layers: int) -> Cache | None:
        """Return `cache` with LEX layers: as it is, or, if it is an empty one of transformers, its layers replaced.

        Args:
            cache: What was passed as `past_key_values`.
            patterns: The attention pattern of each layer in use.
            key_fields: Names and values of the fields that decide how cached keys are rotated and scaled.
            num_layers: Number of layers that the model has.

        Raises:
            ValueError: If the cache already holds states that LEX layers did not store, or was made for another model.
        """
        if cache is None:
            return None
        if not isinstance(cache, Cache):
            raise ValueError(
                f"past_key_values is a {type(cache).__name__}; pass a LexCache, or None to have one made."
            )
        if cache.layers and all(isinstance(layer, LexCacheLayer) for layer in cache.layers):
            _check_layers(cache.layers, patterns, key_fields, num_layers)
            return cache
        if not isinstance(cache, (DynamicCache, StaticCache)) or cache.get_seq_length() > 0:
            raise ValueError(
                f"past_key_values is a {type(cache).__name__} that holds {int(cache.get_seq_length())} tokens; LEX "
                "continues only from its own cache. Pass a LexCache, an empty DynamicCache, or None to have one made."
            )
        is_static = isinstance(cache, StaticCache)
        cache.layers = _new_layers(patterns, key_fields, _room(cache) if is_static else None)
        if not is_static:
            cache.layer_class_to_replicate = None
        return cache

    def activate_past_recording(self) -> None:
        """Remember what is read from now on, so that tokens can be taken back over borders of blocks."""
        record_past(self)

    def nbytes(self) -> int:
        """Return the bytes that all layers occupy."""
        return sum(self.nbytes_by_layer())

    def nbytes_by_layer(self) -> list[int]:
        """Return the bytes that each layer occupies; only those of full attention grow with the text."""
        return [layer.nbytes() for layer in self.layers]


class LexStaticCache(LexCache):
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

    def __init__(self, config: Any, max_cache_len: int, offloading: bool = False) -> None:
        super().__init__(config, offloading, max_cache_len)


def _new_layers(patterns: list[FullPattern], key_fields: Origin, max_cache_len: int | None) -> list[LexCacheLayer]:
    return [LexCacheLayer(pattern, key_fields, max_cache_len) for pattern in patterns]


def _room(cache: StaticCache) -> int:
    """Tokens that a static cache was made for; layers with a window have less room."""
    return max(layer.max_cache_len for layer in cache.layers)


def _check_layers(
    layers: list[LexCacheLayer], patterns: list[FullPattern], key_fields: Origin, num_layers: int
) -> None:
    """Check that layers of a cache were made for a model with these patterns and positions."""
    # An assistant that exits early uses the first layers of a longer cache.
    if len(layers) not in (len(patterns), num_layers):
        raise ValueError(
            f"past_key_values was made for a model with {len(layers)} layers, and this one has {num_layers}."
        )
    for index, (layer, pattern) in enumerate(zip(layers, patterns, strict=False)):
        if (layer.pattern, layer.origin) != (pattern, key_fields):
            found, expected = _described(layer.pattern, layer.origin), dict(_described(pattern, key_fields))
            changes = [
                f"{name} = {value!r}, not {expected.get(name)!r}"
                for name, value in found
                if expected.get(name) != value
            ]
            raise ValueError(
                f"past_key_values was made for a model with other attention patterns or positions: layer {index} has "
                f"{'; '.join(changes) or 'others'}."
            )


def _described(pattern: FullPattern, origin: Origin) -> Origin:
    return (("attention_pattern", pattern.name), ("block length", pattern.block), *origin)
