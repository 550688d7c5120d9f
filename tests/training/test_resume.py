"""Resuming: to the bit an uninterrupted run, from the last complete checkpoint."""

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.trainings import STEPS, assert_same_weights, examples, on_forward, tiny_lex, train_tiny
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from lex_hf.training.interruption import TrainingInterrupted
from lex_hf.training.run_folder import last_checkpoint


class TestResume:
    @pytest.mark.parametrize("accumulation", [1, 2])
    def test_is_to_the_bit_an_uninterrupted_run(self, tmp_path: Path, accumulation: int) -> None:
        options = {"max_steps": 8, "save_steps": 100, "gradient_accumulation_steps": accumulation}
        dropout: dict[str, Any] = {"hidden_dropout": 0.2, "attention_dropout": 0.1}
        straight = tiny_lex(**dropout)
        expected = train_tiny(tmp_path / "straight", straight, examples(10), **options)

        stopped = tiny_lex(**dropout)
        # 10 examples: with batches of 2 * 2, the third step is a smaller one, at the end of an epoch.
        on_forward(stopped, 2 * accumulation + 1, lambda: os.kill(os.getpid(), signal.SIGINT))
        handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
        with pytest.raises(TrainingInterrupted, match=r"after 3 of 8 steps.*checkpoint-3\b.*resume=True") as info:
            train_tiny(tmp_path / "resumed", stopped, examples(10), **options)
        assert handlers == (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))
        assert info.value.steps == 3
        assert info.value.checkpoint == last_checkpoint(tmp_path / "resumed")
        assert_same_weights(AutoModelForCausalLM.from_pretrained(info.value.checkpoint), stopped)

        resumed = tiny_lex(seed=5, **dropout)
        result = train_tiny(tmp_path / "resumed", resumed, examples(10), resume=True, **options)
        assert_same_weights(resumed, straight)
        assert result.losses == expected.losses
        assert (result.train_loss, result.tokens) == (expected.train_loss, expected.tokens)

    def test_of_a_complete_run_takes_no_step(self, tmp_path: Path) -> None:
        model = tiny_lex()
        expected = train_tiny(tmp_path, model, examples(10), max_steps=3)
        (tmp_path / "model.safetensors").unlink()
        again = tiny_lex(seed=5)
        assert train_tiny(tmp_path, again, examples(10), max_steps=3, resume=True) == expected
        assert_same_weights(again, model)
        assert_same_weights(AutoModelForCausalLM.from_pretrained(tmp_path), model)

    def test_passes_over_a_half_written_checkpoint(self, tmp_path: Path) -> None:
        model = tiny_lex()
        options = {"max_steps": 6, "save_steps": 2}
        train_tiny(tmp_path, model, examples(10), **options)
        (tmp_path / "checkpoint-6" / "trainer_state.json").unlink()
        resumed = tiny_lex(seed=5)
        train_tiny(tmp_path, resumed, examples(10), resume=True, **options)
        assert_same_weights(resumed, model)
        assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-6"

    def test_a_half_written_checkpoint_does_not_push_out_a_good_one(self, tmp_path: Path) -> None:
        options = {"max_steps": 4, "save_steps": 2, "save_total_limit": 1}
        train_tiny(tmp_path, tiny_lex(), examples(10), **{**options, "save_total_limit": 2})
        newest = tmp_path / "checkpoint-4"
        (newest / "trainer_state.json").unlink()
        os.utime(newest, times=(2**31, 2**31))  # The Trainer keeps the youngest; clocks can be wrong.
        model = tiny_lex()
        on_forward(model, 1, lambda: signal.raise_signal(signal.SIGTERM))
        with pytest.raises(TrainingInterrupted):
            train_tiny(tmp_path, model, examples(10), resume=True, **options)
        assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-3"

    def test_needs_a_complete_checkpoint(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"resume=True, but .* has no complete checkpoint"):
            train_tiny(tmp_path, tiny_lex(), examples(4), max_steps=2, resume=True)
        train_tiny(tmp_path, tiny_lex(), examples(4), max_steps=2, save_only_model=True)
        with pytest.raises(ValueError, match=r"resume=True, but .* has no complete checkpoint"):
            train_tiny(tmp_path, tiny_lex(), examples(4), max_steps=2, resume=True)

    def test_needs_the_same_model(self, tmp_path: Path) -> None:
        train_tiny(tmp_path, tiny_lex(eos_token_id=3), examples(4), max_steps=1)
        with pytest.raises(ValueError, match=r"checkpoint-1, which has .*intermediate_size = 40, not 44"):
            train_tiny(tmp_path, tiny_lex(intermediate_size=44), examples(4), max_steps=2, resume=True)
        with pytest.raises(ValueError, match=r"position_embedding_type = .*'rope'"):
            train_tiny(tmp_path, tiny_lex(position_embedding_type="rope"), examples(4), max_steps=2, resume=True)
        allowed = {"resume": True, "allow_changes": ["max_steps"]}
        train_tiny(tmp_path, tiny_lex(eos_token_id=3), examples(4), max_steps=2, **allowed)

    @pytest.mark.parametrize("kept", ["checkpoint-1", "model.safetensors"])
    def test_must_be_asked_for(self, tmp_path: Path, kept: str) -> None:
        train_tiny(tmp_path / "done", tiny_lex(), examples(4), max_steps=1)
        (tmp_path / "other").mkdir()
        (tmp_path / "done" / kept).rename(tmp_path / "other" / kept)
        with pytest.raises(ValueError, match=r"holds a trained model or checkpoints: .* resume=True"):
            train_tiny(tmp_path / "other", tiny_lex(), examples(4), max_steps=1)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with checkpoint-1 to checkpoint-10."""
    folder = tmp_path_factory.mktemp("trained")
    train_tiny(folder, tiny_lex(), examples(4), max_steps=10, save_steps=1, save_total_limit=None)
    return folder


class TestLastCheckpoint:
    def test_is_the_one_of_the_highest_step(self, trained: Path, tmp_path: Path) -> None:
        assert last_checkpoint(trained) == trained / "checkpoint-10"
        assert last_checkpoint(tmp_path) is None
        assert last_checkpoint(tmp_path / "missing") is None

    @pytest.mark.parametrize(
        "name",
        [
            "trainer_state.json",
            "config.json",
            "model.safetensors",
            "optimizer.pt",
            "rng_state.pth",
            "scheduler.pt",
        ],
    )
    def test_is_not_one_cut_short(self, trained: Path, tmp_path: Path, name: str) -> None:
        shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
        file = tmp_path / "checkpoint-10" / name
        os.truncate(file, file.stat().st_size - 3)
        assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-9"

    def test_is_not_one_without_a_shard(self, trained: Path, tmp_path: Path) -> None:
        shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
        newest = tmp_path / "checkpoint-10"
        model = AutoModelForCausalLM.from_pretrained(newest)
        (newest / "model.safetensors").unlink()
        model.save_pretrained(newest, max_shard_size="10KB")
        assert last_checkpoint(tmp_path) == newest
        sorted(newest.glob("*.safetensors"))[0].unlink()
        assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-9"


class TestWeights:
    def test_of_another_shape_are_refused(self, copied: Path) -> None:
        weights = copied / "checkpoint-3" / "model.safetensors"
        tensors = load_file(weights)
        tensors["model.norm.weight"] = torch.ones(25)
        save_file(tensors, weights, metadata={"format": "pt"})
        with pytest.raises(ValueError, match=r"model.norm.weight has the shape \[25\], not \[24\]"):
            train_tiny(copied, tiny_lex(), examples(10), resume=True, **STEPS)

    def test_that_miss_are_refused(self, copied: Path) -> None:
        weights = copied / "checkpoint-3" / "model.safetensors"
        tensors = load_file(weights)
        del tensors["model.norm.weight"]
        save_file(tensors, weights, metadata={"format": "pt"})
        with pytest.raises(ValueError, match=r"model.norm.weight has the shape None, not \[24\]"):
            train_tiny(copied, tiny_lex(), examples(10), resume=True, **STEPS)

    @pytest.mark.parametrize("content", ["[]", "null", "{}"])
    def test_a_state_that_is_none_is_no_checkpoint(self, copied: Path, content: str) -> None:
        (copied / "checkpoint-3" / "trainer_state.json").write_text(content)
        assert last_checkpoint(copied) == copied / "checkpoint-2"


def test_a_state_that_cannot_be_read_says_so(copied: Path) -> None:
    """As one that NumPy 2 wrote, for NumPy 1: it names what `weights_only` does not know."""
    checkpoint = last_checkpoint(copied)
    assert checkpoint is not None
    torch.save({"python": Path("of another version")}, checkpoint / "rng_state.pth")
    before = {path: path.stat().st_mtime_ns for path in copied.rglob("*") if path.is_file()}
    with pytest.raises(
        ValueError, match=r"checkpoint-\d+ cannot be resumed with NumPy [\d.]+ and PyTorch .* wrote it"
    ):
        train_tiny(copied, tiny_lex(), examples(10), resume=True, **STEPS)
    assert {path: path.stat().st_mtime_ns for path in before} == before
