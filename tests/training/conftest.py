"""Texts, and a training that was interrupted."""

import shutil
from pathlib import Path

import pytest
from helpers.commands import TEXT
from helpers.trainings import TEXTS, interrupt, write_lines


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def corpus(tmp_path: Path) -> list[Path]:
    return [write_lines(tmp_path / "corpus.jsonl", TEXTS["text"])]


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("interrupted")
    interrupt(folder)
    return folder


@pytest.fixture
def copied(interrupted: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(interrupted, tmp_path / "out"))
