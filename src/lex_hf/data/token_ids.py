"""Texts that are token ids already: JSON lines with `input_ids`, for models without a tokenizer."""

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

FIELD = "input_ids"
_SUFFIXES = (".jsonl", ".jsonl.gz")
_LARGEST_ID = 2**31


def load_token_ids(sources: Sequence[str | Path]) -> list[list[int]] | None:
    """Read token ids of files of JSON lines, one text in each line.

    Args:
        sources: As of [`load_documents`].

    Returns:
        The ids of each text; `None` if the sources hold texts, none of them token ids.

    Raises:
        ValueError: If some sources hold token ids and others texts, or a line does not hold a list of ids.
    """
    with_ids = [str(source) for source in sources if _begins_with_ids(Path(source))]
    if not with_ids:
        return None
    others = [str(source) for source in sources if str(source) not in with_ids]
    if others:
        raise ValueError(f"{with_ids[0]} holds token ids ({FIELD}) and {others[0]} texts: give files of one kind.")
    return [ids for source in sources for ids in _read(Path(source))]


def _begins_with_ids(path: Path) -> bool:
    if not (path.name.lower().endswith(_SUFFIXES) and path.is_file()):
        return False
    try:
        first = json.loads(next(_lines(path), (0, "null"))[1])
    except (ValueError, OSError, EOFError, zlib.error, RecursionError):  # whoever reads it as texts says what is wrong
        return False
    return isinstance(first, dict) and FIELD in first


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield numbers and contents of lines that are not blank."""
    with (
        gzip.open(path, "rt", encoding="utf-8")
        if path.suffix.lower() == ".gz"
        else path.open(encoding="utf-8") as file
    ):
        yield from ((number, line) for number, line in enumerate(file, start=1) if line.strip())


def _read(path: Path) -> Iterator[list[int]]:
    for number, line in _lines(path):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number} is not JSON: {error}.") from error
        ids = row.get(FIELD) if isinstance(row, dict) else None
        if not isinstance(ids, list) or not all(type(each) is int and 0 <= each < _LARGEST_ID for each in ids):
            raise ValueError(f"{path}, line {number}: the field {FIELD!r} must be a list of token ids, whole numbers.")
        yield ids
