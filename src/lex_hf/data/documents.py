"""Documents from files, folders and datasets of the Hub: loaded into memory, or streamed."""

import gzip
import json
import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

from datasets import Dataset, Features, IterableDataset, Value, concatenate_datasets, load_dataset

from lex_hf.errors import plain

JSON_LINES_SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz")
FOLDER_SUFFIXES = (".txt", ".md", ".rst", ".py", ".jsonl", ".jsonl.gz")

_DOCUMENT_FEATURES = Features({"text": Value("string"), "source": Value("string")})
_TEXT_FEATURES = Features({"text": Value("string")})
_TEXT_TYPES = (Value("string"), Value("large_string"))
_HOW_TO_SPLIT = (
    " A file that is one JSON document, a list or an object over several lines, is not read, unlike by "
    "load_dataset('json'): write one object per line, with `jq -c '.[]' {path}` of a list, with `jq -c . {path}` of "
    "objects."
)
_HUB_NAME = re.compile(r"(?P<name>\w[\w.-]*(/\w[\w.-]*)?)(:(?P<configuration>[\w.-]+))?")


def load_documents(sources: Sequence[str | Path], *, text_field: str = "text", split: str = "train") -> Dataset:
    r"""Read documents from files, folders and datasets of the Hub, in the order given.

    A source is one of:

    * a `.jsonl`, `.jsonl.gz`, `.json` or `.json.gz` file: one JSON object, and so one document, per line;
    * any other file: UTF-8 text, one document, read as it is (`\r\n` is kept);
    * a folder: its `.txt`, `.md`, `.rst`, `.py`, `.jsonl`, `.jsonl.gz` files, at any depth, sorted by path;
    * where no such path exists, a dataset of the Hub as `name`, `owner/name` or `owner/name:configuration`.

    Blank lines and empty texts in JSON lines, empty texts in Hub datasets and empty files in a folder are not
    documents and are left out.

    Args:
        sources: Files, folders and datasets of the Hub.
        text_field: The field of JSON lines, or the column of a Hub dataset, that holds the text.
        split: The split of a Hub dataset.

    Returns:
        A dataset with the columns `text` and `source` (the file, or the Hub name), one row per document.

    Raises:
        FileNotFoundError: If a source is neither a file, nor a folder, nor a dataset that can be loaded.
        ValueError: If a source holds no text, is not UTF-8 (with the byte offset), is not JSON lines with
            `text_field` (with the line), or if there are no sources.
    """
    return concatenate_datasets([_load_source(each, text_field, split) for each in _checked(sources)])


def stream_documents(
    sources: Sequence[str | Path], *, text_field: str = "text", split: str = "train"
) -> IterableDataset:
    """Read the documents of `load_documents` one at a time, as they are needed: sources may be larger than memory.

    Only a document at a time is held, so a file that is one document must fit into memory; JSON lines need not.

    Returns:
        A dataset with the column `text`, in the order of `load_documents`. Its `state_dict` holds the position of
        the next document.

    Raises:
        FileNotFoundError: As of `load_documents`.
        ValueError: As of `load_documents`; errors inside a file are found when it is read.
    """
    return concatenate_datasets([_stream_source(each, text_field, split) for each in _checked(sources)])


def _checked(sources: Sequence[str | Path]) -> Sequence[str | Path]:
    if isinstance(sources, str | Path):
        raise ValueError(f"sources = {str(sources)!r} is a single source: give a list, [{str(sources)!r}].")
    if not sources:
        raise ValueError("sources is empty: give at least one file, folder or Hub dataset.")
    return sources


def _load_source(source: str | Path, text_field: str, split: str) -> Dataset:
    files = _files(source)
    if files is None:
        name, texts = _hub_texts(str(source), text_field, split)
        if len(texts) == 0:
            raise ValueError(f"{name}, split {split!r}: no documents; every text in it is empty.")
        return texts.add_column("source", [name] * len(texts)).cast(_DOCUMENT_FEATURES)
    documents = [(text, str(path)) for path in files for text in _read_file(path, text_field)]
    if not documents:
        raise ValueError(f"{source}: no documents; every text in it is empty.")
    texts, paths = zip(*documents, strict=True)
    # Texts in datasets are UTF-8, and names of files need not be.
    names = [path.encode(errors="surrogateescape").decode(errors="backslashreplace") for path in paths]
    return Dataset.from_dict({"text": texts, "source": names}, features=_DOCUMENT_FEATURES)


def _stream_source(source: str | Path, text_field: str, split: str) -> IterableDataset:
    files = _files(source)
    if files is None:
        return _hub_texts(str(source), text_field, split, streaming=True)[1].cast(_TEXT_FEATURES)
    if not files:
        raise ValueError(f"{source}: no documents; every text in it is empty.")
    for path in files:
        path.open("rb").close()  # an unreadable file must be found before hours of training
    names = [str(path) for path in files]
    return IterableDataset.from_generator(
        _generate_texts, features=_TEXT_FEATURES, gen_kwargs={"files": names, "text_field": text_field}
    )


def _generate_texts(files: list[str], text_field: str) -> Iterator[dict[str, str]]:
    for file in files:
        for text in _read_file(Path(file), text_field):
            yield {"text": text}


def _files(source: str | Path) -> list[Path] | None:
    """Return the files of a source, or `None` if it is a dataset of the Hub."""
    path = Path(source)
    if path.is_dir():
        paths = sorted(path.rglob("*"))
        files = [each for each in paths if each.name.endswith(FOLDER_SUFFIXES) and each.is_file()]
        if not files:
            suffixes = ", ".join(FOLDER_SUFFIXES)
            raise ValueError(f"{path}: no files that end in {suffixes}; name files of other kinds one by one.")
        return [each for each in files if each.stat().st_size > 0]
    if path.is_char_device():
        raise ValueError(f"{source} is a device, which may have no end: give a file, a folder or a pipe.")
    if path.exists():
        return [path]
    is_hub_name = isinstance(source, str) and _HUB_NAME.fullmatch(source)
    if not is_hub_name or path.name.endswith((*FOLDER_SUFFIXES, *JSON_LINES_SUFFIXES)):
        raise FileNotFoundError(f"{source}: no such file or folder.")
    return None


def _read_file(path: Path, text_field: str) -> Iterator[str]:
    """Yield the documents of a file; lines of JSON are read one by one."""
    try:
        with gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb") as opened:
            file = cast(BinaryIO, opened)
            if path.name.lower().endswith(JSON_LINES_SUFFIXES):
                yield from _read_json_lines(path, file, text_field)
            else:
                yield decode(path, file.read())
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is not a complete gzip file: {error}.") from error


def _read_json_lines(path: Path, file: BinaryIO, text_field: str) -> Iterator[str]:
    offset, is_first = 0, True
    for number, line in enumerate(file, start=1):
        text = decode(path, line, offset)
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


def decode(path: str | Path, data: bytes, offset: int = 0) -> str:
    """Return the text of a file, or of a part of it.

    Args:
        path: Name of the file, for errors.
        data: Its bytes.
        offset: Bytes of the file before them.

    Raises:
        ValueError: If there are no bytes, or they are not UTF-8.
    """
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


def _hub_texts(source: str, text_field: str, split: str, **options: bool) -> tuple[str, Any]:
    """Return the name of a dataset of the Hub, and its texts in the column `text`."""
    found = _HUB_NAME.fullmatch(source)
    assert found is not None
    name = found["name"]
    try:
        dataset = load_dataset(name, found["configuration"], split=split, **options)
        if dataset.features is None:  # some formats of a stream show their columns in the first row only
            dataset = dataset.cast(Dataset.from_list([next(iter(dataset))]).features)
    except Exception as error:  # datasets has errors of its own, and what it loads raises any
        kind = FileNotFoundError if isinstance(error, OSError) else ValueError
        raise kind(
            f"{name!r} is neither a file or folder here, nor a Hub dataset that could be loaded: {plain(error)}"
        ) from error
    features = dataset.features
    if features.get(text_field) not in _TEXT_TYPES:
        raise ValueError(
            f"{name}: {text_field!r} is not a column of text. The columns are {features}; choose one with text_field."
        )
    texts = dataset.select_columns(text_field).rename_column(text_field, "text")
    return name, texts.filter(lambda row: bool(row["text"]))
