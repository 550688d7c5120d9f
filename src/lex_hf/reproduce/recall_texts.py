"""Texts that ask for recall: pairs of a key and a value come twice among filler, and other texts repeat themselves.

A word is a token. Every text has words of filler with frequencies of its own, which more context tells better: a gist.
A key is always followed by the value that it has in this text: a fact, which only its first occurrence tells. Texts
that repeat a passage teach a model to look back: of them, only the repeats are learnt. Without such texts, models of
this size learn which values a text has, and not to which keys they belong.
"""

import numpy as np
from datasets import Dataset
from numpy.typing import NDArray
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lex_hf.data.tokenizers import END_OF_TEXT, for_language_models
from lex_hf.evaluation.recall_tasks import TokenRecall
from lex_hf.model.loss_lex import IGNORED

VERSION = 1  # of these texts; models of another one are others
FILLERS = KEYS = VALUES = 32  # words of each kind
VOCABULARY = FILLERS + KEYS + VALUES + 1
FILLER_IDS = range(FILLERS)
KEY_IDS = range(FILLERS, FILLERS + KEYS)
VALUE_IDS = range(FILLERS + KEYS, VOCABULARY - 1)
PAIRS = 6  # of a training example
REPEATING = 0.75  # share of the training examples that repeat a passage
_SHORTEST_PASSAGE = 4
_CONCENTRATION = 0.3  # of the frequencies of filler, which a Dirichlet distribution draws for each text
_SHARE_OF_PAIRS = 0.25  # of the words of filler and pairs of a long text

Ids = NDArray[np.int64]


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer of these texts: words with spaces between them, as in `w3 w17 k5 v30 w3`."""
    kinds = {"w": FILLER_IDS, "k": KEY_IDS, "v": VALUE_IDS}
    words = {f"{kind}{id - ids[0]}": id for kind, ids in kinds.items() for id in ids}
    model = models.WordLevel({**words, END_OF_TEXT: VOCABULARY - 1}, unk_token=END_OF_TEXT)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return for_language_models(tokenizer)


def recall_task() -> TokenRecall:
    """Return what the models are asked: one of the keys, hidden with its value in filler."""
    return TokenRecall(keys=KEY_IDS, values=VALUE_IDS, filler=FILLER_IDS)


def training_examples(count: int, length: int, seed: int = 0) -> Dataset:
    """Make training examples.

    Args:
        count: Number of examples.
        length: Tokens of each, at least 32.
        seed: Of all that is drawn.

    Returns:
        A dataset with the columns `input_ids` and `labels`.
    """
    rng = np.random.default_rng(seed)
    repeating = rng.random(count) < REPEATING
    rows = [_repeated(length, rng) if each else (_with_pairs(length, rng),) * 2 for each in repeating]
    ids, labels = (np.stack(column) for column in zip(*rows, strict=True))
    return Dataset.from_dict({"input_ids": ids, "labels": labels})


def long_texts(count: int, length: int, seed: int = 1) -> list[str]:
    """Make texts of `length` words whose every key has a value, and comes again and again at random places."""
    rng, tokenizer = np.random.default_rng(seed), word_tokenizer()
    return [tokenizer.decode(_long_text(length, rng)) for _ in range(count)]


def _with_pairs(length: int, rng: np.random.Generator) -> Ids:
    """A text in which `PAIRS` keys stand twice each, at random places, with their values after them."""
    keys = rng.permutation(np.repeat(rng.choice(KEY_IDS, PAIRS, replace=False), 2))
    is_pair = np.zeros(length - 2 * len(keys), dtype=bool)  # of the words of filler, and pairs counted once
    is_pair = rng.permutation(np.concatenate((is_pair, np.ones(len(keys), dtype=bool))))
    return _written(is_pair, keys, rng)


def _long_text(length: int, rng: np.random.Generator) -> Ids:
    is_pair = rng.random(length) < _SHARE_OF_PAIRS
    return _written(is_pair, rng.choice(KEY_IDS, int(is_pair.sum())), rng)[:length]


def _written(is_pair: NDArray[np.bool_], keys: Ids, rng: np.random.Generator) -> Ids:
    """Write words of filler, and keys in this order with their values where there are pairs."""
    value_of = np.zeros(VOCABULARY, dtype=np.int64)
    value_of[KEY_IDS] = rng.permutation(VALUE_IDS)
    frequencies = rng.dirichlet(np.full(FILLERS, _CONCENTRATION))
    first = rng.choice(FILLER_IDS, len(is_pair), p=frequencies)
    first[is_pair] = keys
    both = np.stack((first, value_of[first]), axis=1)
    return both[np.stack((np.ones_like(is_pair), is_pair), axis=1)]


def _repeated(length: int, rng: np.random.Generator) -> tuple[Ids, Ids]:
    """A passage of different words, over and over, and its labels: all but those of the first time."""
    passage = rng.permutation(VOCABULARY - 1)[: rng.integers(_SHORTEST_PASSAGE, length // 2 + 1)]
    ids = np.resize(passage, length)
    return ids, np.where(np.arange(length) > len(passage), ids, IGNORED)
