"""Recall: how far back a causal language model finds a value whose key it is asked for.

After the needle in a haystack with several keys of RULER (arXiv 2404.06654, §3): pairs of a key and a value are hidden
in a long text, one key is asked for at its end, and what the model says is compared with the value. Here the distance
of the pair is exact, in tokens, and answers are also scored by their probability, so that models that were not taught
to answer can be measured. docs/recall.md has what is copied and what is left out.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import tqdm

from lex_hf.errors import plain
from lex_hf.evaluation.answers import NewCache, answer, own_cache
from lex_hf.evaluation.hidden_pairs import Facts, RecallTask, draw_facts, write_context
from lex_hf.evaluation.loading import evaluating
from lex_hf.evaluation.recall_tasks import TextRecall
from lex_hf.evaluation.statistics import wilson_interval
from lex_hf.model.configuration_lex import LexConfig
from lex_hf.rope.blockwise import training_length_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DISTANCES = (0.5, 1, 2, 4, 8)  # training lengths, where none are given
_TOKENS_AT_ONCE = 2**15  # of all texts that are read together
_MOST_AT_ONCE = 64  # texts


@dataclass(frozen=True)
class RecallOptions:
    """Options of a measurement of recall, checked when they are created: keyword arguments of [`measure_recall`].

    Raises:
        ValueError: If a number is out of range.
    """

    distances: Sequence[int] | None = None
    num_samples: int = 100
    num_pairs: int = 4
    num_candidates: int = 8
    seed: int = 0
    batch_size: int | None = None
    use_cache: bool = True
    progress: bool = True

    def __post_init__(self) -> None:
        least = {"num_samples": 1, "num_pairs": 1, "num_candidates": 2, "seed": 0}
        least |= {} if self.batch_size is None else {"batch_size": 1}
        for name, smallest in least.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < smallest:
                raise ValueError(f"{name} = {value!r}: it must be a whole number of at least {smallest}.")
        if self.num_candidates < self.num_pairs:
            raise ValueError(
                f"num_candidates = {self.num_candidates}: the values of all {self.num_pairs} pairs are among the "
                "candidates, so there must be at least as many."
            )
        for each in () if self.distances is None else self.distances:
            if isinstance(each, bool) or not isinstance(each, int) or each < 1:
                raise ValueError(f"distance = {each!r}: it must be a number of tokens, at least 1.")
        if self.distances is not None and not len(self.distances):
            raise ValueError("distances is empty: give at least one, or None for those of the training length.")

    def distances_of(self, training_length: int | None) -> list[int]:
        """Return the distances in tokens, in rising order, without repetition.

        Raises:
            ValueError: If none are given and the training length is not known.
        """
        if self.distances is not None:
            return sorted(set(self.distances))
        if training_length is None:
            raise ValueError("The configuration of the model does not say its training length: give the distances.")
        return [max(1, int(each * training_length)) for each in DISTANCES]


@dataclass(frozen=True)
class RecallPoint:
    """Recall at one distance. Intervals are those of Wilson, at 95 %.

    Attributes:
        distance: From the last token of the value to the last token of the question, in tokens.
        length: Length of the texts in tokens, without the answer.
        samples: Number of texts.
        problem: Why it could not be measured; all that follows is then `None`.
        accuracy: Share of texts in which the value is the most probable of the candidates.
        accuracy_interval: Its interval.
        exact_match: Share of texts after which greedy decoding writes the value.
        exact_interval: Its interval.
        margin: Log-probability of the value minus that of the best other candidate, in nats, averaged over texts.
    """

    distance: int
    length: int
    samples: int
    problem: str | None = None
    accuracy: float | None = None
    accuracy_interval: tuple[float, float] | None = None
    exact_match: float | None = None
    exact_interval: tuple[float, float] | None = None
    margin: float | None = None


@dataclass(frozen=True)
class RecallResult:
    """Result of [`measure_recall`].

    Attributes:
        model: Name of the model.
        task: What was asked.
        training_length: l in tokens; `None` if the configuration does not say it.
        num_pairs: Pairs in a text.
        num_candidates: Values among which the model chooses.
        seed: Of the texts.
        points: Recall at each distance, in rising order.
    """

    model: str
    task: str
    training_length: int | None
    num_pairs: int
    num_candidates: int
    seed: int
    points: tuple[RecallPoint, ...]

    @property
    def chance(self) -> float:
        """Accuracy of a model that knows nothing of the text.

        One that knows which values the text holds, and not to which keys they belong, has 1 / `num_pairs`.
        """
        return 1 / self.num_candidates

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain dictionaries, lists and numbers, ready for JSON."""
        return asdict(self) | {"chance": self.chance, "points": [asdict(point) for point in self.points]}

    def plot(self) -> "Figure":
        """Draw accuracy and exact match by distance."""
        from lex_hf.evaluation.recall_plot import (
            plot_recall,
        )  # imported here because measuring does not need matplotlib

        return plot_recall({self.model: self}, title=f"Recall of {self.model}")


def measure_recall(
    model: PreTrainedModel,
    task: RecallTask | PreTrainedTokenizerBase,
    *,
    distances: Sequence[int] | None = None,
    num_samples: int = 100,
    num_pairs: int = 4,
    num_candidates: int = 8,
    seed: int = 0,
    batch_size: int | None = None,
    use_cache: bool = True,
    progress: bool = True,
    name: str | None = None,
    training_length: int | None = None,
) -> RecallResult:
    """Measure how often a causal language model finds a value that stands at given distances before its question.

    For each distance, `num_samples` texts are made from the seed: `num_pairs` pairs, of which one, at exactly this
    distance, is asked for at the end; the others stand at random places before and after it, with filler between. All
    texts of a distance have as few tokens before the value as hold all pairs, so their length is that number plus the
    distance. Every model with this task and seed reads the same texts; those of different distances are independent.

    Two things are counted. *Exact match*: greedy decoding writes the value. One pass over the value shows it: each of
    its tokens is the most probable one after those before it, which is the same thing. *Accuracy*: the value's
    log-probability, summed over its tokens, is the highest of `num_candidates` values, those of all pairs among them.
    Values may have different numbers of tokens; their sums are compared as they are. Of values that are equally
    probable the first of their random order is taken, so a model that knows nothing has 1 / `num_candidates`.

    A text is read once, in pieces with the model's own cache, and the candidates are scored with copies of that, one
    after the other: memory is that of two caches and a piece. A distance at which the model refuses to read, e.g.
    beyond its table of positions, has the reason in the place of numbers.

    Args:
        model: Any causal language model, also one that [`lex_hf.blockwise`] changed; left as it was.
        task: [`TextRecall`], [`TokenRecall`], another [`RecallTask`], or a tokenizer, for `TextRecall(tokenizer)`.
        distances: In tokens, from the last token of the value to the last token of the question; by default 1/2, 1, 2,
            4 and 8 training lengths of the model, as its configuration gives it.
        num_samples: Texts for each distance.
        num_pairs: Pairs in a text.
        num_candidates: Values that are compared, at least `num_pairs`.
        seed: Of all that is drawn.
        batch_size: Texts that are read at once; by default as many as have 32,768 tokens together, at most 64.
        use_cache: Whether to use a cache; without one, the text is read again for each candidate, in one pass.
        progress: Whether to show a progress bar, counted in texts.
        name: Name of the model in the result; its type by default.
        training_length: l in tokens, for the distances and the picture; by default what the configuration says.

    Raises:
        ValueError: If an argument does not fit, a distance is too small for the question, there is too little text, or
            the model has no embedding for a token; all of it before the work.

    Example:
        >>> from lex_hf import LexConfig, LexForCausalLM, TokenRecall, measure_recall
        >>> model = LexForCausalLM(LexConfig(vocab_size=40, num_hidden_layers=1, training_length=32))
        >>> task = TokenRecall(keys=range(10, 20), values=range(20, 40), filler=range(10))
        >>> result = measure_recall(model, task, num_samples=8, progress=False)
        >>> [point.distance for point in result.points]
        [16, 32, 64, 128, 256]
    """
    options = RecallOptions(
        distances=distances,
        num_samples=num_samples,
        num_pairs=num_pairs,
        num_candidates=num_candidates,
        seed=seed,
        batch_size=batch_size,
        use_cache=use_cache,
        progress=progress,
    )
    texts = Texts(task, options, known_training_length(model) if training_length is None else training_length)
    return measure_texts(model, texts, own_cache if use_cache else None, name or model.config.model_type)


def measure_texts(model: PreTrainedModel, texts: "Texts", new_cache: NewCache, name: str) -> RecallResult:
    """Do what [`measure_recall`] does, with texts that are drawn already, and any cache.

    Args:
        model: As of [`measure_recall`].
        texts: The texts, for all distances.
        new_cache: Returns an empty cache, or `None` to have the model make one; without it, none is used.
        name: Name of the model.
    """
    texts.check_vocabulary(model)
    total, is_shown = len(texts.distances) * texts.options.num_samples, texts.options.progress
    bar = tqdm(total=total, unit="text", desc=name, disable=not is_shown)
    with torch.no_grad(), evaluating(model), bar:
        points = [_measure(model, texts, distance, new_cache, bar.update) for distance in texts.distances]
    return texts.result(name, points)


def known_training_length(model: PreTrainedModel) -> int | None:
    """Return the number of tokens that a model was trained to read, as its configuration gives it, or `None`."""
    config = model.config.get_text_config()
    if isinstance(config, LexConfig):
        return config.training_length
    try:
        return training_length_of(config)
    except ValueError:  # it says nothing, or an odd number
        return None


class Texts:
    """The texts of a measurement, each made when it is needed, from the seed, its distance and its index.

    Args:
        task: Where they come from; see [`measure_recall`].
        options: How many there are.
        training_length: l in tokens, if known.

    Raises:
        ValueError: If a distance is too small for the question, or there is too little to draw from.
    """

    def __init__(
        self, task: RecallTask | PreTrainedTokenizerBase, options: RecallOptions, training_length: int | None
    ) -> None:
        self.task: RecallTask = TextRecall(task) if isinstance(task, PreTrainedTokenizerBase) else task
        self.options, self.training_length = options, training_length
        self.distances = options.distances_of(training_length)
        self.task.check(0, options.num_pairs, options.num_candidates)
        self.facts = {distance: self._draw(distance) for distance in self.distances}
        every = [facts for row in self.facts.values() for facts in row]
        self.longest_value = max(len(each) for facts in every for each in facts.candidates)
        self.largest_id = max(self.task.largest_id, *(facts.largest_id for facts in every))
        least = max(facts.least_distance for facts in every)
        if self.distances[0] < least:
            raise ValueError(
                f"distance = {self.distances[0]}: the question and what ends a sentence have {least} tokens, which is "
                "the least distance."
            )
        longest = max(self._before(distance) + distance for distance in self.distances)
        self.task.check(longest, options.num_pairs, options.num_candidates)

    def _draw(self, distance: int) -> list[Facts]:
        """Pairs of each text of a distance: others at each, so that figures by distance are independent."""
        seeds = ([self.options.seed, distance, index] for index in range(self.options.num_samples))
        sizes = self.options.num_pairs, self.options.num_candidates
        return [draw_facts(self.task, *sizes, np.random.default_rng(each)) for each in seeds]

    def _before(self, distance: int) -> int:
        """Tokens up to the value in each text of a distance, after the start: as few as hold all pairs."""
        return max(facts.tokens_before for facts in self.facts[distance])

    def result(self, name: str, points: Sequence[RecallPoint]) -> RecallResult:
        """Return the result of a model that is called so."""
        return RecallResult(
            model=name,
            task=self.task.description,
            training_length=self.training_length,
            num_pairs=self.options.num_pairs,
            num_candidates=self.options.num_candidates,
            seed=self.options.seed,
            points=tuple(points),
        )

    def refused(self, name: str, problem: str) -> RecallResult:
        """Return the result of a model that cannot be read in some way at all."""
        return self.result(name, [replace(self.point(each), problem=problem) for each in self.distances])

    def point(self, distance: int) -> RecallPoint:
        """Return what is known of a distance before anything is measured."""
        return RecallPoint(distance, self.length(distance), self.options.num_samples)

    def length(self, distance: int) -> int:
        """Return the length of all texts of a distance in tokens."""
        return len(self.task.start) + self._before(distance) + distance

    @property
    def longest(self) -> int:
        """Length of the longest text with the longest value, in tokens."""
        return max(map(self.length, self.distances)) + self.longest_value

    def check_vocabulary(self, model: PreTrainedModel) -> None:
        """Check that a model has an embedding for every id.

        Raises:
            ValueError: If not.
        """
        vocabulary = model.get_input_embeddings().weight.shape[0]
        if self.largest_id >= vocabulary:
            raise ValueError(
                f"A text can hold the token id {self.largest_id}, but the model's vocabulary has {vocabulary} ids."
            )

    def write(self, index: int, distance: int) -> Tensor:
        """Return a text, int64, shape `(length,)`."""
        rng = np.random.default_rng([self.options.seed, distance, index, 1])
        return write_context(self.task, self.facts[distance][index], distance, self._before(distance), rng)

    def batches(self, distance: int) -> Iterator[tuple[Tensor, Sequence[Facts]]]:
        """Yield texts of shape `(texts, length)`, and what they ask for."""
        size = self.options.batch_size or min(_MOST_AT_ONCE, max(1, _TOKENS_AT_ONCE // self.length(distance)))
        for first in range(0, self.options.num_samples, size):
            facts = self.facts[distance][first : first + size]
            yield torch.stack([self.write(first + index, distance) for index in range(len(facts))]), facts


def _measure(
    model: PreTrainedModel, texts: Texts, distance: int, new_cache: NewCache, progress: Callable[[int], object]
) -> RecallPoint:
    point = texts.point(distance)
    margins, written, best = [], 0, 0
    for ids, facts in texts.batches(distance):
        try:
            answers = answer(model, ids, [each.candidates for each in facts], new_cache)
        except (ValueError, IndexError) as error:  # an IndexError: its table of positions ends
            return replace(point, problem=plain(error))
        right = torch.tensor([each.answer for each in facts])
        scores, own = answers.log_probabilities, answers.log_probabilities.gather(1, right[:, None])[:, 0]
        best += int((scores.argmax(dim=1) == right).sum())
        written += int(answers.is_written.gather(1, right[:, None]).sum())
        others = scores.scatter(1, right[:, None], -math.inf).amax(dim=1)
        margins += (own - others).tolist()
        progress(len(facts))
    return replace(
        point,
        accuracy=best / len(margins),
        accuracy_interval=wilson_interval(best, len(margins)),
        exact_match=written / len(margins),
        exact_interval=wilson_interval(written, len(margins)),
        margin=fmean(margins),
    )
