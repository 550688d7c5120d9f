"""How many tokens are read at once, and how often a page is told."""

import math
import time
from collections.abc import Iterator
from typing import TypeVar

SMALLEST, LARGEST = 16, 4096  # tokens of a piece
_QUICK, _SLOW = 0.1, 0.5  # seconds of a piece
_Value = TypeVar("_Value")


class Pace:
    """Size of the pieces in which a text is read: as many tokens as are read in a few tenths of a second.

    So a page shows something soon, and can be stopped, with models that read ten tokens a second or ten thousand.

    Attributes:
        tokens: Tokens of the next piece.
        seconds: Time of all pieces so far.
    """

    def __init__(self) -> None:
        self.tokens, self.seconds = SMALLEST, 0.0

    def note(self, seconds: float) -> None:
        """Take the time of a piece into account."""
        self.seconds += seconds
        if seconds < _QUICK:
            self.tokens = min(LARGEST, 2 * self.tokens)
        elif seconds > _SLOW:
            self.tokens = max(SMALLEST, self.tokens // 2)


def now_and_then(values: Iterator[_Value], seconds: float) -> Iterator[_Value]:
    """Yield the first value, those that come at least so many seconds after the one before, and the last."""
    shown, waiting = -math.inf, list[_Value]()
    for value in values:
        waiting = [value]
        if time.monotonic() - shown >= seconds:
            yield waiting.pop()
            shown = time.monotonic()
    yield from waiting
