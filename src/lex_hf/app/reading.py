"""A text read in pieces, in several settings beside each other: losses, bytes of the cache and time as they grow."""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from accelerate.utils.memory import should_reduce_batch_size
from torch import Tensor

from lex_hf.app.pace import Pace
from lex_hf.app.settings import Opened
from lex_hf.app.turns import Turns
from lex_hf.evaluation.costs import cache_bytes
from lex_hf.evaluation.scoring import Scores, check_finite, score_next

MOST_CACHE_BYTES = 2**30
"""Keys and values that one text may have on a machine that several people use."""


@dataclass(frozen=True)
class Progress:
    """How far a text has been read in one setting.

    Attributes:
        nll: Negative log-likelihood in nats of each token read but the first, shape `(tokens,)`, float32.
        total: How many these are in the whole text.
        cache_bytes: Bytes of keys and values in the cache.
        seconds: Time in which the model computed.
        problem: Why it cannot be read further; `None` if it can.
    """

    nll: Tensor
    total: int
    cache_bytes: int = 0
    seconds: float = 0.0
    problem: str | None = None

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens read in a second; `None` before the first piece."""
        return len(self.nll) / self.seconds if self.seconds else None

    @property
    def loss(self) -> float | None:
        """Mean of the losses in nats per token; `None` before the first piece."""
        return float(self.nll.double().mean()) if len(self.nll) else None


def read_beside(
    opened: Sequence[Opened], tokens: Tensor, turns: Turns, *, most_cache_bytes: int = MOST_CACHE_BYTES
) -> Iterator[tuple[Progress, ...]]:
    """Read a text in several settings, a piece in each in turn.

    Args:
        opened: The settings.
        tokens: Token ids, int64, shape `(tokens,)`, at least 2.
        turns: Taken for each piece.
        most_cache_bytes: Bytes of a cache with which reading ends.

    Yields:
        Progress in each setting, first of all that of nothing read.
    """
    latest = [Progress(torch.empty(0), len(tokens) - 1) for _ in opened]
    readings = dict(enumerate(read(each, tokens, turns, most_cache_bytes) for each in opened))
    yield tuple(latest)
    while readings:
        for index, reading in list(readings.items()):
            progress = next(reading, None)
            if progress is None:
                del readings[index]
            else:
                latest[index] = progress
                yield tuple(latest)


def read(opened: Opened, tokens: Tensor, turns: Turns, most_cache_bytes: int) -> Iterator[Progress]:
    """Read a text in one setting; see [`read_beside`]. It ends with the text, or with a problem."""
    pace, cache = Pace(), opened.new_cache()
    nll = torch.empty(len(tokens) - 1)
    progress = Progress(nll[:0], len(nll))
    while len(progress.nll) < len(nll):
        done = len(progress.nll)
        piece = tokens[done : done + pace.tokens + 1]
        try:
            with turns, torch.no_grad():  # not around the loop: between two pieces, the thread may change
                start = time.perf_counter()
                found, _ = score_next(opened.model, piece, len(piece) - 1, cache)
                pace.note(time.perf_counter() - start)
            check_finite(Scores(0, done + 1, done + 1, found))
        except (RuntimeError, ValueError) as error:
            yield replace(progress, problem=problem_of(error))
            return
        nll[done : done + len(found)] = found
        progress = Progress(nll[: done + len(found)], len(nll), cache_bytes(cache), pace.seconds)
        if progress.cache_bytes > most_cache_bytes and len(progress.nll) < len(nll):
            progress = replace(progress, problem=too_large(progress.cache_bytes, most_cache_bytes))
        yield progress
        if progress.problem:
            return


def problem_of(error: Exception) -> str:
    """Return what a person is told of an error of reading or writing.

    Raises:
        RuntimeError: The error itself, if it is a fault of the program.
    """
    if isinstance(error, RuntimeError):
        if not should_reduce_batch_size(error):
            raise error
        return "There is not enough memory to go on: choose blocks, a shorter text, or a smaller model."
    if isinstance(error.__cause__, IndexError):  # `forward` gives advice for commands
        return "The model reads no further: its table of positions ends here. Give a shorter text."
    return str(error)


def too_large(size: int, most: int) -> str:
    """Return why a cache of so many bytes may not grow further."""
    return (
        f"The cache holds {size / 2**20:,.0f} MiB, and this page stops at {most / 2**20:,.0f} MiB: choose a setting "
        "whose cache does not grow, or a shorter text."
    )


def by_position(progress: Progress, points: int) -> list[tuple[int, float]]:
    """Return the mean loss at places along a text.

    Args:
        progress: How far it has been read.
        points: Number of places in the whole text, at most.

    Returns:
        For each part of the text that has been read, all of equal length but for the last one of the text, which is
        longer, the number of tokens before its last one, and the mean loss in nats per token.
    """
    size = math.ceil(progress.total / points)
    count = max(1, progress.total // size)
    ends = [size * index for index in range(1, count)] + [progress.total]
    return [
        (end, float(progress.nll[start:end].mean())) for start, end in pairwise([0, *ends]) if end <= len(progress.nll)
    ]
