"""The text of an answer while its tokens come: decoded piece by piece, up to a stop string."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from typing import Any

from transformers.cli.serving.utils import response_events_to_chunks
from transformers.generation.continuous_batching.requests import GenerationOutput

from lex_hf.inference.batching.outputs import is_finished
from lex_hf.inference.serving.limits import RefusedError

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
