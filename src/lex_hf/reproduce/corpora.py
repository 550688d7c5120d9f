"""Texts to train and to test on, with fingerprints: a model is known by what it was trained on."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from lex_hf.data.documents import load_documents
from lex_hf.data.tokenizers import train_tokenizer
from lex_hf.evaluation.segments import segments_in_turn
from lex_hf.records import whole_folder
from lex_hf.reproduce.tiny import standard_library
from lex_hf.training import recipes

STANDARD_LIBRARY = "python"


@dataclass(frozen=True)
class Texts:
    """Documents."""

    name: str  # in the report
    sources: Sequence[str]
    documents: Dataset  # with the column `text`

    @cached_property
    def sha256(self) -> str:
        """Fingerprint of the texts in their order, as hexadecimal digits."""
        digest = hashlib.sha256()
        for text in self.documents["text"]:
            digest.update(hashlib.sha256(text.encode()).digest())
        return digest.hexdigest()

    def summary(self) -> dict[str, Any]:
        """Return the entry of the texts in a record."""
        size = sum(len(text.encode()) for text in self.documents["text"])
        sources = {"sources": list(self.sources), "documents": len(self.documents)}
        return {"name": self.name, **sources, "bytes": size, "sha256": self.sha256}


@dataclass(frozen=True)
class Corpora:
    """Texts of one or several tables, each read once, when they are first asked for.

    Attributes:
        data: Sources of training texts; Python's own library if there are none.
        sets: Test texts, each `NAME=SOURCE`, or `SOURCE` in a set called `test`; names may be repeated.
    """

    data: Sequence[str]
    sets: Sequence[str]

    @cached_property
    def training(self) -> Texts:
        """Training texts: those given, or Python's own library without the files that are held back."""
        if self.data:
            return Texts("training", list(self.data), load_documents(self.data))
        return Texts("training", ["the Python standard library"], standard_library().documents())

    @cached_property
    def tests(self) -> list[Texts]:
        """Sets of test texts; a `ValueError` if there are training texts but no test texts."""
        if not self.sets and self.data:
            raise ValueError("--data without --test: give texts to test on that are not trained on, --test NAME=FILE.")
        if not self.sets:
            held_back = "held-back files of the Python standard library"
            return [Texts(STANDARD_LIBRARY, [held_back], load_documents(standard_library().test))]
        sources: dict[str, list[str]] = {}
        for each in self.sets:
            name, equals, source = each.partition("=")
            sources.setdefault(name if equals else "test", []).append(source if equals else each)
        return [Texts(name, paths, load_documents(paths)) for name, paths in sources.items()]


def tokenizer_fingerprint(specification: str, training: Texts) -> str:
    """Return what identifies a tokenizer, without making it."""
    if specification.startswith("bpe:"):
        return f"{specification}:{training.sha256}"
    if Path(specification).is_dir():
        return hashlib.sha256((Path(specification) / "tokenizer.json").read_bytes()).hexdigest()
    return specification


def load_tokenizer(specification: str, training: Texts, folder: Path) -> PreTrainedTokenizerBase:
    """Load or make a tokenizer: `bytes`, `bpe:N` (kept in `folder` once it is trained), or a folder or Hub id."""
    if not specification.startswith("bpe:"):
        return recipes.load_tokenizer(specification)
    key = hashlib.sha256(tokenizer_fingerprint(specification, training).encode()).hexdigest()[:12]
    place = folder / f"bpe-{_bpe_size(specification)}-{key}"
    if not place.is_dir():
        tokenizer = train_tokenizer(training.documents["text"], _bpe_size(specification))
        with whole_folder(place) as partial:
            tokenizer.save_pretrained(partial)
    return AutoTokenizer.from_pretrained(place)


def vocabulary_size(specification: str) -> int:
    """Return the number of ids of a tokenizer, without making a `bpe:N`.

    Raises:
        ValueError: If N is not a number, or the tokenizer cannot be loaded.
    """
    return _bpe_size(specification) if specification.startswith("bpe:") else len(recipes.load_tokenizer(specification))


def _bpe_size(specification: str) -> int:
    size = specification.removeprefix("bpe:")
    if not size.isdecimal():
        raise ValueError(f"--tokenizer {specification}: after bpe: comes the number of ids, as in bpe:8192.")
    return int(size)


def segments(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, length: int, count: int) -> Tensor:
    """Take segments of `length` tokens from the texts in turn, first their beginnings, `(segments, length)`.

    Args:
        texts: Where to take them from.
        tokenizer: Tokenizer of the model.
        length: Tokens of a segment.
        count: Number of segments; fewer if the texts hold no more.
    """
    return torch.tensor(segments_in_turn(_encode(texts, tokenizer), length)[:count])


def long_enough(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, length: int) -> list[str]:
    """Return the texts with at least `length` tokens."""
    encoded = _encode(texts, tokenizer)
    return [text for text, ids in zip(texts, encoded, strict=True) if len(ids) >= length]


def check_length(texts: Texts, tokenizer: PreTrainedTokenizerBase, length: int) -> None:
    """Check that one text at least has `length` tokens.

    Raises:
        ValueError: If not.
    """
    longest = 0
    for text in texts.documents["text"]:
        (ids,) = _encode([text], tokenizer)
        longest = max(longest, len(ids))
        if longest >= length:
            return
    raise ValueError(
        f"No test text of {texts.name} has {length} tokens, the longest {longest}: give longer texts, or choose a "
        "smaller --length."
    )


def _encode(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    encoded: list[list[int]] = tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
    return encoded
