"""Examples of equal length: documents joined, and cut without padding."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
from datasets import Dataset, Features, List, Value
from datasets.fingerprint import generate_random_fingerprint
from datasets.utils import tqdm
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from lex_hf.data.tokenizing import DOCUMENTS_PER_BATCH, TOKEN_FEATURES, tokenize_in_pieces

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


def _table(rows: Mapping[str, NDArray[np.int32]]) -> pa.Table:
    """Put arrays of shape `(rows, length)` into a table, without a copy."""
    return pa.table({name: _list_column(array) for name, array in rows.items()})


def _list_column(rows: NDArray[np.int32]) -> pa.ListArray:
    count, length = rows.shape
    return pa.ListArray.from_arrays(np.arange(count + 1, dtype=np.int32) * length, rows.reshape(-1))


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
