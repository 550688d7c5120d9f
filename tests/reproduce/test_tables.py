"""What the tables are: systems, printed figures, scales, and the models they need."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.experiments import toy_request

from lex_hf import LexConfig
from lex_hf.model.positions_lex import SCHEMES
from lex_hf.reproduce import models, presets, published, tables
from lex_hf.reproduce.running import Plan, Request
from lex_hf.reproduce.tables import System
from lex_hf.reproduce.tiny import TRAINING_LENGTH, tiny_config


@pytest.mark.parametrize("name", tables.TABLES)
@pytest.mark.parametrize("preset", presets.PRESETS)
def test_every_table_can_be_planned(name: str, preset: str, tmp_path: Path) -> None:
    table = tables.find(name)
    plan = Plan(Request(name, preset, tmp_path, seeds=(0,)))
    printed = published.load(name)
    assert table.printed_length == printed.training_length
    rows = {row for corpus in printed.values.values() for row in corpus}
    columns = {column for corpus in printed.values.values() for row in corpus.values() for column in row}
    assert rows <= {system.name for system in table.systems}
    assert columns <= set(table.column_names)
    places = {(system.name, column) for system in table.systems for column in table.column_names}
    named = [place for claim in table.claims for link in claim.links for place in (link.left, link.right)]
    assert {place for place in named if isinstance(place, tuple)} <= places
    assert table.reference is None or table.reference in plan.configs


def test_published_figures_are_the_papers() -> None:
    table2 = published.load("lex-table2").values
    assert table2["PG22"]["LEX Transformer"] == {
        "256": 33.18, "512": 29.11, "1024": 26.59, "2048": 25.53, "4096": 25.07, "8192": 24.89
    }  # fmt: skip
    assert table2["QMSum"]["Transformer"]["8192"] == 10781.38
    assert published.load("lex-table3").values["texts not named"]["LEX without BCA"]["2048"] == 0.54
    assert published.load("lex-table5").values["PG22"]["xPos + Sliding Window"]["8192"] == 24.61
    assert published.load("lex-table6").values["NarrativeQA"]["Alibi"]["4096"] == 12.09
    one = published.load("sandwich-table1").values
    assert one["ArXiv"]["w = 320"]["1024"] == 178
    assert one["OpenWebText2"]["h = 6"]["8192"] == 165
    assert published.load("sandwich-table2").values["OpenWebText2"]["Δ = 6, longer training"]["2048"] == 15.2
    three = published.load("sandwich-table3").printed
    assert three["GitHub"]["T5"]["512"] == "2.76 ± 0.14*"
    assert three["ArXiv"]["Rotary"]["8192"] == "111†"
    assert published.load("sandwich-table5").values["GitHub"]["Sandwich"]["16384"] == 2.81
    assert published.load("sandwich-figure4").values["ArXiv"]["w = 160"]["ERF / l"] == 2


def test_corpora_stand_for_the_papers() -> None:
    printed = published.load("sandwich-table3")
    assert [printed.corpus_for(name) for name in ("openwebtext2", "python", "letters")] == [
        "OpenWebText2",
        "GitHub",
        "ArXiv",
    ]
    assert published.load("lex-figure2").corpus_for("python") is None


@pytest.mark.parametrize("scheme", SCHEMES)
def test_tiny_models_are_those_of_the_other_experiments(scheme: str) -> None:
    tiny = presets.preset("tiny", tables.LEX)
    system = System("x", {"position_embedding_type": scheme})
    config = tiny.config(tables.find("lex-table2"), system)
    assert config.to_dict() == tiny_config(scheme).to_dict()
    assert tiny.length == TRAINING_LENGTH


def test_the_papers_models_have_their_sizes() -> None:
    medium = presets.preset("paper", tables.LEX)
    system = System("x", {"position_embedding_type": "xpos"})
    table = tables.find("lex-table2")
    given = medium.config(table, system)
    assert {name: getattr(given, name) for name in ("hidden_size", "num_hidden_layers", "training_length")} == {
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "training_length": 1024,
    }
    assert given.xpos_scale_base == LexConfig().xpos_scale_base
    assert medium.examples_per_step(1024) == 512
    job = Plan(Request("sandwich-table3", "paper", Path("nowhere"), seeds=(0,))).jobs[0][0]
    assert round(job.parameters() / 1e6) == 162
    assert job.tokens == 50_000 * 32 * 512
    small = Plan(Request("lex-table2", "small", Path("nowhere"), seeds=(0,))).jobs[0][0]
    assert 3e6 <= small.parameters() <= 10e6


@pytest.mark.parametrize("by_row", [False, True])
def test_the_scale_small_is_in_bfloat16_where_that_is_no_loop(monkeypatch: pytest.MonkeyPatch, by_row: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(presets, "multiplies_by_row", lambda dtype: by_row)
    assert ("bf16" in presets.preset("small", tables.LEX).training) is not by_row


def test_windows_and_lengths_scale_and_windows_are_trained(tmp_path: Path, texts: dict[str, Any]) -> None:
    plan = Plan(toy_request("sandwich-table2", tmp_path, texts, seeds=(0,)))
    assert plan.to_dict()["lengths"] == [512, 1024, 2048]
    window, slopes = plan.configs["w = 160, longer training"], plan.configs["Δ = 6, longer training"]
    assert (window.attention_pattern, window.sliding_window, window.training_length) == ("sliding", 40, 256)
    assert (slopes.attention_pattern, slopes.alibi_slope_shift, slopes.training_length) == ("blockwise", 6, 512)
    assert plan.job(plan.table.systems[0], 0).tokens == plan.job(plan.table.systems[2], 0).tokens


def test_systems_share_models_where_only_evaluation_differs(tmp_path: Path, texts: dict[str, Any]) -> None:
    table5 = Plan(toy_request("lex-table5", tmp_path, texts))
    assert [systems for _, systems in table5.jobs][-1] == ["xPos", "xPos + BCA", "xPos + Sliding Window"]
    table2 = Plan(toy_request("lex-table2", tmp_path, texts, seeds=(1,), also=("sandwich", "kerple+bca")))
    names = {job.name for job, _ in table5.jobs}
    assert [job.name in names for job, _ in table2.jobs] == [True, True, True, True, False, False]
    assert list(table2.configs)[-2:] == ["sandwich", "kerple + bca"]


def test_fields_are_set_in_systems_that_do_not_have_their_own(tmp_path: Path, texts: dict[str, Any]) -> None:
    fields = ("initializer_range=0.1", "xpos_scale_base=7", "xpos_scale=none")
    plan = Plan(toy_request("lex-table4", tmp_path, texts, fields=fields))
    assert all(config.initializer_range == 0.1 for config in plan.configs.values())
    assert all(config.xpos_scale_base == 7 for config in plan.configs.values())  # not what the length gives
    assert plan.configs["Scalar ζ"].xpos_scale == "scalar"
    assert plan.configs["LEX"].xpos_scale == "none"
    before = {job.name for job, _ in Plan(toy_request("lex-table4", tmp_path, texts)).jobs}
    assert not before & {job.name for job, _ in plan.jobs}


def test_the_identity_of_a_model_is_all_that_decides_its_weights() -> None:
    job = models.Job(tiny_config("xpos"), {"max_steps": 10}, 16, 0, "bytes", "data")
    others = [
        replace(job, config=tiny_config("rope")),
        replace(job, config=tiny_config("xpos", xpos_gamma=0.5)),
        replace(job, training={"max_steps": 11}),
        replace(job, examples_per_step=8),
        replace(job, seed=1),
        replace(job, tokenizer="bpe:300"),
        replace(job, data="other data"),
    ]
    assert len({each.name for each in (job, *others)}) == len(others) + 1
    assert replace(job, config=tiny_config("xpos", chunked_loss=True, use_cache=False)).name == job.name
