"""Texts that people give: checked, read from files, and an example."""

import pydoc_data.topics
from pathlib import Path

from lex_hf.data.documents import decode

MOST_CHARACTERS = 1_000_000
_BYTES_OF_A_CHARACTER = 4  # in UTF-8, at most
_EXAMPLE_CHARACTERS = 12_000


def check_text(text: str, most: int = MOST_CHARACTERS) -> None:
    """Check the length of a text.

    Raises:
        ValueError: If it is empty, or has more characters than allowed; the message says how many there are.
    """
    if not text.strip():
        raise ValueError("There is no text: type or paste one, open a file, or take the example.")
    if len(text) > most:
        raise ValueError(
            f"The text has {len(text):,} characters, and this page takes {most:,}: cut it, or read it with lex-hf "
            "evaluate, which has no limit."
        )


def text_of_file(path: str | Path, most: int = MOST_CHARACTERS) -> str:
    """Return the text of a file.

    Raises:
        ValueError: If it is not UTF-8 text, is empty or too long.
    """
    path = Path(path)
    if path.stat().st_size > _BYTES_OF_A_CHARACTER * most:  # it need not be read to know that
        raise ValueError(
            f"{path.name} has {path.stat().st_size:,} bytes, and this page takes {most:,} characters: cut it, or "
            "read it with lex-hf evaluate, which has no limit."
        )
    text = decode(path.name, path.read_bytes())
    check_text(text, most)
    return text


def example() -> str:
    """Return English text that comes with Python: a part of its documentation."""
    return str(pydoc_data.topics.topics["types"])[:_EXAMPLE_CHARACTERS]
