"""Requests of a server in a running batch: each with its own settings, seed and stop strings."""

import asyncio
import queue
import secrets
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any

import torch
from transformers import LogitsProcessor, PreTrainedTokenizerBase
from transformers.utils import logging

from lex_hf.errors import plain
from lex_hf.inference.batching import BlockBatchingManager
from lex_hf.inference.serving.answers import Answer
from lex_hf.inference.serving.fields import DEFAULT_NEW_TOKENS, Query
from lex_hf.inference.serving.limits import RefusedError, ServingLimits
from lex_hf.inference.serving.visits import Visit
from lex_hf.inference.token_text import Text

logger = logging.get_logger(__name__)

VISIT: ContextVar[Visit] = ContextVar("visit")


class Penalties(LogitsProcessor):
    """OpenAI's penalties of tokens that an answer has already.

    `score - frequency * occurrences - presence * (occurrences > 0)`, occurrences in the answer, not in the prompt
    (https://platform.openai.com/docs/api-reference/completions/create). transformers' `repetition_penalty` is another
    one: it divides scores, and looks at the prompt, too.

    Args:
        frequency: What each occurrence takes.
        presence: What the first one takes besides.
        prompt_tokens: Tokens of the prompt.
    """

    def __init__(self, frequency: float, presence: float, prompt_tokens: int) -> None:
        self.frequency, self.presence, self.prompt_tokens = frequency, presence, prompt_tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores, shape `(batch, vocab_size)`, after the penalties."""
        answer = input_ids[:, self.prompt_tokens :]
        counts = torch.zeros_like(scores).scatter_add_(1, answer, torch.ones_like(answer, dtype=scores.dtype))
        return scores - self.frequency * counts - self.presence * (counts > 0)


class Engine:
    """Puts requests into a batch, and their answers where they are awaited.

    Args:
        manager: The batch; it is started if it does not run.
        tokenizer: The tokenizer of its model.
        limits: Limits of the server.
    """

    def __init__(
        self, manager: BlockBatchingManager, tokenizer: PreTrainedTokenizerBase, limits: ServingLimits
    ) -> None:
        self.manager, self.tokenizer, self.limits = manager, tokenizer, limits
        # Prompts of many megabytes must not hold up the event loop; nor, with two threads, all other prompts.
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="lex-hf-prompts")
        tokenizer("a")  # the first call may change the tokenizer, which two at once must not
        manager.start()

    def trouble(self) -> str | None:
        """Return why no requests can be answered, or `None` if they can."""
        if self.manager.fatal_error is not None:
            return f"Generation has failed: {plain(self.manager.fatal_error)}"
        return None if self.manager.is_running() else "Generation was stopped."

    def close(self) -> None:
        """End all requests now, and give back the memory."""
        self.manager.destroy()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def answer(
        self, read: Callable[[], tuple[Query, list[int]]], parser: Callable[[Query, list[int]], Any]
    ) -> tuple[Query, Answer]:
        """Put a request into the batch.

        Args:
            read: Reads and checks it, in another thread: returns what it asks for, and the ids of its prompt.
            parser: Makes what tells thoughts and calls of tools from text, or `None`.

        Raises:
            RefusedError: If it cannot be answered.
        """
        visit, loop = VISIT.get(), asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._begin, visit, loop, read, parser)

    def _begin(
        self,
        visit: Visit,
        loop: asyncio.AbstractEventLoop,
        read: Callable[[], tuple[Query, list[int]]],
        parser: Callable[[Query, list[int]], Any],
    ) -> tuple[Query, Answer]:
        query, ids = read()
        changes, ends = self._settings(query)
        thoughts = parser(query, ids)
        name = f"http-{secrets.token_hex(8)}"
        text = Text(self.tokenizer, query.stops, skip_special_tokens=thoughts is None)
        answer = Answer(name, text, ends, thoughts, len(ids), lambda: self.manager.cancel_request(name))

        def take(output: Any) -> None:
            if visit.is_last or self.trouble() is not None:
                answer.status = 503  # it is not this request that fails
            try:
                answer.take(output)
            except Exception as error:  # of a tokenizer or a parser; whoever waits must hear of it
                logger.exception("The text of %s cannot be decoded.", name)
                answer.fail(plain(error))
            if answer.has_ended:
                visit.release()

        self.manager.outputs.register(name, take, loop)
        try:
            self._add(name, ids, query, changes)
        except BaseException:
            self.manager.outputs.forget(name)
            raise
        visit.expects(answer)  # ends it at once if the client has gone meanwhile
        return query, answer

    def _settings(self, query: Query) -> tuple[dict[str, Any], Collection[int]]:
        """Return the settings of a request, and the ids that end its answer."""
        own = self.manager.generation_config
        changes = dict(query.changes)
        if changes.get("max_new_tokens") is None:
            changes["max_new_tokens"] = min(own.max_new_tokens or DEFAULT_NEW_TOKENS, self.limits.max_new_tokens)
        ends = changes.get("eos_token_id")
        if ends is None:
            ends = own.eos_token_id
        if ends is None:
            ends = self.manager.model.generation_config.eos_token_id
        return changes, frozenset(() if ends is None else ends if isinstance(ends, list) else [ends])

    def _add(self, name: str, ids: list[int], query: Query, changes: dict[str, Any]) -> None:
        size = self.manager.model.get_input_embeddings().weight.shape[0]
        for (token,), _ in changes.get("sequence_bias", []):
            if token >= size:
                raise RefusedError(400, f"logit_bias: {token} is no id of a token; they go from 0 to {size - 1}.")
        processors = []
        if query.frequency_penalty or query.presence_penalty:
            processors = [Penalties(query.frequency_penalty, query.presence_penalty, len(ids))]
        try:
            self.manager.add_request(
                ids,
                request_id=name,
                streaming=query.is_streamed or bool(query.stops),
                record_timestamps=True,
                seed=query.seed,
                logits_processor=processors,
                **changes,
            )
        except queue.Full as error:
            raise RefusedError(429, str(error), "rate_limit_exceeded", {"Retry-After": "1"}) from error
        except RuntimeError as error:
            raise RefusedError(503, plain(error), "unavailable") from error
        except ValueError as error:
            raise RefusedError(400, plain(error)) from error
