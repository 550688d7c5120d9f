"""The models of the tables: each trained once, kept under a hash of all that decides its weights, and resumed.

They are LEX models, or others of transformers. The hash is over the fields of the config that differ from the
defaults, the training settings, the seed, the tokenizer and the training texts; not over versions or hardware, which
are recorded beside the model.
"""

import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import PartialState
from datasets import Dataset
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerBase, set_seed

from lex_hf.model.configuration_lex import LexConfig
from lex_hf.records import fingerprint, hardware, read_json, versions, write_json
from lex_hf.rope.blockwise import training_length_of
from lex_hf.training.arguments import training_arguments
from lex_hf.training.interruption import TrainingInterrupted
from lex_hf.training.run_folder import last_checkpoint
from lex_hf.training.trainer import TrainingResult, train

DONE = "training.json"  # written when a model is whole
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")  # the tokenizer decides them
_WITHOUT_EFFECT = ("chunked_loss", "use_cache", *_IDS)
_CHECKPOINTS, _LOGS = 10, 15  # of a training
LIBRARIES = ("lex-hf", "torch", "transformers", "accelerate", "datasets", "tokenizers", "numpy", "scipy")

State = Literal["trained", "begun", "missing"]


@dataclass(frozen=True)
class Job:
    """Training of a model that a table needs.

    Attributes:
        config: Its configuration, in training: that of a LEX model, or of another causal language model.
        training: Fields of `TrainingArguments` that decide the weights.
        examples_per_step: Training examples of an optimiser step, over all devices.
        seed: Seed of weights and of the order of examples.
        tokenizer: Fingerprint of its tokenizer.
        data: Fingerprint of its training texts.
        label: Name of its folder; `None` makes one of its identity.
    """

    config: PreTrainedConfig
    training: Mapping[str, Any]
    examples_per_step: int
    seed: int
    tokenizer: str
    data: str
    label: str | None = None

    def identity(self) -> dict[str, Any]:
        """Return all that decides the weights."""
        default, kind = type(self.config)().to_dict(), self.config.model_type
        fields = {name: value for name, value in self.config.to_dict().items() if value != default.get(name)}
        of_kind = {} if kind == LexConfig.model_type else {"model_type": kind}
        return {
            "config": of_kind | {name: value for name, value in fields.items() if name not in _WITHOUT_EFFECT},
            "training": dict(self.training),
            "examples_per_step": self.examples_per_step,
            "seed": self.seed,
            "tokenizer": self.tokenizer,
            "data": self.data,
        }

    @property
    def name(self) -> str:
        """Name of its folder: its label, or the scheme or kind, the training length, the seed and the hash."""
        if self.label is not None:
            return self.label
        digest = fingerprint(self.identity())[:12]
        kinds = "-".join(dict.fromkeys(_schemes(self.config))) or self.config.model_type
        return f"{kinds}-l{self.training_length}-seed{self.seed}-{digest}"

    @property
    def training_length(self) -> int:
        """Tokens of a training example."""
        config = self.config
        return config.training_length if isinstance(config, LexConfig) else training_length_of(config)

    @property
    def steps(self) -> int:
        """Optimiser steps."""
        return int(self.training["max_steps"])

    @property
    def tokens(self) -> int:
        """Tokens that it is trained on."""
        return self.steps * self.examples_per_step * self.training_length

    def parameters(self) -> int:
        """Return the number of parameters, counted without creating them."""
        with torch.device("meta"):
            return int(AutoModelForCausalLM.from_config(self.config).num_parameters())

    def state(self, models: Path) -> State:
        """Return whether the folder of models holds it, or a checkpoint of it."""
        folder = models / self.name
        if (folder / DONE).is_file():
            return "trained"
        return "begun" if last_checkpoint(folder) else "missing"


def ensure(
    job: Job, models: Path, tokenizer: PreTrainedTokenizerBase, examples: Dataset | None, tokens_at_once: int
) -> dict[str, Any]:
    """Train a model if the folder of models lacks it; see [`train_job`]. No examples are needed if it is there.

    Returns:
        What is recorded of its training, with `trained_now`: whether this call trained it.

    Raises:
        KeyboardInterrupt: If training was stopped; the next call resumes it from its checkpoint.
    """
    folder, state = models / job.name, job.state(models)
    if state != "trained":
        try:
            # Without a checkpoint, what a killed process left there is replaced.
            train_job(job, folder, tokenizer, examples, tokens_at_once, overwrite=True)
        except TrainingInterrupted as stopped:
            raise KeyboardInterrupt(
                f"Training of {job.name} was stopped after {stopped.steps} of {job.steps} steps. The same command "
                "continues from there."
            ) from stopped
    return {**read_json(folder / DONE), "trained_now": state != "trained"}


def train_job(
    job: Job,
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    examples: Dataset | None,
    tokens_at_once: int,
    *,
    overwrite: bool = False,
) -> TrainingResult:
    """Train a model and save it with a record of its training, from its last checkpoint if there is one.

    Args:
        job: The model.
        folder: Its folder.
        tokenizer: Its tokenizer.
        examples: Its packed training examples.
        tokens_at_once: Tokens of a batch on one device; steps of more are accumulated.
        overwrite: Whether a model that is there without a checkpoint may be replaced.

    Raises:
        TrainingInterrupted: If training was stopped; the next call resumes it.
        ValueError: If a model would be replaced.
    """
    begun = last_checkpoint(folder) is not None
    PartialState().wait_for_everyone()  # so that no process finds what another is about to write
    arguments = training_arguments(folder, **_arguments(job, tokens_at_once))
    set_seed(job.seed)
    ids = {name: getattr(tokenizer, name) for name in _IDS}
    model = AutoModelForCausalLM.from_config(type(job.config)(**{**job.config.to_diff_dict(), **ids}))
    start = time.monotonic()
    result = train(model, tokenizer, examples, arguments, resume=begun, overwrite=overwrite and not begun)
    done = {
        "name": job.name,
        "identity": job.identity(),
        "seed": job.seed,
        "parameters": model.num_parameters(),
        "steps": result.steps,
        "tokens": result.tokens,
        "train_loss": result.train_loss,
        "losses": result.losses,
        "seconds": time.monotonic() - start,
        "resumed": begun,
        "hardware": hardware(),
        "versions": versions(*LIBRARIES),
    }
    if PartialState().is_main_process:
        write_json(folder / DONE, done)
        for checkpoint in folder.glob("checkpoint-*"):
            shutil.rmtree(checkpoint)
    PartialState().wait_for_everyone()
    return result


def can_read(config: PreTrainedConfig, length: int) -> bool:
    """Return whether a model can read texts of `length` tokens; learned positions of LEX end with their table."""
    return "learned" not in _schemes(config) or length <= config.training_length


def _schemes(config: PreTrainedConfig) -> Sequence[str]:
    """Position schemes of the layers of a LEX model; none of others."""
    return config.layer_schemes if isinstance(config, LexConfig) else ()


def _arguments(job: Job, tokens_at_once: int) -> dict[str, Any]:
    processes = PartialState().num_processes
    if job.examples_per_step % processes:
        raise ValueError(
            f"A step has {job.examples_per_step} examples, which {processes} processes cannot share: start another "
            "number of processes."
        )
    mine = job.examples_per_step // processes
    most = max(1, tokens_at_once // job.training_length)
    batch = max(size for size in range(1, mine + 1) if mine % size == 0 and size <= most)
    return {
        **job.training,
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": mine // batch,
        "logging_steps": max(1, job.steps // _LOGS),
        "save_steps": max(1, job.steps // _CHECKPOINTS),
        "save_total_limit": 1,
        "seed": job.seed,
        "use_cpu": not torch.accelerator.is_available(),
    }


def join_processes(output: Path) -> None:
    """Take this process's place among those of a launcher, if there is one, before anything depends on its rank."""
    # On CPUs they are found only with use_cpu.
    training_arguments(output, use_cpu=not torch.accelerator.is_available())
