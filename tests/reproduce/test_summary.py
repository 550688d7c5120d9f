"""All tables in one go, and the page about them."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.experiments import toy_request
from rich.console import Console
from typer.testing import CliRunner

from lex_hf.cli.commands import app
from lex_hf.reproduce import everything, summary
from lex_hf.reproduce.tables import TABLES

SOME = ("lex-figure2", "sandwich-figure6", "sandwich-figure7")


@pytest.fixture
def some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(everything, "TABLES", {name: TABLES[name] for name in SOME})


def run_all(output: Path, texts: dict[str, Any]) -> tuple[dict[str, Any], str]:
    printed = io.StringIO()
    return everything.run_several(toy_request("all", output, texts), console=Console(file=printed)), printed.getvalue()


def test_all_tables_and_the_page(tmp_path: Path, toy: None, some: None, texts: dict[str, Any]) -> None:
    records, printed = run_all(tmp_path / "output", texts)
    assert tuple(records) == SOME
    page = (tmp_path / "output/summary.md").read_text(encoding="utf-8")
    assert "not made yet" not in page
    for name in SOME:
        assert f"({name}-tiny/report.md)" in page
        assert (tmp_path / "output" / f"{name}-tiny" / "report.md").is_file()
    for picture in page.split("](")[1:]:
        if (file := picture.split(")")[0]).endswith(".png"):
            assert (tmp_path / "output" / file).is_file()
    assert printed.count("is trained") == 2 * (1 + 2)  # two seeds of the systems of two figures
    again, printed = run_all(tmp_path / "output", texts)
    assert "is trained" not in printed
    assert [each["results"] for each in again.values()] == [each["results"] for each in records.values()]
    assert (tmp_path / "output/summary.md").read_text(encoding="utf-8") == page


def test_the_page_is_also_about_what_was_made_there_in_the_same_way(
    tmp_path: Path, toy: None, some: None, texts: dict[str, Any]
) -> None:
    run_all(tmp_path, texts)
    page = (tmp_path / "summary.md").read_text(encoding="utf-8")
    several = toy_request("sandwich-figure6,lex-figure2", tmp_path, texts)
    everything.run_several(several, console=Console(quiet=True))
    assert (tmp_path / "summary.md").read_text(encoding="utf-8") == page
    other = replace(several, fields=["rope_theta=5"], overwrite=True)
    everything.run_several(other, console=Console(quiet=True))
    page = (tmp_path / "summary.md").read_text(encoding="utf-8")
    assert "sandwich-figure6-tiny/" in page
    assert "sandwich-figure7-tiny/" not in page


def test_a_page_of_a_part_says_so(tmp_path: Path, toy: None, some: None, texts: dict[str, Any]) -> None:
    records, _ = run_all(tmp_path / "output", texts)
    assert "**13 of 16 are not made yet.**" in summary.render({f"{name}-tiny": records[name] for name in SOME}, 13)


def test_the_page_counts_and_shows_what_does_not_agree() -> None:
    def part(verdict: str) -> dict[str, Any]:
        tested = {"difference": 0.1, "interval": [0.05, 0.15], "p_value": 0.01, "pairing": "seeds", "pairs": 3}
        return {"left": ["a", "64"], "relation": "<", "right": ["b", "64"], "verdict": verdict, "bound": None} | (
            tested | {"document_p_value": None, "documents": 0}
        )

    def claim(text: str, verdict: str) -> dict[str, Any]:
        return {"kind": "claim", "text": text, "verdict": verdict, "parts": [part(verdict)]}

    order = {"kind": "order", "text": "order", "verdict": "disagrees", "parts": [part("agrees"), part("disagrees")]}
    cell = {"mean": 0.5, "seed_interval": None, "document_interval": None, "mark": ""}
    record: dict[str, Any] = {
        "published": {
            "where": "Table 9", "id": "arXiv:0", "title": "Some numbers", "note": "Mind them.",
            "training_length": 64, "printed": {"PG22": {"a": {"64": "26.59"}}},
        },
        "perplexity": False, "training_length": 32, "lengths": {"64": 32}, "columns": ["64"], "by_length": True,
        "systems": {"a": {"group": ""}, "b": {"group": ""}}, "seeds": [0, 1, 2],
        "results": {
            "books": {
                "corpus": "PG22", "cells": {"a": {"64": cell}, "b": {"64": cell}},
                "statements": [claim("a beats b at {64}", "disagrees"), claim("a is fine", "agrees"), order],
            }
        },
    }  # fmt: skip
    page = summary.render({"table9": record})
    row = "| [Table 9 of arXiv:0](table9/report.md) | Some numbers | 3 | Books, beside PG22 | 1 agree, 1 disagree |"
    assert f"{row} 1 agree, 1 disagree |  |" in page
    unanswered = page.split("## What does not agree")[1].split("## Table 9")[0]
    assert (
        "- books, **disagrees**: a beats b at 32\n  - a at 32 < b at 32: difference +0.1 [+0.05, +0.15], p"
        in unanswered
    )
    assert "a is fine" not in unanswered
    assert "Mind them." in unanswered
    assert "| *as printed* | *26.59* |" in page


def test_the_command_plans_all(tmp_path: Path, toy: None, texts: dict[str, Any]) -> None:
    files = ["--data", texts["data"][0], *(word for each in texts["tests"] for word in ("--test", each))]
    common = ["reproduce", "all", *files, "--output", str(tmp_path / "output"), "--seeds", "0", "--dry-run"]
    planned = CliRunner().invoke(app, common)
    assert planned.exit_code == 0, planned.output
    assert "tables share models: 29 are to be trained" in " ".join(planned.output.split())
    assert list(json.loads(CliRunner().invoke(app, [*common, "--json"]).stdout)) == list(TABLES)
    refused = CliRunner().invoke(app, [*common, "--also", "sandwich"])
    assert refused.exit_code == 1
    assert "--also sandwich is for one table, not for all" in " ".join(refused.stderr.split())


def test_some_tables_are_named(tmp_path: Path, toy: None, texts: dict[str, Any]) -> None:
    request = toy_request("sandwich-figure7, lex-figure2", tmp_path, texts)
    assert [plan.table.name for plan in everything.plans(request)] == ["sandwich-figure7", "lex-figure2"]
    for wrong, said in (
        ("lex-figure2,lex-figure2", "named twice"),
        ("lex-figure2,lex-figure3", "'lex-figure3' cannot be one of several"),
        ("all,lex-figure2", "'all' cannot be one of several"),
        ("lex-figure2,", "'' cannot be one of several"),
    ):
        with pytest.raises(ValueError, match=said):
            everything.plans(toy_request(wrong, tmp_path, texts))
