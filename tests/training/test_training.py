"""Training: losses and labels, saved models, separate documents, streams, examples that are none."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from helpers.trainings import (
    LENGTH,
    TEXTS,
    TOKENIZER,
    assert_same_weights,
    examples,
    on_forward,
    stream,
    tiny_lex,
    train_tiny,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

from lex_hf import LexForCausalLM
from lex_hf.data.packing import pack
from lex_hf.training.interruption import TrainingInterrupted
from lex_hf.training.lex_trainer import collate


def _hand_loss(model: LexForCausalLM, data: Dataset) -> float:
    """Mean cross entropy of every token given those before it, one at a time, in float64."""
    losses = []
    for row in data["input_ids"][:]:
        with torch.no_grad():
            logits = model.double()(torch.tensor([row])).logits[0]
        losses += [float(torch.logsumexp(logits[i], 0) - logits[i, row[i + 1]]) for i in range(len(row) - 1)]
    model.float()
    return sum(losses) / len(losses)


class TestLoss:
    def test_falls_on_a_toy_task(self, tmp_path: Path) -> None:
        data = examples(20, {"text": ["abcdefgh" * 40]})
        result = train_tiny(tmp_path, tiny_lex(), data, max_steps=40, per_device_train_batch_size=6)
        assert result.losses[0][1] > 5
        assert result.losses[-1][1] < 1.5
        assert [step for step, _ in result.losses] == list(range(1, 41))
        assert result.train_loss == pytest.approx(sum(loss for _, loss in result.losses) / 40)
        # 20 examples make batches of 6, 6, 6 and 2.
        assert result.tokens == 10 * 20 * LENGTH
        assert (result.steps, result.model_folder) == (40, tmp_path)

    @pytest.mark.parametrize("accumulation", [1, 2, 6])
    def test_is_the_cross_entropy_of_all_tokens(self, tmp_path: Path, accumulation: int) -> None:
        data = examples(6)
        assert any(256 in row for row in data["input_ids"][:]), "end-of-text must count, though it also pads"
        model = tiny_lex(initializer_range=0.3)
        expected = _hand_loss(model, data)
        batch = {
            "gradient_accumulation_steps": accumulation,
            "per_device_train_batch_size": 6 // accumulation,
        }
        result = train_tiny(tmp_path, model, data, max_steps=1, save_strategy="no", **batch)
        assert result.steps == len(result.losses) == 1
        assert result.train_loss == pytest.approx(expected, abs=1e-5)

    def test_labels_are_what_is_predicted(self) -> None:
        """Nothing predicts the first token; older versions of Trainer divide by the number of labels."""
        ids, positions = torch.tensor([5, 6, 7, 8]), torch.tensor([2, 3, 0, 1])
        assert collate([{"input_ids": ids}, {"input_ids": ids}])["labels"].tolist() == [[-100, 6, 7, 8]] * 2
        assert collate([{"input_ids": ids, "position_ids": positions}])["labels"].tolist() == [[-100, 6, -100, 8]]

    def test_labels_of_the_examples_are_learnt(self, tmp_path: Path) -> None:
        data = examples(6)
        masked = [[-100] * 5 + row[5:] for row in data["input_ids"][:]]
        data = data.add_column("labels", masked)
        model = tiny_lex(initializer_range=0.3)
        ids, labels = torch.tensor(data["input_ids"][:]), torch.tensor(masked)
        with torch.no_grad():
            expected = float(model(ids, labels=labels).loss)
        assert expected != pytest.approx(_hand_loss(model, data), abs=1e-3)
        result = train_tiny(tmp_path, model, data, max_steps=1, save_strategy="no", per_device_train_batch_size=6)
        assert result.train_loss == pytest.approx(expected, abs=1e-5)

    @pytest.mark.parametrize("label", [-1, -101, 10**6])
    def test_labels_that_are_no_tokens(self, tmp_path: Path, label: int) -> None:
        data = examples(4)
        data = data.add_column("labels", [[label] * len(row) for row in data["input_ids"][:]])
        with pytest.raises(ValueError, match=f"labels go from {label} to {label}; a label is a token"):
            train_tiny(tmp_path, tiny_lex(), data, max_steps=1)

    def test_accumulated_gradients_are_those_of_the_whole_batch(self, tmp_path: Path) -> None:
        # 10 examples: the second step of each epoch accumulates fewer batches.
        whole, parts = tiny_lex(), tiny_lex()
        options = {"max_steps": 4, "save_strategy": "no"}
        train_tiny(tmp_path / "whole", whole, examples(10), per_device_train_batch_size=6, **options)
        train_tiny(tmp_path / "parts", parts, examples(10), gradient_accumulation_steps=3, **options)
        for one, other in zip(whole.parameters(), parts.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-5)

    def test_is_logged_with_every_checkpoint_and_at_the_end(self, tmp_path: Path) -> None:
        result = train_tiny(tmp_path, tiny_lex(), examples(4), max_steps=8, save_steps=3, logging_steps=5)
        assert [step for step, _ in result.losses] == [3, 5, 6, 8]
        (_, a), (_, b), (_, c), (_, d) = result.losses
        assert result.train_loss == pytest.approx((3 * a + 2 * b + c + 2 * d) / 8)
        options = {"max_steps": 7, "save_strategy": "no", "logging_steps": 5}
        result = train_tiny(tmp_path / "unsaved", tiny_lex(), examples(4), **options)
        assert [step for step, _ in result.losses] == [5, 7]

    def test_evaluation(self, tmp_path: Path) -> None:
        model, held_back = tiny_lex(), examples(7)
        options = {
            "eval_strategy": "epoch",
            "save_strategy": "epoch",
            "num_train_epochs": 2,
            "logging_steps": 2,
        }
        result = train_tiny(tmp_path, model, examples(6), eval_dataset=held_back, **options)
        assert [step for step, _ in result.eval_losses] == [3, 6]
        assert result.eval_losses[-1][1] == pytest.approx(_hand_loss(model, held_back), abs=1e-5)
        assert [step for step, _ in result.losses] == [2, 3, 4, 6]


class TestSavedModel:
    def test_loads_with_auto_classes(self, tmp_path: Path) -> None:
        model = tiny_lex()
        train_tiny(tmp_path, model, examples(4), max_steps=2, save_steps=1)
        ids = torch.tensor(examples(3)["input_ids"][:])
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
        assert torch.equal(loaded(ids).logits, model.eval()(ids).logits)
        assert AutoTokenizer.from_pretrained(tmp_path)("é<|endoftext|>")["input_ids"] == [195, 169, 256]
        names = {path.name for path in tmp_path.iterdir()}
        assert {"checkpoint-1", "checkpoint-2", "config.json", "model.safetensors"} <= names
        assert not names & {".saving", "training_args.bin"}

    def test_cache_is_off_in_training_and_on_after_it(self, tmp_path: Path) -> None:
        model = tiny_lex()
        seen = []
        model.register_forward_pre_hook(lambda _, __, options: seen.append(options["use_cache"]), with_kwargs=True)
        train_tiny(tmp_path, model, examples(4), max_steps=2, save_steps=2)
        assert seen == [False, False]
        for folder in (tmp_path, tmp_path / "checkpoint-2"):
            loaded = AutoModelForCausalLM.from_pretrained(folder)
            assert loaded.config.use_cache is True
            assert loaded(torch.tensor([[1, 2]])).past_key_values is not None


class TestSeparateDocuments:
    def test_loss_is_that_of_the_documents_alone(self, tmp_path: Path) -> None:
        texts = ["one two", "three", "a", "four five six"]
        examples = pack(Dataset.from_dict({"text": texts}), TOKENIZER, LENGTH, separate_documents=True)
        model = tiny_lex(initializer_range=0.3)
        pieces: list[list[int]] = []
        for ids, positions in zip(examples["input_ids"], examples["position_ids"], strict=True):
            for token, position in zip(ids, positions, strict=True):
                pieces += [[]] if position == 0 else []
                pieces[-1].append(token)
        assert len(pieces) > len(examples) + 1
        model.double()
        losses = []
        for piece in pieces:
            with torch.no_grad():
                log = model(torch.tensor([piece])).logits[0].log_softmax(-1)
            losses += [-float(log[index, token]) for index, token in enumerate(piece[1:])]
        model.float()
        result = train_tiny(tmp_path, model, examples, max_steps=1, save_strategy="no", per_device_train_batch_size=9)
        assert result.train_loss == pytest.approx(sum(losses) / len(losses), abs=1e-5)

    def test_what_stands_in_front_does_not_matter(self, tmp_path: Path) -> None:
        # Two corpora whose second documents are equal: their tokens get the same gradients only if kept apart.
        def weights(first: str, folder: str, apart: bool) -> torch.Tensor:
            model = tiny_lex(initializer_range=0.3)
            seen: list[torch.Tensor] = []
            model.model.norm.register_forward_hook(lambda _, __, output: seen.append(output[0, 6:].detach()))
            data = Dataset.from_dict({"text": [first, "world"]})
            examples = pack(data, TOKENIZER, LENGTH, separate_documents=apart)
            train_tiny(tmp_path / folder, model, examples, max_steps=1, save_strategy="no")
            return seen[0]

        torch.testing.assert_close(weights("hello", "a", True), weights("other", "b", True), atol=1e-6, rtol=0)
        assert not torch.allclose(weights("hello", "c", False), weights("other", "d", False), atol=1e-2)


class TestStreaming:
    def test_is_resumed_to_the_bit(self, tmp_path: Path, corpus: list[Path]) -> None:
        options = {"max_steps": 9, "save_steps": 100, "gradient_accumulation_steps": 2}
        dropout: dict[str, Any] = {"hidden_dropout": 0.2, "attention_dropout": 0.1}
        straight = tiny_lex(**dropout)
        expected = train_tiny(tmp_path / "straight", straight, stream(corpus), **options)
        assert expected.tokens == 9 * 4 * LENGTH
        stopped = tiny_lex(**dropout)
        on_forward(stopped, 9, lambda: os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(TrainingInterrupted, match="after 5 of 9 steps"):
            train_tiny(tmp_path / "resumed", stopped, stream(corpus), **options)
        resumed = tiny_lex(seed=5, **dropout)
        result = train_tiny(tmp_path / "resumed", resumed, stream(corpus), resume=True, **options)
        assert_same_weights(resumed, straight)
        assert (result.losses, result.tokens) == (expected.losses, expected.tokens)

    def test_sees_the_examples_in_their_order(self, tmp_path: Path, corpus: list[Path]) -> None:
        model, seen = tiny_lex(), list[torch.Tensor]()
        model.register_forward_pre_hook(lambda _, __, given: seen.append(given["input_ids"]), with_kwargs=True)
        train_tiny(tmp_path, model, stream(corpus), max_steps=12)
        expected = [row["input_ids"] for row, _ in zip(stream(corpus), range(24), strict=False)]
        assert torch.equal(torch.cat(seen), torch.stack(expected))

    def test_bad_arguments(self, tmp_path: Path, corpus: list[Path]) -> None:
        with pytest.raises(ValueError, match="max_steps = -1: a stream has no end"):
            train_tiny(tmp_path, tiny_lex(), stream(corpus))
        with pytest.raises(ValueError, match="dataloader_num_workers = 2: a stream is read"):
            train_tiny(tmp_path, tiny_lex(), stream(corpus), max_steps=1, dataloader_num_workers=2)

    def test_and_memory_are_not_exchanged(self, tmp_path: Path, corpus: list[Path]) -> None:
        train_tiny(tmp_path / "a", tiny_lex(), stream(corpus), max_steps=1)
        with pytest.raises(ValueError, match="is of a training with streaming"):
            train_tiny(tmp_path / "a", tiny_lex(), examples(4), max_steps=2, resume=True)
        train_tiny(tmp_path / "b", tiny_lex(), examples(4), max_steps=1)
        with pytest.raises(ValueError, match="is of a training without streaming"):
            train_tiny(tmp_path / "b", tiny_lex(), stream(corpus), max_steps=2, resume=True)


class TestBadInput:
    def test_examples(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"columns \['text'\], not 'input_ids': make examples with lex_hf"):
            train_tiny(tmp_path, tiny_lex(), Dataset.from_dict(TEXTS), max_steps=1)
        with pytest.raises(ValueError, match="no examples"):
            train_tiny(tmp_path, tiny_lex(), examples(0), max_steps=1)
        for rows, message in (
            ([[1, 2, 3], [1, 2]], "equal length, at least 2 tokens; 'input_ids' has rows of 2, 3"),
            ([[1], [2]], "equal length, at least 2 tokens; 'input_ids' has rows of 1"),
            ([[1, 257]], "hold the token 257, but the model has the tokens 0 to 256"),
            ([[1, -1]], "hold the token -1"),
            ([[1.5, 2.0]], "must hold whole numbers, not float64"),
            ([["a", "b"]], "must hold whole numbers"),
        ):
            with pytest.raises(ValueError, match=message):
                train_tiny(tmp_path, tiny_lex(), Dataset.from_dict({"input_ids": rows}), max_steps=1)
        assert list(tmp_path.iterdir()) == []

    def test_unused_evaluation_data(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="eval_dataset would not be used: set eval_strategy"):
            train_tiny(tmp_path, tiny_lex(), examples(4), max_steps=1, eval_dataset=examples(2))

    def test_vocabulary(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="The tokenizer has 257 tokens, but the model vocab_size = 256"):
            train_tiny(
                tmp_path,
                tiny_lex(vocab_size=256, bos_token_id=3, eos_token_id=3, pad_token_id=3),
                examples(4),
                max_steps=1,
            )
