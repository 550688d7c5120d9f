"""Documents from files or the Hub, and the packed examples that a model is trained on."""

import contextlib
import gzip
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
from datasets import Dataset, Features, IterableDataset, List, Value, concatenate_datasets, load_dataset
from datasets.fingerprint import generate_random_fingerprint
from datasets.utils import tqdm
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from lex_hf.errors import plain

JSON_LINES_SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz")
FOLDER_SUFFIXES = (".txt", ".md", ".rst", ".py", ".jsonl", ".jsonl.gz")

_DOCUMENT_FEATURES = Features({"text": Value("string"), "source": Value("string")})
_TEXT_FEATURES = Features({"text": Value("string")})
_TOKEN_FEATURES = Features({"input_ids": List(Value("int32"))})
_PACKED_FEATURES = Features({"input_ids": List(Value("int32")), "position_ids": List(Value("int32"))})
_TEXT_TYPES = (Value("string"), Value("large_string"))
_HOW_TO_SPLIT = (
    " A file that is one JSON document, a list or an object over several lines, is not read, unlike by "
    "load_dataset('json'): write one object per line, with `jq -c '.[]' {path}` of a list, with `jq -c . {path}` of "
    "objects."
)
_HUB_NAME = re.compile(r"(?P<name>\w[\w.-]*(/\w[\w.-]*)?)(:(?P<configuration>[\w.-]+))?")
_DOCUMENTS_PER_BATCH = 100
_CHARACTERS_AT_ONCE = 1 << 17  # what is tokenised together
_CHARACTERS_OF_A_PIECE = 1 << 12


def load_documents(sources: Sequence[str | Path], *, text_field: str = "text", split: str = "train") -> Dataset:
    r"""Read documents from files, folders and datasets of the Hub, in the order given.

    A source is one of:

    * a `.jsonl`, `.jsonl.gz`, `.json` or `.json.gz` file: one JSON object, and so one document, per line;
    * any other file: UTF-8 text, one document, read as it is (`\r\n` is kept);
    * a folder: its `.txt`, `.md`, `.rst`, `.py`, `.jsonl`, `.jsonl.gz` files, at any depth, sorted by path;
    * where no such path exists, a dataset of the Hub as `name`, `owner/name` or `owner/name:configuration`.

    Blank lines and empty texts in JSON lines, empty texts in Hub datasets and empty files in a folder are no
    documents and are left out.

    Args:
        sources: What to read.
        text_field: The field of JSON lines, or the column of a Hub dataset, that holds the text.
        split: The split of a Hub dataset.

    Returns:
        A dataset with the columns `text` and `source` (the file, or the Hub name), one row per document.

    Raises:
        FileNotFoundError: If a source is neither a file, nor a folder, nor a dataset that can be loaded.
        ValueError: If a source holds no text, is not UTF-8 (with the byte offset), is not JSON lines with
            `text_field` (with the line), or if there are no sources.
    """
    _check_sources(sources)
    return concatenate_datasets([_load_source(source, text_field, split) for source in sources])


def stream_documents(
    sources: Sequence[str | Path], *, text_field: str = "text", split: str = "train"
) -> IterableDataset:
    """Read the documents that `load_documents` reads while they are asked for: sources may be larger than memory.

    Only a document at a time is held, so a file that is one document must fit into memory; JSON lines need not.

    Args:
        sources: What to read, as for `load_documents`.
        text_field: The field of JSON lines, or the column of a Hub dataset, that holds the text.
        split: The split of a Hub dataset.

    Returns:
        A dataset with the column `text`, in the order of `load_documents`. Its `state_dict` tells the next document.

    Raises:
        FileNotFoundError: If a source is neither a file, nor a folder, nor a dataset that can be loaded.
        ValueError: As `load_documents`; what is wrong inside of a file is found when it is read.
    """
    _check_sources(sources)
    return concatenate_datasets([_stream_source(source, text_field, split) for source in sources])


def tokenize_documents(documents: Dataset, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """Turn the column `text` into token ids, without special tokens and without a limit on the length.

    Returns:
        A dataset with the single column `input_ids`, one row per document, of its own length.
    """
    return documents.map(
        lambda batch: {"input_ids": tokenize(batch["text"], tokenizer)},
        batched=True,
        batch_size=_DOCUMENTS_PER_BATCH,
        remove_columns=documents.column_names,
        features=_TOKEN_FEATURES,
        desc="Tokenising",
    )


def tokenize(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[NDArray[np.int32]]:
    """Turn texts into token ids, without special tokens and without a limit on the length.

    Long texts are read in pieces if the ids are the same: what a tokenizer makes of a text takes a hundred times its
    memory.

    Returns:
        Of each text an array of shape `(tokens,)`.
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
    """Do what `tokenize` does, and yield some pieces at a time, each with whether a text ends with it."""
    for group in _grouped(_pieces(texts, tokenizer)):
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
    """The first place from `start` on where no word of `whole` would be cut."""
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


def _grouped(pieces: Iterable[tuple[str, bool]]) -> Iterator[list[tuple[str, bool]]]:
    """Put together what is tokenised at once."""
    group: list[tuple[str, bool]] = []
    characters = 0
    for piece in pieces:
        group.append(piece)
        characters += len(piece[0])
        if characters >= _CHARACTERS_AT_ONCE:
            yield group
            group, characters = [], 0
    if group:
        yield group


def pack(
    documents: Dataset, tokenizer: PreTrainedTokenizerBase, length: int, *, separate_documents: bool = False
) -> Dataset:
    """Join all documents, each followed by the end-of-text token, and cut the result into equal examples.

    Documents keep their order. The tokens after the last full example are dropped.

    Args:
        documents: A dataset with the column `text`, as `load_documents` returns it.
        tokenizer: Any tokenizer with an `eos_token`.
        length: Tokens per example, at least 2 (an example of one token has nothing to predict).
        separate_documents: Whether tokens shall see, and be predicted from, their own document only. A document that
            goes on in the next example begins anew there.

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
            batch_size=_DOCUMENTS_PER_BATCH,
            remove_columns=documents.column_names,
            features=_PACKED_FEATURES if separate_documents else _TOKEN_FEATURES,
            desc="Packing",
        )
    else:  # map would hold them several times over
        batches = tqdm(documents.iter(_DOCUMENTS_PER_BATCH), desc="Packing", unit=" batches")
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
        """Go on where a packer had these `tokens` and `starts`, between two documents."""
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


def _check_sources(sources: Sequence[str | Path]) -> None:
    if isinstance(sources, str | Path):
        raise ValueError(f"sources = {str(sources)!r} is a single source: give a list, [{str(sources)!r}].")
    if not sources:
        raise ValueError("sources is empty: give at least one file, folder or Hub dataset.")


def _load_source(source: str | Path, text_field: str, split: str) -> Dataset:
    files = _files(source)
    if files is None:
        return _load_from_hub(str(source), text_field, split)
    documents = [(text, _printable(path)) for path in files for text in _read_file(path, text_field)]
    if not documents:
        raise ValueError(f"{source}: no documents; every text in it is empty.")
    texts, names = zip(*documents, strict=True)
    return Dataset.from_dict({"text": texts, "source": names}, features=_DOCUMENT_FEATURES)


def _stream_source(source: str | Path, text_field: str, split: str) -> IterableDataset:
    files = _files(source)
    if files is None:
        return _stream_from_hub(str(source), text_field, split)
    if not files:
        raise ValueError(f"{source}: no documents; every text in it is empty.")
    for path in files:
        path.open("rb").close()  # what cannot be read shall be known before hours of training
    names = [str(path) for path in files]
    return IterableDataset.from_generator(
        _generate_texts, features=_TEXT_FEATURES, gen_kwargs={"files": names, "text_field": text_field}
    )


def _printable(path: Path) -> str:
    """Name a file in UTF-8, in which alone datasets hold texts."""
    return str(path).encode(errors="surrogateescape").decode(errors="backslashreplace")


def _generate_texts(files: list[str], text_field: str) -> Iterator[dict[str, str]]:
    for file in files:
        for text in _read_file(Path(file), text_field):
            yield {"text": text}


def _files(source: str | Path) -> list[Path] | None:
    """The files of a source, or `None` if it is a dataset of the Hub."""
    path = Path(source)
    if path.is_dir():
        return _files_of_folder(path)
    if path.is_char_device():
        raise ValueError(f"{source} is a device, which may have no end: give a file, a folder or a pipe.")
    if path.exists():
        return [path]
    is_hub_name = isinstance(source, str) and _HUB_NAME.fullmatch(source)
    if not is_hub_name or path.name.endswith((*FOLDER_SUFFIXES, *JSON_LINES_SUFFIXES)):
        raise FileNotFoundError(f"{source}: no such file or folder.")
    return None


def _files_of_folder(folder: Path) -> list[Path]:
    paths = sorted(folder.rglob("*"))
    files = [path for path in paths if path.name.endswith(FOLDER_SUFFIXES) and path.is_file()]
    if not files:
        suffixes = ", ".join(FOLDER_SUFFIXES)
        raise ValueError(f"{folder}: no files that end in {suffixes}; name files of other kinds one by one.")
    return [path for path in files if path.stat().st_size > 0]


def _read_file(path: Path, text_field: str) -> Iterator[str]:
    """Yield the documents of a file; lines of JSON are read one by one."""
    try:
        with gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb") as opened:
            file = cast(BinaryIO, opened)
            if path.name.lower().endswith(JSON_LINES_SUFFIXES):
                yield from _read_json_lines(path, file, text_field)
            else:
                yield _decode(path, file.read())
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is not a complete gzip file: {error}.") from error


def _read_json_lines(path: Path, file: BinaryIO, text_field: str) -> Iterator[str]:
    offset, is_first = 0, True
    for number, line in enumerate(file, start=1):
        text = _decode(path, line, offset)
        text = text.removeprefix("\ufeff") if number == 1 else text
        offset += len(line)
        if not text.strip():
            continue
        try:
            row = json.loads(text)
        except RecursionError as error:
            raise ValueError(f"{path}, line {number} is JSON that is nested too deeply.") from error
        except ValueError as error:
            hint = _HOW_TO_SPLIT.format(path=path) if text.lstrip()[0] in "[{" and is_first else ""
            raise ValueError(f"{path}, line {number} is not JSON: {error}.{hint}") from error
        is_first = False
        document = _text_of(row, text_field, where=f"{path}, line {number}")
        if document:
            yield document
    if offset == 0:
        raise ValueError(f"{path} is empty.")


def _decode(path: Path, data: bytes, offset: int = 0) -> str:
    if not data:
        raise ValueError(f"{path} is empty.")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8 text: byte 0x{data[error.start]:02x} at offset {offset + error.start}. Convert it."
        ) from error


def _text_of(row: Any, text_field: str, where: str) -> str:
    if isinstance(row, list):
        raise ValueError(
            f"{where}: each line must be a JSON object, not list.{_HOW_TO_SPLIT.format(path=where.split(', line')[0])}"
        )
    if not isinstance(row, dict):
        raise ValueError(f"{where}: each line must be a JSON object, not {type(row).__name__}.")
    if text_field not in row:
        raise ValueError(f"{where}: no field {text_field!r}, only {sorted(row)}. Choose one with text_field.")
    document = row[text_field]
    if not isinstance(document, str):
        raise ValueError(f"{where}: the field {text_field!r} is {type(document).__name__}, not text.")
    try:
        document.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{where}: the text has half a surrogate pair, which UTF-8 cannot write.") from error
    return document


def _load_from_hub(source: str, text_field: str, split: str) -> Dataset:
    name, configuration = _hub_name(source)
    with _explained(name):
        dataset = load_dataset(name, configuration, split=split)
    _check_column(name, text_field, dataset.features)
    texts = dataset.select_columns(text_field).rename_column(text_field, "text").filter(_has_text)
    if len(texts) == 0:
        raise ValueError(f"{name}, split {split!r}: no documents; every text in it is empty.")
    return texts.add_column("source", [name] * len(texts)).cast(_DOCUMENT_FEATURES)


def _stream_from_hub(source: str, text_field: str, split: str) -> IterableDataset:
    name, configuration = _hub_name(source)
    with _explained(name):
        dataset = load_dataset(name, configuration, split=split, streaming=True)
        if dataset.features is None:  # some formats tell their columns in the first row only
            dataset = dataset.cast(Dataset.from_list([next(iter(dataset))]).features)
    _check_column(name, text_field, dataset.features)
    texts = dataset.select_columns(text_field).rename_column(text_field, "text").filter(_has_text)
    return texts.cast(_TEXT_FEATURES)


def _hub_name(source: str) -> tuple[str, str | None]:
    found = _HUB_NAME.fullmatch(source)
    assert found is not None
    return found["name"], found["configuration"]


@contextlib.contextmanager
def _explained(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # datasets has errors of its own, and what it loads raises any
        kind = FileNotFoundError if isinstance(error, OSError) else ValueError
        raise kind(
            f"{name!r} is neither a file or folder here, nor a Hub dataset that could be loaded: {plain(error)}"
        ) from error


def _check_column(name: str, text_field: str, features: Mapping[str, Any]) -> None:
    if features.get(text_field) not in _TEXT_TYPES:
        raise ValueError(
            f"{name}: {text_field!r} is no column of text. The columns are {features}; choose one with text_field."
        )


def _has_text(row: Mapping[str, str | None]) -> bool:
    return bool(row["text"])
