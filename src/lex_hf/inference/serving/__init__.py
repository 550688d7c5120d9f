"""A model served over HTTP with OpenAI's API: transformers' server over a running batch."""

from lex_hf.lazy import exports

__getattr__, __dir__ = exports(__name__, {"ServingLimits": "limits", "build_app": "app", "run": "server"})
