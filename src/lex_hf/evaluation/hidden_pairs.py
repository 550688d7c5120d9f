"""Pairs of a key and a value hidden in a text, and one of the keys at its end: what all tasks of recall share.

The *distance* of a pair is counted in tokens, from the last token of its value to the last token of the question,
after which the model answers: in `k v x x k` it is 3. So the least distance is the length of the question, and of what
ends the sentence of a pair.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

Ids = tuple[int, ...]

_DRAWS = 20  # of passages, until none holds a question by chance


@dataclass(frozen=True)
class Pair:
    """A key and a value, as token ids.

    Attributes:
        question: What stands before the value, with the key; it is also what is asked.
        value: The value.
        end: What stands after the value.
    """

    question: Ids
    value: Ids
    end: Ids

    @property
    def statement(self) -> Ids:
        """The whole of it."""
        return self.question + self.value + self.end


@dataclass(frozen=True)
class Facts:
    """What is hidden and asked in one sample.

    Attributes:
        asked: The pair that is asked for.
        others: All other pairs in the text.
        candidates: Different values, in a random order, that of each pair among them.
        answer: Index of the value that is asked for.
    """

    asked: Pair
    others: tuple[Pair, ...]
    candidates: tuple[Ids, ...]
    answer: int

    @property
    def pairs(self) -> tuple[Pair, ...]:
        """All pairs, that asked for first."""
        return self.asked, *self.others

    @property
    def largest_id(self) -> int:
        """The largest id of all pairs and candidates."""
        return max(map(max, (*self.candidates, *(pair.statement for pair in self.pairs))))

    @property
    def least_distance(self) -> int:
        """The smallest distance at which the pair can be asked for, in tokens."""
        return len(self.asked.end) + len(self.asked.question)

    @property
    def tokens_before(self) -> int:
        """Tokens up to the value that is asked for, after the start, if all other pairs stand before it."""
        others = sum(len(pair.statement) for pair in self.others)
        return others + len(self.asked.question) + len(self.asked.value)


class RecallTask(Protocol):
    """Source of pairs and of the text in which they are hidden.

    All ids that are drawn come from the generator of random numbers alone: equal seeds give equal texts.
    """

    @property
    def description(self) -> str:
        """What is asked, in a few words."""

    @property
    def start(self) -> Ids:
        """Ids with which every text begins."""

    @property
    def end(self) -> Ids:
        """Ids after a value."""

    @property
    def largest_id(self) -> int:
        """Largest id that a text can hold, questions and values not counted."""

    def draw_questions(self, count: int, rng: np.random.Generator) -> list[Ids]:
        """Return different questions, each with a key at its end or near it."""

    def draw_values(self, count: int, rng: np.random.Generator) -> list[Ids]:
        """Return different values."""

    def draw_filler(self, before: int, after: int, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        """Return a passage in two parts, with so many tokens before and after a pair, int64."""

    def places(self, passage: Tensor) -> Sequence[int]:
        """Return the numbers of tokens of a passage after which a pair can stand, 0 and all among them."""

    def check(self, longest: int, pairs: int, values: int) -> None:
        """Check, before any work, that there are so many tokens of filler, questions and values.

        Raises:
            ValueError: If not.
        """


def draw_facts(task: RecallTask, num_pairs: int, num_candidates: int, rng: np.random.Generator) -> Facts:
    """Draw the pairs of a sample, and the values among which a model chooses: those of the pairs, and others.

    Args:
        task: Where they come from.
        num_pairs: Number of pairs, at least 1.
        num_candidates: Number of values, at least as many.
        rng: Source of random numbers.
    """
    values = task.draw_values(num_candidates, rng)
    questions = task.draw_questions(num_pairs, rng)
    asked, *others = (Pair(key, value, task.end) for key, value in zip(questions, values, strict=False))
    order = rng.permutation(num_candidates).tolist()
    return Facts(asked, tuple(others), tuple(values[each] for each in order), order.index(0))


def write_context(task: RecallTask, facts: Facts, distance: int, before: int, rng: np.random.Generator) -> Tensor:
    """Hide the pairs of a sample in a text, and ask for one of them at its end.

    The text is the start, `before` tokens of which the last is that of the value that is asked for, and `distance`
    tokens of which the last is that of the question. Other pairs stand at random places before and after, as far as
    there is room, with filler between.

    Args:
        task: Where the filler comes from.
        facts: The pairs.
        distance: From the last token of the value to the last token of the question, in tokens, at least
            `facts.least_distance`.
        before: Tokens up to the value, at least `facts.tokens_before`.
        rng: Source of random numbers.

    Returns:
        Token ids, int64, shape `(len(task.start) + before + distance,)`.

    Raises:
        ValueError: If each of several passages of filler holds one of the questions.
    """
    asked = facts.asked
    rooms = [before - len(asked.question) - len(asked.value), distance - facts.least_distance]
    sides = _divide(facts.others, rooms, rng)
    before, after = (room - sum(map(len, side)) for room, side in zip(rooms, sides, strict=True))
    for _ in range(_DRAWS):
        parts = task.draw_filler(before, after, rng)
        first, second = (_insert(task, part, side, rng) for part, side in zip(parts, sides, strict=True))
        pieces = (task.start, first, asked.statement, second, asked.question)
        text = torch.cat([torch.as_tensor(piece, dtype=torch.long) for piece in pieces])
        if all(_count(text, pair.question) == 1 + (pair is asked) for pair in facts.pairs):
            return text
    raise ValueError(
        f"Each of {_DRAWS} passages of filler holds one of the questions that were drawn ({task.description}): choose "
        "longer keys, or another text."
    )


def _divide(pairs: Sequence[Pair], rooms: Sequence[int], rng: np.random.Generator) -> tuple[list[Ids], list[Ids]]:
    """Put each sentence before or after, as likely where there is room on both sides, in a random order."""
    left = list(rooms)
    sides: tuple[list[Ids], list[Ids]] = ([], [])
    for index in rng.permutation(len(pairs)).tolist():
        statement = pairs[index].statement
        possible = [side for side in (0, 1) if left[side] >= len(statement)]
        side = possible[int(rng.integers(len(possible)))]
        sides[side].append(statement)
        left[side] -= len(statement)
    return sides


def _insert(task: RecallTask, filler: Tensor, statements: Sequence[Ids], rng: np.random.Generator) -> Tensor:
    """Insert sentences at random places of a passage."""
    places = task.places(filler)
    parts = filler.tensor_split(sorted(places[each] for each in rng.integers(len(places), size=len(statements))))
    pieces = [parts[0]]
    for statement, part in zip(statements, parts[1:], strict=True):
        pieces += [torch.tensor(statement), part]
    return torch.cat(pieces)


def _count(text: Tensor, part: Ids) -> int:
    """Number of places where ids stand in a text."""
    return int((text.unfold(0, len(part), 1) == torch.tensor(part)).all(dim=1).sum())
