"""Documents from files or the Hub, and the packed examples that a model is trained on."""

import gzip
import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, Features, List, Value, concatenate_datasets, load_dataset
from transformers import PreTrainedTokenizerBase

JSON_LINES_SUFFIXES = (".jsonl", ".jsonl.gz", ".json")
FOLDER_SUFFIXES = (".txt", ".md", ".rst", ".py", ".jsonl", ".jsonl.gz")

_DOCUMENT_FEATURES = Features({"text": Value("string"), "source": Value("string")})
_TOKEN_FEATURES = Features({"input_ids": List(Value("int32"))})
_TEXT_TYPES = (Value("string"), Value("large_string"))
_HUB_NAME = re.compile(r"(?P<name>\w[\w.-]*(/\w[\w.-]*)?)(:(?P<configuration>[\w.-]+))?")
_DOCUMENTS_PER_BATCH = 100


def load_documents(sources: Sequence[str | Path], *, text_field: str = "text", split: str = "train") -> Dataset:
    r"""Read documents from files, folders and datasets of the Hub, in the order given.

    A source is one of:

    * a `.jsonl`, `.jsonl.gz` or `.json` file: one JSON object, and so one document, per line;
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
    if isinstance(sources, str | Path):
        raise ValueError(f"sources = {str(sources)!r} is a single source: give a list, [{str(sources)!r}].")
    if not sources:
        raise ValueError("sources is empty: give at least one file, folder or Hub dataset.")
    return concatenate_datasets([_load_source(source, text_field, split) for source in sources])


def tokenize_documents(documents: Dataset, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """Turn the column `text` into token ids, without special tokens and without a limit on the length.

    Returns:
        A dataset with the single column `input_ids`, one row per document, of its own length.
    """

    def tokenize(batch: Mapping[str, list[str]]) -> dict[str, Any]:
        # verbose=False: a document longer than the tokenizer's model_max_length needs no warning here.
        encoding = tokenizer(batch["text"], add_special_tokens=False, verbose=False)
        return {"input_ids": encoding["input_ids"]}

    return documents.map(
        tokenize,
        batched=True,
        batch_size=_DOCUMENTS_PER_BATCH,
        remove_columns=documents.column_names,
        features=_TOKEN_FEATURES,
        desc="Tokenising",
    )


def pack(documents: Dataset, tokenizer: PreTrainedTokenizerBase, length: int) -> Dataset:
    """Join all documents, each followed by the end-of-text token, and cut the result into equal examples.

    Documents keep their order. The tokens after the last full example are dropped.

    Args:
        documents: A dataset with the column `text`, as `load_documents` returns it.
        tokenizer: Any tokenizer with an `eos_token`.
        length: Tokens per example, at least 2 (an example of one token has nothing to predict).

    Returns:
        A dataset with the single column `input_ids`: rows of exactly `length` token ids.

    Raises:
        ValueError: If `length` is too small, the tokenizer has no `eos_token`, or all documents together have
            fewer than `length` tokens.
    """
    if length < 2:
        raise ValueError(f"length = {length}: an example needs at least 2 tokens.")
    if tokenizer.eos_token_id is None:
        raise ValueError("The tokenizer has no eos_token to put between documents: set tokenizer.eos_token.")
    tokens = tokenize_documents(documents, tokenizer).with_format("numpy")
    examples = tokens.map(
        _Packer(length, tokenizer.eos_token_id),
        batched=True,
        batch_size=_DOCUMENTS_PER_BATCH,
        features=_TOKEN_FEATURES,
        desc="Packing",
    )
    if len(examples) == 0:
        count = sum(len(document) + 1 for document in tokens["input_ids"])
        raise ValueError(
            f"length = {length}: all documents ({len(tokens)}) together have {count} tokens, too few for one "
            "example. Give more text, or a smaller length."
        )
    return examples.with_format(None)


class _Packer:
    """Cuts documents that arrive in batches; what does not fill an example waits for the next batch."""

    def __init__(self, length: int, separator: int) -> None:
        self.length = length
        self.separator = separator
        self.rest = np.empty(0, dtype=np.int32)

    def __call__(self, batch: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
        pieces = [self.rest]
        for document in batch["input_ids"]:
            pieces += [document, np.array([self.separator])]
        stream = np.concatenate(pieces, dtype=np.int32, casting="unsafe")
        end = len(stream) // self.length * self.length
        self.rest = stream[end:]
        return {"input_ids": stream[:end].reshape(-1, self.length)}


def _load_source(source: str | Path, text_field: str, split: str) -> Dataset:
    path = Path(source)
    if path.is_dir():
        return _to_dataset(source, _read_folder(path, text_field))
    if path.exists():
        return _to_dataset(source, [(text, str(path)) for text in _read_file(path, text_field)])
    hub_name = _HUB_NAME.fullmatch(source) if isinstance(source, str) else None
    if hub_name is None or path.name.endswith((*FOLDER_SUFFIXES, *JSON_LINES_SUFFIXES)):
        raise FileNotFoundError(f"{source}: no such file or folder.")
    return _load_from_hub(hub_name["name"], hub_name["configuration"], text_field, split)


def _to_dataset(source: str | Path, documents: list[tuple[str, str]]) -> Dataset:
    if not documents:
        raise ValueError(f"{source}: no documents; every text in it is empty.")
    texts, files = zip(*documents, strict=True)
    return Dataset.from_dict({"text": texts, "source": files}, features=_DOCUMENT_FEATURES)


def _read_folder(folder: Path, text_field: str) -> list[tuple[str, str]]:
    paths = sorted(folder.rglob("*"))
    files = [path for path in paths if path.name.endswith(FOLDER_SUFFIXES) and path.is_file()]
    if not files:
        suffixes = ", ".join(FOLDER_SUFFIXES)
        raise ValueError(f"{folder}: no files that end in {suffixes}; name files of other kinds one by one.")
    filled = (path for path in files if path.stat().st_size > 0)
    return [(text, str(path)) for path in filled for text in _read_file(path, text_field)]


def _read_file(path: Path, text_field: str) -> list[str]:
    data = _read_bytes(path)
    if not data:
        raise ValueError(f"{path} is empty.")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8 text: byte 0x{data[error.start]:02x} at offset {error.start}. Convert it."
        ) from error
    if path.name.endswith(JSON_LINES_SUFFIXES):
        return list(_read_json_lines(path, text, text_field))
    return [text]


def _read_bytes(path: Path) -> bytes:
    data = path.read_bytes()
    if path.suffix != ".gz":
        return data
    try:
        return gzip.decompress(data)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is not a complete gzip file: {error}.") from error


def _read_json_lines(path: Path, text: str, text_field: str) -> Iterator[str]:
    # Not str.splitlines, which also splits at separators that JSON allows inside a string.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number} is not JSON: {error}.") from error
        document = _text_of(row, text_field, where=f"{path}, line {number}")
        if document:
            yield document


def _text_of(row: Any, text_field: str, where: str) -> str:
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


def _load_from_hub(name: str, configuration: str | None, text_field: str, split: str) -> Dataset:
    try:
        dataset = load_dataset(name, configuration, split=split)
    except OSError as error:
        raise FileNotFoundError(
            f"{name!r} is neither a file or folder here, nor a Hub dataset that could be loaded: {error}"
        ) from error
    if dataset.features.get(text_field) not in _TEXT_TYPES:
        raise ValueError(
            f"{name}: {text_field!r} is no column of text. The columns are {dataset.features}; choose one "
            "with text_field."
        )
    texts = dataset.select_columns(text_field).rename_column(text_field, "text").filter(_has_text)
    if len(texts) == 0:
        raise ValueError(f"{name}, split {split!r}: no documents; every text in it is empty.")
    return texts.add_column("source", [name] * len(texts)).cast(_DOCUMENT_FEATURES)


def _has_text(row: Mapping[str, str | None]) -> bool:
    return bool(row["text"])
