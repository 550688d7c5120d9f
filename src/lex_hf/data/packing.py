"""Examples of equal length: documents joined, and cut without padding; whether examples fit a model."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
from datasets import Dataset, Features, List, Value
from datasets.fingerprint import generate_random_fingerprint
from datasets.utils import tqdm
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from lex_hf.data.tokenizing import DOCUMENTS_PER_BATCH, TOKEN_FEATURES, tokenize_in_pieces
from lex_hf.model.loss_lex import IGNORED
from lex_hf.records import content_hash

_PACKED_FEATURES = Features({**TOKEN_FEATURES, "position_ids": List(Value("int32"))})


def pack(
    documents: Dataset, tokenizer: PreTrainedTokenizerBase, length: int, *, separate_documents: bool = False
) -> Dataset:
    """Join all documents, each followed by the end-of-text token, and cut the result into equal examples.

    Documents keep their order. The tokens after the last full example are dropped.

    Args:
        documents: A dataset with the column `text`, as `load_documents` returns it.
        tokenizer: Any tokenizer with an `eos_token`.
        length: Tokens per example, at least 2 (an example of one token has nothing to predict).
        separate_documents: Whether tokens see, and are predicted from, their own document only. A document that
            continues in the next example starts again there.

    Returns:
        A dataset with the column `input_ids`: rows of exactly `length` token ids. With `separate_documents` also
        `position_ids`, the positions within the documents, which start at 0 where one begins.

    Raises:
        ValueError: If `length` is too small, the tokenizer has no `eos_token`, or all documents together have
            fewer than `length` tokens.
    """
    packer = Packer(tokenizer, length, separate_documents=separate_documents)

    def examples_of(batch: Mapping[str, Sequence[str]]) -> pa.Table:
        parts = [_table(packer(pieces)) for pieces in tokenize_in_pieces(batch["text"], tokenizer)]
        return pa.concat_tables(parts) if parts else _table(packer([]))

    if documents.cache_files:  # on disk, and so are the examples
        examples = documents.map(
            examples_of,
            batched=True,
            batch_size=DOCUMENTS_PER_BATCH,
            remove_columns=documents.column_names,
            features=_PACKED_FEATURES if separate_documents else TOKEN_FEATURES,
            desc="Packing",
        )
    else:  # map would hold them several times over
        batches = tqdm(documents.iter(DOCUMENTS_PER_BATCH), desc="Packing", unit=" batches")
        tables = [examples_of(batch) for batch in batches]
        examples = Dataset(pa.concat_tables(tables), fingerprint=generate_random_fingerprint())
    if len(examples) == 0:
        raise too_few_tokens(length, len(documents), packer.count)
    return examples.with_format(None)


def _table(examples: Mapping[str, NDArray[np.int32]]) -> pa.Table:
    """Put arrays of shape `(rows, length)` into a table, without a copy."""
    columns = {}
    for name, rows in examples.items():
        starts = np.arange(len(rows) + 1, dtype=np.int32) * rows.shape[1]
        columns[name] = pa.ListArray.from_arrays(starts, rows.reshape(-1))
    return pa.table(columns)


def too_few_tokens(length: int, documents: int, tokens: int) -> ValueError:
    """Make the error for documents that do not fill a single example."""
    return ValueError(
        f"length = {length}: all documents ({documents}) together have {tokens} tokens, too few for one example. Give "
        "more text, or a smaller length."
    )


class Packer:
    """Cuts documents that arrive in batches; what does not fill an example waits for the next batch.

    Attributes:
        tokens: The tokens that wait, fewer than `length`.
        starts: Which of them begin a document.
        count: Tokens that were packed in all, with those between documents.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, length: int, *, separate_documents: bool = False) -> None:
        if length < 2:
            raise ValueError(f"length = {length}: an example needs at least 2 tokens.")
        if tokenizer.eos_token_id is None:
            raise ValueError("The tokenizer has no eos_token to put between documents: set tokenizer.eos_token.")
        self.length = length
        self.separator = tokenizer.eos_token_id
        self.separate_documents = separate_documents
        self.tokens: NDArray[np.int32] = np.empty(0, dtype=np.int32)
        self.starts: NDArray[np.bool_] = np.empty(0, dtype=bool)
        self.count = 0
        self._at_start = True

    def resume(self, tokens: Sequence[int], starts: Sequence[bool]) -> None:
        """Resume where a packer had these `tokens` and `starts`, between two documents."""
        self.tokens, self.starts = np.array(tokens, np.int32), np.array(starts, bool)
        self._at_start = True

    def __call__(self, documents: Iterable[tuple[NDArray[np.int32], bool]]) -> dict[str, NDArray[np.int32]]:
        """Return the examples that are full now: arrays of shape `(examples, length)`.

        Args:
            documents: Tokens of documents or of pieces of them, each with whether the document ends there.
        """
        pieces, starts = [self.tokens], [self.starts]
        for ids, is_end in documents:
            tokens = np.append(ids, np.int32(self.separator)) if is_end else ids
            is_start = np.zeros(len(tokens), dtype=bool)
            is_start[:1] = self._at_start
            self.count += len(tokens)
            pieces.append(tokens)
            starts.append(is_start)
            self._at_start = is_end
        stream, is_start = np.concatenate(pieces), np.concatenate(starts)
        end = len(stream) // self.length * self.length
        self.tokens, self.starts = stream[end:].copy(), is_start[end:].copy()  # not to hold the examples
        examples = {"input_ids": stream[:end].reshape(-1, self.length)}
        if self.separate_documents:
            examples["position_ids"] = _positions(is_start[:end].reshape(-1, self.length))
        return examples


def _positions(starts: NDArray[np.bool_]) -> NDArray[np.int32]:
    """Count from 0 at each start and at the beginning of each row; shape `(rows, length)`, like `starts`."""
    index = np.arange(starts.shape[1], dtype=np.int32)
    return index - np.maximum.accumulate(np.where(starts, index, 0), axis=1, dtype=np.int32)


def check_examples(dataset: Dataset, vocab_size: int) -> str:
    """Read all examples of a model with `vocab_size` ids; return their number, length and a hash of their content.

    Raises:
        ValueError: If there are none, they are not of equal length of at least 2, or an id or label is out of range.
    """
    if "input_ids" not in dataset.column_names:
        raise ValueError(
            f"The dataset has the columns {dataset.column_names}, not 'input_ids': make examples with "
            "lex_hf.data.pack."
        )
    if len(dataset) == 0:
        raise ValueError("The dataset has no examples.")
    columns = columns_of(dataset)
    length = len(dataset[0]["input_ids"])
    digest = content_hash(_checked(dataset.select_columns(columns), length, vocab_size))
    return f"{len(dataset)} examples of {length} tokens, {digest}"


def columns_of(dataset: Dataset) -> list[str]:
    """Return the columns of examples that a training takes: `input_ids`, and `position_ids` and `labels` if there."""
    return [name for name in ("input_ids", "position_ids", "labels") if name in dataset.column_names]


def _checked(dataset: Dataset, length: int, vocab_size: int) -> Iterator[bytes]:
    """Yield the content of all columns, some rows at a time."""
    for table in dataset.with_format("arrow").iter(1000):
        for name in dataset.column_names:
            values = _numbers(table[name], name, length)
            low, high = int(values.min()), int(values.max())
            if name == "input_ids" and (low < 0 or high >= vocab_size):
                raise ValueError(
                    f"The examples hold the token {low if low < 0 else high}, but the model has the tokens 0 to "
                    f"{vocab_size - 1}: they were made with another tokenizer."
                )
            if name == "labels" and (high >= vocab_size or bool(((values < 0) & (values != IGNORED)).any())):
                raise ValueError(
                    f"The labels go from {low} to {high}; a label is a token, 0 to {vocab_size - 1}, or {IGNORED} for "
                    "a token that is not learnt."
                )
            yield values.tobytes()


def _numbers(column: pa.ChunkedArray, name: str, length: int) -> NDArray[np.int32]:
    """Return the values of rows of equal length, joined."""
    try:
        lengths = pc.unique(pc.list_value_length(column)).to_pylist()
        flat = np.concatenate([np.asarray(chunk.flatten()) for chunk in column.chunks])
    except (pa.ArrowException, NotImplementedError) as error:
        raise ValueError(f"The column {name!r} must hold lists of whole numbers: {error}.") from error
    if lengths != [length] or length < 2:
        raise ValueError(
            f"The examples must be of equal length, at least 2 tokens; {name!r} has rows of "
            f"{', '.join(map(str, sorted({length, *lengths}, key=str)))}."
        )
    if flat.dtype.kind not in "iu":
        raise ValueError(f"The column {name!r} must hold whole numbers, not {flat.dtype}.")
    return flat.astype("<i4")
