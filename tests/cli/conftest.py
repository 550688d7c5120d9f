"""A tiny model and texts for commands."""

from pathlib import Path

import pytest
from helpers.commands import TEXT
from helpers.models import tiny_model

from lex_hf.data.tokenizers import byte_tokenizer


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model(vocab_size=257, bos_token_id=256, eos_token_id=256, pad_token_id=256).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def texts(tmp_path: Path) -> list[Path]:
    """Three short texts, as files."""
    words, paths = TEXT.split(), [tmp_path / f"{start}.txt" for start in range(3)]
    for start, path in enumerate(paths):
        path.write_text(" ".join(words[start : start + 12]))
    return paths
