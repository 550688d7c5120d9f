"""The command `lex-hf reproduce`."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lex_hf.cli.commands import app
from lex_hf.reproduce import report


def _lex(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["reproduce", *map(str, arguments)])


def test_the_command_plans_and_runs(tmp_path: Path, toy: None, texts: dict[str, Any]) -> None:
    files = ["--data", texts["data"][0], *(word for each in texts["tests"] for word in ("--test", each))]
    common = ["sandwich-figure6", *files, "--output", tmp_path / "output", "--seeds", "3,4", "--steps", 2]
    planned = _lex(*common, "--dry-run")
    assert planned.exit_code == 0, planned.output
    assert "2 of 2 models are to be trained" in " ".join(planned.output.split())
    assert not (tmp_path / "output").exists()
    done = _lex(*common, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["seeds"] == [3, 4]
    plan = json.loads(_lex(*common, "--dry-run", "--json").stdout)
    assert [model["state"] for model in plan["models"]] == ["trained", "trained"]
    assert plan["models"][0]["tokens"] == 2 * 64
    assert plan["tests"][0]["documents"] == 2


@pytest.mark.parametrize("preset", ["tiny", "small"])  # small has no texts of its own, which the figure does not need
@pytest.mark.parametrize("tables", ["lex-figure2", "lex-table2,lex-figure2"])
def test_a_dry_run_tells_that_a_report_would_be_lost_after_the_list(
    tables: str, preset: str, tmp_path: Path, toy: None
) -> None:
    common = ["--output", tmp_path / "output", "--seeds", "0", "--preset", preset]
    assert _lex("lex-figure2", *common).exit_code == 0
    assert _lex(tables, *common, "--dry-run").exit_code == 0
    other = [tables, *common, "--set", "rope_theta=500", "--dry-run"]
    refused = _lex(*other)
    assert refused.exit_code == 1
    assert "to be trained" in " ".join(refused.stdout.split())
    assert "has rope_theta=default, which this one would not have" in " ".join(refused.stderr.split())
    assert _lex(*other, "--overwrite").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lex-table9"], "TABLE = 'lex-table9': it must be one of lex-table2"),
        (["lex-table2", "--preset", "huge"], "--preset huge: it must be one of tiny, small, paper"),
        (["lex-table2", "--preset", "small"], "--preset small needs texts to train on: give --data FILES"),
        (["lex-table2", "--data", __file__], "--data without --test"),
        (["lex-table2", "--seeds", "0,0"], "seeds = 0, 0: they must be different"),
        (["lex-table2", "--seeds", str(10**20)], "from 0 to 4294967295"),
        (["lex-table2", "--device", "cuda:3"], "device = 'cuda:3': torch finds"),
        (["lex-table2", "--seeds", "one"], "--seeds one: they must be whole numbers"),
        (["lex-table2", "--length", "33"], "--length 33: it must be even"),
        (["lex-table2", "--also", "rope+mca"], "also = 'rope+mca': after the plus sign comes bca or sliding"),
        (["lex-table2", "--also", "rope", "--also", "rope"], "a system is given twice"),
        (["lex-table2", "--set", "initialiser_range=1"], "no field of a recipe is called 'initialiser_range'"),
        (["lex-table2", "--set", "max_steps=5"], "--set takes the fields of LexConfig here"),
        (["lex-table2", "--set", "training_length=8"], "--set training_length: for a table, it is --length"),
        (["lex-table2", "--also", "absolute"], "position_embedding_type = 'absolute'"),
        (["lex-table2", "--tokenizer", "bpe:many"], "--tokenizer bpe:many: after bpe: comes the number of ids"),
    ],
)
def test_bad_requests_give_a_sentence(tmp_path: Path, toy: None, arguments: list[str], message: str) -> None:
    result = _lex(*arguments, "--output", tmp_path / "output")
    assert result.exit_code == 1
    assert message in " ".join(result.stderr.split())
    assert not (tmp_path / "output").exists()


@pytest.mark.parametrize("tables", ["sandwich-figure6", "lex-table2,sandwich-figure6"])
def test_texts_too_short_for_the_last_token_give_a_sentence(
    tables: str, tmp_path: Path, toy: None, texts: dict[str, Any]
) -> None:
    short, output = tmp_path / "short.txt", tmp_path / "output"
    short.write_text("too short")
    tests = [word for each in (*texts["tests"], f"notes={short}") for word in ("--test", each)]
    result = _lex(tables, "--data", texts["data"][0], *tests, "--output", output)
    assert result.exit_code == 1
    assert "No test text of notes has 128 tokens, the longest 9" in " ".join(result.stderr.split())
    assert not output.exists()  # before any model is trained


def test_a_report_that_cannot_be_written_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(report, "write_text", full)
    result = _lex("lex-figure2", "--output", tmp_path / "output", "--seeds", "0", "--quiet")
    assert result.exit_code == 1
    assert "No space left on device" in result.stderr
    assert "# Figure 2 of" in result.stderr


def test_an_output_that_is_a_file_fails_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "output").write_text("precious")
    for path in ("output", "output/below"):
        result = _lex("lex-figure2", "--output", tmp_path / path)
        assert (result.exit_code, "is a file, not a folder" in result.stderr) == (1, True)
    (tmp_path / "folder" / "lex-figure2-tiny" / "record.json").mkdir(parents=True)
    assert "record.json is a folder" in _lex("lex-figure2", "--output", tmp_path / "folder").stderr
    assert (tmp_path / "output").read_text() == "precious"
