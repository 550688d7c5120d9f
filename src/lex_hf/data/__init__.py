"""Texts, tokens, and examples of equal length: loading, tokenising, packing, streaming."""

from lex_hf.lazy import exports

__getattr__, __dir__ = exports(
    __name__,
    {
        "Packer": "documents",
        "load_documents": "documents",
        "pack": "documents",
        "stream_documents": "documents",
        "tokenize": "documents",
        "tokenize_documents": "documents",
    },
)
