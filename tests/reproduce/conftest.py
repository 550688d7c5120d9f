"""Toy experiments, and texts for them."""

from pathlib import Path
from typing import Any

import pytest
from helpers.experiments import toy_preset

from lex_hf.reproduce import presets


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(presets.PRESETS, "tiny", toy_preset)


@pytest.fixture
def texts(tmp_path: Path) -> dict[str, Any]:
    """A text to train on and two to test on, each longer than 32 l."""
    for name in ("train", "one", "two"):
        words = " ".join(f"{name} {number} and {number * number}," for number in range(150))
        (tmp_path / f"{name}.txt").write_text(words)
    tests = [f"books={tmp_path / 'one.txt'}", f"books={tmp_path / 'two.txt'}"]
    return {"data": [str(tmp_path / "train.txt")], "tests": tests}
