"""Protocols: the windows that a model reads of a document, and the tokens that are scored in each.

The scoring convention is the same for every protocol. A text becomes one sequence of tokens ``s``, the start token
first if one is requested. Every token of ``s`` but the first is a *target*. A protocol cuts the sequence into
*windows* and says which targets are scored in each; `chunked`, `sliding` and `streaming` score every target exactly
once, whatever the length, so results at different lengths are over the same tokens. Protocols differ in what the model
sees before a target: its *context*, counted in tokens, at least 1. Nothing is ever padded.

To add a protocol, write one function that takes the number of tokens of a document, at least 2, and the length, and
returns the windows, and add it to `_PROTOCOLS`; an option of its own is a keyword-only parameter with a row in
`_OPTIONS` and a field of `PerplexityOptions`.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self


@dataclass(frozen=True)
class Window:
    """Consecutive tokens of a document that the model reads at once, and the targets scored there.

    The inputs are ``s[start:stop]``; of their targets, ``s[start + 1 : stop + 1]``, the last `scored` (≥ 1) count.
    """

    start: int
    stop: int
    scored: int
    cached: bool = False  # whether the model also sees all tokens before `start`, through the cache

    @property
    def size(self) -> int:
        """Number of inputs."""
        return self.stop - self.start

    @property
    def target(self) -> int:
        """Index of the first target that is scored."""
        return self.stop + 1 - self.scored

    @property
    def context(self) -> int:
        """Number of tokens the model has seen before the first target that is scored."""
        return self.target if self.cached else self.target - self.start


def chunked(tokens: int, length: int) -> list[Window]:
    """Cut a document into segments of `length` tokens, each evaluated alone (LEX paper, section 4.2).

    With L = `length`, segment i has inputs ``s[i*L : (i+1)*L]`` and targets ``s[i*L + 1 : (i+1)*L + 1]``: its
    first input is the last target of the segment before it. A target therefore has 1 to L tokens of context.
    The rest of a document is a shorter segment.
    """
    stops = [*range(length, tokens - 1, length), tokens - 1]
    return [Window(index * length, stop, scored=stop - index * length) for index, stop in enumerate(stops)]


def sliding(tokens: int, length: int, *, stride: int) -> list[Window]:
    """Advance a window of `length` tokens by `stride` tokens at a time and score the new targets.

    Targets of the first window have 1 to `length` tokens of context, all later ones `length` - `stride` + 1 to
    `length`. A stride of `length` is `chunked`; a stride of 1 gives each target all the context that fits, for one
    forward pass per token. The last window may be shorter.
    """
    windows = [Window(0, min(length, tokens - 1), scored=min(length, tokens - 1))]
    while (done := windows[-1].stop) < tokens - 1:
        start = windows[-1].start + stride
        stop = min(start + length, tokens - 1)
        windows.append(Window(start, stop, scored=stop - done))
    return windows


def streaming(tokens: int, length: int) -> list[Window]:
    """Read a document once from start to end, in chunks of `length` tokens, with the model's own cache.

    The context of a target is everything before it, as far as the model's attention and cache reach; `length`
    only sets how much is computed at once. Memory is that of one chunk and of the cache. Documents are read
    one by one, so the batch size has no effect.
    """
    return [Window(each.start, each.stop, each.scored, cached=True) for each in chunked(tokens, length)]


def last_token(tokens: int, length: int, *, contexts: Sequence[int]) -> list[Window]:
    """Score only the last token of each segment of `length` tokens, at several contexts (Sandwich paper, §3.4).

    The segments follow each other without overlap, ``s[i*L : (i+1)*L]`` with L = `length`; the rest of a document is
    left out. The last token of each segment is predicted from each number of tokens in `contexts`, 1 to `length` - 1,
    so perplexities at different contexts are over the same targets.

    Raises:
        ValueError: If the document is shorter than one segment.
    """
    if tokens < length:
        raise ValueError(
            f"it has {tokens} tokens (with the start token), but the protocol 'last_token' needs at least "
            f"length = {length}. Choose a smaller length, or leave the text out."
        )
    targets = range(length - 1, tokens, length)
    return [Window(target - context, target, scored=1) for target in targets for context in contexts]


_PROTOCOLS: tuple[Callable[..., list[Window]], ...] = (chunked, last_token, sliding, streaming)
PROTOCOLS = {each.__name__: each for each in _PROTOCOLS}


@dataclass(frozen=True)
class ProtocolSettings:
    """A protocol with its length and all of its own options, as used."""

    protocol: str
    length: int  # of segments, windows or chunks, in tokens
    options: dict[str, Any]

    @classmethod
    def complete(cls, protocol: str, length: int, given: Mapping[str, Any]) -> Self:
        """Check the numbers of options whose names [`check_names`] let pass, and fill in those that are `None`.

        Raises:
            ValueError: If a number is out of range.
        """
        if length < 1:
            raise ValueError(f"length = {length}: it must be at least 1.")
        return cls(protocol, length, {name: _OPTIONS[name](length, given.get(name)) for name in _own(protocol)})

    @staticmethod
    def check_names(protocol: str, given: Mapping[str, Any]) -> None:
        """Check the names of a protocol and of its options, which need no length; an option not given is `None`.

        Raises:
            ValueError: If there is no such protocol, or it has no such option.
        """
        if protocol not in PROTOCOLS:
            raise ValueError(f"protocol = {protocol!r}: it must be one of {', '.join(PROTOCOLS)}.")
        known = _own(protocol)
        for name, value in given.items():
            if value is not None and name not in known:
                raise ValueError(
                    f"{name} = {value}: the protocol {protocol!r} has no such option; it has "
                    f"{', '.join(known) or 'none of its own'}. Leave it out, or choose another protocol."
                )

    @property
    def contexts(self) -> list[int] | None:
        """Contexts that are measured apart, in ascending order; `None` if the protocol has none."""
        return self.options.get("contexts")

    def windows(self, tokens: int) -> list[Window]:
        """Return the windows of a document of so many tokens."""
        return PROTOCOLS[self.protocol](tokens, self.length, **self.options)


def _own(protocol: str) -> list[str]:
    parameters = inspect.signature(PROTOCOLS[protocol]).parameters.values()
    return [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]


def _stride(length: int, stride: int | None) -> int:
    if stride is None:
        return max(1, length // 2)
    if not 1 <= stride <= length:
        raise ValueError(f"stride = {stride}: it must be 1 to length = {length}, or targets would be left out.")
    return stride


def _contexts(length: int, contexts: Sequence[int] | None) -> list[int]:
    if length < 2:
        raise ValueError(f"length = {length}: it must be at least 2 with protocol = 'last_token'.")
    if contexts is None:
        contexts = [*(2**power for power in range((length - 1).bit_length())), length - 1]
    if len(contexts) == 0 or not all(1 <= context < length for context in contexts):
        raise ValueError(f"contexts = {list(contexts)}: each must be 1 to length - 1 = {length - 1}, one at least.")
    return sorted(set(contexts))


_OPTIONS: dict[str, Callable[[int, Any], Any]] = {"stride": _stride, "contexts": _contexts}
