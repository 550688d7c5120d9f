"""What a server keeps of each HTTP request while it lasts, and what it counts when it is over."""

import threading
import time
from typing import Any

from lex_hf.inference.serving.answers import Answer
from lex_hf.inference.serving.metrics import Metrics


class Visits:
    """The HTTP requests that a server has at the moment.

    Args:
        most: Number of those at most that ask for an answer and do not have it yet.
        metrics: Counts how they ended.

    Attributes:
        count: Number of HTTP requests, those that read their answer included.
        is_stopping: Whether no further ones are taken.
    """

    def __init__(self, most: int, metrics: Metrics) -> None:
        self.most, self.metrics = most, metrics
        self.count = self.open = 0
        self.is_stopping = False


class Visit:
    """An HTTP request that asks for an answer. It takes a place until it has that answer, or has ended.

    Args:
        visits: All of them.
    """

    def __init__(self, visits: Visits) -> None:
        self._visits, self._arrived = visits, time.perf_counter()
        self._answer: Answer | None = None
        self._lock = threading.Lock()
        self._has_place, self._has_ended = True, False
        visits.open += 1

    @property
    def is_last(self) -> bool:
        """True if no further ones are taken."""
        return self._visits.is_stopping

    def expects(self, answer: Answer) -> None:
        """Note the answer, from any thread; it ends with this visit."""
        with self._lock:
            self._answer, has_ended = answer, self._has_ended
        if has_ended:
            answer.leave()

    def release(self) -> None:
        """Give the place to another one; in the event loop."""
        if self._has_place:
            self._has_place = False
            self._visits.open -= 1

    def end(self, status: int | None) -> None:
        """End it: the request leaves the batch if it is still there. In the event loop.

        Args:
            status: HTTP status of the answer, if there was one.
        """
        self.release()
        with self._lock:
            self._has_ended, answer = True, self._answer
        times: Any = ()
        if answer is not None:
            answer.leave()
            times = answer.times
        self._visits.metrics.ended(_outcome(answer, status), self._arrived, times)


def _outcome(answer: Answer | None, status: int | None) -> str:
    if answer is not None:
        return answer.finish_reason or ("cancelled" if answer.has_left else "failed")
    if status is None:
        return "cancelled"
    return "turned_away" if status in (429, 503) else "refused" if status < 500 else "failed"
