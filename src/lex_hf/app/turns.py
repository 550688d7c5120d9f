"""People who use one model take turns."""

import threading
from collections import deque
from types import TracebackType


class Turns:
    """Lock that threads get in the order in which they asked for it.

    A piece of a text is read, or a token written, in each turn. So nobody waits for a long text of another, and the
    time of a piece is not that of several. (A `threading.Lock` may be taken again and again by the same thread.)
    """

    def __init__(self) -> None:
        self._changed, self._waiting = threading.Condition(), deque[object]()

    def __enter__(self) -> None:
        ticket = object()
        with self._changed:
            self._waiting.append(ticket)
            self._changed.wait_for(lambda: self._waiting[0] is ticket)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._waiting.popleft()
            self._changed.notify_all()
