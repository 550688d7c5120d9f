"""Tiny trainings."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

from lex_hf import LexConfig, LexForCausalLM
from lex_hf.data.documents import stream_documents
from lex_hf.data.packing import pack
from lex_hf.data.streaming import PackedStream
from lex_hf.data.tokenizers import byte_tokenizer
from lex_hf.training.arguments import training_arguments
from lex_hf.training.trainer import TrainingResult, train

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


def _stream(corpus: list[Path], **options: Any) -> PackedStream:
    settings = {"shuffle_buffer": 5, "seed": 3, **options}
    return PackedStream(stream_documents(corpus), TOKENIZER, LENGTH, **settings)
