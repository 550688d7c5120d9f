"""Arguments of a training: the defaults of the paper, impossible numbers, what this package decides."""

import json
from pathlib import Path

import pytest
from helpers.trainings import examples, stream, tiny_lex, train_tiny

from lex_hf.training.arguments import training_arguments


class TestArguments:
    def test_are_those_of_the_paper(self, tmp_path: Path) -> None:
        arguments = training_arguments(tmp_path, max_steps=50_000, warmup_steps=20_000)
        assert (arguments.adam_beta1, arguments.adam_beta2, arguments.adam_epsilon) == (0.9, 0.98, 1e-6)
        assert (arguments.learning_rate, arguments.weight_decay, arguments.max_grad_norm) == (3e-4, 0.01, 2.0)
        assert arguments.report_to == []
        assert not arguments.disable_tqdm

    def test_learning_rate_rises_and_falls_to_zero_in_straight_lines(self, tmp_path: Path) -> None:
        options = {"max_steps": 6, "warmup_steps": 2, "save_steps": 6}
        train_tiny(tmp_path, tiny_lex(), examples(4), learning_rate=8e-3, **options)
        state = json.loads((tmp_path / "checkpoint-6" / "trainer_state.json").read_text())
        rates = [entry["learning_rate"] for entry in state["log_history"] if "loss" in entry]
        assert rates == pytest.approx([0, 4e-3, 8e-3, 6e-3, 4e-3, 2e-3])

    def test_another_schedule(self, tmp_path: Path) -> None:
        result = train_tiny(tmp_path, tiny_lex(), examples(4), max_steps=1, lr_scheduler_type="cosine")
        assert result.steps == 1

    @pytest.mark.parametrize("warmup", [5, 7])
    def test_warmup_is_shorter_than_the_training(self, tmp_path: Path, warmup: int) -> None:
        with pytest.raises(ValueError, match=f"warmup_steps = {warmup}: must be less than max_steps = 5"):
            training_arguments(tmp_path, max_steps=5, warmup_steps=warmup)

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            *[("max_steps", value) for value in (0, -2, 10**20)],
            *[("learning_rate", value) for value in (-1e-3, float("nan"), float("inf"), "fast")],
            *[("per_device_train_batch_size", value) for value in (0, -1)],
            *[("num_train_epochs", value) for value in (0, float("nan"))],
            *[("save_steps", value) for value in (0, -5)],
            ("gradient_accumulation_steps", 0),
            ("warmup_steps", -1),
            ("weight_decay", float("nan")),
            ("adam_beta1", 1.0),
            ("adam_epsilon", -1e-8),
            ("max_grad_norm", float("nan")),
            ("seed", -1),
            ("seed", 2**32),
        ],
    )
    def test_impossible_numbers(self, tmp_path: Path, name: str, value: object) -> None:
        with pytest.raises(ValueError, match=rf"{name} (= .*)?(must be|Expected value)"):
            training_arguments(tmp_path, **{name: value})

    def test_what_this_package_decides(self, tmp_path: Path, corpus: list[Path]) -> None:
        with pytest.raises(ValueError, match="restore_callback_states_from_checkpoint must be false"):
            train_tiny(tmp_path, tiny_lex(), examples(4), max_steps=1, restore_callback_states_from_checkpoint=True)
        with pytest.raises(ValueError, match="auto_find_batch_size must be false: a stream"):
            train_tiny(tmp_path, tiny_lex(), stream(corpus), max_steps=1, auto_find_batch_size=True)

    def test_what_the_trainer_does_not_know(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"TrainingArguments: .*'no_such_field'"):
            training_arguments(tmp_path, no_such_field=1)
        with pytest.raises(ValueError, match=r"TrainingArguments: .*'foo'"):
            training_arguments(tmp_path, accelerator_config={"foo": 1})
        with pytest.raises(ValueError, match=r"lr_scheduler_kwargs = .*'foo'"):
            train_tiny(tmp_path, tiny_lex(), examples(4), max_steps=1, lr_scheduler_kwargs={"foo": 1})
        with pytest.raises(ValueError, match="train_sampling_strategy = 'foo': it must be one of random"):
            train_tiny(tmp_path, tiny_lex(), examples(4), max_steps=1, train_sampling_strategy="foo")

    def test_what_is_not_installed(self, tmp_path: Path) -> None:
        for fields in ({"report_to": "comet_ml"}, {"optim": "adamw_bnb_8bit"}):
            with pytest.raises(ValueError, match=r"needs what is not available here: .*(comet|bitsandbytes)"):
                train_tiny(tmp_path, tiny_lex(), examples(4), max_steps=1, **fields)
