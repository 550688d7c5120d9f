"""Token ids of texts of any length, in constant memory."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np
from datasets import Dataset, Features, List, Value
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

DOCUMENTS_PER_BATCH = 100
TOKEN_FEATURES = Features({"input_ids": List(Value("int32"))})

_CHARACTERS_AT_ONCE = 1 << 17  # tokenised together
_CHARACTERS_OF_A_PIECE = 1 << 12

_T = TypeVar("_T")


def tokenize_documents(documents: Dataset, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """Turn the column `text` into token ids, without special tokens and without a limit on the length.

    Returns:
        A dataset with the single column `input_ids`, one row per document, of its own length.
    """
    return documents.map(
        lambda batch: {"input_ids": tokenize(batch["text"], tokenizer)},
        batched=True,
        batch_size=DOCUMENTS_PER_BATCH,
        remove_columns=documents.column_names,
        features=TOKEN_FEATURES,
        desc="Tokenising",
    )


def tokenize(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[NDArray[np.int32]]:
    """Turn texts into token ids, without special tokens and without a limit on the length.

    Long texts are read in pieces if the ids are the same: the result of a tokenizer takes a hundred times the memory
    of its text.

    Returns:
        An array of shape `(tokens,)` for each text.
    """
    pieces: list[list[NDArray[np.int32]]] = [[]]
    for group in tokenize_in_pieces(texts, tokenizer):
        for ids, is_end in group:
            pieces[-1].append(ids)
            if is_end:
                pieces.append([])
    return [each[0] if len(each) == 1 else np.concatenate(each) for each in pieces[:-1]]


def tokenize_in_pieces(
    texts: Iterable[str], tokenizer: PreTrainedTokenizerBase
) -> Iterator[list[tuple[NDArray[np.int32], bool]]]:
    """Tokenise as `tokenize` does, but yield some pieces at a time, each with whether a text ends with it."""
    for group in grouped(_pieces(texts, tokenizer), lambda piece: len(piece[0]), _CHARACTERS_AT_ONCE):
        # verbose=False: a document longer than the tokenizer's model_max_length needs no warning here.
        encoded = tokenizer(
            [piece for piece, _ in group], add_special_tokens=False, return_attention_mask=False, verbose=False
        )
        yield [
            (np.array(ids, dtype=np.int32), is_end)
            for ids, (_, is_end) in zip(encoded["input_ids"], group, strict=True)
        ]


def _pieces(texts: Iterable[str], tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[str, bool]]:
    """Cut texts; with each piece comes whether a text ends with it."""
    places, whole = None, None
    for text in texts:
        if len(text) <= _CHARACTERS_OF_A_PIECE:
            yield text, True
            continue
        if whole is None:
            places, whole = _places_to_cut(tokenizer), [str(each) for each in tokenizer.added_tokens_decoder.values()]
        start = 0
        while places and (cut := _next_cut(text, start + _CHARACTERS_OF_A_PIECE, places, whole)):
            yield text[start:cut], False
            start = cut
        yield text[start:], True


def _next_cut(text: str, start: int, places: re.Pattern[str], whole: Sequence[str]) -> int | None:
    """Return the first place from `start` on where no word of `whole` would be cut."""
    for place in places.finditer(text, start):
        cut = place.start()
        if cut < len(text) and not any(
            word in text[max(0, cut - len(word) + 1) : cut + len(word) - 1] for word in whole
        ):
            return cut
    return None


def _places_to_cut(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str] | None:
    """Match the places where a text can be cut without another change of its tokens, or `None` if there are none."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or any(
        each.lstrip or each.rstrip or each.single_word for each in tokenizer.added_tokens_decoder.values()
    ):
        return None
    parts = json.loads(backend.to_str())
    splits, model = parts["pre_tokenizer"] or {}, parts["model"]
    if (
        parts["normalizer"]
        or splits.get("type") != "ByteLevel"
        or splits["add_prefix_space"]
        or model["type"] != "BPE"
    ):
        return None
    if splits["use_regex"]:  # that of GPT-2: a space before a letter begins a word
        return re.compile(r"(?= [A-Za-z])")
    joins = ("merges", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "ignore_merges", "dropout")
    return None if any(model.get(name) for name in joins) else re.compile("")


def grouped(items: Iterable[_T], length: Callable[[_T], int], enough: int) -> Iterator[list[_T]]:
    """Collect items until their lengths are enough together; none is read before it is needed."""
    group: list[_T] = []
    total = 0
    for item in items:
        group.append(item)
        total += length(item)
        if total >= enough:
            yield group
            group, total = [], 0
    if group:
        yield group
