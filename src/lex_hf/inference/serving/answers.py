"""The text of an answer while its tokens come: decoded piece by piece, up to a stop string."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from typing import Any

from transformers.cli.serving.utils import response_events_to_chunks
from transformers.generation.continuous_batching.requests import GenerationOutput

from lex_hf.inference.batching.outputs import is_finished
from lex_hf.inference.serving.limits import RefusedError
from lex_hf.inference.token_text import Text


class Answer:
    """An answer on its way from the thread that generates to a client, in one event loop.

    Args:
        name: Name of the request in the batch.
        text: Takes its tokens.
        ends: Ids of tokens that end it.
        parser: Tells thoughts and calls of tools from text; `None` if all is text.
        cancel: Ends the request in the batch.

    Attributes:
        prompt_tokens: Tokens of the prompt.
        finish_reason: `"stop"`, `"length"` or `"tool_calls"`, once it has ended well.
        error: Why it has ended otherwise.
        has_left: Whether it was still being written when the client went.
        status: HTTP status of an answer that failed.
        times: When each token was written.
    """

    def __init__(
        self, name: str, text: Text, ends: Collection[int], parser: Any, prompt_tokens: int, cancel: Callable[[], None]
    ) -> None:
        self.name, self.prompt_tokens = name, prompt_tokens
        self.finish_reason: str | None = None
        self.error: str | None = None
        self.has_left = False
        self.status = 500
        self.times: Sequence[float] = ()
        self._text, self._ends, self._parser, self._cancel = text, ends, parser, cancel
        self._taken = 0
        self._has_calls = False
        self._items: list[Any] = [] if parser is None else response_events_to_chunks(parser.initial_events)
        self._changed = asyncio.Event()

    @property
    def tokens(self) -> int:
        """Number of new tokens."""
        return self._text.tokens

    @property
    def has_ended(self) -> bool:
        """True once nothing more will come."""
        return self.finish_reason is not None or self.error is not None

    def take(self, output: GenerationOutput) -> None:
        """Take a result of the batch."""
        if self.has_ended:
            return
        self._accept(self._text.feed(output.generated_tokens[self._taken :]))
        self._taken = len(output.generated_tokens)
        self.times = output.timestamps or ()
        if self._text.is_stopped:
            self._end("stop")
            if not is_finished(output):
                self._cancel()
        elif output.error is not None:
            self.error = output.error
        elif is_finished(output):
            self._end("stop" if output.generated_tokens[-1] in self._ends else "length")
        self._changed.set()

    def _end(self, reason: str) -> None:
        self._accept(self._text.finish())
        if self._parser is not None:
            try:
                _, events = self._parser.finalize()
            except (ValueError, RuntimeError):  # it ended within a call of a tool
                events = []
            self._add(response_events_to_chunks(events))
        self.finish_reason = "tool_calls" if self._has_calls else reason

    def _accept(self, text: str) -> None:
        if text:
            self._add([text] if self._parser is None else response_events_to_chunks(self._parser.feed(text)))

    def _add(self, items: list[Any]) -> None:
        for item in items:
            self._has_calls |= not isinstance(item, str)
            if self._items and isinstance(item, str) and type(item) is type(self._items[-1]):
                self._items[-1] = type(item)(self._items[-1] + item)  # one piece for a reader who is slow
            else:
                self._items.append(item)

    async def pieces(self) -> AsyncIterator[list[Any]]:
        """Yield what has come, until all has: text, and transformers' `ReasoningText` and `ToolCall`.

        Raises:
            RefusedError: If the request failed.
        """
        while True:
            items, self._items = self._items, []
            ended = self.has_ended
            self._changed.clear()
            if items:
                yield items
            if self.error is not None:
                raise RefusedError(
                    self.status, f"The answer could not be completed: {self.error}", "generation_failed"
                )
            if ended:
                return
            if not items:
                await self._changed.wait()

    def fail(self, why: str) -> None:
        """End the request in the batch, because what it writes cannot be sent."""
        self.error = why
        self._cancel()
        self._changed.set()

    def leave(self) -> None:
        """End the request in the batch, if it has not ended: nobody waits for it any more."""
        if not self.has_ended:
            self.has_left, self.error = True, "The client has gone."
            self._cancel()
