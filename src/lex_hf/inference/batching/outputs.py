"""Results on their way from the thread that generates to those who wait for them."""

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable

from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

Handler = Callable[[GenerationOutput], None]


def is_finished(output: GenerationOutput) -> bool:
    """Return whether a request wrote its last token, or failed."""
    return output.status >= RequestStatus.FINISHED


class Outputs:
    """Results that nobody took yet, in order, and handlers for those of single requests."""

    def __init__(self) -> None:
        self._waiting: deque[GenerationOutput] = deque()
        self._handlers: dict[str, tuple[Handler, asyncio.AbstractEventLoop]] = {}
        self._changed = threading.Condition()
        self._is_closed = False

    def open(self) -> None:
        """Expect results."""
        with self._changed:
            self._is_closed = False

    def close(self) -> None:
        """Expect no further results: whoever waits for one, waits no longer."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def register(self, request_id: str, handler: Handler, loop: asyncio.AbstractEventLoop) -> None:
        """Call `handler` in an event loop with each result of a request, up to the last one."""
        with self._changed:
            self._handlers[request_id] = (handler, loop)

    def forget(self, request_id: str) -> None:
        """Take a handler back whose request did not come to be."""
        with self._changed:
            self._handlers.pop(request_id, None)

    def deliver(self, output: GenerationOutput) -> None:
        """Hand a result to its handler, or to whoever waits for it."""
        with self._changed:
            handler, loop = self._handlers.get(output.request_id, (None, None))
            if handler is None:
                self._waiting.append(output)
                self._changed.notify_all()
            elif is_finished(output):
                del self._handlers[output.request_id]
        if handler is not None and loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody listens any more
                loop.call_soon_threadsafe(handler, output)

    def take(self, request_id: str | None, timeout: float | None) -> GenerationOutput | None:
        """Return the oldest result, of a request or of any; `None` if there is none in time, or none will come.

        Args:
            request_id: The request; `None` for any.
            timeout: Seconds to wait; `None` for no limit.
        """
        end = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while (place := self._oldest(request_id)) is None:
                left = None if end is None else end - time.monotonic()
                if self._is_closed or (left is not None and left <= 0):
                    return None
                self._changed.wait(left)
            found = self._waiting[place]
            del self._waiting[place]
            return found

    def _oldest(self, request_id: str | None) -> int | None:
        """Return where the oldest result of a request, or of any, stands."""
        outputs = enumerate(self._waiting)
        return next((place for place, output in outputs if request_id in (None, output.request_id)), None)
