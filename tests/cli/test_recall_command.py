"""The command recall: tables, JSON, files, several readings of one model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.commands import TEXT, lex
from helpers.rope_models import rope_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from lex_hf import TextRecall, measure_recall

FEW = ("--distance", 30, "--distance", 60, "--samples", 5, "--pairs", 2, "--candidates", 3)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a Llama without a tokenizer, and token ids for it."""
    folder = tmp_path_factory.mktemp("llama")
    rope_model().save_pretrained(folder)
    ids = torch.randint(2, 61, (2, 200), generator=torch.Generator().manual_seed(0)).tolist()
    (folder / "ids.jsonl").write_text("".join(json.dumps({"input_ids": [1, *row]}) + "\n" for row in ids))
    return folder


def points(result: Any) -> list[float]:
    return [each[name] for each in result["points"] for name in ("distance", "accuracy", "exact_match", "margin")]


def test_patterns_are_measured_on_the_same_texts_and_written(model: Path, text: Path, tmp_path: Path) -> None:
    output = tmp_path / "measured"
    options = ("--attention-pattern", "full", "--attention-pattern", "blockwise", "--seed", 3, "--output", output)
    result = lex("recall", model, text, *FEW, *options, "--json")
    assert result.exit_code == 0, result.output
    numbers = json.loads(result.stdout)
    assert list(numbers) == ["full", "blockwise"]
    assert json.loads((output / "recall.json").read_text()) == numbers
    assert (output / "recall.png").read_bytes().startswith(b"\x89PNG")
    task = TextRecall(AutoTokenizer.from_pretrained(model), [TEXT])
    for name, found in numbers.items():
        network = AutoModelForCausalLM.from_pretrained(model, attention_pattern=name)
        expected = measure_recall(
            network, task, distances=[30, 60], num_samples=5, num_pairs=2, num_candidates=3, seed=3, progress=False
        )
        assert points(found) == pytest.approx(points(expected.to_dict()))
        assert (found["chance"], found["task"]) == (1 / 3, "The code of {key} is {value}. in texts")


def test_a_table_shows_shares_with_intervals(model: Path) -> None:
    result = lex("recall", model, *FEW, "--sentence", "{key} lives at {value}.")
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.stdout.splitlines()]
    rows = [line for line in lines if "30" in line[:2] or "60" in line[:1]]
    assert [row[0] for row in rows] == ["blockwise", "60"]
    assert float(rows[0][2]) in range(0, 101, 20)
    assert "chance 33.3;" in " ".join(result.stdout.split())


def test_ways_of_a_model_without_a_tokenizer(llama: Path) -> None:
    ways = ("--way", "unchanged", "--way", "blockwise", "--way", "self-extend", "--way", "yarn")
    result = lex("recall", llama, llama / "ids.jsonl", *FEW, *ways, "--json")
    assert result.exit_code == 0, result.output
    numbers = json.loads(result.stdout)
    assert [name.partition(",")[0] for name in numbers] == ["full attention", "blockwise", "Self-Extend", "YaRN"]
    assert len({each["margin"] for name in numbers for each in numbers[name]["points"]}) == 8
    assert all(each["problem"] is None for name in numbers for each in numbers[name]["points"])
    [found] = json.loads(lex("recall", llama, llama / "ids.jsonl", *FEW, "--blockwise", 8, "--json").stdout).items()
    assert found[0] == "blockwise, blocks of 4"
    [same] = [result for name, result in numbers.items() if name.startswith("blockwise")]
    assert points(found[1]) == pytest.approx(points(same))


def test_layers_that_keep_full_attention(llama: Path) -> None:
    found = []
    some = ("--blockwise-layer", 0, "--blockwise-layer", 2)
    for layers in ((), some, (*some, "--yarn-factor", 4), ("--blockwise-layer", 1)):
        result = lex("recall", llama, llama / "ids.jsonl", *FEW, "--blockwise", "auto", *layers, "--json")
        assert result.exit_code == 0, result.output
        [numbers] = json.loads(result.stdout).values()
        found.append(numbers["points"][0]["margin"])
    assert len(set(found)) == 4


def test_a_way_that_a_model_cannot_read_is_a_reason_in_the_table(model: Path) -> None:
    result = lex("recall", model, *FEW, "--way", "unchanged", "--way", "blockwise")
    assert result.exit_code == 0, result.output
    assert "blockwise, blocks of 7, distance 30: A LEX model has blocks of its own" in " ".join(result.stdout.split())
    assert "full attention, unchanged" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--way", "unchanged", "--attention-pattern", "full"], "give one kind"),
        (["--way", "unchanged", "--blockwise", "8"], "--blockwise 8: with --way"),
        (["--blockwise-layer", "1"], "--blockwise-layer 1: a layer reads in blocks with --blockwise only"),
        (["--yarn-factor", "4"], "--yarn-factor 4: it is for layers that keep full attention"),
        (["--blockwise", "8", "--yarn-factor", "4"], "--yarn-factor 4: it is for layers that keep full attention"),
        (["--sentence", "{key}"], "sentence = '{key}': it must have {key} once"),
        (["--distance", "3"], "distance = 3: the question and what ends a sentence have 24 tokens"),
        (["--candidates", "3", "--distance", "40"], "the values of all 4 pairs are among the candidates"),
    ],
)
def test_what_does_not_fit_is_said_before_the_work(model: Path, arguments: list[str], said: str) -> None:
    result = lex("recall", model, *arguments)
    assert result.exit_code == 1
    assert said in " ".join(result.stderr.split())


def test_token_ids_have_no_sentence(llama: Path) -> None:
    result = lex("recall", llama, llama / "ids.jsonl", "--sentence", "{key} is {value}")
    assert "there is no tokenizer for a sentence" in result.stderr
