"""Tiny trainings."""

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

from lex_hf import LexConfig, LexForCausalLM
from lex_hf.data.documents import stream_documents
from lex_hf.data.packing import pack
from lex_hf.data.streaming import PackedStream
from lex_hf.data.tokenizers import byte_tokenizer
from lex_hf.training.arguments import training_arguments
from lex_hf.training.interruption import TrainingInterrupted
from lex_hf.training.trainer import TrainingResult, train

LENGTH = 12

TOKENIZER = byte_tokenizer()

TEXTS = {"text": [f"{word} {number} " * 4 for number, word in enumerate(["one", "two", "three"] * 3)]}

STEPS = {"max_steps": 6, "save_steps": 2, "save_total_limit": None}


def tiny_lex(seed: int = 0, **fields: Any) -> LexForCausalLM:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 40}
    lengths = {"training_length": LENGTH, "xpos_scale_base": LENGTH // 2}
    ids = {"bos_token_id": 256, "eos_token_id": 256, "pad_token_id": 256}
    return LexForCausalLM(LexConfig(**{"vocab_size": 257, **sizes, **lengths, **ids, **fields}))


def examples(count: int, text: dict[str, list[str]] = TEXTS) -> Dataset:
    return pack(Dataset.from_dict(text), TOKENIZER, LENGTH).select(range(count))


def train_tiny(folder: Path, model: LexForCausalLM, data: Dataset | PackedStream, **options: Any) -> TrainingResult:
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
    return train(model, TOKENIZER, data, arguments, **rules)


def on_forward(model: LexForCausalLM, number: int, action: Callable[[], object]) -> None:
    """Call `action` in the given forward pass of the model, counted from 1."""
    calls = 0

    def hook(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == number:
            action()

    model.register_forward_pre_hook(hook)


def assert_same_weights(model: LexForCausalLM, other: LexForCausalLM) -> None:
    weights, others = model.state_dict(), other.state_dict()
    assert weights.keys() == others.keys()
    assert [name for name in weights if not torch.equal(weights[name], others[name])] == []


def stream(corpus: list[Path], **options: Any) -> PackedStream:
    settings = {"shuffle_buffer": 5, "seed": 3, **options}
    return PackedStream(stream_documents(corpus), TOKENIZER, LENGTH, **settings)


def interrupt(folder: Path, step: int = 3, data: Any = None, **options: Any) -> None:
    """Leave a training that was interrupted after some steps."""
    model = tiny_lex()
    on_forward(model, step, lambda: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(TrainingInterrupted):
        train_tiny(folder, model, examples(10) if data is None else data, **{**STEPS, **options})


def write_lines(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": each}) + "\n" for each in texts))
    return path
