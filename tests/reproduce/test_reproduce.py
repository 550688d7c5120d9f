"""Tables made at toy size from end to end: trained once, measured, reported."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.experiments import run_experiment
from rich.console import Console

from lex_hf.evaluation.perplexity import compute_perplexity, load_for_evaluation
from lex_hf.evaluation.receptive_field import receptive_field
from lex_hf.evaluation.resolution import measure_resolution
from lex_hf.reproduce import report
from lex_hf.reproduce.corpora import segments
from lex_hf.reproduce.measuring import jackknife
from lex_hf.reproduce.running import Request, run


def test_a_table_is_trained_once_measured_and_reported(tmp_path: Path, toy: None, texts: dict[str, Any]) -> None:
    output = tmp_path / "output"
    record = run_experiment("lex-table2", output, texts)
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
    again = run_experiment("lex-table2", output, texts)
    assert _plain(again["results"]) == _plain(record["results"])
    assert [each["trained_now"] for each in again["models"]] == [False] * 8
    more = run_experiment("lex-table2", output, texts, seeds=(0, 1, 2))
    assert [each["trained_now"] for each in more["models"]] == [False, False, True] * 4
    assert {name: time for name, time in _weights(output).items() if name in before} == before
    figure = run_experiment("lex-figure1", output, texts)
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
    record = run_experiment("sandwich-table2", tmp_path / "output", texts, seeds=(0,))
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
    record = run_experiment("sandwich-table3", tmp_path / "output", texts, seeds=(0,), also=("learned",))
    assert len(record["models"]) == 8
    cells = record["results"]["books"]["cells"]
    assert list(cells.pop("learned")) == ["512"]  # its positions end there
    assert {len(row) for row in cells.values()} == {5}
    assert {cell["mark"] for cell in cells["Sandwich"].values()} == {""}
    folder = tmp_path / "output" / "sandwich-table3-tiny"
    assert len(list(folder.glob("books-*.png"))) == 3  # systems without and with parameters, and the further one
    assert "| *as printed* | *22.6 ± 3.6\\** |" not in (folder / "report.md").read_text()  # of another corpus
    assert "*5.16 ± 0.37\\**" in (folder / "report.md").read_text()


def test_resolution_is_measured_with_and_without_blocks(tmp_path: Path, toy: None, texts: dict[str, Any]) -> None:
    record = run_experiment("lex-table3", tmp_path / "output", texts, seeds=(0,))
    cells = record["results"]["books"]["cells"]
    assert len(cells["LEX"]["2048"]["documents"][0]) == 3
    # Of texts no longer than l the blocks change nothing.
    assert cells["LEX"]["1024"]["mean"] == pytest.approx(cells["LEX without BCA"]["1024"]["mean"], abs=1e-6)
    folder = tmp_path / "output" / "models" / record["models"][3]["name"]
    model, tokenizer = load_for_evaluation(str(folder), device="cpu")
    documents = [Path(each.removeprefix("books=")).read_text() for each in texts["tests"]]
    ids = segments(documents, tokenizer, 64, 3)
    by_hand = measure_resolution(model, ids, progress=False).mean
    assert cells["LEX"]["2048"]["mean"] == pytest.approx(by_hand, rel=1e-5)
    last = 3 * by_hand - 2 * measure_resolution(model, ids[:2], progress=False).mean  # a pseudo-value
    assert cells["LEX"]["2048"]["documents"][0][2] == pytest.approx(last, rel=1e-4)
    curves = record["results"]["books"]["curves"]
    assert [len(curves[name]["2048"]) for name in ("LEX", "LEX without BCA")] == [32, 64]
    assert "| LEX without BCA |" in (tmp_path / "output" / "lex-table3-tiny" / "report.md").read_text()


def test_receptive_fields_end_at_the_window(tmp_path: Path, toy: None, texts: dict[str, Any]) -> None:
    record = run_experiment("sandwich-figure4", tmp_path / "output", texts, seeds=(0,))
    cells = record["results"]["books"]["cells"]
    # Windows of 40 of 512, at l = 32, are 2 tokens wide: 2 layers see 3 tokens.
    assert cells["w = 40"]["ERF / l"]["mean"] <= 3 / 32
    assert cells["w = 40"]["share of newest l"]["mean"] == pytest.approx(1)
    assert len(record["results"]["books"]["curves"]["w = 40"]["ERF / l"]) == 128
    verdicts = [each["verdict"] for each in record["results"]["books"]["statements"] if each["kind"] == "claim"]
    assert verdicts[:3] == ["agrees"] * 3
    documents = [Path(each.removeprefix("books=")).read_text() for each in texts["tests"]]
    for window in (100, 160, 320):
        system = f"w = {window}"
        name = next(each["name"] for each in record["models"] if each["systems"] == [system])
        model, tokenizer = load_for_evaluation(str(tmp_path / "output" / "models" / name), device="cpu")
        ids = segments(documents, tokenizer, 128, 3)
        parts = (ids, ids[1:], ids[[0, 2]], ids[:2])
        whole, *others = (receptive_field(model, part, progress=False, threshold=0.99).erf / 32 for part in parts)
        assert cells[system]["ERF / l"]["mean"] == pytest.approx(whole)
        pseudo_values = [3 * whole - 2 * other for other in others]
        assert cells[system]["ERF / l"]["documents"] == [pytest.approx(pseudo_values)]


def test_a_jump_is_found_where_it_is() -> None:
    from lex_hf.reproduce.measuring import _jump

    shares = torch.full((128,), 0.5)  # from the oldest on
    shares[31] = 30.0
    shares[120] = 90.0  # of the newest 32
    assert _jump((shares / shares.sum()).flip(0).cumsum(0), 32) == 32


def test_pseudo_values_of_a_mean_are_the_values() -> None:
    curves = torch.rand(7, 5, dtype=torch.float64)
    assert jackknife(lambda mean: float(mean[2]), curves) == pytest.approx(curves[:, 2].tolist())
    assert jackknife(lambda mean: float(mean[2]), curves[:1]) == curves[:1, 2].tolist()


def test_pseudo_values_of_a_variance_give_the_unbiased_one() -> None:
    curves = torch.rand(9, 1, dtype=torch.float64)
    moments = torch.cat([curves, curves**2], dim=1)
    values = jackknife(lambda mean: float(mean[1] - mean[0] ** 2), moments)
    assert sum(values) / 9 == pytest.approx(float(curves.var()))


def test_the_jump_is_measured(tmp_path: Path, toy: None, texts: dict[str, Any]) -> None:
    fields = ("initializer_range=0.1",)
    record = run_experiment("sandwich-figure7", tmp_path / "output", texts, seeds=(0,), fields=fields)
    cells = record["results"]["books"]["cells"]
    assert 0 < cells["Sinusoidal"]["jump / l"]["mean"] <= 3
    assert 0 < cells["Sinusoidal, short training"]["jump / l"]["mean"] <= 15
    assert cells["Sinusoidal"]["jump / l"]["documents"] == []
    assert len(cells["Sinusoidal"]["ERF / l"]["documents"][0]) == 3
    folder = tmp_path / "output" / "sandwich-figure7-tiny"
    page = (folder / "report.md").read_text()
    assert "Receptive fields are of mean curves" in page
    assert "Set in all systems that do not have their own: `initializer_range=0.1`." in page


def test_expected_attention_needs_no_training(tmp_path: Path) -> None:
    record = run(Request("lex-figure2", "paper", tmp_path), console=Console(file=io.StringIO()))
    result = record["results"][report.NO_TEXTS]
    assert [each["verdict"] for each in result["statements"]] == ["agrees", "agrees"]
    assert len(result["curves"]["xPos"]["total variation beyond l/2"]) == 4096
    assert not (tmp_path / "models").exists()
    assert len(list((tmp_path / "lex-figure2-paper").glob("*.png"))) == 1


def test_a_trained_tokenizer_serves_all_seeds(tmp_path: Path, toy: None, texts: dict[str, Any]) -> None:
    output = tmp_path / "output"
    record = run_experiment("sandwich-figure6", output, texts, tokenizer="bpe:280", seeds=(0, 1))
    assert [path.name.split("-")[:2] for path in (output / "tokenizers").iterdir()] == [["bpe", "280"]]
    folder = output / "models" / record["models"][1]["name"]
    config = json.loads((folder / "config.json").read_text())
    assert (config["vocab_size"], config["eos_token_id"]) == (280, 279)
