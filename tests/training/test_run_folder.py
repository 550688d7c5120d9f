"""The folder of a run: two trainings at once, files that are there, a full disk."""

import json
import os
import resource
import signal
import threading
import time
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
from helpers.commands import SMALL, lex
from helpers.files import contents
from helpers.trainings import STEPS, assert_same_weights, examples, on_forward, tiny_lex, train_tiny
from transformers import AutoModelForCausalLM

import lex_hf.training.run_folder
from lex_hf.data.tokenizers import byte_tokenizer
from lex_hf.training.arguments import training_arguments
from lex_hf.training.recipes import load_recipe
from lex_hf.training.run_folder import LOCK_NAME, claimed
from lex_hf.training.trainer import train


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
                train_tiny(folder, tiny_lex(), examples(4), max_steps=1)
        finally:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            os.close(reading)
        assert (folder / LOCK_NAME).exists()
        train_tiny(folder, tiny_lex(), examples(4), max_steps=1)
        assert not (folder / LOCK_NAME).exists()

    def test_holds_between_threads(self, tmp_path: Path) -> None:
        errors: list[Exception] = []

        def second() -> None:
            try:
                train_tiny(tmp_path, tiny_lex(), examples(4), max_steps=1)
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

        monkeypatch.setattr(lex_hf.training.run_folder.FileLock, "acquire", fail)
        assert train_tiny(tmp_path, tiny_lex(), examples(4), max_steps=1).steps == 1
        assert "cannot be locked" in caplog.text


OWN = ["config.json", "tokenizer.json", "model.safetensors", "generation_config.json", "modeling_lex.py"]


class TestOwnFiles:
    @pytest.mark.parametrize("name", OWN)
    def test_are_not_replaced(self, tmp_path: Path, name: str) -> None:
        (tmp_path / name).write_text("mine")
        with pytest.raises(ValueError, match=rf"{name}.*overwrite=True \(--overwrite\)"):
            train_tiny(tmp_path, tiny_lex(), examples(4), max_steps=1)
        assert contents(tmp_path) == {name: b"mine"}

    def test_are_kept_where_they_are_not_in_the_way(self, tmp_path: Path) -> None:
        for name in ("README.md", "notes.txt", "recipe.yaml", "checkpoint-notes"):
            (tmp_path / name).write_text("mine")
        train_tiny(tmp_path, tiny_lex(), examples(4), max_steps=1, save_strategy="no")
        found = contents(tmp_path)
        for name in ("README.md", "notes.txt", "recipe.yaml", "checkpoint-notes"):
            assert found[name] == b"mine"

    def test_are_replaced_if_that_is_asked_for(self, tmp_path: Path) -> None:
        train_tiny(tmp_path, tiny_lex(num_hidden_layers=1), examples(4), max_steps=9, save_steps=3)
        for name in ("README.md", "model-00001-of-00002.safetensors", "added_tokens.json"):
            (tmp_path / name).write_text("mine")
        model = tiny_lex()
        train_tiny(tmp_path, model, examples(4), max_steps=3, save_steps=3, overwrite=True)
        assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-3"}
        assert (tmp_path / "README.md").read_text() == "mine"
        assert not (tmp_path / "model-00001-of-00002.safetensors").exists()
        assert not (tmp_path / "added_tokens.json").exists()
        assert_same_weights(AutoModelForCausalLM.from_pretrained(tmp_path), model)

    def test_stay_until_there_is_something_to_replace_them(self, tmp_path: Path) -> None:
        train_tiny(tmp_path, tiny_lex(), examples(4), max_steps=1)
        before = contents(tmp_path)
        with pytest.raises(ValueError, match="no examples"):
            train_tiny(tmp_path, tiny_lex(), examples(0), max_steps=1, overwrite=True)
        assert contents(tmp_path) == before

    def test_are_known_to_be_none_of_a_run_that_is_resumed(self, copied: Path) -> None:
        (copied / "config.json").write_text("mine")
        with pytest.raises(ValueError, match=r"files that the training would replace: config.json; choose"):
            train_tiny(copied, tiny_lex(), examples(10), resume=True, **STEPS)
        train_tiny(copied, tiny_lex(), examples(10), resume=True, overwrite=True, **STEPS)
        assert (copied / "config.json").read_bytes() == (copied / "checkpoint-6" / "config.json").read_bytes()
        assert (copied / "checkpoint-2").exists()

    def test_no_file_is_written_that_is_not_looked_for(self, tmp_path: Path) -> None:
        words = byte_tokenizer()
        words.chat_template = "{{ messages }}"
        words.add_tokens(["<x>"])
        arguments = training_arguments(tmp_path, max_steps=1, per_device_train_batch_size=2)
        train(tiny_lex(vocab_size=258), words, examples(4), arguments)
        known = (*lex_hf.training.run_folder._MODEL, *lex_hf.training.run_folder._CHECKPOINTS)
        names = [path.name for path in tmp_path.iterdir()]
        assert [name for name in names if not any(fnmatchcase(name, pattern) for pattern in known)] == []

    def test_the_output_must_be_a_folder(self, tmp_path: Path, text: Path) -> None:
        file = tmp_path / "file"
        file.write_text("mine")
        with pytest.raises(ValueError, match=r"output_dir .*file is a file, not a folder"):
            train_tiny(file, tiny_lex(), examples(4), max_steps=1)
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
        model = tiny_lex()
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        # Files of weights have some 70,000 bytes, those of the optimiser twice as many.
        on_forward(model, 3, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1])))
        try:
            with pytest.raises(
                OSError, match=r"checkpoint-4 could not be written: .*checkpoint-2, is kept.*disk full"
            ) as info:
                train_tiny(tmp_path, model, examples(10), **STEPS)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert "\n" not in str(info.value)
        assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-2"]
        assert train_tiny(tmp_path, tiny_lex(), examples(10), resume=True, **STEPS).steps == 6

    def test_at_the_end_leaves_no_half_model(self, tmp_path: Path) -> None:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        model = tiny_lex()
        on_forward(model, 1, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1])))
        try:
            with pytest.raises(OSError, match="could not be written"):
                train_tiny(tmp_path / "out", model, examples(10), max_steps=1, save_strategy="no")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert not (tmp_path / "out").exists()
