"""Trainings that diverge: an error, and the last checkpoint is kept."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.commands import SMALL, lex, setting
from helpers.trainings import STEPS, assert_same_weights, examples, on_forward, tiny_lex, train_tiny
from packaging.version import Version
from safetensors.torch import load_file, save_file

from lex_hf.training.divergence import TrainingDiverged
from lex_hf.training.run_folder import last_checkpoint


def _break(model: Any, value: float = float("nan")) -> None:
    with torch.no_grad():
        model.model.norm.weight.fill_(value)


class TestDivergence:
    @pytest.mark.parametrize("logging_steps", [1, 100])
    def test_of_the_loss_is_an_error_and_the_last_checkpoint_is_kept(self, tmp_path: Path, logging_steps: int) -> None:
        model = tiny_lex()
        on_forward(model, 4, lambda: _break(model))
        with pytest.raises(
            TrainingDiverged, match=r"loss is nan at step 4\..*checkpoint-2, is kept.*Lower learn"
        ) as info:
            train_tiny(tmp_path, model, examples(10), **{**STEPS, "logging_steps": logging_steps})
        assert info.value.step == 4
        assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-2"]
        again = {**STEPS, "learning_rate": 1e-4, "resume": True, "allow_changes": ["learning_rate"]}
        assert train_tiny(tmp_path, tiny_lex(), examples(10), **again).steps == 6

    def test_is_an_error_in_a_resumed_run_too(self, copied: Path) -> None:
        model = tiny_lex()
        on_forward(model, 2, lambda: _break(model, float("inf")))
        with pytest.raises(TrainingDiverged, match=r"loss is (nan|inf) at step 5\..*checkpoint-4, is kept"):
            train_tiny(copied, model, examples(10), resume=True, **STEPS)
        assert not (copied / "config.json").exists()

    @pytest.mark.skipif(Version(torch.__version__).release < (2, 13), reason="AdamW itself refuses what overflows")
    @pytest.mark.parametrize("strategy", ["no", "steps"])
    def test_in_the_last_step_is_seen_in_the_weights(self, tmp_path: Path, strategy: str) -> None:
        options = {"max_steps": 1, "learning_rate": 1e39, "save_strategy": strategy, "max_grad_norm": 0.0}
        with pytest.raises(
            TrainingDiverged, match=r"not all weights are finite numbers at step 1\. No model was saved"
        ):
            train_tiny(tmp_path / "out", tiny_lex(), examples(4), **options)
        assert not (tmp_path / "out").exists()

    def test_a_checkpoint_that_diverged_is_passed_over(self, copied: Path) -> None:
        weights = copied / "checkpoint-3" / "model.safetensors"
        tensors = load_file(weights)
        tensors["model.norm.weight"][5] = float("inf")
        save_file(tensors, weights, metadata={"format": "pt"})
        assert last_checkpoint(copied) == copied / "checkpoint-2"
        expected = tiny_lex()
        train_tiny(copied.parent / "straight", expected, examples(10), **STEPS)
        resumed = tiny_lex(seed=5)
        train_tiny(copied, resumed, examples(10), resume=True, **STEPS)
        assert_same_weights(resumed, expected)

    def test_ends_the_command_with_an_error(self, tmp_path: Path, text: Path) -> None:
        options = setting(max_steps=30, learning_rate=1e37, warmup_steps=0, max_grad_norm=0, logging_steps=5)
        result = lex("train", "tiny", text, "--output", tmp_path / "out", *SMALL, *options)
        assert result.exit_code == 1
        assert "Training diverged" in result.stderr
        assert "Traceback" not in result.stderr
        assert not (tmp_path / "out" / "config.json").exists()
