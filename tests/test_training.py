"""Training: losses and labels, saving, resumption to the bit, interruption by real signals."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from lex_hf import LexConfig, LexForCausalLM
from lex_hf.cli import app
from lex_hf.data import pack, stream_documents
from lex_hf.streaming import PackedStream
from lex_hf.tokenization import byte_tokenizer
from lex_hf.training import (
    TrainingInterrupted,
    TrainingResult,
    last_checkpoint,
    train,
    training_arguments,
)

LENGTH = 12
TOKENIZER = byte_tokenizer()
TEXTS = {"text": [f"{word} {number} " * 4 for number, word in enumerate(["one", "two", "three"] * 3)]}


def _model(seed: int = 0, **fields: Any) -> LexForCausalLM:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 40}
    lengths = {"training_length": LENGTH, "xpos_scale_base": LENGTH // 2}
    ids = {"bos_token_id": 256, "eos_token_id": 256, "pad_token_id": 256}
    return LexForCausalLM(LexConfig(**{"vocab_size": 257, **sizes, **lengths, **ids, **fields}))


def _examples(count: int, text: dict[str, list[str]] = TEXTS) -> Dataset:
    return pack(Dataset.from_dict(text), TOKENIZER, LENGTH).select(range(count))


def _train(folder: Path, model: LexForCausalLM, examples: Dataset | PackedStream, **options: Any) -> TrainingResult:
    """Train with small batches and a log at every step, unless the options say otherwise."""
    names = ("resume", "eval_dataset", "allow_changes", "overwrite", "on_save")
    rules = {name: options.pop(name) for name in names if name in options}
    defaults = {
        "per_device_train_batch_size": 2,
        "logging_steps": 1,
        "disable_tqdm": True,
        "learning_rate": 1e-2,
    }
    arguments = training_arguments(folder, **{**defaults, **options})
    return train(model, TOKENIZER, examples, arguments, **rules)


def _hand_loss(model: LexForCausalLM, examples: Dataset) -> float:
    """Mean cross entropy of every token given those before it, one at a time, in float64."""
    losses = []
    for row in examples["input_ids"][:]:
        with torch.no_grad():
            logits = model.double()(torch.tensor([row])).logits[0]
        losses += [float(torch.logsumexp(logits[i], 0) - logits[i, row[i + 1]]) for i in range(len(row) - 1)]
    model.float()
    return sum(losses) / len(losses)


def _on_forward(model: LexForCausalLM, number: int, action: Callable[[], object]) -> None:
    """Call `action` in the given forward pass of the model, counted from 1."""
    calls = 0

    def hook(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == number:
            action()

    model.register_forward_pre_hook(hook)


def _assert_same_weights(model: LexForCausalLM, other: LexForCausalLM) -> None:
    weights, others = model.state_dict(), other.state_dict()
    assert weights.keys() == others.keys()
    assert [name for name in weights if not torch.equal(weights[name], others[name])] == []


class TestLoss:
    def test_falls_on_a_toy_task(self, tmp_path: Path) -> None:
        examples = _examples(20, {"text": ["abcdefgh" * 40]})
        result = _train(tmp_path, _model(), examples, max_steps=40, per_device_train_batch_size=6)
        assert result.losses[0][1] > 5
        assert result.losses[-1][1] < 1.5
        assert [step for step, _ in result.losses] == list(range(1, 41))
        assert result.train_loss == pytest.approx(sum(loss for _, loss in result.losses) / 40)
        # 20 examples make batches of 6, 6, 6 and 2.
        assert result.tokens == 10 * 20 * LENGTH
        assert (result.steps, result.model_folder) == (40, tmp_path)

    @pytest.mark.parametrize("accumulation", [1, 2, 6])
    def test_is_the_cross_entropy_of_all_tokens(self, tmp_path: Path, accumulation: int) -> None:
        examples = _examples(6)
        assert any(256 in row for row in examples["input_ids"][:]), "end-of-text must count, though it also pads"
        model = _model(initializer_range=0.3)
        expected = _hand_loss(model, examples)
        batch = {
            "gradient_accumulation_steps": accumulation,
            "per_device_train_batch_size": 6 // accumulation,
        }
        result = _train(tmp_path, model, examples, max_steps=1, save_strategy="no", **batch)
        assert result.steps == len(result.losses) == 1
        assert result.train_loss == pytest.approx(expected, abs=1e-5)

    def test_accumulated_gradients_are_those_of_the_whole_batch(self, tmp_path: Path) -> None:
        # 10 examples: the second step of each epoch accumulates fewer batches.
        whole, parts = _model(), _model()
        options = {"max_steps": 4, "save_strategy": "no"}
        _train(tmp_path / "whole", whole, _examples(10), per_device_train_batch_size=6, **options)
        _train(tmp_path / "parts", parts, _examples(10), gradient_accumulation_steps=3, **options)
        for one, other in zip(whole.parameters(), parts.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-5)

    def test_is_logged_with_every_checkpoint_and_at_the_end(self, tmp_path: Path) -> None:
        result = _train(tmp_path, _model(), _examples(4), max_steps=8, save_steps=3, logging_steps=5)
        assert [step for step, _ in result.losses] == [3, 5, 6, 8]
        (_, a), (_, b), (_, c), (_, d) = result.losses
        assert result.train_loss == pytest.approx((3 * a + 2 * b + c + 2 * d) / 8)
        options = {"max_steps": 7, "save_strategy": "no", "logging_steps": 5}
        result = _train(tmp_path / "unsaved", _model(), _examples(4), **options)
        assert [step for step, _ in result.losses] == [5, 7]

    def test_evaluation(self, tmp_path: Path) -> None:
        model, held_back = _model(), _examples(7)
        options = {
            "eval_strategy": "epoch",
            "save_strategy": "epoch",
            "num_train_epochs": 2,
            "logging_steps": 2,
        }
        result = _train(tmp_path, model, _examples(6), eval_dataset=held_back, **options)
        assert [step for step, _ in result.eval_losses] == [3, 6]
        assert result.eval_losses[-1][1] == pytest.approx(_hand_loss(model, held_back), abs=1e-5)
        assert [step for step, _ in result.losses] == [2, 3, 4, 6]


class TestSavedModel:
    def test_loads_with_auto_classes(self, tmp_path: Path) -> None:
        model = _model()
        _train(tmp_path, model, _examples(4), max_steps=2, save_steps=1)
        ids = torch.tensor(_examples(3)["input_ids"][:])
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
        assert torch.equal(loaded(ids).logits, model.eval()(ids).logits)
        assert AutoTokenizer.from_pretrained(tmp_path)("é<|endoftext|>")["input_ids"] == [195, 169, 256]
        names = {path.name for path in tmp_path.iterdir()}
        assert {"checkpoint-1", "checkpoint-2", "config.json", "model.safetensors"} <= names
        assert not names & {".saving", "training_args.bin"}

    def test_cache_is_off_in_training_and_on_after_it(self, tmp_path: Path) -> None:
        model = _model()
        seen = []
        model.register_forward_pre_hook(lambda _, __, options: seen.append(options["use_cache"]), with_kwargs=True)
        _train(tmp_path, model, _examples(4), max_steps=2, save_steps=2)
        assert seen == [False, False]
        for folder in (tmp_path, tmp_path / "checkpoint-2"):
            loaded = AutoModelForCausalLM.from_pretrained(folder)
            assert loaded.config.use_cache is True
            assert loaded(torch.tensor([[1, 2]])).past_key_values is not None


class TestResume:
    @pytest.mark.parametrize("accumulation", [1, 2])
    def test_is_to_the_bit_an_uninterrupted_run(self, tmp_path: Path, accumulation: int) -> None:
        options = {"max_steps": 8, "save_steps": 100, "gradient_accumulation_steps": accumulation}
        dropout: dict[str, Any] = {"hidden_dropout": 0.2, "attention_dropout": 0.1}
        straight = _model(**dropout)
        expected = _train(tmp_path / "straight", straight, _examples(10), **options)

        stopped = _model(**dropout)
        # 10 examples: with batches of 2 * 2, the third step is a smaller one, at the end of an epoch.
        _on_forward(stopped, 2 * accumulation + 1, lambda: os.kill(os.getpid(), signal.SIGINT))
        handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
        with pytest.raises(TrainingInterrupted, match=r"after 3 of 8 steps.*checkpoint-3\b.*resume=True") as info:
            _train(tmp_path / "resumed", stopped, _examples(10), **options)
        assert handlers == (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))
        assert info.value.steps == 3
        assert info.value.checkpoint == last_checkpoint(tmp_path / "resumed")
        _assert_same_weights(AutoModelForCausalLM.from_pretrained(info.value.checkpoint), stopped)

        resumed = _model(seed=5, **dropout)
        result = _train(tmp_path / "resumed", resumed, _examples(10), resume=True, **options)
        _assert_same_weights(resumed, straight)
        assert result.losses == expected.losses
        assert (result.train_loss, result.tokens) == (expected.train_loss, expected.tokens)

    def test_of_a_complete_run_takes_no_step(self, tmp_path: Path) -> None:
        model = _model()
        expected = _train(tmp_path, model, _examples(10), max_steps=3)
        (tmp_path / "model.safetensors").unlink()
        again = _model(seed=5)
        assert _train(tmp_path, again, _examples(10), max_steps=3, resume=True) == expected
        _assert_same_weights(again, model)
        _assert_same_weights(AutoModelForCausalLM.from_pretrained(tmp_path), model)

    def test_passes_over_a_half_written_checkpoint(self, tmp_path: Path) -> None:
        model = _model()
        options = {"max_steps": 6, "save_steps": 2}
        _train(tmp_path, model, _examples(10), **options)
        (tmp_path / "checkpoint-6" / "trainer_state.json").unlink()
        resumed = _model(seed=5)
        _train(tmp_path, resumed, _examples(10), resume=True, **options)
        _assert_same_weights(resumed, model)
        assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-6"

    def test_a_half_written_checkpoint_does_not_push_out_a_good_one(self, tmp_path: Path) -> None:
        options = {"max_steps": 4, "save_steps": 2, "save_total_limit": 1}
        _train(tmp_path, _model(), _examples(10), **{**options, "save_total_limit": 2})
        newest = tmp_path / "checkpoint-4"
        (newest / "trainer_state.json").unlink()
        os.utime(newest, times=(2**31, 2**31))  # The Trainer keeps the youngest; clocks can be wrong.
        model = _model()
        _on_forward(model, 1, lambda: signal.raise_signal(signal.SIGTERM))
        with pytest.raises(TrainingInterrupted):
            _train(tmp_path, model, _examples(10), resume=True, **options)
        assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-3"

    def test_needs_a_complete_checkpoint(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"resume=True, but .* has no complete checkpoint"):
            _train(tmp_path, _model(), _examples(4), max_steps=2, resume=True)
        _train(tmp_path, _model(), _examples(4), max_steps=2, save_only_model=True)
        with pytest.raises(ValueError, match=r"resume=True, but .* has no complete checkpoint"):
            _train(tmp_path, _model(), _examples(4), max_steps=2, resume=True)

    def test_needs_the_same_model(self, tmp_path: Path) -> None:
        _train(tmp_path, _model(eos_token_id=3), _examples(4), max_steps=1)
        with pytest.raises(ValueError, match=r"checkpoint-1, which has .*intermediate_size = 40, not 44"):
            _train(tmp_path, _model(intermediate_size=44), _examples(4), max_steps=2, resume=True)
        with pytest.raises(ValueError, match=r"position_embedding_type = .*'rope'"):
            _train(tmp_path, _model(position_embedding_type="rope"), _examples(4), max_steps=2, resume=True)
        allowed = {"resume": True, "allow_changes": ["max_steps"]}
        _train(tmp_path, _model(eos_token_id=3), _examples(4), max_steps=2, **allowed)

    @pytest.mark.parametrize("kept", ["checkpoint-1", "model.safetensors"])
    def test_must_be_asked_for(self, tmp_path: Path, kept: str) -> None:
        _train(tmp_path / "done", _model(), _examples(4), max_steps=1)
        (tmp_path / "other").mkdir()
        (tmp_path / "done" / kept).rename(tmp_path / "other" / kept)
        with pytest.raises(ValueError, match=r"holds a trained model or checkpoints: .* resume=True"):
            _train(tmp_path / "other", _model(), _examples(4), max_steps=1)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with checkpoint-1 to checkpoint-10."""
    folder = tmp_path_factory.mktemp("trained")
    _train(folder, _model(), _examples(4), max_steps=10, save_steps=1, save_total_limit=None)
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


class TestSeparateDocuments:
    def test_loss_is_that_of_the_documents_alone(self, tmp_path: Path) -> None:
        texts = ["one two", "three", "a", "four five six"]
        examples = pack(Dataset.from_dict({"text": texts}), TOKENIZER, LENGTH, separate_documents=True)
        model = _model(initializer_range=0.3)
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
        result = _train(tmp_path, model, examples, max_steps=1, save_strategy="no", per_device_train_batch_size=9)
        assert result.train_loss == pytest.approx(sum(losses) / len(losses), abs=1e-5)

    def test_what_stands_in_front_does_not_matter(self, tmp_path: Path) -> None:
        # Two corpora whose second documents are equal: their tokens get the same gradients only if kept apart.
        def weights(first: str, folder: str, apart: bool) -> torch.Tensor:
            model = _model(initializer_range=0.3)
            seen: list[torch.Tensor] = []
            model.model.norm.register_forward_hook(lambda _, __, output: seen.append(output[0, 6:].detach()))
            data = Dataset.from_dict({"text": [first, "world"]})
            examples = pack(data, TOKENIZER, LENGTH, separate_documents=apart)
            _train(tmp_path / folder, model, examples, max_steps=1, save_strategy="no")
            return seen[0]

        torch.testing.assert_close(weights("hello", "a", True), weights("other", "b", True), atol=1e-6, rtol=0)
        assert not torch.allclose(weights("hello", "c", False), weights("other", "d", False), atol=1e-2)


@pytest.fixture
def corpus(tmp_path: Path) -> list[Path]:
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS["text"]))
    return [path]


def _stream(corpus: list[Path], **options: Any) -> PackedStream:
    settings = {"shuffle_buffer": 5, "seed": 3, **options}
    return PackedStream(stream_documents(corpus), TOKENIZER, LENGTH, **settings)


class TestStreaming:
    def test_is_resumed_to_the_bit(self, tmp_path: Path, corpus: list[Path]) -> None:
        options = {"max_steps": 9, "save_steps": 100, "gradient_accumulation_steps": 2}
        dropout: dict[str, Any] = {"hidden_dropout": 0.2, "attention_dropout": 0.1}
        straight = _model(**dropout)
        expected = _train(tmp_path / "straight", straight, _stream(corpus), **options)
        assert expected.tokens == 9 * 4 * LENGTH
        stopped = _model(**dropout)
        _on_forward(stopped, 9, lambda: os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(TrainingInterrupted, match="after 5 of 9 steps"):
            _train(tmp_path / "resumed", stopped, _stream(corpus), **options)
        resumed = _model(seed=5, **dropout)
        result = _train(tmp_path / "resumed", resumed, _stream(corpus), resume=True, **options)
        _assert_same_weights(resumed, straight)
        assert (result.losses, result.tokens) == (expected.losses, expected.tokens)

    def test_sees_the_examples_in_their_order(self, tmp_path: Path, corpus: list[Path]) -> None:
        model, seen = _model(), list[torch.Tensor]()
        model.register_forward_pre_hook(lambda _, __, given: seen.append(given["input_ids"]), with_kwargs=True)
        _train(tmp_path, model, _stream(corpus), max_steps=12)
        expected = [row["input_ids"] for row, _ in zip(_stream(corpus), range(24), strict=False)]
        assert torch.equal(torch.cat(seen), torch.stack(expected))

    def test_bad_arguments(self, tmp_path: Path, corpus: list[Path]) -> None:
        with pytest.raises(ValueError, match="max_steps = -1: a stream has no end"):
            _train(tmp_path, _model(), _stream(corpus))
        with pytest.raises(ValueError, match="dataloader_num_workers = 2: a stream is read"):
            _train(tmp_path, _model(), _stream(corpus), max_steps=1, dataloader_num_workers=2)

    def test_and_memory_are_not_exchanged(self, tmp_path: Path, corpus: list[Path]) -> None:
        _train(tmp_path / "a", _model(), _stream(corpus), max_steps=1)
        with pytest.raises(ValueError, match="is of a training with streaming"):
            _train(tmp_path / "a", _model(), _examples(4), max_steps=2, resume=True)
        _train(tmp_path / "b", _model(), _examples(4), max_steps=1)
        with pytest.raises(ValueError, match="is of a training without streaming"):
            _train(tmp_path / "b", _model(), _stream(corpus), max_steps=2, resume=True)


KILLED = """
import os, random, signal, sys
from pathlib import Path
from test_training import _examples, _model, _on_forward, _stream, _train

folder, corpus, step = Path(sys.argv[1]), [Path(sys.argv[2])], int(sys.argv[3])
codes = []
for streaming in (False, True):
    process = os.fork()  # what is killed need not import all of this again
    if not process:
        model = _model(hidden_dropout=0.2)
        _on_forward(model, step, lambda: os.kill(os.getpid(), signal.SIGKILL))
        data = _stream(corpus) if streaming else _examples(10)
        _train(folder / str(streaming), model, data, max_steps=12, save_steps=2)
        os._exit(0)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
print("", *codes, sep="\\n")
"""


class TestKill:
    @pytest.mark.processes
    def test_at_a_random_step_loses_nothing(self, tmp_path: Path, corpus: list[Path]) -> None:
        step = random.SystemRandom().randrange(4, 13)
        command = [sys.executable, "-c", KILLED, str(tmp_path), str(corpus[0]), str(step)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        process = subprocess.run(command, env=environment, check=False, capture_output=True, text=True, timeout=300)
        assert process.stdout.split()[-2:] == [str(-signal.SIGKILL)] * 2, process.stderr
        for streaming in (False, True):
            folder = tmp_path / str(streaming)
            last = last_checkpoint(folder)
            assert last == folder / f"checkpoint-{(step - 1) // 2 * 2}", f"killed in step {step}"
            straight, resumed = _model(hidden_dropout=0.2), _model(seed=7, hidden_dropout=0.2)
            data = [_stream(corpus) if streaming else _examples(10) for _ in range(2)]
            expected = _train(tmp_path / f"straight-{streaming}", straight, data[0], max_steps=12, save_steps=2)
            result = _train(folder, resumed, data[1], max_steps=12, save_steps=2, resume=True)
            _assert_same_weights(resumed, straight)
            assert (result.losses, result.tokens) == (expected.losses, expected.tokens), f"killed in step {step}"


def _in_two_processes(*arguments: str) -> None:
    """Run Python with these arguments in two processes that know each other."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(
        [*launcher, *arguments], env=environment, check=False, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr


SHARDED = """
import sys
import lex_hf
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

torch.distributed.init_process_group("gloo")
ids = torch.arange(60).view(2, 30) % 257
plain = AutoModelForCausalLM.from_pretrained(sys.argv[1])
expected = plain(ids, labels=ids, use_cache=False).loss
expected.backward()

by_hand = AutoModelForCausalLM.from_pretrained(sys.argv[1])
mesh = init_device_mesh("cpu", (2,))
for layer in by_hand.model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(by_hand, mesh=mesh)
loaded = AutoModelForCausalLM.from_pretrained(sys.argv[1], distributed_config=DistributedConfig(fsdp_size=2))
for model in (by_hand, loaded):
    loss = model.train()(ids, labels=ids, use_cache=False).loss
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=0)
    loss.backward()
    sharded = 0
    for (name, one), (_, other) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        sharded += isinstance(one, DTensor) and one.to_local().numel() < one.numel()
        gradient = one.grad.full_tensor() if isinstance(one.grad, DTensor) else one.grad
        torch.testing.assert_close(gradient, other.grad, atol=1e-5, rtol=0, msg=name)
    assert sharded > 20, sharded
    torch.optim.AdamW(model.parameters(), lr=1e-2).step()
    assert model(ids, labels=ids, use_cache=False).loss < loss
torch.distributed.destroy_process_group()
"""


IN_TURN = """
import sys
from lex_hf.cli import app

for streaming in ("false", "true"):
    output = f"{sys.argv[1]}-{streaming}"
    app([*sys.argv[2:], "--set", f"streaming={streaming}", "--output", output], standalone_mode=False)
"""


class TestTwoProcesses:
    @pytest.mark.processes
    def test_train_what_one_does(self, tmp_path: Path, corpus: list[Path]) -> None:
        sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
        numbers = {"training_length": LENGTH, "max_steps": 5, "save_steps": 3, "warmup_steps": 0, "shuffle_buffer": 5}
        batches = {"per_device_train_batch_size": 2, "examples_per_step": 4, "separate_documents": "true"}
        fields = {**sizes, **numbers, **batches, "use_cpu": "true"}
        options = [part for name, value in fields.items() for part in ("--set", f"{name}={value}")]
        command = ["train", "tiny", "--data", str(corpus[0]), *options]
        script = tmp_path / "script.py"
        script.write_text(IN_TURN)
        _in_two_processes(str(script), str(tmp_path / "both"), *command)
        for streaming in ("false", "true"):
            alone = tmp_path / f"alone-{streaming}"
            result = CliRunner().invoke(app, [*command, "--set", f"streaming={streaming}", "--output", str(alone)])
            assert result.exit_code == 0, result.output
            self.assert_trained_alike(tmp_path / f"both-{streaming}", alone)

    def assert_trained_alike(self, both: Path, alone: Path) -> None:
        states = [json.loads((path / "checkpoint-5" / "trainer_state.json").read_text()) for path in (both, alone)]
        assert states[0]["num_input_tokens_seen"] == states[1]["num_input_tokens_seen"] == 5 * 4 * LENGTH
        one, other = (AutoModelForCausalLM.from_pretrained(path) for path in (both, alone))
        for name, weight in one.state_dict().items():
            torch.testing.assert_close(weight, other.state_dict()[name], atol=2e-5, rtol=0, msg=name)
        started = LexForCausalLM(one.config)
        assert not torch.allclose(started.lm_head.weight, one.lm_head.weight, atol=1e-3)

    @pytest.mark.processes
    def test_share_out_a_model(self, tmp_path: Path) -> None:
        script = tmp_path / "script.py"
        script.write_text(SHARDED)
        _model(initializer_range=0.2).save_pretrained(tmp_path / "model")
        _in_two_processes(str(script), str(tmp_path / "model"))

    @pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
    def test_sharding_is_not_left_out_in_silence(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
        with pytest.raises(ValueError, match="FSDP is asked for, and there is no accelerator here"):
            _train(tmp_path, _model(), _examples(4), max_steps=1)


class TestSignals:
    @pytest.fixture(autouse=True)
    def python_answers_to_ctrl_c(self) -> Iterator[None]:
        """Shells start what runs in the background with SIGINT ignored, and Python leaves it so."""
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        yield
        signal.signal(signal.SIGINT, before)

    @pytest.mark.processes
    def test_sigterm_from_another_process(self, tmp_path: Path) -> None:
        script = (
            "from pathlib import Path\n"
            "from test_training import _examples, _model, _train\n"
            f"_train(Path({str(tmp_path)!r}), _model(), _examples(10), max_steps=10**6, save_steps=10**6,\n"
            "       logging_steps=10**6, logging_first_step=True)\n"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        with process:
            assert process.stdout is not None
            assert "loss" in process.stdout.readline()
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=60)
        assert process.returncode != 0
        checkpoint = last_checkpoint(tmp_path)
        assert checkpoint is not None
        steps = json.loads((checkpoint / "trainer_state.json").read_text())["global_step"]
        assert f"TrainingInterrupted: Training was interrupted after {steps} of 1000000 steps" in errors
        AutoModelForCausalLM.from_pretrained(checkpoint)

    def test_second_signal_stops_at_once(self, tmp_path: Path) -> None:
        model = _model()

        def twice() -> None:
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGINT)

        _on_forward(model, 2, twice)
        with pytest.raises(KeyboardInterrupt) as info:
            _train(tmp_path, model, _examples(10), max_steps=5)
        assert not isinstance(info.value, TrainingInterrupted)
        assert last_checkpoint(tmp_path) is None

    def test_signal_in_the_last_step_comes_after_the_model_is_saved(self, tmp_path: Path) -> None:
        model = _model()
        _on_forward(model, 3, lambda: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt) as info:
            _train(tmp_path, model, _examples(10), max_steps=3)
        assert not isinstance(info.value, TrainingInterrupted)
        _assert_same_weights(AutoModelForCausalLM.from_pretrained(tmp_path), model)

    @pytest.mark.parametrize("strategy", ["steps", "epoch"])
    def test_stop_skips_the_evaluation(self, tmp_path: Path, strategy: str) -> None:
        model = _model()
        _on_forward(model, 2, lambda: signal.raise_signal(signal.SIGINT))
        options = {"max_steps": 9, "eval_strategy": strategy, "eval_steps": 2, "save_strategy": strategy}
        with pytest.raises(TrainingInterrupted):
            _train(tmp_path, model, _examples(10), eval_dataset=_examples(2), **options)
        state = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())
        assert [entry["step"] for entry in state["log_history"] if "loss" in entry] == [1, 2]
        assert not any("eval_loss" in entry for entry in state["log_history"])

    def test_training_in_another_thread(self, tmp_path: Path) -> None:
        results: list[TrainingResult] = []
        work = threading.Thread(target=lambda: results.append(_train(tmp_path, _model(), _examples(4), max_steps=1)))
        work.start()
        work.join()
        assert [result.steps for result in results] == [1]


class TestArguments:
    def test_are_those_of_the_paper(self, tmp_path: Path) -> None:
        arguments = training_arguments(tmp_path, max_steps=50_000, warmup_steps=20_000)
        assert (arguments.adam_beta1, arguments.adam_beta2, arguments.adam_epsilon) == (0.9, 0.98, 1e-6)
        assert (arguments.learning_rate, arguments.weight_decay, arguments.max_grad_norm) == (3e-4, 0.01, 2.0)
        assert arguments.report_to == []
        assert not arguments.disable_tqdm

    def test_learning_rate_rises_and_falls_to_zero_in_straight_lines(self, tmp_path: Path) -> None:
        options = {"max_steps": 6, "warmup_steps": 2, "save_steps": 6}
        _train(tmp_path, _model(), _examples(4), learning_rate=8e-3, **options)
        state = json.loads((tmp_path / "checkpoint-6" / "trainer_state.json").read_text())
        rates = [entry["learning_rate"] for entry in state["log_history"] if "loss" in entry]
        assert rates == pytest.approx([0, 4e-3, 8e-3, 6e-3, 4e-3, 2e-3])

    def test_another_schedule(self, tmp_path: Path) -> None:
        result = _train(tmp_path, _model(), _examples(4), max_steps=1, lr_scheduler_type="cosine")
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
        with pytest.raises(ValueError, match=rf"{name} = .*(must be|Expected value)"):
            training_arguments(tmp_path, **{name: value})

    def test_what_this_package_decides(self, tmp_path: Path, corpus: list[Path]) -> None:
        with pytest.raises(ValueError, match="restore_callback_states_from_checkpoint must be false"):
            _train(tmp_path, _model(), _examples(4), max_steps=1, restore_callback_states_from_checkpoint=True)
        with pytest.raises(ValueError, match="auto_find_batch_size must be false: a stream"):
            _train(tmp_path, _model(), _stream(corpus), max_steps=1, auto_find_batch_size=True)

    def test_what_the_trainer_does_not_know(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"TrainingArguments: .*'no_such_field'"):
            training_arguments(tmp_path, no_such_field=1)
        with pytest.raises(ValueError, match=r"TrainingArguments: .*'foo'"):
            training_arguments(tmp_path, accelerator_config={"foo": 1})
        with pytest.raises(ValueError, match=r"lr_scheduler_kwargs = .*'foo'"):
            _train(tmp_path, _model(), _examples(4), max_steps=1, lr_scheduler_kwargs={"foo": 1})
        with pytest.raises(ValueError, match="train_sampling_strategy = 'foo': it must be one of random"):
            _train(tmp_path, _model(), _examples(4), max_steps=1, train_sampling_strategy="foo")

    def test_what_is_not_installed(self, tmp_path: Path) -> None:
        for fields in ({"report_to": "comet_ml"}, {"optim": "adamw_bnb_8bit"}):
            with pytest.raises(ValueError, match=r"asks for what is not here: .*(comet|bitsandbytes)"):
                _train(tmp_path, _model(), _examples(4), max_steps=1, **fields)


class TestBadInput:
    def test_examples(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"columns \['text'\], not 'input_ids': make examples with lex_hf"):
            _train(tmp_path, _model(), Dataset.from_dict(TEXTS), max_steps=1)
        with pytest.raises(ValueError, match="no examples"):
            _train(tmp_path, _model(), _examples(0), max_steps=1)
        for rows, message in (
            ([[1, 2, 3], [1, 2]], "equal length, at least 2 tokens; 'input_ids' has rows of 2, 3"),
            ([[1], [2]], "equal length, at least 2 tokens; 'input_ids' has rows of 1"),
            ([[1, 257]], "hold the token 257, but the model has the tokens 0 to 256"),
            ([[1, -1]], "hold the token -1"),
            ([[1.5, 2.0]], "must hold whole numbers, not float64"),
            ([["a", "b"]], "must hold whole numbers"),
        ):
            with pytest.raises(ValueError, match=message):
                _train(tmp_path, _model(), Dataset.from_dict({"input_ids": rows}), max_steps=1)
        assert list(tmp_path.iterdir()) == []

    def test_unused_evaluation_data(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="eval_dataset would not be used: set eval_strategy"):
            _train(tmp_path, _model(), _examples(4), max_steps=1, eval_dataset=_examples(2))

    def test_vocabulary(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="The tokenizer has 257 tokens, but the model vocab_size = 256"):
            _train(
                tmp_path,
                _model(vocab_size=256, bos_token_id=3, eos_token_id=3, pad_token_id=3),
                _examples(4),
                max_steps=1,
            )
