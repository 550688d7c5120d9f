"""Tiny experiments on two CPU cores: models of 0.5 million parameters on the sources of Python's standard library.

Nothing is downloaded, and what a model is tested on it was never trained on.
"""

import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lex_hf.data.documents import load_documents
from lex_hf.data.packing import pack
from lex_hf.data.tokenizers import byte_tokenizer
from lex_hf.evaluation.perplexity import compute_perplexity
from lex_hf.model.configuration_lex import LexConfig
from lex_hf.reproduce.models import Job, can_read, join_processes, train_job
from lex_hf.training.interruption import TrainingInterrupted
from lex_hf.training.recipes import load_recipe
from lex_hf.training.trainer import TrainingResult

RECIPE = load_recipe("tiny")
TRAINING_LENGTH: int = RECIPE.model["training_length"]  # 128 bytes
STEPS: int = RECIPE.training["max_steps"]
EXAMPLES_PER_STEP = cast(int, RECIPE.data.examples_per_step)
TOKENS_AT_ONCE = 8192
LENGTHS = (32, 64, 128, 256, 512, 1024, 2048)
PATTERNS = {"full": "", "blockwise": " + BCA"}  # at evaluation, and what they add to the name of a system

LARGEST_SEED = 2**32 - 1  # of NumPy
MOST_STEPS = 10**9

# Parts of the standard library that are not ordinary code: tests, other people's packages, tables.
_LEFT_OUT = {"encodings", "idlelib", "lib2to3", "site-packages", "dist-packages", "test", "tests", "turtledemo"}
_LONG_FILE, _EVERY = 40_000, 4  # of the files of at least 40 000 bytes, every fourth is held back
_BYTES_OF_A_TEST_FILE = 16_384


@dataclass(frozen=True)
class Corpus:
    """Files of the standard library: those to train on, those held back, and a long one, held back too."""

    train: list[Path]
    test: list[Path]
    long: Path

    def documents(self) -> Dataset:
        """Return the training files, in the column `text`."""
        return load_documents([path for path in self.train if path.stat().st_size])

    def examples(self) -> Dataset:
        """Return the training files as packed examples of `TRAINING_LENGTH` bytes."""
        return pack(self.documents(), byte_tokenizer(), TRAINING_LENGTH)

    def test_texts(self) -> list[str]:
        """Return the beginnings of the held-back files."""
        return [path.read_bytes()[:_BYTES_OF_A_TEST_FILE].decode(errors="ignore") for path in self.test]


def standard_library() -> Corpus:
    """Split the sources of Python's standard library by file; what is held back is long."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [
        path
        for path in sorted(root.rglob("*.py"))
        if not _LEFT_OUT & set(path.relative_to(root).parts) and not path.name.startswith("_sysconfigdata")
    ]
    top = [path for path in files if path.parent == root and path.stat().st_size >= _LONG_FILE]
    longest = max(top, key=lambda path: path.stat().st_size)
    test = [path for path in top[::_EVERY] if path != longest]
    return Corpus([path for path in files if path not in (*test, longest)], test, longest)


def check_steps(steps: int) -> None:
    """Check a number of optimiser steps.

    Raises:
        ValueError: If it is not from 1 to `MOST_STEPS`.
    """
    if not 1 <= steps <= MOST_STEPS:
        raise ValueError(f"steps = {steps}: it must be from 1 to {MOST_STEPS}.")


def check_seeds(seeds: Sequence[int]) -> None:
    """Check seeds of several trainings.

    Raises:
        ValueError: If there are none, one is given twice, or one is not from 0 to `LARGEST_SEED`.
    """
    if not seeds or len(set(seeds)) < len(seeds) or min(seeds) < 0 or max(seeds) > LARGEST_SEED:
        raise ValueError(
            f"seeds = {', '.join(map(str, seeds)) or 'none'}: they must be different, from 0 to {LARGEST_SEED}, and "
            "one at least."
        )


def tiny_config(scheme: str, **fields: Any) -> LexConfig:
    """Return the configuration of a byte model with 4 layers of 96, l = 128, and a position scheme.

    Distances scale with l: B = l/2 as in the LEX paper, and T5's last bucket begins at l/4 as in the Sandwich paper,
    whose T5 baseline also multiplies the table by √head_dim; unscaled, few steps teach it next to nothing.
    `fields` are further ones of `LexConfig`.
    """
    model = RECIPE.model | {"position_embedding_type": scheme} | fields
    return replace(RECIPE, model=model).config()


def tiny_training(steps: int) -> dict[str, Any]:
    """Return the fields of `TrainingArguments` that decide the weights of a tiny model."""
    warmup = min(steps - 1, max(1, RECIPE.warmup_steps(steps)))
    return {"max_steps": steps, "learning_rate": RECIPE.training["learning_rate"], "warmup_steps": warmup}


def train_tiny(config: LexConfig, folder: Path, examples: Dataset, *, steps: int, seed: int = 0) -> TrainingResult:
    """Train a model and save it in `folder`; from the last checkpoint there, if there is one.

    Args:
        config: Its configuration, from [`tiny_config`].
        folder: Its folder.
        examples: Packed examples of `TRAINING_LENGTH` bytes.
        steps: Optimiser steps, of 16 examples each.
        seed: Seed of weights and of the order of examples.

    Raises:
        KeyboardInterrupt: If training was stopped; the same call resumes it from its checkpoint.
        ValueError: If `folder` holds another model.
    """
    job = Job(config, tiny_training(steps), EXAMPLES_PER_STEP, seed, "bytes", "examples given", label=folder.name)
    return train_in(folder, job, examples)


def train_in(folder: Path, job: Job, examples: Dataset) -> TrainingResult:
    """Train a model of bytes and save it in `folder`, as [`train_tiny`] does.

    Raises:
        KeyboardInterrupt: As of [`train_tiny`].
        ValueError: As of [`train_tiny`].
    """
    join_processes(folder)
    try:
        return train_job(job, folder, byte_tokenizer(), examples, TOKENS_AT_ONCE)
    except TrainingInterrupted as stopped:
        raise KeyboardInterrupt(
            f"Training was stopped after {stopped.steps} of {job.steps} steps, which are saved in {folder}."
        ) from stopped


def perplexity_by_length(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    lengths: Sequence[int],
    *,
    add_start_token: bool = True,
) -> dict[int, float]:
    """Measure perplexity under the protocol `chunked` at several lengths of segments in tokens, over the same texts.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        texts: Texts.
        lengths: Lengths of segments in tokens.
        add_start_token: Whether texts begin with the BOS token.

    Returns:
        Perplexity by length; lengths that the model cannot read are missing.
    """
    curve = {}
    for length in lengths:
        if can_read(model.config, length):
            batch_size = max(1, TOKENS_AT_ONCE // length)
            result = compute_perplexity(
                model,
                tokenizer,
                texts,
                length=length,
                batch_size=batch_size,
                add_start_token=add_start_token,
                progress=False,
            )
            curve[length] = result.perplexity
    return curve
