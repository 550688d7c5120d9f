"""Tasks of recall: where pairs, and the text that hides them, come from.

[`TextRecall`] is for models that read text, [`TokenRecall`] for models of token ids, e.g. those of synthetic studies.
"""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lex_hf.data.tokenizing import tokenize
from lex_hf.evaluation.hidden_pairs import Ids

SENTENCE = "The code of {key} is {value}."
_NAME = "Talomi"  # after which it is seen how a value is tokenised
_MOST_DIFFERENT = 2**62  # of which are drawn
_FIRST_NUMBER, _NUMBERS = 1000, 9000  # those of four digits
_END = re.compile(r"""[.!?…]["')\u2019\u201d]*\s*$|\n""")  # in the last token of a sentence


@dataclass(frozen=True)
class TokenRecall:
    """Pairs of token ids between other token ids, for models without a tokenizer.

    A pair is `marker`, the key, the value; the question is `marker` and the key.

    Args:
        keys: Ids of which keys are drawn, without repetition.
        values: Ids of which values are drawn, without repetition.
        filler: Ids of which the rest of a text is drawn, one by one and evenly; with `is_text`, a text of which a
            passage is read, from a random place.
        marker: Ids before each key.
        start: Ids with which every text begins.
        key_length: Ids of a key.
        value_length: Ids of a value.
        is_text: Whether `filler` is a text. It may then hold the ids of keys and values; passages in which a question
            occurs are not used.

    Raises:
        ValueError: If there are no ids, a length is less than 1, or keys, values, markers and filler share ids, so
            that a text could hold a pair by chance.

    Example:
        >>> from lex_hf.evaluation.recall_tasks import TokenRecall
        >>> TokenRecall(keys=range(10, 20), values=range(20, 30), filler=range(10), marker=(30,)).description
        'ids: a marker of 1, keys of 1 of 10 ids, values of 1 of 10 ids'
    """

    keys: Sequence[int]
    values: Sequence[int]
    filler: Sequence[int]
    marker: Ids = ()
    start: Ids = ()
    key_length: int = 1
    value_length: int = 1
    is_text: bool = False

    def __post_init__(self) -> None:
        for name in ("keys", "values", "filler"):
            ids = getattr(self, name)
            if not len(ids) or min(ids) < 0:
                raise ValueError(f"{name} = {_shown(ids)}: give token ids, at least one, none negative.")
        for name in ("key_length", "value_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: it must be at least 1.")
        kinds = {"keys": self.keys, "values": self.values, "marker": self.marker, "filler": self.filler}
        for (one, ids), (other, others) in itertools.combinations(kinds.items(), 2):
            shared = set() if self.is_text else set(ids) & set(others)
            if shared:
                raise ValueError(
                    f"{one} and {other} share the id {min(shared)}, so a text could hold a pair by chance: choose ids "
                    "that differ."
                )

    @cached_property
    def _filler(self) -> Tensor:
        return torch.tensor(self.filler, dtype=torch.long)

    @property
    def description(self) -> str:
        """What is asked, in a few words."""
        keys = f"keys of {self.key_length} of {len(set(self.keys))} ids"
        values = f"values of {self.value_length} of {len(set(self.values))} ids"
        return f"ids: {f'a marker of {len(self.marker)}, ' if self.marker else ''}{keys}, {values}"

    @property
    def largest_id(self) -> int:
        """Largest id that a text can hold, questions and values not counted."""
        return max(int(self._filler.max()), *self.start, 0)

    @property
    def end(self) -> Ids:
        """Ids after a value: none."""
        return ()

    def draw_questions(self, count: int, rng: np.random.Generator) -> list[Ids]:
        """Return different questions."""
        return [self.marker + key for key in _different(self.keys, self.key_length, count, rng)]

    def draw_values(self, count: int, rng: np.random.Generator) -> list[Ids]:
        """Return different values."""
        return _different(self.values, self.value_length, count, rng)

    def draw_filler(self, before: int, after: int, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        """Return a passage in two parts, with so many tokens before and after a pair, int64."""
        if self.is_text:
            place = int(rng.integers(before, len(self._filler) - after + 1))
            return _around(self._filler, place, before, after)
        drawn = torch.from_numpy(rng.integers(len(self._filler), size=before + after))
        return _around(self._filler[drawn], before, before, after)

    def places(self, passage: Tensor) -> Sequence[int]:
        """Return the numbers of tokens of a passage after which a pair can stand: all."""
        return range(len(passage) + 1)

    def check(self, longest: int, pairs: int, values: int) -> None:
        """Check that there are so many tokens of filler, questions and values.

        Raises:
            ValueError: If not.
        """
        for name, ids, length, wanted in (
            ("keys", self.keys, self.key_length, pairs),
            ("values", self.values, self.value_length, values),
        ):
            found = len(set(ids)) ** length
            if found < wanted:
                raise ValueError(f"{name}: there are {found} different ones, and a sample needs {wanted}; give more.")
        if self.is_text:
            _check_passage(len(self.filler), longest)


@dataclass(frozen=True)
class TextRecall:
    """Sentences that give a number of four digits to a made-up name, on lines of their own in a text.

    Pairs stand where a sentence of the text ends, if there is such a place; the beginning of a text and the last
    sentence before the question are cut at any token, so that distances are exact.

    Ids of the parts are joined, and the model reads exactly these ids: a passage of the text, a line up to the value,
    the value, the rest of the line. A value is tokenised as it is after that line, and the space before it belongs to
    it, so its ids are the same in the sentence and as a candidate. Where a tokenizer would have merged letters over
    one of these borders, the ids are others than those of the whole text.

    Args:
        tokenizer: Tokenizer of the model; special tokens are not added, but for the start token.
        texts: Texts that hide the pairs, one after the other; a sample reads a passage from a random place. By
            default, a few hundred sentences of our own, in random order.
        sentence: Sentence with `{key}`, and after it `{value}`.
        add_start_token: Whether a text begins with the BOS token, if there is one.

    Raises:
        ValueError: If the sentence is of another form, or the tokenizer joins a value to what is before it.
    """

    tokenizer: PreTrainedTokenizerBase
    texts: Sequence[str] | None = None
    sentence: str = SENTENCE
    add_start_token: bool = True
    _parts: tuple[str, str, str, str] = field(init=False, repr=False)
    _end: Ids = field(init=False, repr=False)
    _passages: tuple[Tensor, ...] = field(init=False, repr=False)  # all texts, or one of each sentence
    _enders: Tensor = field(init=False, repr=False)  # ids that end sentences
    _ends: Tensor = field(init=False, repr=False)  # numbers of tokens of the texts up to the end of each sentence

    def __post_init__(self) -> None:
        texts = [""] if self.texts is None else self.texts
        if isinstance(texts, str) or not len(texts) or not all(isinstance(each, str) for each in texts):
            raise ValueError("texts must be a list of strings, at least one; or None for filler of our own.")
        object.__setattr__(self, "_parts", _parts_of(self.sentence))
        before, asked, space, after = self._parts
        self._value(_FIRST_NUMBER)  # fails before any work
        object.__setattr__(self, "_end", self._placed(f"{before}{_NAME}{asked}{space}{_FIRST_NUMBER}", after))
        if self.texts is None:
            passages = [torch.tensor(self._placed(".", f" {each}")) for each in _sentences()]
        else:
            passages = [torch.from_numpy(np.concatenate(tokenize(texts, self.tokenizer))).long()]
        if not all(map(len, passages)):
            raise ValueError("The tokenizer gives no ids: the texts are empty, or it does not know them.")
        object.__setattr__(self, "_passages", tuple(passages))
        object.__setattr__(self, "_enders", _ids_that_end_sentences(self.tokenizer, torch.cat(passages).unique()))
        object.__setattr__(self, "_ends", self._ends_in(passages[0]))

    @property
    def description(self) -> str:
        """What is asked, in a few words."""
        return f"{self.sentence} in {'filler' if self.texts is None else 'texts'}"

    @property
    def start(self) -> Ids:
        """The start token, if there is one and it is wanted."""
        start = self.tokenizer.bos_token_id
        return () if start is None or not self.add_start_token else (start,)

    @property
    def largest_id(self) -> int:
        """Largest id that a text can hold, questions and values not counted."""
        return max(*self.start, *self.end, *(int(each.max()) for each in self._passages))

    @property
    def end(self) -> Ids:
        """What ends a line."""
        return self._end

    def draw_questions(self, count: int, rng: np.random.Generator) -> list[Ids]:
        """Return questions with different names of three syllables."""
        before, asked, _, _ = self._parts
        syllables = [a + b for a in "bdfgklmnprstvz" for b in "aeiou"]
        names = ["".join(syllables[each] for each in key) for key in _different(range(len(syllables)), 3, count, rng)]
        return _all_different([_ids(self.tokenizer, before + name.title() + asked) for name in names], "names")

    def draw_values(self, count: int, rng: np.random.Generator) -> list[Ids]:
        """Return different numbers of four digits."""
        numbers = _FIRST_NUMBER + rng.choice(_NUMBERS, size=count, replace=False)
        return _all_different([self._value(each) for each in numbers.tolist()], "numbers")

    def draw_filler(self, before: int, after: int, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        """Return a passage in two parts, with so many tokens before and after a pair, int64."""
        if self.texts is None:
            first, second = self._some_sentences(before, rng), self._some_sentences(after, rng)
            return first[len(first) - before :], second[:after]
        text, ends = self._passages[0], self._ends
        ends = ends[(ends >= before) & (ends <= len(text) - after)]
        # Texts without sentences, e.g. tables, are cut anywhere.
        place = int(ends[rng.integers(len(ends))] if len(ends) else rng.integers(before, len(text) - after + 1))
        return _around(text, place, before, after)

    def places(self, passage: Tensor) -> Sequence[int]:
        """Return the numbers of tokens of a passage after which a pair can stand: none, all, and whole sentences."""
        return sorted({0, len(passage), *self._ends_in(passage).tolist()})

    def _placed(self, before: str, text: str) -> Ids:
        """Ids of a text as they are after another one, or by itself if the tokenizer joins the two."""
        return _after(self.tokenizer, before, text) or _ids(self.tokenizer, text)

    def _some_sentences(self, tokens: int, rng: np.random.Generator) -> Tensor:
        """At least so many tokens of our own."""
        order = rng.integers(len(self._passages), size=1 + tokens // min(map(len, self._passages)))
        return torch.cat([self._passages[each] for each in order])

    def _ends_in(self, passage: Tensor) -> Tensor:
        """Numbers of tokens up to the end of each sentence."""
        return torch.isin(passage, self._enders).nonzero()[:, 0] + 1

    def check(self, longest: int, pairs: int, values: int) -> None:
        """Check that there are so many tokens of filler, questions and values.

        Raises:
            ValueError: If not.
        """
        if values > _NUMBERS:
            raise ValueError(f"A sample needs {values} values, and there are {_NUMBERS} numbers of four digits.")
        if self.texts is not None:
            _check_passage(len(self._passages[0]), longest)

    def _value(self, number: int) -> Ids:
        """Ids of a number, as they are after the text of a question."""
        before, asked, space, _ = self._parts
        return _ids_after(self.tokenizer, f"{before}{_NAME}{asked}", f"{space}{number}")


def _different(ids: Sequence[int], length: int, count: int, rng: np.random.Generator) -> list[Ids]:
    """Draw different sequences of ids."""
    distinct = sorted(set(ids))
    numbers = rng.choice(min(len(distinct) ** length, _MOST_DIFFERENT), size=count, replace=False).tolist()
    places = [len(distinct) ** power for power in range(length)]
    return [tuple(distinct[number // place % len(distinct)] for place in places) for number in numbers]


def _all_different(found: list[Ids], what: str) -> list[Ids]:
    if len(set(found)) < len(found):
        raise ValueError(f"The tokenizer gives different {what} the same ids: it does not know them.")
    return found


def _around(text: Tensor, place: int, before: int, after: int) -> tuple[Tensor, Tensor]:
    """Return so many ids before and after a place."""
    return text[place - before : place], text[place : place + after]


def _check_passage(found: int, wanted: int) -> None:
    if found < wanted:
        raise ValueError(
            f"The texts have {found} tokens, and the largest distance needs {wanted}: give more text, or a smaller "
            "distance."
        )


def _ids_that_end_sentences(tokenizer: PreTrainedTokenizerBase, ids: Tensor) -> Tensor:
    written = zip(ids.tolist(), tokenizer.batch_decode(ids[:, None]), strict=True)
    return torch.tensor([each for each, text in written if _END.search(text)], dtype=torch.long)


def _parts_of(sentence: str) -> tuple[str, str, str, str]:
    """What stands before the key, between it and the space before the value, that space, and the rest of the line."""
    before, _, rest = sentence.partition("{key}")
    between, _, after = rest.partition("{value}")
    if not between or any(sentence.count(field) != 1 for field in ("{key}", "{value}")):
        raise ValueError(
            f"sentence = {sentence!r}: it must have {{key}} once, and {{value}} once and apart after it, e.g. "
            f"{SENTENCE!r}."
        )
    asked = between.rstrip()
    return "\n" + before, asked, between[len(asked) :], after + "\n"


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> Ids:
    return tuple(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _ids_after(tokenizer: PreTrainedTokenizerBase, before: str, text: str) -> Ids:
    """Ids of a text as they are after another one."""
    found = _after(tokenizer, before, text)
    if found is None:
        raise ValueError(
            f"The tokenizer does not keep {text!r} apart from what is before it, {before!r}: choose another sentence, "
            "with a space before the value."
        )
    return found


def _after(tokenizer: PreTrainedTokenizerBase, before: str, text: str) -> Ids | None:
    """Ids of a text as they are after another one; `None` if the tokenizer joins the two."""
    begin, whole = _ids(tokenizer, before), _ids(tokenizer, before + text)
    return whole[len(begin) :] if whole[: len(begin)] == begin and len(whole) > len(begin) else None


def _shown(ids: Sequence[int]) -> str:
    return str(ids) if isinstance(ids, range) else f"{list(ids[:5])}{'…' * (len(ids) > 5)}"


def _sentences() -> list[str]:
    """Every sentence of the filler."""
    return [f"{who} {does}." for who in _WHO for does in _DOES]


_WHO = (
    "The old miller",
    "A tall woman",
    "The youngest of the brothers",
    "Our neighbour",
    "The captain",
    "A boy with a lantern",
    "The teacher",
    "Some of the guests",
    "The carpenter",
    "A stranger",
    "The gardener",
    "Her aunt",
    "The two sisters",
    "The postman",
    "A shepherd",
    "The doctor",
)
_DOES = (
    "walked along the river before breakfast",
    "closed the window because of the wind",
    "talked about the harvest for a while",
    "waited at the gate until it was dark",
    "carried a basket of apples to the market",
    "laughed, and put another log on the fire",
    "could not remember where the path ended",
    "had seen the sea only once",
    "wrote a long letter and did not send it",
    "listened to the rain on the roof",
    "came home late that evening",
    "asked for bread and a little cheese",
    "slept in a chair near the stove",
    "led the horses down to the water",
    "looked at the clouds and said nothing",
    "mended the fence behind the barn",
)
