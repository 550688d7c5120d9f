"""The study of recall: its texts, its systems, and `lex-hf reproduce recall`."""

import functools
import io
import itertools
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.commands import lex
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from lex_hf import LexConfig, LexForCausalLM
from lex_hf.evaluation.costs import Costs
from lex_hf.reproduce import models, recall, recall_material, recall_report, recall_systems, recall_texts
from lex_hf.reproduce.experiment import distinct
from lex_hf.reproduce.recall_material import words_that_ask

LENGTH = 32
MULTIPLES = (1, 8, 16)
FEW = ("xPos, blocks", "xPos, full", "1 full in 4, no positions", "Llama, unchanged", "Llama, blockwise, 1 full in 4")
IGNORED = -100
EVERY = recall.systems(64)
BY_NAME = {system.name: system for system in EVERY}


@pytest.fixture(scope="module", autouse=True)
def small() -> Iterator[None]:
    """Short texts, few systems and small models."""
    few = [system for system in recall.systems(LENGTH) if system.name in FEW]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recall, "LENGTH", LENGTH)
        patch.setattr(recall, "MULTIPLES", MULTIPLES)
        patch.setattr(recall, "systems", lambda length: few)
        patch.setattr(recall, "_ROUNDS", 1)
        patch.setattr(recall_material, "_TEXTS", 2)
        patch.setattr(recall, "_SIZES", {**recall._SIZES, "hidden_size": 16, "num_attention_heads": 2})
        yield


def _run(folder: Path, **options: Any) -> dict[str, Any]:
    settings = {"steps": 2, "seeds": (0,), "samples": 4, "console": Console(file=io.StringIO()), **options}
    return recall.run(folder, **settings)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A study that was stopped in the first step of its second model, and what it said."""
    folder, forward, calls = tmp_path_factory.mktemp("study"), LexForCausalLM.forward, itertools.count(1)

    @functools.wraps(forward)
    def interrupted(self: LexForCausalLM, *args: Any, **options: Any) -> Any:
        if next(calls) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return forward(self, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LexForCausalLM, "forward", interrupted)
        with pytest.raises(KeyboardInterrupt) as error:
            _run(folder)
    assert not (folder / "recall-tiny").exists()
    return folder, str(error.value)


@pytest.fixture(scope="module")
def made(stopped: tuple[Path, str]) -> tuple[Path, dict[str, Any]]:
    """That study, continued."""
    return stopped[0], _run(stopped[0])


@pytest.fixture
def without_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """No time is measured, which every run measures anew."""
    monkeypatch.setattr(recall, "measure_costs", lambda *_: Costs(1, 1.0, 1.0))


# Texts


def _by_kind(count: int, length: int, seed: int = 0) -> tuple[list[Any], list[Any]]:
    """Ids and labels of examples that repeat a passage, and those of others."""
    examples = recall_texts.training_examples(count, length, seed).with_format("numpy")[:]
    rows = list(zip(examples["input_ids"], examples["labels"], strict=True))
    return [row for row in rows if IGNORED in row[1]], [row for row in rows if IGNORED not in row[1]]


def _values_after_keys(ids: Any) -> list[tuple[int, int]]:
    """Keys with what follows them."""
    return [(key, value) for key, value in itertools.pairwise(map(int, ids)) if key in recall_texts.KEY_IDS]


def test_keys_stand_twice_with_their_value() -> None:
    repeating, others = _by_kind(400, 48)
    assert len(repeating) / 400 == pytest.approx(recall_texts.REPEATING, abs=0.08)
    mappings = set()
    for ids, labels in others:
        assert ids.shape == (48,)
        assert (ids == labels).all()
        found = _values_after_keys(ids)
        assert len(found) == 2 * recall_texts.PAIRS
        value_of = dict(found)
        assert all(found.count(pair) == 2 for pair in value_of.items())
        assert len(value_of) == len(set(value_of.values())) == recall_texts.PAIRS
        assert set(value_of.values()) <= set(recall_texts.VALUE_IDS)
        known = {*value_of, *value_of.values()}
        assert all(each in recall_texts.FILLER_IDS for each in set(map(int, ids)) - known)
        mappings.add(tuple(sorted(found)))
    assert len(mappings) == len(others)  # every text has pairs of its own


def test_only_repeats_of_a_passage_are_learnt() -> None:
    repeating, _ = _by_kind(200, 48)
    periods = set()
    for ids, labels in repeating:
        period = int(np.flatnonzero(ids == ids[0])[1])  # words of a passage differ
        assert len(set(ids[:period])) == period
        assert (ids[period:] == ids[:-period]).all()
        assert (labels[: period + 1] == IGNORED).all()  # the first word of the second time cannot be known
        assert (labels[period + 1 :] == ids[period + 1 :]).all()
        periods.add(period)
    assert (min(periods), max(periods)) == (4, 24)


def test_a_seed_gives_the_same_texts() -> None:
    first, again, other = (recall_texts.training_examples(9, 40, seed)[:] for seed in (5, 5, 6))
    assert first == again != other
    assert recall_texts.long_texts(2, 50, 5) == recall_texts.long_texts(2, 50, 5) != recall_texts.long_texts(2, 50, 6)


def test_keys_of_long_texts_have_one_value() -> None:
    texts, tokenizer, mappings = recall_texts.long_texts(3, 2000), recall_texts.word_tokenizer(), []
    for text in texts:
        ids = tokenizer(text)["input_ids"]
        assert len(ids) == len(text.split()) == 2000
        found = _values_after_keys(ids)
        assert len(set(found)) == len(dict(found)) == len({value for _, value in found}) == recall_texts.KEYS
        assert len(found) > 8 * recall_texts.KEYS
        mappings.append(dict(found))
    assert mappings[0] != mappings[1] != mappings[2] != mappings[0]


def test_a_word_is_a_token() -> None:
    tokenizer = recall_texts.word_tokenizer()
    ids = tokenizer("w3 k5 v30 w31")["input_ids"]
    assert ids == [3, 32 + 5, 64 + 30, 31]
    assert tokenizer.decode(ids) == "w3 k5 v30 w31"
    assert len(tokenizer) == recall_texts.VOCABULARY == tokenizer.eos_token_id + 1


# Systems


def _config(name: str, *, reads: bool = True) -> LexConfig:
    system = BY_NAME[name]
    sizes = {"num_hidden_layers": recall_systems.LAYERS, "training_length": 64}
    return LexConfig(**{**sizes, **system.model, **(system.reading if reads else {})})


@pytest.mark.parametrize(("share", "full"), [(2, [1, 3, 5, 7]), (4, [2, 6]), (8, [4])])
def test_full_layers_are_where_they_should_be(share: int, full: list[int]) -> None:
    for scheme, label in {"none": "no positions", "rope": "RoPE", "xpos": "xPos"}.items():
        name = f"1 full in {share}, {label}"
        config = _config(name, reads=False)
        assert config.block_length == 8
        assert config.layer_patterns == ["full" if index in full else "blockwise" for index in range(8)]
        assert config.layer_schemes == [scheme if index in full else "xpos" for index in range(8)]
        assert BY_NAME[name].full_layers() == len(full)
    assert recall_systems.bounded_layers(share) == [index for index in range(8) if index not in full]


@pytest.mark.parametrize(
    ("name", "pattern", "scheme", "full"),
    [
        ("xPos, blocks", "blockwise", "xpos", 0),
        ("xPos, sliding", "sliding", "xpos", 0),
        ("RoPE, blocks", "blockwise", "rope", 0),
        ("xPos, full", "full", "xpos", 8),
        ("RoPE, full", "full", "rope", 8),
        ("ALiBi, full", "full", "alibi", 8),
        ("no positions, full", "full", "none", 8),
    ],
)
def test_systems_of_one_scheme_read_alike_in_all_layers(name: str, pattern: str, scheme: str, full: int) -> None:
    config = _config(name)
    assert set(config.layer_patterns) == {pattern}
    assert set(config.layer_schemes) == {scheme}
    assert (config.block_length, BY_NAME[name].full_layers()) == (None, full)  # None: l/2


def test_what_controls_are() -> None:
    assert _config("1 full in 4, no positions, blocks of l/2").block_length is None  # l/2
    late = "xPos, 1 full in 4 in reading alone"
    assert set(_config(late, reads=False).layer_patterns) == {"blockwise"}  # of l/2: full attention within l
    assert _config(late, reads=False).block_length is None
    assert _config(late).layer_patterns == _config("1 full in 4, xPos").layer_patterns
    scaled = "1 full in 4, no positions, log scaling"
    assert not _config(scaled, reads=False).full_attention_log_scaling
    assert _config(scaled).full_attention_log_scaling


def test_a_llama_reads_under_blockwise() -> None:
    found = {system.name: system for system in EVERY if system.kind == recall_systems.LLAMA}
    yarn = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 32.0, "original_max_position_embeddings": 64}
    assert {name: (system.full_layers(), dict(system.reading)) for name, system in found.items()} == {
        "Llama, unchanged": (8, {}),
        "Llama, YaRN": (8, {"rope_parameters": yarn}),
        "Llama, blockwise": (0, {"blockwise": 64}),
        "Llama, blockwise, 1 full in 4": (2, {"blockwise": 64, "layers": [0, 1, 3, 4, 5, 7]}),
        "Llama, blockwise, 1 full in 2": (4, {"blockwise": 64, "layers": [0, 2, 4, 6]}),
        "Llama, blockwise, 1 full in 2, YaRN": (
            4,
            {"blockwise": 64, "layers": [0, 2, 4, 6], "rope_parameters": yarn},
        ),
        "Llama, blockwise, 1 full in 2, YaRN in these": (
            4,
            {"blockwise": 64, "layers": [0, 2, 4, 6], "yarn_factor": 32.0},
        ),
        "Llama, blockwise, 1 full in 4, from layer 1": (2, {"blockwise": 64, "layers": [0, 2, 3, 4, 6, 7]}),
        "Llama, blockwise, 1 full in 4, from layer 1, YaRN in these": (
            2,
            {"blockwise": 64, "layers": [0, 2, 3, 4, 6, 7], "yarn_factor": 32.0},
        ),
    }
    config = found["Llama, unchanged"].config(64, {"hidden_size": 64, "num_hidden_layers": 8})
    assert (config.model_type, config.max_position_embeddings, config.rope_parameters["rope_type"]) == (
        "llama",
        64,
        "default",
    )


def test_systems_that_differ_in_reading_share_a_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    study = recall._Study(words_that_ask(LENGTH), tmp_path, 2, (3, 4), 1, Console(file=io.StringIO()))
    monkeypatch.setattr(recall, "systems", lambda length: EVERY)
    served = [(job, names) for job, names in distinct(study.jobs) if job.seed == 3]
    assert {names[0]: names[1:] for _, names in served if len(names) > 1} == {
        "xPos, blocks": ["xPos, sliding", "xPos, full", "xPos, 1 full in 4 in reading alone"],
        "RoPE, blocks": ["RoPE, full"],
        "no positions, full": ["no positions, full, log scaling"],
        **{f"1 full in {n}, no positions": [f"1 full in {n}, no positions, log scaling"] for n in (2, 4, 8)},
        "Llama, unchanged": [system.name for system in EVERY if system.kind == "llama"][1:],
    }
    assert len(served) == 15
    job = study.jobs["Llama, blockwise", 3]
    assert job.name.startswith(f"llama-l{LENGTH}-seed3-")
    assert (job.training_length, job.tokens) == (LENGTH, 2 * 32 * LENGTH)
    assert job.identity()["config"]["model_type"] == "llama"
    # Models from before there were other kinds have no kind.
    assert "model_type" not in study.jobs["xPos, full", 3].identity()["config"]
    weights = AutoModelForCausalLM.from_config(job.config)
    assert job.parameters() == sum(each.numel() for each in weights.parameters())


# The study


def _files(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_the_study_leaves_record_report_and_pictures(made: tuple[Path, dict[str, Any]]) -> None:
    folder, record = made
    out = folder / "recall-tiny"
    assert sorted(path.name for path in out.iterdir()) == ["perplexity.png", "recall.png", "record.json", "report.md"]
    assert json.loads((out / "record.json").read_text()) == record
    assert [system["name"] for system in record["systems"]] == list(FEW)
    assert [each["systems"] for each in record["models"]] == [list(FEW[:2]), [FEW[2]], list(FEW[3:])]
    for system in record["systems"]:
        distances = [[point["distance"] for point in seed["points"]] for seed in system["recall"]]
        assert distances == [[LENGTH // 2, *(LENGTH * each for each in MULTIPLES)]]
        assert all(point["problem"] is None for seed in system["recall"] for point in seed["points"])
        lengths = [list(map(int, seed["texts that ask"])) for seed in system["perplexity"]]
        assert lengths == [[LENGTH * each for each in MULTIPLES]]
    report = (out / "report.md").read_text()
    for name in FEW:
        assert report.count(f"| {name} |") >= 4
    for heading in ("## Recall", "## Perplexity", "## Costs", "## What was asked of a hybrid", "## How it was made"):
        assert heading in report
    assert "Llama is that of transformers" in report


def test_caches_are_those_of_the_layers(made: tuple[Path, dict[str, Any]]) -> None:
    tokens, block = 16 * LENGTH, LENGTH // 2
    of_layer = {system["name"]: system["costs"][str(tokens)]["cache_bytes"] for system in made[1]["systems"]}
    whole = of_layer["xPos, full"]
    assert of_layer["Llama, unchanged"] == whole
    shares = {name: size / whole for name, size in of_layer.items()}
    assert shares["xPos, blocks"] == pytest.approx(2 * block / tokens)
    assert shares["Llama, blockwise, 1 full in 4"] == pytest.approx((2 + 6 * 2 * block / tokens) / 8)
    assert shares["1 full in 4, no positions"] == pytest.approx((2 + 6 * 2 * (LENGTH // 8) / tokens) / 8)


def test_systems_read_as_they_say(made: tuple[Path, dict[str, Any]]) -> None:
    """Within l, blocks of l/2 do nothing, and beyond it they do."""
    curves = {system["name"]: system["perplexity"][0]["texts that ask"] for system in made[1]["systems"]}
    for bounded, full in (("xPos, blocks", "xPos, full"), ("Llama, blockwise, 1 full in 4", "Llama, unchanged")):
        assert curves[bounded][str(LENGTH)] == pytest.approx(curves[full][str(LENGTH)], rel=1e-5)
        assert curves[bounded][str(16 * LENGTH)] != pytest.approx(curves[full][str(16 * LENGTH)], rel=1e-5)


def test_nothing_is_made_twice(
    made: tuple[Path, dict[str, Any]], without_costs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recall_report, "pictures", lambda record: {})
    folder, record = made
    before = _files(folder / "models")
    again = _run(folder)
    assert _files(folder / "models") == before
    assert not any(each["trained_now"] for each in again["models"])
    for name in ("recall", "perplexity", "full_layers"):
        assert [each[name] for each in again["systems"]] == [each[name] for each in record["systems"]]


@pytest.mark.parametrize(
    ("options", "lost"), [({"steps": 1}, "steps=2"), ({"samples": 5}, "samples=4"), ({"seeds": (1,)}, "seed 0")]
)
def test_a_report_of_other_settings_is_not_replaced(
    options: dict[str, Any], lost: str, made: tuple[Path, dict[str, Any]]
) -> None:
    before = _files(made[0])
    with pytest.raises(ValueError, match=f"The report in .*recall-tiny has {lost}, which .*--overwrite"):
        _run(made[0], **options)
    assert _files(made[0]) == before


def test_a_study_that_was_stopped_continues(
    stopped: tuple[Path, str], made: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    assert "stopped after 1 of 2 steps. The same command continues" in stopped[1]
    trained = made[1]["models"]
    assert [(each["trained_now"], each["resumed"]) for each in trained] == [
        (False, False),
        (True, True),
        (True, False),
    ]
    material = words_that_ask(LENGTH)
    study = recall._Study(material, tmp_path, 2, (0,), 1, Console(file=io.StringIO()))
    job = study.jobs[FEW[2], 0]
    assert job.name == trained[1]["name"]
    models.ensure(job, tmp_path, material.tokenizer, material.make_examples(64, LENGTH), 8192)
    weights = [load_file(folder / job.name / "model.safetensors") for folder in (tmp_path, stopped[0] / "models")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_texts_of_the_user_have_perplexity_alone(
    tmp_path: Path, texts: dict[str, Any], without_costs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recall, "systems", lambda length: [BY_NAME[name] for name in FEW[:2]])
    files = ["--data", texts["data"][0], *(word for each in texts["tests"] for word in ("--test", each))]
    done = lex("reproduce", "recall", "--output", tmp_path, *files, "--seeds", "7,8", "--steps", 2, "--json")
    assert done.exit_code == 0, done.output
    record, out = json.loads(done.stdout), tmp_path / "recall-texts"
    assert sorted(path.name for path in out.iterdir()) == ["perplexity.png", "record.json", "report.md"]
    assert [model["seed"] for model in record["models"]] == record["seeds"] == [7, 8]
    assert (record["unit"], record["data"]["documents"], record["tests"]["books"]["documents"]) == ("bytes", 1, 2)
    for system in record["systems"]:
        assert system["recall"] == [None, None]
        first, second = (seed["books"] for seed in system["perplexity"])
        assert list(map(int, first)) == list(map(int, second)) == [LENGTH * each for each in MULTIPLES]
        assert first != second
    report = (out / "report.md").read_text()
    assert "## Recall" not in report
    assert "recall.png" not in report
    assert "| hybrid | perplexity falls | small cache | all |" in report
    assert " ± " in report  # of two seeds
    fewer = ["reproduce", "recall", "--output", tmp_path, *files, "--seeds", "7", "--steps", 2]
    refused = " ".join(lex(*fewer).stderr.split())
    assert "has seed 8, which this one would not have" in refused
    assert (out / "report.md").read_text() == report
    assert lex(*fewer, "--overwrite").exit_code == 0
    assert json.loads((out / "record.json").read_text())["seeds"] == [7]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tests": ["books=some.txt"]}, "--test without --data"),
        ({"steps": 0}, "steps = 0: it must be from 1"),
        ({"seeds": (1, 1)}, "seeds = 1, 1: they must be different"),
        ({"data": ["missing.txt"], "tests": ["missing.txt"]}, "missing.txt"),
    ],
)
def test_impossible_requests_fail_before_any_work(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        _run(tmp_path / "output", **options)
    assert not (tmp_path / "output").exists()


def test_a_text_without_a_scored_byte_fails_before_any_work(texts: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("x")
    with pytest.raises(ValueError, match="--test notes: 'x' has one byte"):
        _run(tmp_path / "output", data=texts["data"], tests=[*texts["tests"], f"notes={tmp_path / 'short.txt'}"])
    assert not (tmp_path / "output").exists()


@pytest.mark.parametrize("place", ["", "models", "recall-tiny", "recall-tiny/report.md"])
def test_an_output_that_cannot_be_written_to_fails_before_any_work(place: str, tmp_path: Path) -> None:
    output = tmp_path / "output"
    taken = output / place
    if place.endswith(".md"):
        taken.mkdir(parents=True)
    else:
        taken.parent.mkdir(exist_ok=True)
        taken.write_text("precious")
    before = list(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match="--output:"):
        _run(output)
    assert list(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--preset", "small"], "--preset small"),
        (["--length", 64], "--length"),
        (["--tokenizer", "bytes"], "--tokenizer"),
        (["--also", "kerple"], "--also"),
        (["--segments", 3], "--segments"),
        (["--device", "cpu"], "--device"),
        (["--dry-run"], "--dry-run"),
    ],
)
def test_the_command_refuses_options_of_tables(options: list[object], message: str, tmp_path: Path) -> None:
    done = lex("reproduce", "recall", "--output", tmp_path / "output", *options)
    assert done.exit_code == 1
    assert f"recall has the preset tiny alone, and no {message};" in " ".join(done.stderr.split())
    assert not (tmp_path / "output").exists()


# The aim


def _measured(
    name: str, full_layers: int, recalled: list[float], curve: list[float], cache_bytes: int
) -> dict[str, Any]:
    """A system as a record has it, with l = 10: recall at 8 l, perplexity from 1 to 32 l, cache at 16 l."""
    lengths = (10, 20, 40, 80, 160, 320)
    return {
        "name": name,
        "full_layers": full_layers,
        "recall": [{"points": [{"distance": 80, "exact_match": each, "problem": None}]} for each in recalled],
        "perplexity": [{"books": dict(zip(map(str, lengths), curve, strict=True))} for _ in recalled],
        "costs": {"160": {"cache_bytes": cache_bytes}},
    }


_REACHED = ([0.88, 0.94], [9.0, 8.0, 7.0, 6.0, 5.0, 6.0], 300)  # what comes beyond 16 l does not count


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({}, set()),
        ({0: [0.88, 0.91]}, {"recalls"}),
        ({1: [9.0, 8.0, 7.0, 6.0, 6.0, 5.0]}, {"perplexity falls"}),
        ({1: [9.0, 9.5, 7.0, 6.0, 5.0, 4.0]}, {"perplexity falls"}),
        ({2: 301}, {"small cache"}),
        ({0: [0.1, 0.1], 2: 900}, {"recalls", "small cache"}),
    ],
)
def test_the_aim_has_three_parts(changes: dict[int, Any], missed: set[str]) -> None:
    fields = [changes.get(index, value) for index, value in enumerate(_REACHED)]
    hybrid = _measured("hybrid", 2, *fields)
    whole = _measured("full", recall_systems.LAYERS, *_REACHED[:2], 900)
    record = {"training_length": 10, "multiples": [1, 2, 4, 8, 16, 32], "systems": [hybrid, whole]}
    found = recall_report.aims(record, hybrid)
    assert {name for name, reached in found.items() if not reached} == missed
    assert set(found) == {"recalls", "perplexity falls", "small cache"}


def test_every_test_must_fall_where_recall_is_not_asked() -> None:
    hybrid, whole = (_measured(name, full, *_REACHED[:2], 300) for name, full in (("hybrid", 2), ("full", 8)))
    for system in (hybrid, whole):
        system["recall"] = [None, None]
    record = {"training_length": 10, "multiples": [1, 2, 4, 8, 16, 32], "systems": [hybrid, whole]}
    assert recall_report.aims(record, hybrid) == {"perplexity falls": True, "small cache": False}
    for system in (hybrid, whole):
        for seed in system["perplexity"]:
            seed["news"] = {**seed["books"], "160": 7.0}
    assert not recall_report.aims(record, hybrid)["perplexity falls"]
