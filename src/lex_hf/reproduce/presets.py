"""Scales at which the tables are made again.

`tiny` is for two CPU cores, `small` for a night of them or for a GPU, `paper` as printed. Sizes and training are
those of recipes ([`lex_hf.training.recipes`]); here is what differs, and how it is measured.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from lex_hf.model.configuration_lex import LexConfig
from lex_hf.model.linear_lex import multiplies_by_row
from lex_hf.reproduce.corpora import vocabulary_size
from lex_hf.reproduce.tables import LEX, System, Table
from lex_hf.reproduce.tiny import check_steps
from lex_hf.training.recipe_files import lex_optimizer
from lex_hf.training.recipes import Recipe, load_recipe, model_fields

_SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "tie_word_embeddings",
    "chunked_loss",
    "initializer_range",
)

# Fields that are not for `--set`, and what decides them.
_DECIDED = {
    "position_embedding_type": "its systems have their own; others come with --also",
    "attention_pattern": "its systems have their own",
    "sliding_window": "its systems have their own",
    "training_length": "it is --length",
    "vocab_size": "it comes from --tokenizer",
}


@dataclass(frozen=True)
class Preset:
    """A scale.

    Attributes:
        name: `tiny`, `small` or `paper`.
        length: l in tokens.
        model: Sizes of the models, as fields of `LexConfig`.
        training: Fields of `TrainingArguments` that decide the weights, with `max_steps`.
        batch_tokens: Tokens of an optimiser step, over all devices.
        tokenizer: `bytes`, `bpe:N` (a byte-level BPE of N ids, trained on the training texts), or a folder or Hub id.
        test_tokens: Tokens of each test text that are read under `chunked`; `None` reads all.
        segments: Segments of the longest length under `last_token` (1000 in the paper).
        measured_segments: Segments of which resolution and receptive fields are measured.
        needs_data: Whether training texts must be given; else Python's own library serves.
        tokens_at_once: Tokens of a batch, in training on one device and in evaluation.
        vocabulary: Number of token ids.
        fields: Further fields of `LexConfig`, of all systems that do not have their own.
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
    vocabulary: int
    fields: Mapping[str, Any] = field(default_factory=dict)

    def config(self, table: Table, system: System) -> LexConfig:
        """The model of a system, for training: full attention within l, unless it is trained with its window.

        Distances scale with the training length: B = l/2, and T5's last bucket begins at l/4, as in the papers.
        """
        length = self.length if system.trained_at is None else table.scaled(system.trained_at, self.length)
        length += length % 2  # even
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
        return LexConfig(**(fields | dict(self.fields) | dict(system.model)))

    def examples_per_step(self, length: int) -> int:
        """Training examples of an optimiser step."""
        return max(1, self.batch_tokens // length)


def preset(
    name: str,
    paper: str,
    *,
    length: int | None = None,
    steps: int | None = None,
    segments: int | None = None,
    tokenizer: str | None = None,
    fields: Sequence[str] = (),
) -> Preset:
    """Make a preset for the tables of one of the papers.

    Args:
        name: `tiny`, `small` or `paper`.
        paper: `LEX` or `SANDWICH`.
        length: Another l in tokens; tokens of a step stay the same.
        steps: Another number of optimiser steps; the warm-up keeps its share of them.
        segments: Another number of segments under `last_token`.
        tokenizer: Another tokenizer, and so another vocabulary.
        fields: Fields of `LexConfig` for all systems that do not have their own, each `NAME=VALUE`.

    Raises:
        ValueError: If there is no such preset, the length is odd, a number or the tokenizer impossible, or a field
            unknown or decided elsewhere.
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
    if segments is not None:
        chosen = replace(chosen, segments=segments)
    if tokenizer is not None:
        chosen = replace(chosen, tokenizer=tokenizer, vocabulary=vocabulary_size(tokenizer))
    given = model_fields(fields)
    for decided in _DECIDED.keys() & given.keys():
        raise ValueError(f"--set {decided}: for a table, {_DECIDED[decided]}.")
    return replace(chosen, fields=given)


def _tiny(paper: str) -> Preset:
    recipe, steps = load_recipe("tiny"), 1000
    return _of_recipe(
        recipe.override([f"max_steps={steps}", f"warmup_steps={recipe.warmup_steps(steps)}"]),
        name="tiny",
        tokenizer="bytes",
        test_tokens=16_384,
        segments=200,
        measured_segments=16,
        needs_data=False,
        tokens_at_once=8192,
    )


def _small(paper: str) -> Preset:
    """4.2 million parameters: 4 layers of 256, heads of 64 as the papers; 8 million tokens; bfloat16 if possible."""
    recipe = load_recipe("small").override(
        [
            "training_length=256",
            "num_hidden_layers=4",
            "hidden_size=256",
            "num_attention_heads=4",
            "intermediate_size=1024",
            "vocab_size=4096",
            "chunked_loss=false",
            "max_steps=2000",
            "learning_rate=1.5e-3",
            "examples_per_step=16",
        ]
    )
    if not torch.cuda.is_available() and multiplies_by_row(torch.bfloat16):
        recipe = recipe.override(["bf16=false"])
    return _of_recipe(
        recipe,
        name="small",
        tokenizer=f"bpe:{recipe.model['vocab_size']}",
        test_tokens=65_536,
        segments=400,
        measured_segments=32,
        needs_data=True,
        tokens_at_once=8192,
    )


def _paper(paper: str) -> Preset:
    return _of_recipe(
        load_recipe("gpt-medium" if paper == LEX else "sandwich-162m"),
        name="paper",
        tokenizer="gpt2",  # part of the hash in the names of model folders
        test_tokens=None,
        segments=1000,
        measured_segments=64,
        needs_data=True,
        tokens_at_once=16_384,
    )


def _of_recipe(recipe: Recipe, **measuring: Any) -> Preset:
    """Take sizes, training and batch from a recipe; its positions and attention pattern are those of the systems."""
    length, printed = recipe.model["training_length"], recipe.training
    training = {name: printed[name] for name in ("max_steps", "learning_rate")}
    training["warmup_steps"] = recipe.warmup_steps(printed["max_steps"])
    paper = lex_optimizer()
    optimizer = {name: printed[name] for name in paper if name in printed}
    # Left out if it is the paper's, which is the default: folders of models are named after a hash of this.
    if any(optimizer[name] != paper[name] for name in optimizer if name != "learning_rate"):
        training |= optimizer
    if printed.get("bf16"):
        training["bf16"] = True
    return Preset(
        length=length,
        model={name: recipe.model[name] for name in _SIZES if name in recipe.model},
        training=training,
        batch_tokens=recipe.data.examples_per_step * length,
        vocabulary=recipe.model["vocab_size"],
        **measuring,
    )


PRESETS = {"tiny": _tiny, "small": _small, "paper": _paper}
