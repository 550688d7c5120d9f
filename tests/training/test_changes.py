"""Settings and texts that differ from those of the run that is resumed: refused, or allowed and recorded."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from helpers.files import contents
from helpers.trainings import (
    LENGTH,
    STEPS,
    TEXTS,
    TOKENIZER,
    assert_same_weights,
    examples,
    interrupt,
    on_forward,
    stream,
    tiny_lex,
    train_tiny,
    write_lines,
)
from transformers import AutoModelForCausalLM

from lex_hf.data.packing import pack
from lex_hf.data.tokenizers import byte_tokenizer
from lex_hf.training.arguments import training_arguments
from lex_hf.training.interruption import TrainingInterrupted
from lex_hf.training.run_record import Change
from lex_hf.training.trainer import train


def _state(checkpoint: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((checkpoint / "trainer_state.json").read_text())
    return state


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
        before = contents(copied)
        with pytest.raises(ValueError, match=message) as info:
            train_tiny(copied, tiny_lex(), examples(10), resume=True, **{**STEPS, **options})
        assert "from step 4 on with allow_changes=['" in str(info.value)
        assert "--allow-change" in str(info.value)
        assert contents(copied) == before

    def test_of_the_data(self, copied: Path) -> None:
        for other in (examples(9), examples(10, {"text": ["other words, and as many of them "] * 9})):
            with pytest.raises(
                ValueError, match=rf"data: was '10 examples of {LENGTH} tokens, \w+', now '\d+ examples"
            ):
                train_tiny(copied, tiny_lex(), other, resume=True, **STEPS)
        apart = pack(Dataset.from_dict({"text": TEXTS["text"]}), TOKENIZER, LENGTH, separate_documents=True)
        with pytest.raises(ValueError, match="data: was"):
            train_tiny(copied, tiny_lex(), apart.select(range(10)), resume=True, **STEPS)

    def test_of_the_tokenizer(self, copied: Path) -> None:
        other = byte_tokenizer()
        other.pad_token = "a"
        with pytest.raises(ValueError, match="tokenizer: was '257 tokens"):
            train(
                tiny_lex(),
                other,
                examples(10),
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
        result = train_tiny(copied, tiny_lex(seed=5), examples(10), resume=True, **{**STEPS, **options})
        assert [step for step, _ in result.losses] == [1, 2, 3, 4, 5, 6]
        assert {path.name for path in copied.glob("checkpoint-*")} == {f"checkpoint-{step}" for step in (2, 3, 5, 6)}
        assert result.changes == []
        straight = tiny_lex()
        train_tiny(tmp_path / "straight", straight, examples(10), **STEPS)
        for one, other in zip(
            straight.parameters(), AutoModelForCausalLM.from_pretrained(copied).parameters(), strict=True
        ):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-5)

    def test_how_often_it_is_evaluated_does_not_change_dropout(self, tmp_path: Path) -> None:
        plain, looked_at = tiny_lex(hidden_dropout=0.3), tiny_lex(hidden_dropout=0.3)
        train_tiny(tmp_path / "plain", plain, examples(10), **STEPS)
        often = {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": examples(2)}
        train_tiny(tmp_path / "looked_at", looked_at, examples(10), **STEPS, **often)
        assert_same_weights(plain, looked_at)

    def test_examples_made_otherwise_are_the_same_examples(self, copied: Path) -> None:
        rows = [[*row] for row in examples(10)["input_ids"]]
        again = Dataset.from_dict({"input_ids": rows[3:] + rows[:3]}).select([*range(7, 10), *range(7)])
        assert train_tiny(copied, tiny_lex(), again, resume=True, **STEPS).changes == []

    def test_of_the_optimiser_take_effect(self, copied: Path) -> None:
        allowed = ["learning_rate", "weight_decay", "adam_beta2"]
        seen: list[dict[str, Any]] = []
        model = tiny_lex()
        options = {"learning_rate": 2e-3, "weight_decay": 0.5, "adam_beta2": 0.7}
        _look_at_optimiser(model, seen)
        result = train_tiny(copied, model, examples(10), resume=True, allow_changes=allowed, **{**STEPS, **options})
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
        result = train_tiny(copied, tiny_lex(), examples(10), allow_changes=["max_steps"], **options)
        rates = [
            entry["learning_rate"] for entry in _state(copied / "checkpoint-12")["log_history"] if "loss" in entry
        ]
        assert rates[3:] == pytest.approx([1e-2 * (12 - step) / 12 for step in range(3, 12)])
        assert result.changes == [Change(3, "max_steps", 6, 12)]

    def test_are_kept_by_all_later_checkpoints(self, copied: Path) -> None:
        first = {**STEPS, "learning_rate": 1e-3, "resume": True, "allow_changes": ["learning_rate"]}
        model = tiny_lex()
        on_forward(model, 2, lambda: signal.raise_signal(signal.SIGTERM))
        with pytest.raises(TrainingInterrupted):
            train_tiny(copied, model, examples(10), **first)
        with pytest.raises(ValueError, match=r"learning_rate: was 0\.001, now 0\.01"):
            train_tiny(copied, tiny_lex(), examples(10), resume=True, **STEPS)
        told: list[list[Change]] = []
        second = {**first, "seed": 1, "allow_changes": ["seed"], "on_save": told.append}
        result = train_tiny(copied, tiny_lex(), examples(10), **second)
        assert result.changes == [Change(3, "learning_rate", 1e-2, 1e-3), Change(5, "seed", 42, 1)]
        assert told[0] == told[-1] == result.changes
        assert json.loads(json.dumps(result.to_dict()))["changes"][1]["now"] == 1

    def test_that_cannot_take_effect_are_refused_even_if_allowed(self, copied: Path) -> None:
        for name, value in (("optim", "sgd"), ("lr_scheduler_type", "reduce_lr_on_plateau")):
            options: dict[str, Any] = {**STEPS, name: value, "eval_strategy": "steps", "eval_steps": 2}
            with pytest.raises(ValueError, match=rf"{name[:12]}\w*: was .* cannot be changed by resuming"):
                train_tiny(
                    copied,
                    tiny_lex(),
                    examples(10),
                    resume=True,
                    allow_changes=[name, "metric_for_best_model", "greater_is_better"],
                    eval_dataset=examples(2),
                    **options,
                )
        with pytest.raises(ValueError, match=r"max_steps = 2: .*checkpoint-3 has 3 steps already"):
            train_tiny(copied, tiny_lex(), examples(10), resume=True, allow_changes=["max_steps"], max_steps=2)

    def test_must_be_named_rightly(self, copied: Path, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"there is no setting 'learning_rat'; there are: .*learning_rate"):
            train_tiny(copied, tiny_lex(), examples(10), resume=True, allow_changes=["learning_rat"], **STEPS)
        with pytest.raises(ValueError, match=r"'seed' is a single name: give a list, \['seed'\]"):
            train_tiny(copied, tiny_lex(), examples(10), resume=True, allow_changes="seed", **STEPS)
        with pytest.raises(ValueError, match="allow_changes is for a training that is resumed"):
            train_tiny(tmp_path / "new", tiny_lex(), examples(10), allow_changes=["seed"], **STEPS)
        assert not (tmp_path / "new").exists()

    def test_checkpoints_without_a_record_go_on_with_a_warning(
        self, copied: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        state = _state(copied / "checkpoint-3")
        del state["stateful_callbacks"]["RunRecord"]
        (copied / "checkpoint-3" / "trainer_state.json").write_text(json.dumps(state))
        result = train_tiny(
            copied, tiny_lex(), examples(10), resume=True, **{**STEPS, "seed": 3, "learning_rate": 1e-3}
        )
        assert "checkpoint-3 has no record of its settings" in caplog.text
        assert "cannot be checked" in caplog.text
        assert result.changes == [Change(3, "all", None, "as given")]
        assert result.steps == 6
        assert (
            _state(copied / "checkpoint-6")["stateful_callbacks"]["RunRecord"]["attributes"]["settings"]["seed"] == 3
        )


class TestStreams:
    @pytest.mark.parametrize("are_named", [True, False])
    def test_of_other_texts_are_refused(self, tmp_path: Path, corpus: list[Path], are_named: bool) -> None:
        def read(files: list[Path]) -> Any:
            return stream(files, **({"sources": files} if are_named else {}))

        interrupt(tmp_path / "out", data=read(corpus))
        other = [write_lines(tmp_path / "other.jsonl", [each.upper() for each in TEXTS["text"]])]
        name = "sources" if are_named else "texts"
        with pytest.raises(ValueError, match=rf"data\.{name}: was"):
            train_tiny(tmp_path / "out", tiny_lex(), read(other), resume=True, **STEPS)
        shorter = [write_lines(tmp_path / "shorter.jsonl", TEXTS["text"][:2])]
        with pytest.raises(ValueError, match=rf"data\.{name}: was"):
            train_tiny(tmp_path / "out", tiny_lex(), read(shorter), resume=True, **STEPS)
        # Allowed, the new one begins at its first document.
        seen: list[torch.Tensor] = []
        model = tiny_lex()
        model.register_forward_pre_hook(lambda _, __, given: seen.append(given["input_ids"]), with_kwargs=True)
        result = train_tiny(tmp_path / "out", model, read(other), resume=True, allow_changes=["data"], **STEPS)
        assert [change.name for change in result.changes] == [f"data.{name}"]
        expected = [row["input_ids"] for row, _ in zip(read(other), range(6), strict=False)]
        assert torch.equal(torch.cat(seen), torch.stack(expected))

    def test_that_grew_are_refused(self, tmp_path: Path, corpus: list[Path]) -> None:
        interrupt(tmp_path / "out", data=stream(corpus, sources=corpus))
        with corpus[0].open("a") as file:
            file.write(json.dumps({"text": "more"}) + "\n")
        with pytest.raises(ValueError, match=r"data\.sources: was \['corpus.jsonl: \d+ bytes'\], now"):
            train_tiny(tmp_path / "out", tiny_lex(), stream(corpus, sources=corpus), resume=True, **STEPS)

    def test_of_other_settings_are_refused(self, tmp_path: Path, corpus: list[Path]) -> None:
        interrupt(tmp_path / "out", data=stream(corpus))
        with pytest.raises(ValueError, match=r"data\.shuffle_buffer: was 5, now 4; data\.seed: was 3, now 4"):
            train_tiny(tmp_path / "out", tiny_lex(), stream(corpus, shuffle_buffer=4, seed=4), resume=True, **STEPS)

    def test_that_moved_go_on(self, tmp_path: Path, corpus: list[Path]) -> None:
        interrupt(tmp_path / "out", data=stream(corpus, sources=corpus))
        (tmp_path / "elsewhere").mkdir()
        moved = [corpus[0].rename(tmp_path / "elsewhere" / corpus[0].name)]
        result = train_tiny(tmp_path / "out", tiny_lex(), stream(moved, sources=moved), resume=True, **STEPS)
        assert (result.steps, result.changes) == (6, [])
