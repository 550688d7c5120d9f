"""What lex-hf 0.1.0 wrote is still read; files_of_0_1_0/README.md tells how each file was made."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner, Result

from lex_hf import load_cache
from lex_hf.cli.commands import app
from lex_hf.evaluation.resume import model_fingerprint

FILES = Path(__file__).with_name("files_of_0_1_0")
TEXTS = [FILES / f"text-{number}.txt" for number in range(3)]


def lex(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A copy, which commands may change."""
    return Path(shutil.copytree(FILES, tmp_path / "files"))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_model_gives_the_same_logits(attention: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(FILES / "model", attn_implementation=attention)
    stored = load_file(FILES / "logits.safetensors")
    with torch.no_grad():
        logits = model(stored["input_ids"]).logits
    torch.testing.assert_close(logits, stored["logits"], atol=1e-4, rtol=0)


def test_a_cache_is_refused_with_what_to_do() -> None:
    model = AutoModelForCausalLM.from_pretrained(FILES / "model")
    with pytest.raises(
        ValueError, match=r"earlier version of lex_hf, such as 0\.1\.0.* read the text again, and save the cache"
    ):
        load_cache(FILES / "cache.safetensors", model)


@pytest.mark.parametrize("recipe", ["recipe.yaml", "tiny"])
def test_a_training_goes_on_to_the_same_weights(files: Path, recipe: str, caplog: pytest.LogCaptureFixture) -> None:
    folder, settings = files / "training", []
    if recipe == "tiny":  # the command that began the training, with its own options
        kept = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
        kept |= {"training_length": 16, "per_device_train_batch_size": 2, "examples_per_step": 2, "max_steps": 4}
        kept |= {"save_steps": 2, "logging_steps": 1, "warmup_steps": 0}
        kept |= {"initializer_range": 0.02}  # as the recipe had it then
        settings = [argument for name, value in kept.items() for argument in ("--set", f"{name}={value}")]
    plan = recipe if settings else folder / recipe
    result = lex("train", plan, TEXTS[0], "--output", folder, "--resume", "--json", *settings)
    assert result.exit_code == 0, result.output
    assert "checkpoint-2 has no record of its settings: it was written by lex-hf 0.1.0" in caplog.text
    report: dict[str, Any] = json.loads(result.stdout)
    assert [step for step, _ in report["losses"]] == [1, 2, 3, 4]
    weights, expected = load_file(folder / "model.safetensors"), load_file(files / "trained.safetensors")
    begun = load_file(folder / "checkpoint-2/model.safetensors")
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected[name], atol=1e-5, rtol=0)
    assert max((expected[name] - begun[name]).abs().max() for name in expected) > 1e-3


def test_a_training_does_not_go_on_with_what_came_later(files: Path) -> None:
    changed = ("--set", "full_attention_log_scaling=true")
    folder = files / "training"
    result = lex("train", folder / "recipe.yaml", TEXTS[0], "--output", folder, "--resume", *changed)
    assert result.exit_code == 1
    assert "which has full_attention_log_scaling = False, not True" in result.stderr


def test_records_tell_what_came_later_apart() -> None:
    model = AutoModelForCausalLM.from_pretrained(FILES / "model")
    before = model_fingerprint(model)
    model.config.full_attention_log_scaling = True
    assert model_fingerprint(model) != before


def evaluate(folder: Path) -> Any:
    command = ["evaluate", folder / "training/checkpoint-2", *TEXTS, "--length", 32, "--json"]
    result = lex(*command, "--records", folder / "records.jsonl")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_an_evaluation_goes_on_from_its_records(files: Path) -> None:
    records = files / "records.jsonl"
    begun = records.read_bytes()
    (found,), (expected,) = evaluate(files), json.loads((files / "perplexity.json").read_text())
    assert found.keys() >= expected.keys()
    assert found["perplexity"] == pytest.approx(expected["perplexity"], rel=1e-6)
    assert found["perplexities"] == pytest.approx(expected["perplexities"], rel=1e-6)
    lines = begun.splitlines(keepends=True)
    assert records.read_bytes().startswith(b"".join(lines[:2]))
    assert [json.loads(line)["key"] for line in records.read_bytes().splitlines()[:2]] == [
        json.loads(line)["key"] for line in lines[:2]
    ]
    assert len(records.read_bytes().splitlines()) == 3


def test_texts_on_record_are_not_measured_again(files: Path) -> None:
    records = files / "records.jsonl"
    first, *others = records.read_text().splitlines(keepends=True)
    records.write_text("".join([json.dumps(json.loads(first) | {"nll": 1234.5}) + "\n", *others]))
    (found,) = evaluate(files)
    assert found["documents"][0]["nll"] == 1234.5


def test_a_card_is_rendered_from_its_record(files: Path) -> None:
    card = files / "card/README.md"
    expected = card.read_text()
    result = lex("card", files / "card")  # which refuses to replace what is not the card of the record
    assert result.exit_code == 0, result.output
    assert card.read_text().split("---\n", 2)[2] == expected.split("---\n", 2)[2]
