"""Tasks of recall: where pairs, and the text that hides them, come from.

[`TextRecall`] is for models that read text, [`TokenRecall`] for models of token ids, e.g. those of synthetic studies.
"""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lex_hf.data.tokenizing import tokenize
from lex_hf.evaluation.hidden_pairs import Ids

SENTENCE = "The code of {key} is {value}."
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

    @property
    def description(self) -> str:
        """What is asked, in a few words."""
        keys = f"keys of {self.key_length} of {len(set(self.keys))} ids"
        values = f"values of {self.value_length} of {len(set(self.values))} ids"
        return f"ids: {f'a marker of {len(self.marker)}, ' if self.marker else ''}{keys}, {values}"

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
            text = torch.as_tensor(self.filler)
            return _around(text, int(rng.integers(before, len(text) - after + 1)), before, after)
        ids = np.asarray(self.filler, dtype=np.int64)[rng.integers(len(self.filler), size=before + after)]
        return _around(torch.from_numpy(ids), before, before, after)

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
    it; so its ids are the same in the sentence and as a candidate. Where a tokenizer would have merged letters over
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
    _passages: tuple[Tensor, ...] = field(init=False, repr=False)  # all texts, or one of each sentence
    _enders: Tensor = field(init=False, repr=False)  # ids that end sentences
    _ends: Tensor = field(init=False, repr=False)  # numbers of tokens of the texts up to the end of each sentence

    def __post_init__(self) -> None:
        if isinstance(self.texts, str) or (self.texts is not None and not len(self.texts)):
            raise ValueError("texts must be a list of strings, at least one; or None for filler of our own.")
        object.__setattr__(self, "_parts", _parts_of(self.sentence))
        self._value(_FIRST_NUMBER)  # fails before any work
        if self.texts is None:
            passages = [torch.tensor(_ids_after(self.tokenizer, ".", f" {each}")) for each in _sentences()]
        else:
            passages = [torch.from_numpy(np.concatenate(tokenize(self.texts, self.tokenizer))).long()]
        object.__setattr__(self, "_passages", tuple(passages))
        known = torch.cat(self._passages).unique().tolist()
        written = zip(known, self.tokenizer.batch_decode([[each] for each in known]), strict=True)
        object.__setattr__(self, "_enders", torch.tensor([each for each, text in written if _END.search(text)]))
        object.__setattr__(self, "_ends", self._ends_in(self._passages[0]))

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
    def end(self) -> Ids:
        """What ends a line."""
        return _ids(self.tokenizer, self._parts[3])

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
        return _ids_after(self.tokenizer, f"{before}Talomi{asked}", f"{space}{number}")


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
    return text[place - before : place].long(), text[place : place + after].long()


def _check_passage(found: int, wanted: int) -> None:
    if found < wanted:
        raise ValueError(
            f"The texts have {found} tokens, and the largest distance needs {wanted}: give more text, or a smaller "
            "distance."
        )


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
    begin, whole = _ids(tokenizer, before), _ids(tokenizer, before + text)
    if whole[: len(begin)] != begin or len(whole) == len(begin):
        raise ValueError(
            f"The tokenizer does not keep {text!r} apart from what is before it, {before!r}: choose another sentence, "
            "with a space before the value."
        )
    return whole[len(begin) :]


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
