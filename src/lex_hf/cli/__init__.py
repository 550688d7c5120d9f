"""The command line `lex-hf`: it parses, calls one function of the package, and prints."""

from lex_hf.lazy import exports

__getattr__, __dir__ = exports(__name__, {"app": "app", "main": "app"})
