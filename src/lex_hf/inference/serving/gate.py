"""What stands before the app: the Host header, the size of bodies, the number of requests, and clients who go."""

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from lex_hf.inference.serving.engine import VISIT
from lex_hf.inference.serving.limits import RefusedError, ServingLimits
from lex_hf.inference.serving.visits import Visit, Visits

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

_ALWAYS = ("/health", "/metrics")  # answered while stopping, too


class Gate:
    """ASGI middleware that refuses what the app should not see, and ends its work when the client has gone.

    Args:
        app: The app.
        limits: Limits of the server.
        visits: The requests at the moment.
    """

    def __init__(self, app: App, limits: ServingLimits, visits: Visits) -> None:
        self.app, self.limits, self.visits = app, limits, visits

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})
        elif scope["type"] != "http":
            await self.app(scope, receive, send)
        else:
            self.visits.count += 1
            try:
                await self._answer(scope, receive, send)
            finally:
                self.visits.count -= 1

    async def _answer(self, scope: Message, receive: Receive, send: Send) -> None:
        started: list[int] = []

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                started.append(message["status"])
            await send(message)

        asks = scope["method"] == "POST" and scope["path"].startswith("/v1/")
        try:
            self._check(scope, asks)
        except RefusedError as refusal:
            if asks:
                Visit(self.visits).end(refusal.status)
            await refuse(refusal, send)
            return
        visit = Visit(self.visits) if asks else None
        try:
            if visit is not None:
                VISIT.set(visit)
            body = await self._body(scope, receive)
            if body is not None:
                await self._run(scope, body, receive, sending)
        except RefusedError as refusal:
            await refuse(refusal, sending)
        finally:
            if visit is not None:
                visit.end(started[0] if started else None)

    def _check(self, scope: Message, asks: bool) -> None:
        """Refuse a request by its headers alone."""
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        host = headers.get(b"host", "")
        if not self.limits.is_addressed(host):
            raise RefusedError(
                400, f"This server is not called {host!a:.99}: start it with --allowed-host for further names.", "host"
            )
        if self.visits.is_stopping and scope["path"] not in _ALWAYS:
            raise RefusedError(503, "The server is stopping.", "unavailable", {"Retry-After": "10"})
        if asks and self.visits.open >= self.visits.most:
            raise RefusedError(
                429,
                f"{self.visits.open} requests are being answered or waiting, and no more may: try again later.",
                "rate_limit_exceeded",
                {"Retry-After": "1"},
            )
        length = headers.get(b"content-length", "0")
        if not length.isdecimal() or int(length[:18]) > self.limits.max_body_bytes:
            raise self._too_long()

    def _too_long(self) -> RefusedError:
        return RefusedError(413, f"The body is too long: {self.limits.max_body_bytes} bytes are allowed.", "too_long")

    async def _body(self, scope: Message, receive: Receive) -> bytes | None:
        """Return the body; `None` if the client went before it had come."""
        body = bytearray()
        try:
            async with asyncio.timeout(self.limits.body_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    body += message.get("body", b"")
                    if len(body) > self.limits.max_body_bytes:
                        raise self._too_long()
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            raise RefusedError(
                408, f"The body did not come within {self.limits.body_seconds:g} s.", "timeout"
            ) from None

    async def _run(self, scope: Message, body: bytes, receive: Receive, send: Send) -> None:
        """Run the app until it has answered, or the client goes."""
        messages = [{"type": "http.request", "body": body, "more_body": False}]
        gone = asyncio.Event()

        async def replay() -> Message:
            if messages:
                return messages.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            gone.set()

        app = asyncio.ensure_future(self.app(scope, replay, send))
        watcher = asyncio.ensure_future(watch())
        try:
            await asyncio.wait({app, watcher}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            watcher.cancel()
            if not app.done():
                app.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await app


async def refuse(refusal: RefusedError, send: Send) -> None:
    """Send a refusal."""
    body = json.dumps(refusal.body()).encode()
    headers = {"content-type": "application/json", "content-length": str(len(body)), **refusal.headers}
    pairs = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": refusal.status, "headers": pairs})
    await send({"type": "http.response.body", "body": body})
