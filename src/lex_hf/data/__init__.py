"""Texts, tokens, and examples of equal length: loading, tokenising, packing, streaming."""

from lex_hf.lazy import exports

__getattr__, __dir__ = exports(
    __name__,
    {
        "Packer": "packing",
        "load_documents": "documents",
        "pack": "packing",
        "stream_documents": "documents",
        "tokenize": "tokenizing",
        "tokenize_documents": "tokenizing",
    },
)
