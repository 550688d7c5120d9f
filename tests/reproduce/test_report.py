"""The report, from a record that is fixed."""

import math
from typing import Any

import pytest

from lex_hf.reproduce import report


def _record() -> dict[str, Any]:
    part = {"left": ["a", "2048"], "relation": "<", "right": ["a", "1024"], "bound": None}
    tested = {
        "difference": -0.1,
        "interval": [-0.2, 0.0],
        "p_value": 0.04,
        "pairing": "seeds",
        "pairs": 2,
        "document_p_value": 0.001,
        "documents": 8,
    }
    return {
        "published": {
            "where": "Table 9", "id": "arXiv:0", "paper": "On Tables", "title": "Some numbers", "note": "Mind them.",
            "training_length": 1024, "printed": {"PG22": {"a": {"1024": "26.59", "2048": "25.53*"}}},
        },
        "preset": {"name": "tiny"}, "measure": "chunked", "perplexity": True, "training_length": 128,
        "lengths": {"1024": 128, "2048": 256}, "columns": ["1024", "2048"], "by_length": True, "reference": "a",
        "systems": {"a": {"group": ""}, "b": {"group": ""}}, "seeds": [0, 1],
        "data": None, "tests": {}, "models": [], "command": "lex-hf reproduce table9", "created": "2024-01-01",
        "versions": {"python": "3.11"}, "seconds": {"training": 7.0, "all": 9.0},
        "hardware": {"machine": "arm", "system": "Linux", "threads": 2, "accelerators": [], "processes": 1},
        "results": {
            "books": {
                "corpus": "PG22",
                "cells": {
                    "a": {
                        "1024": {"mean": 0.0, "seed_interval": [-0.1, 0.1], "document_interval": [-1, 1], "mark": ""},
                        "2048": {"mean": 1.0, "seed_interval": None, "document_interval": None, "mark": ""},
                    },
                    "b": {"1024": {"mean": 800.0, "seed_interval": None, "document_interval": None, "mark": "†"}},
                },
                "curves": {"a": {}, "b": {}},
                "statements": [
                    {"text": "a falls to {2048}", "kind": "claim", "verdict": "agrees",
                     "parts": [{**part, **tested, "verdict": "agrees"}]},
                    {"text": "order of the systems at {2048}", "kind": "order", "verdict": "not significant",
                     "parts": [{**part, **tested, "verdict": "agrees"},
                               {**part, **tested, "p_value": 0.5, "verdict": "not significant"}]},
                ],
            }
        },
    }  # fmt: skip


def test_a_report_is_rendered_from_its_record() -> None:
    text = report.render(_record())
    assert text.splitlines()[0] == "# Table 9 of arXiv:0, at the scale `tiny`"
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert rows[:5] == [
        "| system | 128 (l) | 256 (2 l) |",
        "| --- | ---: | ---: |",
        "| a | 1.000 ± 0.100 | 2.718 |",
        "| *as printed* | *26.59* | *25.53\\** |",
        "| b | ∞† |  |",
    ]
    assert "| a | 0.368 to 2.718 |  |" in rows
    assert (
        "- **agrees**: a falls to 256 (ratio 0.9048 [0.8187, 1], p = 0.04 over 2 seeds, p = 0.001 over 8 documents)"
        in text
    )
    assert "- **not significant**: order of the systems at 256: 1 agree, 1 not significant" in text
    assert "  - left open: a at 256 < a at 128\n" in text
    assert "- 2 pairs of systems: 1 agree, 1 not significant" in text
    assert "`lex-hf reproduce table9`, 2024-01-01." in text
    assert "Mind them." in text


def test_seeds_that_all_differ_by_the_same_are_said_to_and_have_no_p_value() -> None:
    record = _record()
    (part,) = record["results"]["books"]["statements"][0]["parts"]
    part |= {"interval": [-0.1, -0.1 + 1e-17], "p_value": 0.0}
    expected = "(ratio 0.9048 [0.9048, 0.9048], the same in all 2 seeds, p = 0.001 over 8 documents)"
    assert expected in report.render(record)


@pytest.mark.parametrize("mixed", [False, True])
def test_mixed_precision_is_said(mixed: bool) -> None:
    model = {"name": "m", "systems": [], "parameters": 7, "steps": 2, "tokens": 64, "train_loss": 1.0, "seconds": 3.0}
    record = {**_record(), "models": [{**model, "identity": {"training": {"bf16": True} if mixed else {}}}]}
    assert ("mixed precision, with bfloat16" in report.render(record)) is mixed


@pytest.mark.parametrize(("count", "pictures"), [(6, ["books.png"]), (9, ["books-1.png", "books-2.png"])])
def test_many_systems_get_several_pictures(count: int, pictures: list[str]) -> None:
    record = _record()
    record["systems"] = {str(number): {"group": ""} for number in range(count)}
    cells = record["results"]["books"]["cells"]["a"]
    record["results"]["books"]["cells"] = dict.fromkeys(record["systems"], cells)
    assert list(report.pictures(record)) == pictures
    assert [f"]({name})" in report.render(record) for name in pictures] == [True] * len(pictures)


def test_the_reference_is_in_all_pictures() -> None:
    record = _record()
    record["systems"] = {name: {"group": ""} for name in ["a", *map(str, range(8))]}
    cells = record["results"]["books"]["cells"]["a"]
    record["results"]["books"]["cells"] = dict.fromkeys(record["systems"], cells)
    for figure in report.pictures(record).values():
        assert "a" in {line.get_label() for line in figure.axes[0].lines}
        assert figure.axes[1].get_ylabel() == "Difference from a (%)"


@pytest.mark.parametrize(("value", "shown"), [(math.nan, "NaN"), (math.inf, "∞"), (800.0, "∞"), (0.0, "1.000")])
def test_losses_that_are_not_finite_are_shown_as_what_they_are(value: float, shown: str) -> None:
    assert report._number(report._shown({"perplexity": True}, value)) == shown
