"""An earlier report is replaced only by one that has all that it has."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from accelerate import PartialState
from helpers.experiments import run_experiment, toy_request
from rich.console import Console

from lex_hf.records import write_json
from lex_hf.reproduce import everything
from lex_hf.reproduce.earlier import check_nothing_is_lost
from lex_hf.reproduce.running import Plan, check_output, made

_OLD: dict[str, Any] = {
    "preset": {"length": 128, "training": {"max_steps": 1000}, "fields": {}, "tokens_at_once": 8192},
    "data": {"sha256": "d"},
    "tests": {"books": {"sha256": "t"}},
    "seeds": [0, 1],
    "systems": {"LEX": {"model": {"xpos_rotation": True}, "pattern": "blockwise"}},
}


def _changed(**parts: Any) -> dict[str, Any]:
    return {**deepcopy(_OLD), **parts}


def _record(folder: Path, record: Any) -> Path:
    write_json(folder / "record.json", record)
    return folder / "record.json"


@pytest.mark.parametrize(
    "new",
    [
        _changed(),
        _changed(seeds=(1, 0, 2)),
        _changed(tests={**_OLD["tests"], "meetings": {"sha256": "m"}}),
        _changed(systems={**_OLD["systems"], "shaw": {"model": {}, "pattern": "full"}}),
        _changed(preset={**_OLD["preset"], "tokens_at_once": 1}),
    ],
    ids=["the same", "further seed", "further texts", "further system", "no result depends on it"],
)
def test_a_report_that_has_all_of_it_replaces_an_earlier_one(new: dict[str, Any], tmp_path: Path) -> None:
    check_nothing_is_lost(_record(tmp_path, _OLD), made, new)


def test_where_there_is_no_report_nothing_is_lost(tmp_path: Path) -> None:
    check_nothing_is_lost(tmp_path / "record.json", made, _OLD)


@pytest.mark.parametrize("foreign", [[], {}, "text", {**_OLD, "systems": []}])
def test_what_is_no_record_is_not_replaced(foreign: Any, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"record\.json is not the record of such a report\. Give another --output, or --overwrite"
    ):
        check_nothing_is_lost(_record(tmp_path, foreign), made, _OLD)


@pytest.mark.parametrize(
    ("new", "lost"),
    [
        (_changed(preset={**_OLD["preset"], "length": 64}), "length=128"),
        (_changed(preset={**_OLD["preset"], "training": {"max_steps": 10}}), "max_steps=1000"),
        (_changed(preset={**_OLD["preset"], "fields": {"rope_theta": 1.0}}), "rope_theta=default"),
        (_changed(data={"sha256": "other"}), "sha256 of the training texts=d"),
        (_changed(tests={"books": {"sha256": "other"}}), "the test texts books"),
        (_changed(tests={}), "the test texts books"),
        (_changed(seeds=[1, 2]), "seed 0"),
        (_changed(seeds=[2]), "seed 0, seed 1"),
        (_changed(systems={}), "the system LEX"),
        (_changed(systems={"LEX": {"model": {}, "pattern": "blockwise"}}), "the system LEX"),
    ],
)
def test_what_would_be_lost_is_said(new: dict[str, Any], lost: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"The report in {tmp_path} has {lost}, which .*--output, or --overwrite"):
        check_nothing_is_lost(_record(tmp_path, _OLD), made, new)


def test_a_table_of_other_settings_replaces_a_report_only_if_it_is_told_to(
    tmp_path: Path, toy: None, texts: dict[str, Any]
) -> None:
    record = tmp_path / "lex-figure1-tiny/record.json"
    run_experiment("lex-figure1", tmp_path, texts, seeds=(0,))
    again = Plan(toy_request("lex-figure1", tmp_path, texts, seeds=(0,)))
    PartialState._reset_state()
    check_output(again)
    assert not PartialState._shared_state  # it would be of this process alone, before others are joined
    before, models = record.read_bytes(), sorted((tmp_path / "models").iterdir())
    with pytest.raises(ValueError, match="has rope_theta=default, which this one would not have"):
        run_experiment("lex-figure1", tmp_path, texts, seeds=(0,), fields=["rope_theta=5"])
    several = toy_request("lex-figure2,lex-figure1", tmp_path, texts, seeds=(1,))
    with pytest.raises(ValueError, match="has seed 0, which"):
        everything.run_several(several, console=Console(quiet=True))
    assert record.read_bytes() == before
    assert sorted((tmp_path / "models").iterdir()) == models
    assert not (tmp_path / "lex-figure2-tiny").exists()  # all are checked before the first is made
    run_experiment("lex-figure1", tmp_path, texts, seeds=(0,), fields=["rope_theta=5"], overwrite=True)
    assert json.loads(record.read_text())["preset"]["fields"] == {"rope_theta": 5.0}
