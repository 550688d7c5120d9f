"""Caches of two blocks, for whatever model reads in blocks."""

from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from lex_hf.model.cache_lex import LexCache, LexStaticCache
from lex_hf.rope.blockwise import reader_of


def new_cache(model: PreTrainedModel, max_cache_len: int | None = None) -> Cache:
    """Make an empty cache for a LEX model, or for one that [`lex_hf.blockwise`] made.

    Args:
        model: The model.
        max_cache_len: If given, all memory is allocated once, and full attention has room for that many tokens.
    """
    reader = reader_of(model)
    if reader is not None:
        return reader.new_cache(max_cache_len)
    return LexCache(model.config) if max_cache_len is None else LexStaticCache(model.config, max_cache_len)
