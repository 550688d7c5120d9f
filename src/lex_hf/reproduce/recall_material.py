"""What the systems of the study of recall are trained on: texts that ask for recall, or texts of the user as bytes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from lex_hf.data.packing import pack
from lex_hf.data.tokenizers import byte_tokenizer
from lex_hf.evaluation.hidden_pairs import RecallTask
from lex_hf.reproduce import corpora, recall_texts

_TEXTS = 16  # of a test
_BYTES_OF_A_TEXT = 16_384


@dataclass(frozen=True)
class Material:
    """Texts of a study.

    Attributes:
        unit: What a token is.
        tokenizer: Tokenizer of all models.
        make_examples: Returns a number of training examples of a length in tokens, or as many as there are.
        fingerprint: What identifies the training texts, given the number of examples that are drawn.
        tests: By name, texts whose perplexity is measured.
        about_tests: What a report says of them.
        task: What models are asked; `None` if they are not.
        summary: Entry of the training texts in a record; `None` if they are made here.
        test_summaries: Entries of the tests, by name.
    """

    unit: str
    tokenizer: PreTrainedTokenizerBase
    make_examples: Callable[[int, int], Dataset]
    fingerprint: Callable[[int], str]
    tests: Mapping[str, Sequence[str]]
    about_tests: str
    task: RecallTask | None
    summary: Mapping[str, Any] | None
    test_summaries: Mapping[str, Any]


def words_that_ask(longest: int) -> Material:
    """Return texts that ask for recall; those of the test have `longest` words."""
    return Material(
        unit="words",
        tokenizer=recall_texts.word_tokenizer(),
        make_examples=recall_texts.training_examples,
        fingerprint=lambda count: f"{count} examples of recall_texts.py, version {recall_texts.VERSION}",
        tests={"texts that ask": recall_texts.long_texts(_TEXTS, longest)},
        about_tests="Texts in which 32 keys come again and again, each with its value in this text",
        task=recall_texts.recall_task(),
        summary=None,
        test_summaries={},
    )


def bytes_of(data: Sequence[str], tests: Sequence[str]) -> Material:
    """Return texts of the user.

    Args:
        data: Texts to train on, as `load_documents` reads them; `python` alone is Python's own library.
        tests: Texts to test on, each `NAME=SOURCE` or `SOURCE`.

    Raises:
        ValueError: If they cannot be read, there are none to test on, or one of these has a single byte.
    """
    given = [] if list(data) == [corpora.STANDARD_LIBRARY] else list(data)
    texts = corpora.Corpora(given, tests)
    training, held_back = texts.training, texts.tests
    tokenizer = byte_tokenizer()
    return Material(
        unit="bytes",
        tokenizer=tokenizer,
        make_examples=lambda count, length: pack(training.documents, tokenizer, length),
        fingerprint=lambda count: training.sha256,
        tests={each.name: _beginnings(each) for each in held_back},
        about_tests=f"The first {_BYTES_OF_A_TEXT:,} bytes of up to {_TEXTS} texts",
        task=None,
        summary=training.summary(),
        test_summaries={each.name: each.summary() for each in held_back},
    )


def _beginnings(texts: corpora.Texts) -> list[str]:
    found = [text.encode()[:_BYTES_OF_A_TEXT].decode(errors="ignore") for text in texts.documents["text"][:_TEXTS]]
    if short := [text for text in found if len(text.encode()) < 2]:
        raise ValueError(f"--test {texts.name}: {short[0]!r} has one byte, and the first is not scored: leave it out.")
    return found
