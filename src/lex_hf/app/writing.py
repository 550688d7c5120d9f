"""A text continued without an end, a token at a time."""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.generation.logits_process import (
    LogitsProcessorList,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

from lex_hf.app.pace import Pace
from lex_hf.app.reading import MOST_CACHE_BYTES, problem_of, too_large
from lex_hf.app.settings import Opened
from lex_hf.app.turns import Turns
from lex_hf.evaluation.costs import cache_bytes
from lex_hf.evaluation.scoring import forward
from lex_hf.inference.token_text import Text

KEPT_CHARACTERS = 10_000  # of what was written; a page without an end would become slow
_HISTORY = 128  # pairs, at most one more


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
        temperature: By which logits are divided; 0 takes the most probable token.
        top_p: The most probable tokens, whose probabilities add up to this, are chosen from.

    Raises:
        ValueError: If a value is impossible.
    """

    temperature: float = 0.8
    top_p: float = 0.95

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature = {self.temperature}: it must be a number of at least 0, e.g. 0.8.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p = {self.top_p}: it must be more than 0 and at most 1, e.g. 0.95.")

    def processors(self, ends: list[int], device: torch.device) -> LogitsProcessorList:
        """Return what changes logits before a token is chosen.

        Args:
            ends: Ids of tokens that end a text, which are never chosen.
            device: Device of the logits.
        """
        found = LogitsProcessorList([SuppressTokensLogitsProcessor(ends, device=device)] if ends else [])
        if self.temperature > 0:
            found.append(TemperatureLogitsWarper(self.temperature))
            found.append(TopPLogitsWarper(self.top_p))
        return found


@dataclass(frozen=True)
class Written:
    """How far a text has been continued.

    Attributes:
        text: What was written; of a long text its end, at least `KEPT_CHARACTERS`.
        tokens: Number of tokens written.
        read: Number of tokens of the beginning that were read.
        total: How many these are in the whole beginning.
        cache_bytes: Bytes of keys and values in the cache.
        seconds: Time in which the model wrote.
        history: Some pairs of tokens in the text and bytes of its cache, in order; the last one is now.
        problem: Why it cannot be continued; `None` if it can.
    """

    text: str
    tokens: int
    read: int
    total: int
    cache_bytes: int = 0
    seconds: float = 0.0
    history: tuple[tuple[int, int], ...] = ()
    problem: str | None = None

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens written in a second; `None` before the first one."""
        return self.tokens / self.seconds if self.seconds else None


def write(
    opened: Opened,
    tokenizer: PreTrainedTokenizerBase,
    input_ids: Tensor,
    sampling: Sampling,
    turns: Turns,
    *,
    generator: torch.Generator | None = None,
    most_cache_bytes: int = MOST_CACHE_BYTES,
) -> Iterator[Written]:
    """Read a beginning, and continue it for as long as it is iterated over.

    Tokens are those of `generate` with the same sampling, without tokens that end a text.

    Args:
        opened: The model in a setting.
        tokenizer: Its tokenizer.
        input_ids: Token ids of the beginning, shape `(1, tokens)`.
        sampling: How tokens are chosen.
        turns: Taken for each piece that is read, and each token.
        generator: Source of chance, on the device of the model; one with another seed each time by default.
        most_cache_bytes: Bytes of the cache with which it ends.

    Yields:
        Progress after each piece of the beginning and each token. The last one has a problem.
    """
    device = opened.model.device
    if generator is None:
        generator = torch.Generator(device)
        generator.seed()
    processors, cache = sampling.processors(_ends(opened.model), device), opened.new_cache()
    text, pace, begun = Text(tokenizer), Pace(), 0.0
    state, waiting = Written("", 0, 0, input_ids.shape[1]), input_ids
    while True:
        piece, waiting = waiting.tensor_split([pace.tokens], dim=1)
        try:
            with turns, torch.no_grad():  # not around the loop: between two tokens, the thread may change
                start = time.perf_counter()
                logits = forward(opened.model, piece, 1, past_key_values=cache, use_cache=True).logits[:, -1].float()
                _check(logits)
                if not waiting.shape[1]:
                    waiting = _chosen(processors(input_ids[:, :0], logits), sampling, generator)
                elapsed = time.perf_counter() - start
        except (RuntimeError, ValueError) as error:
            yield replace(state, problem=problem_of(error))
            return
        if state.read < state.total:
            pace.note(elapsed)
            state = replace(state, read=state.read + piece.shape[1])
        else:
            begun += elapsed
        if state.read == state.total:
            state = replace(state, tokens=state.tokens + 1, text=_kept(state.text + text.feed(waiting[0].tolist())))
        state = _with_cache(state, cache_bytes(cache), begun)
        if state.cache_bytes > most_cache_bytes:
            yield replace(state, problem=too_large(state.cache_bytes, most_cache_bytes))
            return
        yield state


def _with_cache(state: Written, size: int, seconds: float) -> Written:
    tokens = state.read + max(0, state.tokens - 1)  # the newest one has not been read
    history = state.history
    if len(history) > 1 and tokens - history[-2][0] < tokens / _HISTORY:
        history = history[:-1]  # too near: it was there to be the last
    if len(history) >= _HISTORY:
        history = history[::2]
    return replace(state, cache_bytes=size, seconds=seconds, history=(*history, (tokens, size)))


def _ends(model: Any) -> list[int]:
    ends = model.generation_config.eos_token_id
    return [] if ends is None else [ends] if isinstance(ends, int) else list(ends)


def _check(logits: Tensor) -> None:
    if not bool(logits.isfinite().all()):
        raise ValueError("The model's logits are not finite: check the weights, or load it with --dtype float32.")


def _chosen(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> Tensor:
    """Return the next token of each row, shape `(batch, 1)`."""
    if sampling.temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    return torch.multinomial(logits.softmax(dim=-1), 1, generator=generator)


def _kept(text: str) -> str:
    return text if len(text) <= 2 * KEPT_CHARACTERS else text[-KEPT_CHARACTERS:]
