"""Models and tokenizers in a folder of their own, which appears only when it is whole."""

from pathlib import Path
from typing import Any

from lex_hf.errors import plain
from lex_hf.records import whole_folder


def save_pretrained(folder: Path, *parts: Any) -> None:
    """Save models, tokenizers and whatever else has `save_pretrained` in one folder, which is new or empty.

    Raises:
        OSError: If they cannot be written; nothing is left of them.
    """
    try:
        with whole_folder(folder) as partial:
            for part in parts:
                part.save_pretrained(partial)
    except Exception as error:  # of a full disk, tokenizers and safetensors raise errors of their own
        raise OSError(f"{folder} cannot be written, nothing is left of it: {plain(error)}") from error
