"""Scales at which the tables are made again: `tiny` for two CPU cores, `small` for one GPU, `paper` as printed."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from lex_hf.model.configuration_lex import LexConfig
from lex_hf.reproduce.tables import LEX, System, Table
from lex_hf.reproduce.tiny import check_steps, tiny_config

# Nothing of a model that can be trained: the versions and names that transformers keeps in a config.
_NOT_A_FIELD = ("transformers_version", "model_type", "architectures", "dtype")


@dataclass(frozen=True)
class Preset:
    """A scale.

    Attributes:
        name: `tiny`, `small` or `paper`.
        length: l in tokens.
        model: Fields of `LexConfig` that all systems share.
        training: Fields of `TrainingArguments` that decide the weights, with `max_steps`.
        batch_tokens: Tokens of an optimiser step, over all devices.
        tokenizer: `bytes`, `bpe:N` (a byte-level BPE of N ids, trained on the training texts), or a folder or Hub id.
        test_tokens: Tokens of each test text that are read under `chunked`; `None` reads all.
        segments: Segments of the longest length under `last_token` (1000 in the paper).
        measured_segments: Segments of which resolution and receptive fields are measured.
        needs_data: Whether training texts must be given; else Python's own library serves.
        tokens_at_once: Tokens of a batch, in training on one device and in evaluation.
    """

    name: str
    length: int
    model: Mapping[str, Any]
    training: Mapping[str, Any]
    batch_tokens: int
    tokenizer: str
    test_tokens: int | None
    segments: int
    measured_segments: int
    needs_data: bool
    tokens_at_once: int
    vocabulary: int = field(default=50257)

    def config(self, table: Table, system: System) -> LexConfig:
        """The model of a system, for training: full attention within l, unless it is trained with its window.

        Distances scale with the training length: B = l/2, and T5's last bucket begins at l/4, as in the papers.
        """
        length = self.training_length(table, system)
        fields = dict(self.model) | {
            "vocab_size": self.vocabulary,
            "training_length": length,
            "xpos_scale_base": max(1, length // 2),
            "t5_max_distance": max(17, length // 4),  # more than half of its 32 buckets
            "t5_scaled": True,
            **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), self.vocabulary - 1),
        }
        if system.trained_with_window:
            fields |= {"attention_pattern": "sliding", "sliding_window": table.scaled(system.window or 0, self.length)}
        return LexConfig(**(fields | dict(system.model)))

    def training_length(self, table: Table, system: System) -> int:
        """Tokens of a training example of a system; even."""
        scaled = self.length if system.trained_at is None else table.scaled(system.trained_at, self.length)
        return scaled + scaled % 2

    def examples_per_step(self, length: int) -> int:
        """Training examples of an optimiser step."""
        return max(1, self.batch_tokens // length)


def preset(name: str, paper: str, *, length: int | None = None, steps: int | None = None) -> Preset:
    """Make a preset for the tables of one of the papers.

    Args:
        name: `tiny`, `small` or `paper`.
        paper: `LEX` or `SANDWICH`.
        length: Another l in tokens; tokens of a step stay the same.
        steps: Another number of optimiser steps; the warm-up keeps its share of them.

    Raises:
        ValueError: If there is no such preset, or the length is odd.
    """
    if name not in PRESETS:
        raise ValueError(f"--preset {name}: it must be one of {', '.join(PRESETS)}.")
    chosen = PRESETS[name](paper)
    if length is not None:
        if length < 8 or length % 2:
            raise ValueError(f"--length {length}: it must be even and at least 8.")
        chosen = replace(chosen, length=length)
    if steps is not None:
        check_steps(steps)
        printed = chosen.training["max_steps"]
        warmup = min(steps - 1, chosen.training["warmup_steps"] * steps // printed)
        chosen = replace(chosen, training={**chosen.training, "max_steps": steps, "warmup_steps": warmup})
    return chosen


def _tiny(paper: str) -> Preset:
    fields = {name: value for name, value in tiny_config("xpos").to_diff_dict().items() if name not in _NOT_A_FIELD}
    length, vocabulary = fields.pop("training_length"), fields.pop("vocab_size")
    return Preset(
        name="tiny",
        length=length,
        model=fields,
        training={"max_steps": 1000, "warmup_steps": 66, "learning_rate": 2e-3},
        batch_tokens=16 * length,
        tokenizer="bytes",
        vocabulary=vocabulary,
        test_tokens=16_384,
        segments=200,
        measured_segments=16,
        needs_data=False,
        tokens_at_once=8192,
    )


def _small(paper: str) -> Preset:
    """17 million parameters: 8 layers of 384, a vocabulary of 8192; 98 million tokens."""
    return Preset(
        name="small",
        length=512,
        model={
            "hidden_size": 384,
            "num_hidden_layers": 8,
            "num_attention_heads": 6,
            "intermediate_size": 1536,
        },
        training={"max_steps": 3000, "warmup_steps": 300, "learning_rate": 1e-3, **_mixed_precision()},
        batch_tokens=64 * 512,
        tokenizer="bpe:8192",
        vocabulary=8192,
        test_tokens=65_536,
        segments=400,
        measured_segments=32,
        needs_data=True,
        tokens_at_once=32_768,
    )


def _paper(paper: str) -> Preset:
    return _GPT_MEDIUM if paper == LEX else _GPT_162M


def _mixed_precision() -> dict[str, Any]:
    return {"bf16": True} if torch.cuda.is_available() else {}


# LEX paper, Table 7; its batch is 512 texts of 1024 tokens.
_GPT_MEDIUM = Preset(
    name="paper",
    length=1024,
    model={"chunked_loss": True},
    training={"max_steps": 50_000, "warmup_steps": 20_000, "learning_rate": 3e-4, "bf16": True},
    batch_tokens=512 * 1024,
    tokenizer="gpt2",
    test_tokens=None,
    segments=1000,
    measured_segments=64,
    needs_data=True,
    tokens_at_once=16_384,
)
# Sandwich paper, §3.1 and Table 7, which gives the head dimension as the hidden size; 162 million parameters are those
# with an LM head of its own. What it leaves to the defaults of GPT-NeoX is as there (configs/125M.yml).
_GPT_162M = replace(
    _GPT_MEDIUM,
    length=512,
    model={
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "tie_word_embeddings": False,
        "chunked_loss": True,
    },
    training={
        "max_steps": 50_000,
        "warmup_steps": 500,
        "learning_rate": 6e-4,
        "lr_scheduler_type": "cosine",
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "adam_epsilon": 1e-8,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "bf16": True,
    },
    batch_tokens=32 * 512,
)
PRESETS = {"tiny": _tiny, "small": _small, "paper": _paper}
