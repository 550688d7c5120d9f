"""The notebooks were run from top to bottom, without errors, and are small. `make docs-test` runs them again."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted(ROOT.glob("notebooks/*.ipynb"))
KIB = 1024


def cells(path: Path) -> list[dict[str, Any]]:
    return [each for each in json.loads(path.read_text(encoding="utf-8"))["cells"] if each["cell_type"] == "code"]


def test_they_are_all_here() -> None:
    assert [path.stem for path in NOTEBOOKS] == [
        "blockwise",
        "extrapolation",
        "finetune",
        "measurements",
        "quickstart",
        "recall",
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_was_run_in_order_without_errors(path: Path) -> None:
    code = cells(path)
    assert [each["execution_count"] for each in code] == list(range(1, len(code) + 1))
    outputs = [output for each in code for output in each["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert any("image/png" in output.get("data", {}) for output in outputs)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_small_and_names_no_machine(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.encode()) < 700 * KIB
    assert "/home/" not in text
    assert str(Path.home()) not in text
    assert "/tmp/" not in text
    assert "site-packages" not in text


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_files_that_it_names_are_there(path: Path) -> None:
    named = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        pattern = r'"([^"\s]*/[^"\s]*)"' if cell["cell_type"] == "code" else r"\]\(([^)#:]+)\)"
        named += re.findall(pattern, "".join(cell["source"]))
    made_there = "measured/"
    assert not [each for each in named if not each.startswith(made_there) and not (path.parent / each).exists()]
