"""The commands evaluate, compare, check, resolution and receptive-field."""

import csv
import json
from pathlib import Path

import pytest
import torch
from helpers.commands import TEXT, lex
from helpers.models import tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from lex_hf import measure_resolution, receptive_field
from lex_hf.data.tokenizers import byte_tokenizer
from lex_hf.evaluation.perplexity import compute_perplexity


def test_evaluate_prints_a_table(model: Path, text: Path) -> None:
    result = lex("evaluate", model, text, "--protocol", "streaming", "--attention-pattern", "sliding")
    assert result.exit_code == 0, result.output
    assert "bits/byte" in result.output
    assert str(len(TEXT)) in result.output


def test_check_reports_what_holds(model: Path) -> None:
    result = lex("check", model, "--text", "some words, and some more of them")
    assert result.exit_code == 0, result.output
    assert "knows order" in result.output
    assert "not: positions are relative" not in result.output
    numbers = json.loads(lex("check", model, "--json", "--shift", 3).stdout)
    assert numbers["left_padding"] <= numbers["tolerance"] < numbers["order_variance"]


def numbers_of(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_evaluate_sliding_with_csv_and_plot(model: Path, texts: list[Path], tmp_path: Path) -> None:
    table, plot = tmp_path / "table.csv", tmp_path / "plot.png"
    options = ["--protocol", "sliding", "--length", 9, "--length", 4, "--stride", 3, "--batch-size", "auto"]
    result = lex("evaluate", model, *texts, *options, "--csv", table, "--plot", plot, "--json")
    assert result.exit_code == 0, result.output
    measured = json.loads(result.stdout)
    words, network = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    contents = [path.read_text() for path in texts]
    for got, row, length in zip(measured, numbers_of(table), (9, 4), strict=True):
        options = {"protocol": "sliding", "length": length, "stride": 3, "progress": False}
        expected = compute_perplexity(network, words, contents, **options)
        assert got["perplexity"] == pytest.approx(expected.perplexity, rel=1e-5)
        assert (got["options"], len(got["documents"])) == ({"stride": 3}, 3)
        low, high = got["confidence_interval"]
        written = (length, got["tokens"], got["nll"], got["perplexity"], low, high, got["bits_per_byte"])
        assert [float(value) for value in row.values()] == list(written)
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.txt", "1.txt", "2.txt", "plot.png", "table.csv"]


def test_plot_of_a_single_text(model: Path, texts: list[Path], tmp_path: Path) -> None:
    plot = tmp_path / "plot.png"
    result = lex("evaluate", model, texts[0], "--length", 9, "--length", 4, "--plot", plot)
    assert result.exit_code == 0, result.output
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_evaluate_last_token_shows_every_context(model: Path, texts: list[Path], tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    options = ["--protocol", "last_token", "--length", 20, "--contexts", 7, "--contexts", 19, "--csv", table]
    result = lex("evaluate", model, *texts, *options)
    assert result.exit_code == 0, result.output
    words, network = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    contents = [path.read_text() for path in texts]
    expected = compute_perplexity(
        network, words, contents, protocol="last_token", length=20, contexts=[7, 19], progress=False
    )
    for row, bucket in zip(numbers_of(table), expected.loss_by_position, strict=True):
        assert (row["context"], row["tokens"]) == (str(bucket.start), str(bucket.tokens))
        assert float(row["perplexity"]) == pytest.approx(bucket.perplexity)
        assert f"{bucket.perplexity:#.5g}" in result.output
        assert (row["low"] == "") == (bucket.start == 7)
    assert "context" in result.output


def test_evaluate_goes_on_from_records(model: Path, texts: list[Path], tmp_path: Path) -> None:
    records = tmp_path / "records.jsonl"
    options = ["--length", 9, "--records", records, "--json"]
    first = lex("evaluate", model, *texts, *options)
    lines = records.read_text().splitlines(keepends=True)
    assert len(lines) == 3
    records.write_text("".join(lines[:2]))
    again = lex("evaluate", model, *texts, *options)
    assert again.stdout == first.stdout
    assert records.read_text().splitlines(keepends=True) == lines


def test_compare_models(model: Path, texts: list[Path], tmp_path: Path) -> None:
    other = tmp_path / "other"
    tiny_model(vocab_size=257, bos_token_id=256, seed=1).save_pretrained(other)
    byte_tokenizer().save_pretrained(other)
    options = [*texts, "--length", 9, "--protocol", "chunked"]
    result = lex("compare", model, other, *options, "--json")
    assert result.exit_code == 0, result.output
    paired = json.loads(result.stdout)
    a, b = (json.loads(lex("evaluate", each, *options, "--json").stdout)[0] for each in (model, other))
    assert (paired["a"], paired["b"]) == (a, b)
    assert paired["perplexity_ratio"] == pytest.approx(a["perplexity"] / b["perplexity"])
    means = [[each["nll"] / each["tokens"] for each in result["documents"]] for result in (a, b)]
    differences = [one - other for one, other in zip(*means, strict=True)]
    assert paired["difference"] == pytest.approx(sum(differences) / 3)
    assert paired["n"] == 3
    shown = lex("compare", model, other, *options)
    assert shown.exit_code == 0, shown.output
    assert paired["verdict"] in " ".join(shown.output.split())
    assert f"{paired['difference']:+.4f}" in shown.output


def test_compare_two_patterns_of_one_model(model: Path, texts: list[Path]) -> None:
    patterns = ["--attention-pattern", "blockwise", "--attention-pattern", "full"]
    short, long = (
        json.loads(lex("compare", model, model, *texts, "--length", length, *patterns, "--json").stdout)
        for length in (14, 50)  # the model's training length is 14: up to there the patterns are one
    )
    assert short["difference"] == pytest.approx(0, abs=1e-5)
    assert abs(long["difference"]) > 1e-3


def test_bad_options_of_evaluate_and_compare(model: Path, text: Path, texts: list[Path], tmp_path: Path) -> None:
    three = [argument for _ in range(3) for argument in ("--attention-pattern", "full")]
    cases = {
        "--plot draws perplexity against length": ["evaluate", model, text, "--plot", tmp_path / "plot.png"],
        "batch_size = 'many': it must be": ["evaluate", model, text, "--batch-size", "many"],
        "stride = 3: the protocol 'chunked' has no such option": ["evaluate", model, text, "--stride", 3],
        "Text 0 (counted from 0): it has": ["evaluate", model, *texts, "--protocol", "last_token", "--length", 999],
        "line 1 of": ["evaluate", model, *texts, "--records", text],
        "is the same file as --csv": ["evaluate", model, text, "--csv", tmp_path / "a", "--records", tmp_path / "a"],
        "text.txt is the same file as": ["evaluate", model, text, "--csv", text],
        "there is no folder": ["evaluate", model, *texts, "--records", tmp_path / "none" / "records.jsonl"],
        "too few pairs, 1": ["compare", model, model, text],
        "--attention-pattern is given 3 times": ["compare", model, model, *texts, *three],
    }
    text.write_text(TEXT + "\n")
    for message, arguments in cases.items():
        result = lex(*arguments)
        assert result.exit_code == 1, (message, result.output)
        assert message in " ".join(result.stderr.split()), (message, result.stderr)
        assert "Traceback" not in result.output
    assert text.read_text() == TEXT + "\n"


def test_resolution_compares_patterns_and_writes_what_it_found(model: Path, text: Path, tmp_path: Path) -> None:
    output = tmp_path / "measured"
    patterns = ["--attention-pattern", "full", "--attention-pattern", "blockwise"]
    arguments = ["resolution", model, text, "--length", 40, "--segments", 2, *patterns]
    result = lex(*arguments, "--output", output)
    assert result.exit_code == 0, result.output
    numbers = json.loads((output / "resolution.json").read_text())
    loaded = AutoModelForCausalLM.from_pretrained(model, attention_pattern="full")
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = torch.tensor(tokenizer(TEXT)["input_ids"])
    expected = measure_resolution(loaded, torch.stack((ids[:40], ids[40:80])), progress=False)
    assert numbers["full"]["by_layer"] == pytest.approx(expected.by_layer, rel=1e-6)
    assert len(numbers["blockwise"]["curves"][0]) == 14
    assert f"{expected.mean:.4f}" in result.output
    assert {path.name for path in output.iterdir()} == {
        "resolution.json",
        "resolution.png",
        "curves-full.png",
        "curves-blockwise.png",
    }
    assert json.loads(lex(*arguments, "--json").stdout) == numbers


def test_receptive_field_prints_and_writes(model: Path, text: Path, tmp_path: Path) -> None:
    arguments = ["receptive-field", model, text, "--length", 40, "--segments", 3]
    result = lex(*arguments, "--output", tmp_path)
    assert result.exit_code == 0, result.output
    loaded, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    ids = torch.tensor(tokenizer(TEXT)["input_ids"][:120]).view(3, 40)
    expected = receptive_field(loaded, ids, progress=False)
    assert json.loads((tmp_path / "receptive-field.json").read_text())["blockwise"]["erf"] == expected.erf
    assert str(expected.theoretical) in result.output
    assert (tmp_path / "receptive-field.png").is_file()
    too_short = lex(*arguments[:-1], 1000)
    assert too_short.exit_code == 1
    assert "hold 45 segments of 40 tokens, 1000 were requested" in " ".join(too_short.stderr.split())
