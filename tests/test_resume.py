"""Resuming, diverging, two runs in one folder, files that are there: nothing wrong in silence, nothing lost."""

import json
import os
import resource
import shutil
import signal
import threading
import time
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file
from test_cli import SMALL, TEXT, lex, setting
from test_training import (
    LENGTH,
    TOKENIZER,
    _assert_same_weights,
    _examples,
    _model,
    _on_forward,
    _stream,
    _train,
)
from transformers import AutoModelForCausalLM

import lex_hf.run_folder
from lex_hf.data import pack
from lex_hf.recipes import load_recipe
from lex_hf.run_folder import LOCK_NAME, claimed
from lex_hf.tokenization import byte_tokenizer
from lex_hf.training import (
    Change,
    TrainingDiverged,
    TrainingInterrupted,
    last_checkpoint,
    train,
    training_arguments,
)

STEPS = {"max_steps": 6, "save_steps": 2, "save_total_limit": None}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def _stop(folder: Path, step: int = 3, data: Any = None, **options: Any) -> None:
    """Leave a training that was interrupted after some steps."""
    model = _model()
    _on_forward(model, step, lambda: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(TrainingInterrupted):
        _train(folder, model, _examples(10) if data is None else data, **{**STEPS, **options})


def _state(checkpoint: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((checkpoint / "trainer_state.json").read_text())
    return state


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("interrupted")
    _stop(folder)
    return folder


@pytest.fixture
def copied(interrupted: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(interrupted, tmp_path / "out"))


class TestChanges:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"learning_rate": 5e-3}, "learning_rate: was 0.01, now 0.005"),
            ({"max_steps": 7}, "max_steps: was 6, now 7"),
            (
                {"max_steps": -1, "num_train_epochs": 3},
                "max_steps: was 6, now None; num_train_epochs: was None, now 3",
            ),
            ({"seed": 7}, "seed: was 42, now 7"),
            ({"per_device_train_batch_size": 4}, "examples_per_step: was 2, now 4"),
            ({"warmup_steps": 2, "weight_decay": 0.0}, "warmup_steps: was 0, now 2; weight_decay: was 0.01, now 0.0"),
            ({"lr_scheduler_type": "cosine"}, "lr_scheduler_type: was 'polynomial', now 'cosine'"),
            ({"adam_beta2": 0.5}, "adam_beta2: was 0.98, now 0.5"),
        ],
    )
    def test_are_refused_and_listed(self, copied: Path, options: dict[str, Any], message: str) -> None:
        before = _contents(copied)
        with pytest.raises(ValueError, match=message) as info:
            _train(copied, _model(), _examples(10), resume=True, **{**STEPS, **options})
        assert "from step 4 on with allow_changes=['" in str(info.value)
        assert "--allow-change" in str(info.value)
        assert _contents(copied) == before

    def test_of_the_data(self, copied: Path) -> None:
        for other in (_examples(9), _examples(10, {"text": ["other words, and as many of them "] * 9})):
            with pytest.raises(
                ValueError, match=rf"data: was '10 examples of {LENGTH} tokens, \w+', now '\d+ examples"
            ):
                _train(copied, _model(), other, resume=True, **STEPS)
        apart = pack(Dataset.from_dict({"text": _texts()}), TOKENIZER, LENGTH, separate_documents=True)
        with pytest.raises(ValueError, match="data: was"):
            _train(copied, _model(), apart.select(range(10)), resume=True, **STEPS)

    def test_of_the_tokenizer(self, copied: Path) -> None:
        other = byte_tokenizer()
        other.pad_token = "a"
        with pytest.raises(ValueError, match="tokenizer: was '257 tokens"):
            train(
                _model(),
                other,
                _examples(10),
                training_arguments(copied, per_device_train_batch_size=2, learning_rate=1e-2, **STEPS),
                resume=True,
            )

    def test_that_change_no_result_are_free_and_take_effect(self, copied: Path, tmp_path: Path) -> None:
        options = {
            "save_steps": 5,
            "logging_steps": 2,
            "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": 2,
            "dataloader_num_workers": 0,
        }
        result = _train(copied, _model(seed=5), _examples(10), resume=True, **{**STEPS, **options})
        assert [step for step, _ in result.losses] == [1, 2, 3, 4, 5, 6]
        assert {path.name for path in copied.glob("checkpoint-*")} == {f"checkpoint-{step}" for step in (2, 3, 5, 6)}
        assert result.changes == []
        straight = _model()
        _train(tmp_path / "straight", straight, _examples(10), **STEPS)
        for one, other in zip(straight.parameters(), _load(copied).parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-5)

    def test_how_often_it_is_evaluated_does_not_change_dropout(self, tmp_path: Path) -> None:
        plain, looked_at = _model(hidden_dropout=0.3), _model(hidden_dropout=0.3)
        _train(tmp_path / "plain", plain, _examples(10), **STEPS)
        often = {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": _examples(2)}
        _train(tmp_path / "looked_at", looked_at, _examples(10), **STEPS, **often)
        _assert_same_weights(plain, looked_at)

    def test_examples_made_otherwise_are_the_same_examples(self, copied: Path) -> None:
        rows = [[*row] for row in _examples(10)["input_ids"]]
        again = Dataset.from_dict({"input_ids": rows[3:] + rows[:3]}).select([*range(7, 10), *range(7)])
        assert _train(copied, _model(), again, resume=True, **STEPS).changes == []

    def test_of_the_optimiser_take_effect(self, copied: Path) -> None:
        allowed = ["learning_rate", "weight_decay", "adam_beta2"]
        seen: list[dict[str, Any]] = []
        model = _model()
        options = {"learning_rate": 2e-3, "weight_decay": 0.5, "adam_beta2": 0.7}
        _look_at_optimiser(model, seen)
        result = _train(copied, model, _examples(10), resume=True, allow_changes=allowed, **{**STEPS, **options})
        rates = [entry["learning_rate"] for entry in _state(copied / "checkpoint-6")["log_history"] if "loss" in entry]
        assert rates == pytest.approx([1e-2, 1e-2 * 5 / 6, 1e-2 * 4 / 6, 1e-3, 2e-3 * 2 / 6, 2e-3 * 1 / 6])
        assert seen[0]["lr"] == pytest.approx(1e-3)
        assert (seen[0]["betas"], seen[0]["weight_decay"]) == ((0.9, 0.7), 0.5)
        assert {(change.name, change.was, change.now) for change in result.changes} == {
            ("learning_rate", 1e-2, 2e-3),
            ("weight_decay", 0.01, 0.5),
            ("adam_beta2", 0.98, 0.7),
        }
        assert {change.step for change in result.changes} == {3}

    def test_more_steps_are_a_change_of_the_schedule(self, copied: Path) -> None:
        options = {**STEPS, "max_steps": 12, "resume": True}
        result = _train(copied, _model(), _examples(10), allow_changes=["max_steps"], **options)
        rates = [
            entry["learning_rate"] for entry in _state(copied / "checkpoint-12")["log_history"] if "loss" in entry
        ]
        assert rates[3:] == pytest.approx([1e-2 * (12 - step) / 12 for step in range(3, 12)])
        assert result.changes == [Change(3, "max_steps", 6, 12)]

    def test_are_kept_by_all_later_checkpoints(self, copied: Path) -> None:
        first = {**STEPS, "learning_rate": 1e-3, "resume": True, "allow_changes": ["learning_rate"]}
        model = _model()
        _on_forward(model, 2, lambda: signal.raise_signal(signal.SIGTERM))
        with pytest.raises(TrainingInterrupted):
            _train(copied, model, _examples(10), **first)
        with pytest.raises(ValueError, match=r"learning_rate: was 0\.001, now 0\.01"):
            _train(copied, _model(), _examples(10), resume=True, **STEPS)
        told: list[list[Change]] = []
        second = {**first, "seed": 1, "allow_changes": ["seed"], "on_save": told.append}
        result = _train(copied, _model(), _examples(10), **second)
        assert result.changes == [Change(3, "learning_rate", 1e-2, 1e-3), Change(5, "seed", 42, 1)]
        assert told[0] == told[-1] == result.changes
        assert json.loads(json.dumps(result.to_dict()))["changes"][1]["now"] == 1

    def test_that_cannot_take_effect_are_refused_even_if_allowed(self, copied: Path) -> None:
        for name, value in (("optim", "sgd"), ("lr_scheduler_type", "reduce_lr_on_plateau")):
            options: dict[str, Any] = {**STEPS, name: value, "eval_strategy": "steps", "eval_steps": 2}
            with pytest.raises(ValueError, match=rf"{name[:12]}\w*: was .* cannot be changed by resuming"):
                _train(
                    copied,
                    _model(),
                    _examples(10),
                    resume=True,
                    allow_changes=[name, "metric_for_best_model", "greater_is_better"],
                    eval_dataset=_examples(2),
                    **options,
                )
        with pytest.raises(ValueError, match=r"max_steps = 2: .*checkpoint-3 has 3 steps already"):
            _train(copied, _model(), _examples(10), resume=True, allow_changes=["max_steps"], max_steps=2)

    def test_must_be_named_rightly(self, copied: Path, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"there is no setting 'learning_rat'; there are: .*learning_rate"):
            _train(copied, _model(), _examples(10), resume=True, allow_changes=["learning_rat"], **STEPS)
        with pytest.raises(ValueError, match=r"'seed' is a single name: give a list, \['seed'\]"):
            _train(copied, _model(), _examples(10), resume=True, allow_changes="seed", **STEPS)
        with pytest.raises(ValueError, match="allow_changes is for a training that is resumed"):
            _train(tmp_path / "new", _model(), _examples(10), allow_changes=["seed"], **STEPS)
        assert not (tmp_path / "new").exists()

    def test_checkpoints_without_a_record_go_on_with_a_warning(
        self, copied: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        state = _state(copied / "checkpoint-3")
        del state["stateful_callbacks"]["RunRecord"]
        (copied / "checkpoint-3" / "trainer_state.json").write_text(json.dumps(state))
        result = _train(copied, _model(), _examples(10), resume=True, **{**STEPS, "seed": 3, "learning_rate": 1e-3})
        assert "checkpoint-3 has no record of its settings" in caplog.text
        assert "cannot be checked" in caplog.text
        assert result.changes == [Change(3, "all", None, "as given")]
        assert result.steps == 6
        assert (
            _state(copied / "checkpoint-6")["stateful_callbacks"]["RunRecord"]["attributes"]["settings"]["seed"] == 3
        )


def _texts() -> list[str]:
    return [f"{word} {number} " * 4 for number, word in enumerate(["one", "two", "three"] * 3)]


def _load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder)


def _look_at_optimiser(model: Any, seen: list[dict[str, Any]]) -> None:
    """Note the settings of the optimiser at each step, in the group that has weight decay."""
    original = torch.optim.AdamW.step

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append({name: value for name, value in self.param_groups[0].items() if name != "params"})
        return original(self, *args, **kwargs)

    model.register_forward_pre_hook(lambda *_: setattr(torch.optim.AdamW, "step", step))


@pytest.fixture(autouse=True)
def _adamw() -> Any:
    original = torch.optim.AdamW.step
    yield
    torch.optim.AdamW.step = original  # type: ignore[method-assign]


class TestStreams:
    @pytest.fixture
    def corpus(self, tmp_path: Path) -> list[Path]:
        return [_lines(tmp_path / "corpus.jsonl", _texts())]

    @pytest.mark.parametrize("are_named", [True, False])
    def test_of_other_texts_are_refused(self, tmp_path: Path, corpus: list[Path], are_named: bool) -> None:
        def stream(files: list[Path]) -> Any:
            return _stream(files, **({"sources": files} if are_named else {}))

        _stop(tmp_path / "out", data=stream(corpus))
        other = [_lines(tmp_path / "other.jsonl", [each.upper() for each in _texts()])]
        name = "sources" if are_named else "texts"
        with pytest.raises(ValueError, match=rf"data\.{name}: was"):
            _train(tmp_path / "out", _model(), stream(other), resume=True, **STEPS)
        shorter = [_lines(tmp_path / "shorter.jsonl", _texts()[:2])]
        with pytest.raises(ValueError, match=rf"data\.{name}: was"):
            _train(tmp_path / "out", _model(), stream(shorter), resume=True, **STEPS)
        # Allowed, the new one begins at its first document.
        seen: list[torch.Tensor] = []
        model = _model()
        model.register_forward_pre_hook(lambda _, __, given: seen.append(given["input_ids"]), with_kwargs=True)
        result = _train(tmp_path / "out", model, stream(other), resume=True, allow_changes=["data"], **STEPS)
        assert [change.name for change in result.changes] == [f"data.{name}"]
        expected = [row["input_ids"] for row, _ in zip(stream(other), range(6), strict=False)]
        assert torch.equal(torch.cat(seen), torch.stack(expected))

    def test_that_grew_are_refused(self, tmp_path: Path, corpus: list[Path]) -> None:
        _stop(tmp_path / "out", data=_stream(corpus, sources=corpus))
        with corpus[0].open("a") as file:
            file.write(json.dumps({"text": "more"}) + "\n")
        with pytest.raises(ValueError, match=r"data\.sources: was \['corpus.jsonl: \d+ bytes'\], now"):
            _train(tmp_path / "out", _model(), _stream(corpus, sources=corpus), resume=True, **STEPS)

    def test_of_other_settings_are_refused(self, tmp_path: Path, corpus: list[Path]) -> None:
        _stop(tmp_path / "out", data=_stream(corpus))
        with pytest.raises(ValueError, match=r"data\.shuffle_buffer: was 5, now 4; data\.seed: was 3, now 4"):
            _train(tmp_path / "out", _model(), _stream(corpus, shuffle_buffer=4, seed=4), resume=True, **STEPS)

    def test_that_moved_go_on(self, tmp_path: Path, corpus: list[Path]) -> None:
        _stop(tmp_path / "out", data=_stream(corpus, sources=corpus))
        (tmp_path / "elsewhere").mkdir()
        moved = [corpus[0].rename(tmp_path / "elsewhere" / corpus[0].name)]
        result = _train(tmp_path / "out", _model(), _stream(moved, sources=moved), resume=True, **STEPS)
        assert (result.steps, result.changes) == (6, [])


def _lines(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": each}) + "\n" for each in texts))
    return path


def _break(model: Any, value: float = float("nan")) -> None:
    with torch.no_grad():
        model.model.norm.weight.fill_(value)


class TestDivergence:
    @pytest.mark.parametrize("logging_steps", [1, 100])
    def test_of_the_loss_is_an_error_and_the_last_checkpoint_is_kept(self, tmp_path: Path, logging_steps: int) -> None:
        model = _model()
        _on_forward(model, 4, lambda: _break(model))
        with pytest.raises(
            TrainingDiverged, match=r"loss is nan at step 4\..*checkpoint-2, is kept.*Lower learn"
        ) as info:
            _train(tmp_path, model, _examples(10), **{**STEPS, "logging_steps": logging_steps})
        assert info.value.step == 4
        assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-2"]
        again = {**STEPS, "learning_rate": 1e-4, "resume": True, "allow_changes": ["learning_rate"]}
        assert _train(tmp_path, _model(), _examples(10), **again).steps == 6

    def test_is_an_error_in_a_resumed_run_too(self, copied: Path) -> None:
        model = _model()
        _on_forward(model, 2, lambda: _break(model, float("inf")))
        with pytest.raises(TrainingDiverged, match=r"loss is (nan|inf) at step 5\..*checkpoint-4, is kept"):
            _train(copied, model, _examples(10), resume=True, **STEPS)
        assert not (copied / "config.json").exists()

    @pytest.mark.parametrize("strategy", ["no", "steps"])
    def test_in_the_last_step_is_seen_in_the_weights(self, tmp_path: Path, strategy: str) -> None:
        options = {"max_steps": 1, "learning_rate": 1e39, "save_strategy": strategy, "max_grad_norm": 0.0}
        with pytest.raises(
            TrainingDiverged, match=r"not all weights are finite numbers at step 1\. No model was saved"
        ):
            _train(tmp_path / "out", _model(), _examples(4), **options)
        assert not (tmp_path / "out").exists()

    def test_a_checkpoint_that_diverged_is_passed_over(self, copied: Path) -> None:
        weights = copied / "checkpoint-3" / "model.safetensors"
        tensors = load_file(weights)
        tensors["model.norm.weight"][5] = float("inf")
        save_file(tensors, weights, metadata={"format": "pt"})
        assert last_checkpoint(copied) == copied / "checkpoint-2"
        expected = _model()
        _train(copied.parent / "straight", expected, _examples(10), **STEPS)
        resumed = _model(seed=5)
        _train(copied, resumed, _examples(10), resume=True, **STEPS)
        _assert_same_weights(resumed, expected)

    def test_ends_the_command_with_an_error(self, tmp_path: Path, text: Path) -> None:
        options = setting(max_steps=30, learning_rate=1e38, warmup_steps=0, max_grad_norm=0, logging_steps=5)
        result = lex("train", "tiny", text, "--output", tmp_path / "out", *SMALL, *options)
        assert result.exit_code == 1
        assert "Training diverged" in result.stderr
        assert "Traceback" not in result.stderr
        assert not (tmp_path / "out" / "config.json").exists()


class TestWeights:
    def test_of_another_shape_are_refused(self, copied: Path) -> None:
        weights = copied / "checkpoint-3" / "model.safetensors"
        tensors = load_file(weights)
        tensors["model.norm.weight"] = torch.ones(25)
        save_file(tensors, weights, metadata={"format": "pt"})
        with pytest.raises(ValueError, match=r"model.norm.weight has the shape \[25\], not \[24\]"):
            _train(copied, _model(), _examples(10), resume=True, **STEPS)

    def test_that_miss_are_refused(self, copied: Path) -> None:
        weights = copied / "checkpoint-3" / "model.safetensors"
        tensors = load_file(weights)
        del tensors["model.norm.weight"]
        save_file(tensors, weights, metadata={"format": "pt"})
        with pytest.raises(ValueError, match=r"model.norm.weight has the shape None, not \[24\]"):
            _train(copied, _model(), _examples(10), resume=True, **STEPS)

    @pytest.mark.parametrize("content", ["[]", "null", "{}"])
    def test_a_state_that_is_none_is_no_checkpoint(self, copied: Path, content: str) -> None:
        (copied / "checkpoint-3" / "trainer_state.json").write_text(content)
        assert last_checkpoint(copied) == copied / "checkpoint-2"


def _hold(folder: Path, told: int) -> None:
    """Claim a folder, say so, and wait to be killed; nothing else is safe in a copy of a process with threads."""
    try:
        with claimed(training_arguments(folder), resume=False, overwrite=False):
            os.write(told, b"held")
            time.sleep(600)
    finally:
        os._exit(1)


class TestLock:
    @pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")  # from Python 3.12 on
    def test_a_second_training_is_refused_at_once_and_a_killed_one_blocks_nothing(self, tmp_path: Path) -> None:
        folder = tmp_path / "out"
        reading, writing = os.pipe()
        process = os.fork()
        if not process:
            _hold(folder, writing)
        os.close(writing)
        try:
            assert os.read(reading, 4) == b"held"
            with pytest.raises(ValueError, match="out is in use by another training"):
                _train(folder, _model(), _examples(4), max_steps=1)
        finally:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            os.close(reading)
        assert (folder / LOCK_NAME).exists()
        _train(folder, _model(), _examples(4), max_steps=1)
        assert not (folder / LOCK_NAME).exists()

    def test_holds_between_threads(self, tmp_path: Path) -> None:
        errors: list[Exception] = []

        def second() -> None:
            try:
                _train(tmp_path, _model(), _examples(4), max_steps=1)
            except ValueError as error:
                errors.append(error)

        with claimed(training_arguments(tmp_path), resume=False, overwrite=False):
            thread = threading.Thread(target=second)
            thread.start()
            thread.join()
        assert "in use by another training" in str(errors[0])

    def test_of_the_command_comes_before_the_texts_are_read(self, tmp_path: Path, text: Path) -> None:
        arguments = training_arguments(tmp_path / "out")
        results: list[Any] = []
        with claimed(arguments, resume=False, overwrite=False):
            call = lambda: results.append(lex("train", "tiny", tmp_path / "none", "--output", tmp_path / "out"))  # noqa: E731
            thread = threading.Thread(target=call)
            thread.start()
            thread.join()
        assert results[0].exit_code == 1
        assert "in use by another training" in " ".join(results[0].stderr.split())

    def test_where_there_are_no_locks_a_warning_is_given(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def fail(self: Any, *args: Any, **kwargs: Any) -> None:
            raise OSError(37, "No locks available")

        monkeypatch.setattr(lex_hf.run_folder.FileLock, "acquire", fail)
        assert _train(tmp_path, _model(), _examples(4), max_steps=1).steps == 1
        assert "cannot be locked" in caplog.text


OWN = ["config.json", "tokenizer.json", "model.safetensors", "generation_config.json", "modeling_lex.py"]


class TestOwnFiles:
    @pytest.mark.parametrize("name", OWN)
    def test_are_not_replaced(self, tmp_path: Path, name: str) -> None:
        (tmp_path / name).write_text("mine")
        with pytest.raises(ValueError, match=rf"{name}.*overwrite=True \(--overwrite\)"):
            _train(tmp_path, _model(), _examples(4), max_steps=1)
        assert _contents(tmp_path) == {name: b"mine"}

    def test_are_kept_where_they_are_not_in_the_way(self, tmp_path: Path) -> None:
        for name in ("README.md", "notes.txt", "recipe.yaml", "checkpoint-notes"):
            (tmp_path / name).write_text("mine")
        _train(tmp_path, _model(), _examples(4), max_steps=1, save_strategy="no")
        contents = _contents(tmp_path)
        for name in ("README.md", "notes.txt", "recipe.yaml", "checkpoint-notes"):
            assert contents[name] == b"mine"

    def test_are_replaced_if_that_is_asked_for(self, tmp_path: Path) -> None:
        _train(tmp_path, _model(num_hidden_layers=1), _examples(4), max_steps=9, save_steps=3)
        for name in ("README.md", "model-00001-of-00002.safetensors", "added_tokens.json"):
            (tmp_path / name).write_text("mine")
        model = _model()
        _train(tmp_path, model, _examples(4), max_steps=3, save_steps=3, overwrite=True)
        assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-3"}
        assert (tmp_path / "README.md").read_text() == "mine"
        assert not (tmp_path / "model-00001-of-00002.safetensors").exists()
        assert not (tmp_path / "added_tokens.json").exists()
        _assert_same_weights(_load(tmp_path), model)

    def test_stay_until_there_is_something_to_replace_them(self, tmp_path: Path) -> None:
        _train(tmp_path, _model(), _examples(4), max_steps=1)
        before = _contents(tmp_path)
        with pytest.raises(ValueError, match="no examples"):
            _train(tmp_path, _model(), _examples(0), max_steps=1, overwrite=True)
        assert _contents(tmp_path) == before

    def test_are_known_to_be_none_of_a_run_that_is_resumed(self, copied: Path) -> None:
        (copied / "config.json").write_text("mine")
        with pytest.raises(ValueError, match=r"files that the training would replace: config.json; choose"):
            _train(copied, _model(), _examples(10), resume=True, **STEPS)
        _train(copied, _model(), _examples(10), resume=True, overwrite=True, **STEPS)
        assert (copied / "config.json").read_bytes() == (copied / "checkpoint-6" / "config.json").read_bytes()
        assert (copied / "checkpoint-2").exists()

    def test_no_file_is_written_that_is_not_looked_for(self, tmp_path: Path) -> None:
        words = byte_tokenizer()
        words.chat_template = "{{ messages }}"
        words.add_tokens(["<x>"])
        arguments = training_arguments(tmp_path, max_steps=1, per_device_train_batch_size=2)
        train(_model(vocab_size=258), words, _examples(4), arguments)
        known = (*lex_hf.run_folder._MODEL, *lex_hf.run_folder._CHECKPOINTS)
        names = [path.name for path in tmp_path.iterdir()]
        assert [name for name in names if not any(fnmatchcase(name, pattern) for pattern in known)] == []

    def test_the_output_must_be_a_folder(self, tmp_path: Path, text: Path) -> None:
        file = tmp_path / "file"
        file.write_text("mine")
        with pytest.raises(ValueError, match=r"output_dir .*file is a file, not a folder"):
            _train(file, _model(), _examples(4), max_steps=1)
        for output in (file, file / "under", "/proc/none"):
            result = lex("train", "tiny", text, "--output", output, *SMALL)
            assert result.exit_code == 1
            assert "--output" in result.stderr
            assert "Tokenising" not in result.stderr
        assert file.read_text() == "mine"

    def test_of_the_folder_that_the_command_runs_in(
        self,
        tmp_path: Path,
        text: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.chdir(tmp_path)
        recipe = "# mine\ntraining: {max_steps: 2}\nmodel: {training_length: 16}\ndata: {tokenizer: bytes}\n"
        (tmp_path / "recipe.yaml").write_text(recipe)
        command = ["train", "recipe.yaml", "text.txt", "--output", ".", *SMALL, "--json"]
        refused = lex(*command)
        assert refused.exit_code == 1
        assert "recipe.yaml" in refused.stderr
        assert "--overwrite" in " ".join(refused.stderr.split())
        assert {path.name for path in tmp_path.iterdir()} == {"recipe.yaml", "text.txt"}
        assert (tmp_path / "recipe.yaml").read_text() == recipe
        result = lex(*command, "--overwrite")
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["steps"] == 2
        assert text.is_file()
        assert load_recipe("recipe.yaml").training["max_steps"] == 2


class TestFullDisk:
    @pytest.mark.parametrize("limit", [20_000, 60_000])
    def test_leaves_the_checkpoint_before(self, tmp_path: Path, limit: int) -> None:
        model = _model()
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        # Files of weights have some 70,000 bytes, those of the optimiser twice as many.
        _on_forward(model, 3, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1])))
        try:
            with pytest.raises(
                OSError, match=r"checkpoint-4 could not be written: .*checkpoint-2, is kept.*disk full"
            ) as info:
                _train(tmp_path, model, _examples(10), **STEPS)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert "\n" not in str(info.value)
        assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-2"]
        assert _train(tmp_path, _model(), _examples(10), resume=True, **STEPS).steps == 6

    def test_at_the_end_leaves_no_half_model(self, tmp_path: Path) -> None:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        model = _model()
        _on_forward(model, 1, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1])))
        try:
            with pytest.raises(OSError, match="could not be written"):
                _train(tmp_path / "out", model, _examples(10), max_steps=1, save_strategy="no")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert not (tmp_path / "out").exists()


class TestCommand:
    def test_keeps_the_truth_in_the_recipe(self, tmp_path: Path, text: Path) -> None:
        folder = tmp_path / "out"
        options = [*SMALL, *setting(max_steps=4, save_steps=2, warmup_steps=0)]
        command = ["train", "tiny", text, "--output", folder, *options]
        assert lex(*command).exit_code == 0
        shutil.rmtree(folder / "checkpoint-4")
        written = (folder / "recipe.yaml").read_text()
        other = [*command, "--resume", *setting(learning_rate=1e-4, seed=1), "--json"]
        refused = lex(*other)
        assert refused.exit_code == 1
        message = " ".join(refused.stderr.split())
        assert "learning_rate: was 0.002, now 0.0001; seed: was 0, now 1" in message
        assert "--allow-change learning_rate --allow-change seed" in message
        assert (folder / "recipe.yaml").read_text() == written
        result = lex(*other, "--allow-change", "learning_rate", "--allow-change", "seed")
        assert result.exit_code == 0, result.output
        kept = (folder / "recipe.yaml").read_text()
        assert "# Resumed with changes: up to step 2 learning_rate was 0.002, then 0.0001." in kept
        assert load_recipe(folder / "recipe.yaml").training["learning_rate"] == 1e-4

    @pytest.mark.parametrize("streaming", ["false", "true"])
    def test_refuses_another_text(self, tmp_path: Path, text: Path, streaming: str) -> None:
        options = [*SMALL, *setting(max_steps=4, save_steps=2, streaming=streaming)]
        assert lex("train", "tiny", text, "--output", tmp_path / "out", *options).exit_code == 0
        shutil.rmtree(tmp_path / "out" / "checkpoint-4")
        before = _contents(tmp_path / "out")
        other = tmp_path / "other.txt"
        other.write_text(text.read_text().replace("fox", "dog"))
        for source in (other,):
            result = lex("train", "tiny", source, "--output", tmp_path / "out", *options, "--resume")
            assert result.exit_code == 1
            assert "data" in " ".join(result.stderr.split())
        assert _contents(tmp_path / "out") == before

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (setting(max_steps=0), "max_steps = 0: it must be a number, at least 1"),
            (setting(per_device_train_batch_size=0), "per_device_train_batch_size = 0"),
            (setting(examples_per_step=0), "data.examples_per_step = 0: it must be at least 1"),
            (setting(length=0), "data.length = 0: it must be at least 2"),
            (setting(shuffle_buffer=0), "data.shuffle_buffer = 0"),
            (setting(learning_rate="-.inf"), "learning_rate = -inf"),
            (setting(max_steps=10**20), "too large a number"),
            (setting(auto_find_batch_size="true"), "use per_device_train_batch_size"),
        ],
    )
    @pytest.mark.parametrize("dry", [True, False])
    def test_impossible_values(
        self,
        tmp_path: Path,
        text: Path,
        options: list[str],
        message: str,
        dry: bool,
    ) -> None:
        result = lex("train", "tiny", text, "--output", tmp_path / "out", *options, *(["--dry-run"] if dry else []))
        assert result.exit_code == 1, result.output
        assert message in " ".join(result.stderr.split())
        assert not (tmp_path / "out").exists()

    def test_leaves_nothing_in_the_way_of_the_next_try(self, tmp_path: Path, text: Path) -> None:
        command = ["train", "tiny", text, "--output", tmp_path / "out", *SMALL, *setting(max_steps=2)]
        missing = lex(*command, *setting(use_liger_kernel="true"))
        assert missing.exit_code == 1
        assert "asks for what is not here" in missing.stderr
        assert not (tmp_path / "out").exists()
        assert lex(*command).exit_code == 0

    def test_changes_are_allowed_when_resuming_only(self, tmp_path: Path, text: Path) -> None:
        result = lex("train", "tiny", text, "--output", tmp_path / "out", "--allow-change", "seed")
        assert result.exit_code == 1
        assert "(--resume)" in result.stderr
        assert not (tmp_path / "out").exists()

    def test_ctrl_c_before_the_first_step(
        self,
        tmp_path: Path,
        text: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        def interrupt(*_: Any, **__: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr("transformers.PreTrainedTokenizerFast.__call__", interrupt)
        result = lex("train", "tiny", text, "--output", tmp_path / "new" / "out", *SMALL)
        assert (result.exit_code, "Traceback" in result.stderr) == (130, False)
        assert not (tmp_path / "new").exists()
