"""README keeps its word: its code runs, and its table is the one on record."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.forks import LIBRARIES
from helpers.rope_models import rope_model

from lex_hf.reproduce import report
from lex_hf.reproduce.extrapolation import Extrapolation

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def demo_table() -> str:
    """The demo's table in Markdown, from the results that a run of the demo left."""
    curves = json.loads((ROOT / "notebooks/demo/results.json").read_text())["perplexity"]
    rows = [["length", *curves], ["---:"] * (1 + len(curves))]
    rows += [[length, *(f"{curve[length]:.3f}" for curve in curves.values())] for length in curves["xPos"]]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def comparison() -> Extrapolation:
    """The comparison of schemes, from the results that its command left."""
    record = json.loads((ROOT / "notebooks/demo/extrapolation.json").read_text())
    curves = {
        system: {int(length): values for length, values in curve.items()}
        for system, curve in record["perplexity"].items()
    }
    return Extrapolation(record["steps"], record["seeds"], curves)


def zoo_table() -> str:
    """Perplexity of the checkpoint, from the record of its card."""
    record = json.loads((ROOT / "model_cards/lex-books-3m/record.json").read_text())
    lengths = list(record["evaluation"]["books"])
    rows = [["texts", *lengths], ["---", *["---:"] * len(lengths)]]
    for name, curve in record["evaluation"].items():
        rows.append([name, *(f"{curve[length]['perplexity']:.2f}" for length in lengths)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def reproduced_table() -> str:
    """The first table of the report on the LEX paper's Table 2."""
    folder = ROOT / "notebooks/reproduction/books/lex-table2"
    return next(block for block in (folder / "report.md").read_text().split("\n\n") if block.startswith("| system"))


def record_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "record.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("record", "table"),
    [
        ("model_cards/lex-books-3m/record.json", zoo_table),
        ("notebooks/reproduction/books/lex-table2/record.json", reproduced_table),
        ("notebooks/demo/results.json", demo_table),
        ("notebooks/demo/extrapolation.json", lambda: comparison().markdown()),
    ],
)
def test_the_tables_are_those_on_record(record: str, table: Callable[[], str]) -> None:
    begin, end = f"<!-- table: {record} -->\n", "<!-- end of table -->"
    assert README.split(begin)[1].split(end)[0].strip() == table().strip()


@pytest.mark.parametrize("folder", sorted(ROOT.glob("notebooks/reproduction/*/*/")), ids=lambda path: path.name)
def test_reports_are_those_of_their_records(folder: Path) -> None:
    assert (folder / "report.md").read_text(encoding="utf-8") == report.render(record_of(folder))
    for picture in re.findall(r"!\[.*?\]\((.*?)\)", (folder / "report.md").read_text(encoding="utf-8")):
        assert (folder / picture).is_file()


def test_the_schemes_behave_as_published() -> None:
    means = comparison().means()
    for system, curve in means.items():
        scheme, is_blockwise = system.removesuffix(" + BCA"), system.endswith(" + BCA")
        if scheme == "learned":
            assert max(curve) == 128
        elif is_blockwise and scheme in ("xpos", "rope"):
            values = list(curve.values())
            assert values == sorted(values, reverse=True), system
        elif not is_blockwise and scheme in ("rope", "sinusoidal"):
            assert curve[2048] > 1.5 * curve[128], system
        elif scheme == "alibi" or (is_blockwise and scheme in ("t5", "kerple", "sandwich", "smoothed_sandwich")):
            assert curve[2048] < 1.02 * curve[128], system
        elif scheme in ("t5", "kerple", "sandwich", "smoothed_sandwich"):
            assert curve[256] < curve[128], system  # beyond that, T5 rises in the paper, too


def test_the_record_shows_what_readme_says() -> None:
    results = json.loads((ROOT / "notebooks/demo/results.json").read_text())
    for system in ("xPos + BCA", "RoPE + BCA"):
        values = list(results["perplexity"][system].values())
        assert values == sorted(values, reverse=True)
    for system, least in (("xPos", 1.05), ("RoPE", 3.0)):
        curve = results["perplexity"][system]
        assert curve["2048"] > least * curve["128"]
    assert results["stream_tokens"] >= 50_000
    assert results["generated_tokens"] == 2000
    assert {*results["cache_bytes"].values()} == {results["generation_cache_bytes"]}


@pytest.mark.processes
def test_the_code_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 8
    rope_model(attention="sdpa").save_pretrained(tmp_path / "my_llama")
    (tmp_path / "model_cards").symlink_to(ROOT / "model_cards")
    (tmp_path / "book.txt").write_text("In a hole in the ground there lived a test. " * 300)
    (tmp_path / "readme.py").write_text("\n".join(blocks), encoding="utf-8")
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home")}
    result = LIBRARIES.run("readme.py", cwd=tmp_path, env=environment)
    assert result.returncode == 0, result.stderr
    assert re.search(rf"\d+ tokens read, {2 * 4 * 256 * 224 * 4} bytes of cache", result.stdout)
    assert (tmp_path / "my_model/model.safetensors").is_file()
