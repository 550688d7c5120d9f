"""Which request gets on when: prompts are read in pieces, between steps that give every running request a token."""

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from lex_hf.inference.batching.requests import CANCELLED, Request, choose
from lex_hf.inference.batching.rows import Rows
from lex_hf.inference.batching.sessions import Sessions
from lex_hf.inference.caches import new_cache

Forward = Callable[..., Any]


class Schedule:
    """All requests of a running batch; used by the thread that generates, and by no other.

    Args:
        model: The model.
        rows: The rows of the batch.
        piece: Number of tokens of prompts that are read between two steps, at most.
        reads_all: Whether to read all prompts for which there are rows before the next step instead.
        step: What computes a step; the model itself, or a compiled form of it.
        sizes: Numbers of rows for which a step is compiled, ascending; empty if it is not.
        sessions: What finished requests leave behind, for prompts that go on from there.
        deliver: What takes results.

    Attributes:
        waiting: Requests whose prompt was not begun, in their order.
        reading: The request whose prompt is being read.
        running: The request of each row in use.
        tokens_read: Number of tokens of prompts that were read so far.
        tokens_written: Number of tokens that were written so far.
        steps: Number of steps so far.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        rows: Rows,
        *,
        piece: int,
        reads_all: bool,
        step: Forward,
        sizes: tuple[int, ...],
        sessions: Sessions,
        deliver: Callable[[GenerationOutput], None],
    ) -> None:
        self.model, self.rows, self.piece, self.reads_all = model, rows, piece, reads_all
        self.step, self.sizes, self.sessions, self.deliver = step, sizes, sessions, deliver
        self.waiting: deque[Request] = deque()
        self.reading: Request | None = None
        self.running: list[Request] = []
        self.tokens_read = self.tokens_written = self.steps = 0
        self._spare: Any = None  # a cache for the next prompt, whose memory is mapped already
        self._keeps_logits = {"logits_to_keep": 1} if model._supports_logits_to_keep() else {}

    def is_idle(self) -> bool:
        """Return whether there is nothing to do."""
        return not (self.waiting or self.reading or self.running)

    def requests(self) -> list[Request]:
        """Return all requests that have not ended."""
        return [*self.running, *filter(None, [self.reading]), *self.waiting]

    def cancel(self, request_id: str) -> None:
        """End a request, if it has not ended."""
        for request in self.requests():
            if request.request_id == request_id:
                self._fail(request, CANCELLED)

    def fail_all(self, error: str) -> None:
        """End all requests with an error, and forget what was read: a step may have been left half-way."""
        for request in self.requests():
            self._fail(request, error, is_whole=False)

    def _fail(self, request: Request, error: str, is_whole: bool = True) -> None:
        request.end(RequestStatus.FAILED, error)
        if request in self.running:
            self._leave(self.running.index(request), is_whole)
        else:
            if request is self.reading:
                self.reading = None
            else:
                self.waiting.remove(request)
            self._release(request)
        self.deliver(request.output())

    @torch.no_grad()
    def advance(self) -> None:
        """Read at most one piece of prompts, and give each running request a token."""
        left: int | None = None if self.reads_all else self.piece
        while (left is None or left > 0) and (self.reading is not None or self._begin()):
            read = self._read(self.piece if left is None else left)
            left = left if left is None else left - read
        if self.running:
            self._write()

    def _begin(self) -> bool:
        """Begin the prompt of the next request, if there is one and a row for it."""
        if not self.waiting or len(self.running) == self.rows.size:
            return False
        self.reading = request = self.waiting.popleft()
        request.begin()
        prompt = request.prompt
        if prompt.cache is None:
            prompt.read, prompt.cache = self.sessions.find(prompt.ids, self.model)
        if prompt.cache is None:
            prompt.cache, self._spare = self._spare or new_cache(self.model), None
        return True

    def _read(self, most: int) -> int:
        """Read up to `most` tokens of the prompt that is being read, and return their number."""
        request = self.reading
        assert request is not None
        try:
            read = self._read_piece(request, most)
            if request.prompt.logits is not None:
                self._join(request)
        except Exception as error:  # whatever a model or a processor raises belongs to this request alone
            prompt = request.prompt
            prompt.cache, prompt.read, prompt.logits = None, 0, None  # it may hold half a piece
            self._fail(request, f"{type(error).__name__}: {error}")
            return most
        return read

    def _read_piece(self, request: Request, most: int) -> int:
        prompt = request.prompt
        if prompt.logits is not None:
            return 0
        ids = torch.tensor([prompt.ids[prompt.read : prompt.read + most]], device=self.model.device)
        is_last = prompt.read + ids.shape[1] == len(prompt.ids)
        if is_last:
            output = self.model(ids, past_key_values=prompt.cache, use_cache=True, **self._keeps_logits)
            prompt.logits = output.logits[:, -1].clone()
        else:
            self.model.base_model(ids, past_key_values=prompt.cache, use_cache=True)
        prompt.read += ids.shape[1]
        self.tokens_read += ids.shape[1]
        return ids.shape[1]

    def _join(self, request: Request) -> None:
        """Let a request, all of whose prompt was read, write its first token and take a row."""
        prompt = request.prompt
        assert prompt.logits is not None
        (choice,) = choose([request], prompt.logits)
        if choice.error is not None:
            self._fail(request, choice.error)
            return
        request.accept(choice)
        if not request.has_ended:
            self.rows.put(len(self.running), prompt.cache)
            self.running.append(request)
        self.reading = None
        self._release(request)
        self._announce(request)

    def _release(self, request: Request) -> None:
        """Note that a request needs the cache of its prompt no longer; the last one hands it on."""
        prompt = request.prompt
        prompt.waiting -= 1
        if prompt.waiting or prompt.cache is None:
            return
        cache, prompt.cache = prompt.cache, None
        if prompt.logits is not None and self.sessions.keep(prompt.ids, cache, self.model):
            return
        if all(isinstance(layer.lengths, int) for layer in cache.layers):  # of a session that went on, it is a ring
            cache.reset()
            self._spare = cache

    def _write(self) -> None:
        """Give each running request a token."""
        count = len(self.running)
        size = next((each for each in self.sizes if each >= count), count)
        tokens = [request.tokens[-1] for request in self.running] + [0] * (size - count)
        ids = torch.tensor(tokens, device=self.model.device)[:, None]
        output = self.step(input_ids=ids, past_key_values=self.rows.first(size), use_cache=True)
        self.steps += 1
        choices = zip(list(self.running), choose(self.running, output.logits[:count, -1]), strict=True)
        for request, choice in choices:
            if choice.error is not None:
                self._fail(request, choice.error)
                continue
            request.accept(choice)
            self._announce(request)
            if request.has_ended:
                self._leave(self.running.index(request))

    def _announce(self, request: Request) -> None:
        """Count a new token, and deliver it if somebody waits for it."""
        self.tokens_written += 1
        if request.has_ended or request.streaming:
            self.deliver(request.output())

    def _leave(self, row: int, is_whole: bool = True) -> None:
        """Free the row of a request; the last row in use moves there, so that those in use are the first ones."""
        request = self.running[row]
        if is_whole and self.sessions.max_bytes:
            self.sessions.keep(request.prompt.ids + request.tokens[:-1], self.rows.taken(row), self.model)
        last = self.running.pop()
        if row < len(self.running):
            self.rows.move(len(self.running), row)
            self.running[row] = last
