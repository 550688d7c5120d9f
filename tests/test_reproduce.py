"""The papers' tables made again at toy size: plans, training once, resumption, orders, reports."""

import io
import json
import math
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from typer.testing import CliRunner

from lex_hf import LexConfig
from lex_hf.cli import app
from lex_hf.perplexity import compute_perplexity, load_for_evaluation
from lex_hf.positions_lex import SCHEMES
from lex_hf.reproduce import models, presets, published, report, tables
from lex_hf.reproduce.corpora import segments
from lex_hf.reproduce.running import Plan, Request, run
from lex_hf.reproduce.statements import Cell, difference, document_difference, marks, statements
from lex_hf.reproduce.tables import Claim, System, Table
from lex_hf.resolution import measure_resolution
from lex_hf.tiny import TRAINING_LENGTH, tiny_config
from lex_hf.training import last_checkpoint

_TINY = presets.PRESETS["tiny"]
TOY = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}


def _toy(paper: str) -> presets.Preset:
    """The tiny preset, smaller: l = 32, 4 steps."""
    full = _TINY(paper)
    return replace(
        full,
        length=32,
        model={**full.model, **TOY},
        training={"max_steps": 4, "warmup_steps": 1, "learning_rate": 1e-2, "disable_tqdm": True},
        batch_tokens=64,
        test_tokens=600,
        segments=4,
        measured_segments=3,
    )


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(presets.PRESETS, "tiny", _toy)


@pytest.fixture
def texts(tmp_path: Path) -> dict[str, Any]:
    """A text to train on and two to test on, each longer than 32 l."""
    for name in ("train", "one", "two"):
        words = " ".join(f"{name} {number} and {number * number}," for number in range(150))
        (tmp_path / f"{name}.txt").write_text(words)
    tests = [f"books={tmp_path / 'one.txt'}", f"books={tmp_path / 'two.txt'}"]
    return {"data": [str(tmp_path / "train.txt")], "tests": tests}


def _request(table: str, output: Path, texts: dict[str, Any], **options: Any) -> Request:
    return Request(table=table, preset="tiny", output=output, **{"seeds": (0, 1), "device": "cpu", **texts, **options})


def _run(*arguments: Any, **options: Any) -> dict[str, Any]:
    return run(_request(*arguments, **options), console=Console(file=io.StringIO()))


# What the tables are


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
    assert 10e6 <= small.parameters() <= 30e6


def test_windows_and_lengths_scale_and_windows_are_trained(tmp_path: Path, texts: dict[str, Any]) -> None:
    plan = Plan(_request("sandwich-table2", tmp_path, texts, seeds=(0,)))
    assert plan.to_dict()["lengths"] == [512, 1024, 2048]
    window, slopes = plan.configs["w = 160, longer training"], plan.configs["Δ = 6, longer training"]
    assert (window.attention_pattern, window.sliding_window, window.training_length) == ("sliding", 40, 256)
    assert (slopes.attention_pattern, slopes.alibi_slope_shift, slopes.training_length) == ("blockwise", 6, 512)
    assert plan.job(plan.table.systems[0], 0).tokens == plan.job(plan.table.systems[2], 0).tokens


def test_systems_share_models_where_only_evaluation_differs(tmp_path: Path, texts: dict[str, Any]) -> None:
    table5 = Plan(_request("lex-table5", tmp_path, texts))
    assert [systems for _, systems in table5.jobs][-1] == ["xPos", "xPos + BCA", "xPos + Sliding Window"]
    table2 = Plan(_request("lex-table2", tmp_path, texts, seeds=(1,), also=("sandwich", "kerple+bca")))
    names = {job.name for job, _ in table5.jobs}
    assert [job.name in names for job, _ in table2.jobs] == [True, True, True, True, False, False]
    assert list(table2.configs)[-2:] == ["sandwich", "kerple + bca"]


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


# Orders, on numbers made up


def _cell(*values: float) -> Cell:
    return Cell(values, [[value, value * 1.5, value * 0.8] for value in values], [3, 1, 2])


def _made_up(cells: dict[str, dict[str, Cell]], *claims: Claim) -> list[Any]:
    systems = tuple(System(name, {}) for name in cells)
    table = Table("made-up", tables.LEX, "chunked", systems, (1024, 2048), "a", claims)
    values = {"corpus": {"a": {"1024": 10.0, "2048": 9.0}, "b": {"1024": 11.0, "2048": 12.0}, "c": {"1024": 10.0}}}
    printed = published.Published("made-up", "", "", "", "", "perplexity", 1024, "", values, {})
    return statements(table, printed, "corpus", cells)


def test_orders_agree_disagree_or_are_not_significant() -> None:
    cells = {
        "a": {"1024": _cell(1.00, 1.02, 1.01), "2048": _cell(0.90, 0.92, 0.91)},
        "b": {"1024": _cell(1.20, 1.21, 1.23), "2048": _cell(0.70, 0.73, 0.71)},
        "c": {"1024": _cell(1.22, 1.20, 1.22)},
    }
    found = {each.text: each for each in _made_up(cells, tables.falls("a", (1024, 2048)))}
    assert found["a falls at every step from {1024} to {2048}"].verdict == "agrees"
    at_l = found["order of the systems at {1024}"]
    pairs = {(part["left"][0], part["right"][0]): part["verdict"] for part in at_l.parts}
    # b is printed above c; a and c are printed alike, so nothing is said of them.
    assert pairs == {("a", "b"): "agrees", ("b", "c"): "not significant"}
    assert at_l.verdict == "not significant"
    assert found["order of the systems at {2048}"].verdict == "disagrees"
    assert found["rises and falls of a from length to length"].verdict == "agrees"
    assert found["rises and falls of b from length to length"].verdict == "disagrees"
    part = found["order of the systems at {2048}"].parts[0]
    assert part["difference"] == pytest.approx(0.91 - 0.7133, abs=1e-3)
    assert part["interval"][0] < part["difference"] < part["interval"][1]
    assert (part["pairing"], part["pairs"], part["documents"]) == ("seeds", 3, 3)
    assert part["p_value"] < part["document_p_value"] == pytest.approx(0.034, abs=1e-3)


def test_a_single_seed_is_paired_by_document_and_a_single_document_is_not_tested() -> None:
    a = Cell([1.0], [[1.0, 2.0, 3.0]])
    b = Cell([1.2], [[1.21, 2.2, 3.19]])
    found = difference(a, b)
    assert found == document_difference(a, b)
    assert (found.pairing, found.pairs, found.shows("<")) == ("documents", 3, "agrees")
    alone = difference(Cell([1.0], [[1.0]]), Cell([2.0], [[2.0]]))
    assert (alone.p_value, alone.shows("<"), alone.shows("≈", 9.0)) == (None, "not tested", "not tested")
    missing = _made_up({"a": {"1024": a}, "b": {}}, tables.lower("a", "b", 1024))[0]
    assert (missing.verdict, missing.parts[0]["reason"]) == ("not tested", "there is no measurement")


def test_near_is_told_from_the_whole_interval() -> None:
    near, far, spread = _cell(1.00, 1.01, 1.02), _cell(2.0, 2.01, 2.03), _cell(0.5, 1.0, 1.6)
    assert difference(near, 1.0).shows("≈", 0.1) == "agrees"
    assert difference(far, near).shows("≈", 0.1) == "disagrees"
    assert difference(spread, near).shows("≈", 0.1) == "not significant"


def test_computed_values_need_no_test() -> None:
    low, high = Cell([1.0], [], (), True), Cell([2.0], [], (), True)
    assert [difference(low, high).shows("<"), difference(low, high).shows(">")] == ["agrees", "disagrees"]
    assert difference(low, low).shows("<") == "not significant"


def test_marks_say_where_the_reference_is_better_or_worse() -> None:
    table = Table("x", tables.SANDWICH, "last_token", (), (512,), "a")
    cells = {
        "a": {"512": _cell(1.0, 1.1, 1.2)},
        "better": {"512": _cell(0.8, 0.91, 1.0)},
        "worse": {"512": _cell(1.5, 1.6, 1.72)},
        "alike": {"512": _cell(1.2, 1.1, 1.0)},
    }
    assert marks(table, cells) == {("better", "512"): "*", ("worse", "512"): "†"}
    assert marks(replace(table, measure="resolution"), cells) == {("better", "512"): "†", ("worse", "512"): "*"}


def test_intervals_weigh_documents_by_their_tokens() -> None:
    cell = Cell([1.0, 3.0], [[1.0, 2.0], [1.0, 4.0]], [9, 1])
    assert cell.document_interval() == (1.0, 3.0)
    assert cell.seed_interval() == pytest.approx((2 - 12.706, 2 + 12.706), abs=1e-2)
    assert Cell([1.0], [[1.0]]).seed_interval() is None
    assert Cell([1.0], [[1.0]]).document_interval() is None


# From end to end


def test_a_table_is_trained_once_measured_and_reported(tmp_path: Path, toy: None, texts: dict[str, Any]) -> None:
    output = tmp_path / "output"
    record = _run("lex-table2", output, texts)
    trained = sorted(path.name for path in (output / "models").iterdir())
    assert len(trained) == 8
    assert not list(output.rglob("checkpoint-*")) + list(output.rglob("*.partial*"))
    cells = record["results"]["books"]["cells"]
    assert list(cells) == ["Transformer", "Alibi", "Roformer", "LEX Transformer", "Roformer + BCA"]
    assert record["lengths"] == {"256": 8, "512": 16, "1024": 32, "2048": 64, "4096": 128, "8192": 256}
    _check_against_the_metric(record, output, texts)
    folder = output / "lex-table2-tiny"
    assert (folder / "books.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((folder / "record.json").read_text()) == _plain(record)
    text = (folder / "report.md").read_text()
    assert text == report.render(json.loads((folder / "record.json").read_text()))
    assert "| *as printed* | *33.18* | *29.11* | *26.59* | *25.53* | *25.07* | *24.89* |" in text
    assert "LEX Transformer ≤ Roformer + BCA at 256" in text

    before = _weights(output)
    again = _run("lex-table2", output, texts)
    assert _plain(again["results"]) == _plain(record["results"])
    assert [each["trained_now"] for each in again["models"]] == [False] * 8
    more = _run("lex-table2", output, texts, seeds=(0, 1, 2))
    assert [each["trained_now"] for each in more["models"]] == [False, False, True] * 4
    assert {name: time for name, time in _weights(output).items() if name in before} == before
    figure = _run("lex-figure1", output, texts)
    assert not any(each["trained_now"] for each in figure["models"])
    assert len(list(output.glob("models/*/measurements/*.json"))) == 15 * 6  # those of the table serve the figure


def _plain(content: Any) -> Any:
    """As it is read back: tuples become lists."""
    return json.loads(json.dumps(content))


def _weights(output: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in output.glob("models/*/model.safetensors")}


def _check_against_the_metric(record: dict[str, Any], output: Path, texts: dict[str, Any]) -> None:
    """One cell, made by hand."""
    name = next(each["name"] for each in record["models"] if each["systems"] == ["LEX Transformer"])
    model, tokenizer = load_for_evaluation(str(output / "models" / name), device="cpu")
    assert model.config.layer_patterns == ["blockwise"] * 2
    documents = [Path(each.removeprefix("books=")).read_text() for each in texts["tests"]]
    expected = compute_perplexity(model, tokenizer, documents, length=128, max_length=600, progress=False)
    cell = record["results"]["books"]["cells"]["LEX Transformer"]["4096"]
    assert cell["values"][0] == pytest.approx(expected.nll, rel=1e-6)
    assert [len(each) for each in cell["documents"]] == [2, 2]


def test_last_tokens_are_the_same_at_every_length(tmp_path: Path, toy: None, texts: dict[str, Any]) -> None:
    record = _run("sandwich-table2", tmp_path / "output", texts, seeds=(0,))
    assert {each["name"].split("-")[1] for each in record["models"]} == {"l32", "l64", "l128"}
    cells = record["results"]["books"]["cells"]
    assert {tuple(cell["weights"]) for row in cells.values() for cell in row.values()} == {(2, 2)}
    # 2 layers with a window of 10 see 19 tokens, so the last token's loss does not change with the length.
    window = cells["w = 160"]
    assert window["2048"]["mean"] == pytest.approx(window["8192"]["mean"], abs=1e-5)
    statement = next(
        each for each in record["results"]["books"]["statements"] if each["text"].startswith("w = 160, longer")
    )
    assert statement["verdict"] == "agrees"
    assert statement["parts"][0]["pairing"] == "documents"


def test_all_schemes_of_a_table_run_and_are_marked(tmp_path: Path, toy: None, texts: dict[str, Any]) -> None:
    record = _run("sandwich-table3", tmp_path / "output", texts, seeds=(0,))
    assert len(record["models"]) == 7
    cells = record["results"]["books"]["cells"]
    assert {len(row) for row in cells.values()} == {5}
    assert {cell["mark"] for cell in cells["Sandwich"].values()} == {""}
    folder = tmp_path / "output" / "sandwich-table3-tiny"
    assert len(list(folder.glob("books-*.png"))) == 2  # systems without and with parameters
    assert "| *as printed* | *22.6 ± 3.6\\** |" not in (folder / "report.md").read_text()  # of another corpus
    assert "*5.16 ± 0.37\\**" in (folder / "report.md").read_text()


def test_resolution_is_measured_with_and_without_blocks(tmp_path: Path, toy: None, texts: dict[str, Any]) -> None:
    record = _run("lex-table3", tmp_path / "output", texts, seeds=(0,))
    cells = record["results"]["books"]["cells"]
    assert len(cells["LEX"]["2048"]["documents"][0]) == 3
    # Of texts no longer than l the blocks change nothing.
    assert cells["LEX"]["1024"]["mean"] == pytest.approx(cells["LEX without BCA"]["1024"]["mean"], abs=1e-6)
    folder = tmp_path / "output" / "models" / record["models"][3]["name"]
    model, tokenizer = load_for_evaluation(str(folder), device="cpu")
    documents = [Path(each.removeprefix("books=")).read_text() for each in texts["tests"]]
    by_hand = measure_resolution(model, segments(documents, tokenizer, 64, 3), progress=False)
    assert cells["LEX"]["2048"]["mean"] == pytest.approx(by_hand.mean, rel=1e-5)
    curves = record["results"]["books"]["curves"]
    assert [len(curves[name]["2048"]) for name in ("LEX", "LEX without BCA")] == [32, 64]
    assert "| LEX without BCA |" in (tmp_path / "output" / "lex-table3-tiny" / "report.md").read_text()


def test_receptive_fields_end_at_the_window(tmp_path: Path, toy: None, texts: dict[str, Any]) -> None:
    record = _run("sandwich-figure4", tmp_path / "output", texts, seeds=(0,))
    cells = record["results"]["books"]["cells"]
    # Windows of 40 of 512, at l = 32, are 2 tokens wide: 2 layers see 3 tokens.
    assert cells["w = 40"]["ERF / l"]["mean"] <= 3 / 32
    assert cells["w = 40"]["share of newest l"]["mean"] == pytest.approx(1)
    assert len(record["results"]["books"]["curves"]["w = 40"]["ERF / l"]) == 128
    verdicts = [each["verdict"] for each in record["results"]["books"]["statements"] if each["kind"] == "claim"]
    assert verdicts[:3] == ["agrees"] * 3


def test_a_jump_is_found_where_it_is() -> None:
    from lex_hf.reproduce.measuring import _jump

    shares = torch.full((128,), 0.5)  # from the oldest on
    shares[31] = 30.0
    shares[120] = 90.0  # of the newest 32
    assert _jump((shares / shares.sum()).flip(0).cumsum(0), 32) == 32


def test_the_jump_is_measured(tmp_path: Path, toy: None, texts: dict[str, Any]) -> None:
    record = _run("sandwich-figure7", tmp_path / "output", texts, seeds=(0,))
    cells = record["results"]["books"]["cells"]
    assert 0 < cells["Sinusoidal"]["jump / l"]["mean"] <= 3
    assert 0 < cells["Sinusoidal, short training"]["jump / l"]["mean"] <= 15


def test_expected_attention_needs_no_training(tmp_path: Path) -> None:
    record = run(Request("lex-figure2", "paper", tmp_path), console=Console(file=io.StringIO()))
    result = record["results"][report.NO_TEXTS]
    assert [each["verdict"] for each in result["statements"]] == ["agrees", "agrees"]
    assert len(result["curves"]["xPos"]["total variation beyond l/2"]) == 4096
    assert not (tmp_path / "models").exists()
    assert len(list((tmp_path / "lex-figure2-paper").glob("*.png"))) == 1


def test_a_trained_tokenizer_serves_all_seeds(tmp_path: Path, toy: None, texts: dict[str, Any]) -> None:
    output = tmp_path / "output"
    record = _run("sandwich-figure6", output, texts, tokenizer="bpe:280", seeds=(0, 1))
    assert [path.name.split("-")[:2] for path in (output / "tokenizers").iterdir()] == [["bpe", "280"]]
    folder = output / "models" / record["models"][1]["name"]
    config = json.loads((folder / "config.json").read_text())
    assert (config["vocab_size"], config["eos_token_id"]) == (280, 279)


# Interruption

_KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import test_reproduce
from lex_hf import training
from lex_hf.reproduce import presets, running
from transformers import TrainerCallback

class Kill(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == step and "seed1" in args.output_dir:
            os.kill(os.getpid(), kill)

build = training._build_trainer
def _build(*arguments):
    trainer = build(*arguments)
    trainer.add_callback(Kill())
    return trainer
training._build_trainer = _build
presets.PRESETS["tiny"] = test_reproduce._toy
codes = []
for name, step in {kills!r}:
    process = os.fork()  # what is killed need not import all of this again
    if not process:
        kill = getattr(signal, name)
        output = Path({output!r}, f"{{name}}-{{step}}")
        running.run(test_reproduce._request("sandwich-figure6", output, {texts!r}, steps=6))
        os._exit(0)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
print("", *codes, sep="\\n")
"""


@pytest.mark.processes
def test_killed_runs_go_on(tmp_path: Path, toy: None, texts: dict[str, Any]) -> None:
    kills, tests = [("SIGKILL", 1), ("SIGKILL", 4), ("SIGINT", 4)], str(Path(__file__).parent)
    code = _KILLED.format(tests=tests, kills=kills, output=str(tmp_path), texts=texts)
    process = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert process.stdout.split()[-3:] == [str(-getattr(signal, name)) for name, _ in kills], process.stderr
    assert process.stderr.count("stopped after 4 of 6 steps. The same command goes on") == 1  # of SIGINT
    whole = _run("sandwich-figure6", tmp_path / "whole", texts, steps=6)
    for name, step in kills:
        output = tmp_path / f"{name}-{step}"
        second = next(path for path in (output / "models").iterdir() if "seed1" in path.name)
        assert not (second / models.DONE).exists()
        begun = last_checkpoint(second) is not None
        record = _run("sandwich-figure6", output, texts, steps=6)
        assert [each["trained_now"] for each in record["models"]] == [False, True]
        assert record["models"][1]["resumed"] == begun
        weights = [
            load_file(folder / "models" / second.name / "model.safetensors") for folder in (output, tmp_path / "whole")
        ]
        assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[1])
        assert record["results"] == whole["results"]


_SHARED_OUT = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import test_reproduce
from lex_hf.reproduce import presets, running

presets.PRESETS["tiny"] = test_reproduce._toy
running.run(
    test_reproduce._request("lex-figure1", Path({output!r}), {texts!r}, seeds=(0,), tokenizer="bpe:270")
)
"""


@pytest.mark.processes
def test_two_processes_make_the_same_table(tmp_path: Path, toy: None, texts: dict[str, Any]) -> None:
    alone = _run("lex-figure1", tmp_path / "alone", texts, seeds=(0,), tokenizer="bpe:270")
    script, output = tmp_path / "script.py", tmp_path / "two"
    script.write_text(_SHARED_OUT.format(tests=str(Path(__file__).parent), output=str(output), texts=texts))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run([*launcher, str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    record = json.loads((output / "lex-figure1-tiny" / "record.json").read_text())
    assert record["hardware"]["processes"] == 2
    assert record["models"][0]["tokens"] == alone["models"][0]["tokens"]
    for system, cells in alone["results"]["books"]["cells"].items():
        ours = record["results"]["books"]["cells"][system]
        for column, cell in cells.items():
            assert ours[column]["values"] == pytest.approx(cell["values"], rel=1e-5)


# The report, from a record that is fixed


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
        "- **agrees**: a falls to 256 (ratio 0.9048 [0.8187, 1], p = 0.04 over 2 seeds, 0.001 over 8 documents)"
        in text
    )
    assert "- **not significant**: order of the systems at 256: 1 agree, 1 not significant" in text
    assert "  - left open: a at 256 < a at 128\n" in text
    assert "- 2 pairs of systems: 1 agree, 1 not significant" in text
    assert "`lex-hf reproduce table9`, 2024-01-01." in text
    assert "Mind them." in text


@pytest.mark.parametrize(("count", "pictures"), [(6, ["books.png"]), (9, ["books-1.png", "books-2.png"])])
def test_many_systems_get_several_pictures(count: int, pictures: list[str]) -> None:
    record = _record()
    record["systems"] = {str(number): {"group": ""} for number in range(count)}
    cells = record["results"]["books"]["cells"]["a"]
    record["results"]["books"]["cells"] = dict.fromkeys(record["systems"], cells)
    assert list(report.pictures(record)) == pictures
    assert [f"]({name})" in report.render(record) for name in pictures] == [True] * len(pictures)


# The command


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
        (["lex-table2", "--also", "rope", "--also", "rope"], "a system is there twice"),
        (["lex-table2", "--also", "absolute"], "position_embedding_type = 'absolute'"),
        (["lex-table2", "--tokenizer", "bpe:many"], "--tokenizer bpe:many: after bpe: comes the number of ids"),
    ],
)
def test_bad_requests_give_a_sentence(tmp_path: Path, toy: None, arguments: list[str], message: str) -> None:
    result = _lex(*arguments, "--output", tmp_path / "output")
    assert result.exit_code == 1
    assert message in " ".join(result.stderr.split())
    assert not (tmp_path / "output").exists()


def test_texts_too_short_for_the_last_token_give_a_sentence(tmp_path: Path, toy: None, texts: dict[str, Any]) -> None:
    short = tmp_path / "short.txt"
    short.write_text("too short")
    with pytest.raises(ValueError, match="No test text has 128 tokens, the longest 9"):
        _run("sandwich-figure6", tmp_path / "output", {**texts, "tests": [str(short)]}, steps=1)


def test_a_report_that_cannot_be_written_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(report, "write_text", full)
    result = _lex("lex-figure2", "--output", tmp_path / "output", "--seeds", "0")
    assert result.exit_code == 1
    assert "No space left on device" in result.stderr
    assert "# Figure 2 of" in result.stdout


def test_an_output_that_is_a_file_fails_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "output").write_text("precious")
    for path in ("output", "output/below"):
        result = _lex("lex-figure2", "--output", tmp_path / path)
        assert (result.exit_code, "is a file, not a folder" in result.stderr) == (1, True)
    (tmp_path / "folder" / "lex-figure2-tiny" / "record.json").mkdir(parents=True)
    assert "record.json is a folder" in _lex("lex-figure2", "--output", tmp_path / "folder").stderr
    assert (tmp_path / "output").read_text() == "precious"


@pytest.mark.parametrize(("value", "shown"), [(math.nan, "NaN"), (math.inf, "∞"), (800.0, "∞"), (0.0, "1.000")])
def test_losses_that_are_not_finite_are_shown_as_what_they_are(value: float, shown: str) -> None:
    assert report._number(report._shown({"perplexity": True}, value)) == shown
