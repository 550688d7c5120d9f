"""The process that serves an app, and its end: what was begun is finished first."""

import asyncio
import time
from typing import Any

import uvicorn
from fastapi import FastAPI
from transformers.utils import logging

logger = logging.get_logger(__name__)

_FLUSH = 2.0  # seconds for the last words of requests that are ended
_TICK = 0.02  # seconds between two looks at what is still running


class Server(uvicorn.Server):
    """Serves an app of [`build_app`] until it is told to stop.

    The first SIGTERM or Ctrl-C lets requests finish that run, and answers further ones with 503; the second one ends
    all at once.

    Args:
        app: The app.
        host: Address to listen on.
        port: Port to listen on.
        grace: Seconds in which running requests may finish.
        log_level: Name of the level of uvicorn's log.
    """

    def __init__(self, app: FastAPI, host: str, port: int, grace: float, log_level: str = "info") -> None:
        config = uvicorn.Config(
            app, host=host, port=port, log_level=log_level, timeout_graceful_shutdown=int(_FLUSH), ws="none"
        )
        super().__init__(config)
        self.app, self.grace = app, grace
        self._signals = 0
        self._ending: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Begin to stop; the second time, end all requests; the third time, end without a word."""
        self._signals += 1
        if self._signals > 2:
            self.should_exit = self.force_exit = True

    async def on_tick(self, counter: int) -> bool:
        """Do what is due; uvicorn asks ten times a second."""
        if self._signals and self._ending is None:
            self._ending = asyncio.create_task(self._end())
        return await super().on_tick(counter)

    async def _end(self) -> None:
        visits, engine = self.app.state.visits, self.app.state.engine
        visits.is_stopping = True
        logger.warning("Stopping: %d requests may finish within %g s; Ctrl-C ends them.", visits.count, self.grace)
        last = time.monotonic() + self.grace
        while visits.count and time.monotonic() < last and self._signals < 2:
            await asyncio.sleep(_TICK)
        if visits.count:
            engine.manager.stop(block=False, hard_stop=True)
            last = time.monotonic() + _FLUSH
            while visits.count and time.monotonic() < last:
                await asyncio.sleep(_TICK)
        self.should_exit = True


def run(app: FastAPI, host: str, port: int, grace: float, log_level: str = "info") -> None:
    """Serve an app of [`build_app`] until SIGTERM or Ctrl-C; see [`Server`].

    Raises:
        ValueError: If the address cannot be used.
    """
    server = Server(app, host, port, grace, log_level)
    try:
        server.run()
    except SystemExit as error:  # uvicorn has logged why
        raise ValueError(f"Could not listen on {host}:{port}: choose another --host or --port.") from error
    finally:
        app.state.engine.close()  # also where the app never began
