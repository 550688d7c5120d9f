"""The text of tokens that come one by one."""

from collections.abc import Collection, Sequence
from typing import Any

_UNKNOWN = "\N{REPLACEMENT CHARACTER}"  # what tokenizers write for bytes that are no character, or none yet
_LONGEST = 32  # tokens that may wait for the end of a character, which has four bytes: the rest will never be text


class Text:
    """Text of tokens that come one by one, which ends before the first stop string.

    A token alone is not always text: a character may take several, and tokenizers write spaces by what precedes. So
    each is decoded together with those before it, back to the last place where text was whole.

    Args:
        tokenizer: The tokenizer.
        stops: Strings that end the text, and are no part of it.
        skip_special_tokens: Whether special tokens are no part of it.

    Attributes:
        tokens: Number of tokens, that with which a stop string became complete included.
        is_stopped: Whether a stop string came.
    """

    def __init__(self, tokenizer: Any, stops: Collection[str] = (), skip_special_tokens: bool = True) -> None:
        self._tokenizer, self._stops, self._skips = tokenizer, stops, skip_special_tokens
        self._window: list[int] = []
        self._read = 0  # tokens of the window whose text was taken
        self._held = ""  # text that may be the beginning of a stop string
        self.tokens = 0
        self.is_stopped = False

    def feed(self, ids: Sequence[int]) -> str:
        """Take further tokens, and return the text that is certain by now."""
        text = ""
        # One by one, a text ends at the same token however many come at once.
        for piece in [[each] for each in ids] if self._stops else [ids]:
            if self.is_stopped:
                break
            self._window += piece
            self.tokens += len(piece)
            text += self._release(self._new())
        return text

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skips)

    def _new(self, is_last: bool = False) -> str:
        """Return the text of the tokens that were not taken yet, unless a character is still incomplete."""
        before, text = self._decode(self._window[: self._read]), self._decode(self._window)
        waits = text.endswith(_UNKNOWN) and len(self._window) - self._read < _LONGEST
        if not is_last and (waits or len(text) <= len(before)):
            return ""
        self._window, self._read = self._window[self._read :], len(self._window) - self._read
        return text[len(before) :]

    def _release(self, text: str) -> str:
        """Return a text up to a stop string, or to what may become one."""
        if not self._stops:
            return text
        self._held += text
        places = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if places:
            self.is_stopped = True
            return self._held[: min(places)]
        kept = max(_overlap(self._held, stop) for stop in self._stops)
        text, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
        return text

    def finish(self) -> str:
        """Return the text that waited for more, when no more will come."""
        if self.is_stopped:
            return ""
        text = self._release(self._new(is_last=True))
        return text if self.is_stopped else text + self._held


def _overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of a text are the beginning of a stop string."""
    most = min(len(text), len(stop) - 1)
    return next((size for size in range(most, 0, -1) if text.endswith(stop[:size])), 0)
