"""The settings that a model can be read with: one model for each, all with the same weights."""

import copy
import itertools
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from lex_hf.errors import plain
from lex_hf.inference.caches import new_cache
from lex_hf.model.masking_lex import FullPattern, SlidingPattern
from lex_hf.rope import probe
from lex_hf.rope.blockwise import reader_of, training_length_of
from lex_hf.rope.reader import ModelFunction
from lex_hf.rope.ways import WAYS, Size

OWN = "own"
SETTINGS: Mapping[str, str] = {
    "full": "Full",
    "sliding": "Sliding window",
    "blockwise": "Blockwise",
    "blockwise-sinks": "Blockwise with sinks",
}
"""Titles of the settings by name; a LEX model whose layers differ has `OWN` beside them."""

_TITLE_OF_OWN = "Its own layers"
_NO_LENGTH = 2  # with full attention none is needed
_WAY = {"full": "unchanged"}  # of models that are not LEX, where it has another name than the setting


@dataclass(frozen=True)
class Opened:
    """A model in a setting.

    Attributes:
        name: Name of the setting.
        model: The model; its weights are those of all other settings.
        new_cache: Returns an empty cache.
        patterns: Attention pattern by index of the layer; empty if it is not known which keys a query sees.
        owner: What opened it, which lives as long: a model goes back to its own attention when that is gone.
    """

    name: str
    model: PreTrainedModel
    new_cache: Callable[[], Cache]
    patterns: Mapping[int, FullPattern]
    owner: object = field(repr=False)

    @property
    def description(self) -> str:
        """What queries see, in words, e.g. `"blocks of 128 tokens"`; in several if layers differ."""
        return "; ".join(dict.fromkeys(map(self.describe, self.patterns))) or "attention of its own"

    def describe(self, layer: int) -> str:
        """Return what the queries of a layer see, in words."""
        pattern = self.patterns[layer]
        if pattern.block is None:
            return "all tokens before"
        if isinstance(pattern, SlidingPattern):
            return f"window of {pattern.block:,} tokens"
        sinks = f", {pattern.sinks} sinks" if pattern.sinks else ""
        return f"blocks of {pattern.block:,} tokens{sinks}"


class Settings:
    """A causal language model in each of its settings, opened when it is first asked for.

    May be used by several threads.

    Args:
        model: The model, LEX or another one of transformers, in evaluation mode; it is left as it is.
        training_length: Number of tokens that a model that is not LEX was trained to read; by default what its
            configuration says.

    Raises:
        ValueError: If a training length is given for a LEX model, or is impossible.
    """

    def __init__(self, model: PreTrainedModel, training_length: int | None = None) -> None:
        self._model, self._config = model, model.config.get_text_config()
        self._is_lex = model.config.model_type == "lex"
        if self._is_lex and training_length is not None:
            raise ValueError(
                f"training_length = {training_length}: a LEX model has one of its own, {self._config.training_length} "
                "tokens; leave it out."
            )
        self._length = self._config.training_length if self._is_lex else _length_of(self._config, training_length)
        self._opened: dict[str, Opened | str] = {}
        self._lock, self._contexts = threading.Lock(), ExitStack()
        weakref.finalize(self, self._contexts.close)  # also at the end of Python, while it still works

    @property
    def titles(self) -> dict[str, str]:
        """Titles of the settings by name; whether one is possible is found out by [`open`]."""
        differ = self._is_lex and len(set(self._config.layer_patterns)) > 1
        return ({OWN: _TITLE_OF_OWN} if differ else {}) | dict(SETTINGS)

    @property
    def training_length(self) -> int | None:
        """Number of tokens that the model was trained to read; `None` if it is not known."""
        return self._length

    def open(self, name: str) -> Opened:
        """Return the model in a setting.

        Raises:
            ValueError: If there is no such setting, or the model cannot be read with it; the message says why.
        """
        if name not in self.titles:
            raise ValueError(f"setting = {name!r}: it must be one of {', '.join(self.titles)}.")
        found = self._opened.get(name) or self._open_once(name)  # others may be opening another one for a while
        if isinstance(found, str):
            raise ValueError(f"{self.titles[name]}: {found}")
        return found

    def _open_once(self, name: str) -> Opened | str:
        """Open a setting unless another thread has; return why it cannot be, if so."""
        with self._lock:
            if name not in self._opened:
                try:
                    self._opened[name] = self._open_lex(name) if self._is_lex else self._open_other(name)
                except ValueError as error:
                    self._opened[name] = str(error)  # it takes a while to find out
            return self._opened[name]

    def _open_lex(self, name: str) -> Opened:
        model: Any = sharing_weights(self._model)
        for each, value in self._fields(name).items():
            setattr(model.config, each, value)
        return Opened(name, model, lambda: new_cache(model), dict(enumerate(model.config.patterns)), self)

    def _fields(self, name: str) -> dict[str, Any]:
        """Return the fields of the configuration of a LEX model that make a setting."""
        if name == OWN:
            return {}
        if name == "blockwise-sinks":
            raise ValueError(
                "a LEX model has blocks of its own, without sinks, as it was trained: choose blockwise. Sinks are for "
                "models that were trained with full attention."
            )
        return {"attention_pattern": name}

    def _open_other(self, name: str) -> Opened:
        length = self._length or training_length_of(self._config) if name != "full" else self._length or _NO_LENGTH
        model = sharing_weights(self._model)
        reading = self._contexts.enter_context(WAYS[_WAY.get(name, name)].open(model, Size(length, length)))
        assert reading.new_cache is not None, "ways without a cache are no settings"
        _check_pieces(model, reading.new_cache)
        return Opened(name, model, reading.new_cache, self._patterns(name, model, length), self)

    def _patterns(self, name: str, model: PreTrainedModel, length: int) -> dict[int, FullPattern]:
        reader = reader_of(model)
        windows = self._windows()
        if reader is not None:
            return dict(zip(sorted(windows), reader.patterns, strict=True))
        if name == "sliding":
            windows = {index: length if own is None or own > length else own for index, own in windows.items()}
        return {
            index: FullPattern() if window is None else SlidingPattern(window)
            for index, window in sorted(windows.items())
        }

    def _windows(self) -> dict[int, int | None]:
        """Tokens that each layer sees by itself, `None` for all; empty if they attend in a way of their own."""
        try:
            seen = probe.examine(self._model, ModelFunction(self._config._attn_implementation).of)
        except Exception as error:  # code of models raises anything
            raise ValueError(f"reading a few tokens failed ({plain(error)}).") from error
        return {} if seen.unmasked or not seen.is_causal or -1 in seen.windows else seen.windows


def _length_of(config: Any, given: int | None) -> int | None:
    """Return a training length in tokens: the one given, or that of the configuration; `None` if it has none."""
    if given is not None:
        return training_length_of(config, given)
    try:
        return training_length_of(config)
    except ValueError:
        return None


def _check_pieces(model: PreTrainedModel, new_cache: Callable[[], Cache]) -> None:
    """Refuse a model that does not go on from its cache: it would forget what it has read."""
    cache = new_cache()
    try:
        with torch.no_grad():
            for piece in probe.tokens(model, 3).split(2, dim=1):
                output = model(input_ids=piece, past_key_values=cache, use_cache=True)
        lengths = {cache.get_seq_length(), output.past_key_values.get_seq_length()}
    except Exception as error:  # code of models raises anything
        raise ValueError(
            f"{type(model).__name__} cannot read a text in pieces so ({plain(error)}). Choose another setting; its "
            "perplexity is measured by lex-hf evaluate."
        ) from error
    if lengths != {3}:
        raise ValueError(f"{type(model).__name__} does not fill its cache, so it cannot read a text in pieces.")


def sharing_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of a model with a configuration of its own, and with the same parameters and buffers."""
    shared = itertools.chain(model.parameters(), model.buffers())
    return copy.deepcopy(model, {id(each): each for each in shared})
