"""Arguments of a training: the LEX paper's optimiser by default, and checks before there are a model and data."""

import math
import os
from collections.abc import Callable, Collection
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments

from lex_hf.training.recipe_files import lex_optimizer

_SAMPLING = next(
    each.metadata["choices"] for each in fields(TrainingArguments) if each.name == "train_sampling_strategy"
)
# Ranges of finite numbers; the Trainer accepts others silently, or fails after hours.
_AT_LEAST_1 = (lambda value: value >= 1, "at least 1")
_AT_LEAST_0 = (lambda value: value >= 0, "at least 0")
_POSITIVE = (lambda value: value > 0, "greater than 0")
_SHARE = (lambda value: 0 <= value < 1, "at least 0 and less than 1")
_SEED = (lambda value: 0 <= value < 2**32, "from 0 to 2**32 - 1")
_NUMBERS: dict[str, tuple[Callable[[float], bool], str]] = {
    "max_steps": (lambda value: value >= 1 or value == -1, "at least 1, or -1 to let num_train_epochs decide"),
    "num_train_epochs": _POSITIVE,
    "per_device_train_batch_size": _AT_LEAST_1,
    "per_device_eval_batch_size": _AT_LEAST_1,
    "gradient_accumulation_steps": _AT_LEAST_1,
    "learning_rate": _AT_LEAST_0,
    "warmup_steps": _AT_LEAST_0,
    "weight_decay": _AT_LEAST_0,
    "adam_beta1": _SHARE,
    "adam_beta2": _SHARE,
    "adam_epsilon": _AT_LEAST_0,
    "max_grad_norm": _AT_LEAST_0,
    "label_smoothing_factor": _SHARE,
    "logging_steps": _POSITIVE,
    "save_steps": _POSITIVE,
    "eval_steps": _POSITIVE,
    "seed": _SEED,
    "data_seed": _SEED,
}


def training_arguments(output_dir: str | Path, **overrides: Any) -> TrainingArguments:
    """Make `TrainingArguments` with the constants of the LEX paper (arXiv 2212.10554, Table 7).

    AdamW with β = (0.9, 0.98) and ε = 1e-6, learning rate 3e-4 with polynomial (linear) decay to 0, weight
    decay 0.01 (not on biases and norms, as `Trainer` does it), gradient clipping at 2.0. The scale of a run
    is for the caller to choose; the paper has `max_steps=50_000, warmup_steps=20_000`, 0.5M tokens a step.

    Args:
        output_dir: Folder of the checkpoints and the trained model.
        overrides: Any other field of `TrainingArguments`, or another value for one of the above.

    Raises:
        ValueError: If a value is impossible, or the warm-up is not shorter than the training.
    """
    optimizer = lex_optimizer()
    if overrides.get("lr_scheduler_type", optimizer["lr_scheduler_type"]) != optimizer["lr_scheduler_type"]:
        del optimizer["lr_scheduler_kwargs"]
    settings: dict[str, Any] = {
        **optimizer,
        "logging_steps": 10,
        # The filter would replace a diverged loss by the mean of the others.
        "logging_nan_inf_filter": False,
        "save_total_limit": 2,
        "disable_tqdm": False,
        "dataloader_pin_memory": torch.accelerator.is_available(),
        "ddp_find_unused_parameters": False,
    } | overrides
    try:
        arguments = TrainingArguments(output_dir=str(output_dir), **settings)
    except (TypeError, ImportError) as error:  # of nested fields, and of packages that are not installed
        raise ValueError(f"TrainingArguments: {error}") from error
    _check_numbers(arguments)
    return arguments


def examples_per_step(arguments: TrainingArguments) -> int:
    """Return the examples of an optimiser step over all devices."""
    return int(arguments.train_batch_size * arguments.world_size * arguments.gradient_accumulation_steps)


def check_arguments(arguments: TrainingArguments, resume: bool, allow_changes: Collection[str]) -> None:
    """Check everything about a training that does not need its model and data.

    Raises:
        ValueError: As [`lex_hf.training.train`].
    """
    _check_numbers(arguments)
    is_sharded = arguments.fsdp or os.environ.get("ACCELERATE_USE_FSDP", "").lower() in ("1", "true")
    if is_sharded and not torch.accelerator.is_available():
        raise ValueError(
            "FSDP was requested, and there is no accelerator here: every process would silently keep the whole model. "
            "Leave fsdp unset."
        )
    if isinstance(allow_changes, str):
        raise ValueError(f"allow_changes = {allow_changes!r} is a single name: give a list, [{allow_changes!r}].")
    if allow_changes and not resume:
        raise ValueError("allow_changes is for a training that is resumed: set resume=True (--resume), too.")
    order = arguments.train_sampling_strategy
    if order not in _SAMPLING:
        raise ValueError(f"train_sampling_strategy = {order!r}: it must be one of {', '.join(_SAMPLING)}.")
    if arguments.restore_callback_states_from_checkpoint:
        raise ValueError("restore_callback_states_from_checkpoint must be false: this package restores its own.")


def check_streaming(arguments: TrainingArguments) -> None:
    """Check that a stream can be trained on with these arguments.

    Raises:
        ValueError: If the number of steps is not given, or other processes would read the data.
    """
    if arguments.max_steps <= 0:
        raise ValueError(f"max_steps = {arguments.max_steps}: a stream has no end; set the number of steps.")
    if arguments.dataloader_num_workers:
        raise ValueError(
            f"dataloader_num_workers = {arguments.dataloader_num_workers}: a stream is read in the process that "
            "trains, so it must be 0."
        )
    if arguments.auto_find_batch_size:
        raise ValueError("auto_find_batch_size must be false: a stream has to know how many examples a step takes.")


def _check_numbers(arguments: TrainingArguments) -> None:
    """Refuse what the Trainer would accept silently, or fail at later."""
    for name, (holds, rule) in _NUMBERS.items():
        value = getattr(arguments, name)
        if value is None or (name == "num_train_epochs" and arguments.max_steps > 0):
            continue
        if not isinstance(value, int | float) or not math.isfinite(value) or not holds(value):
            raise ValueError(f"{name} = {value!r}: it must be a number, {rule}.")
        if isinstance(value, int) and value >= 2**53:
            raise ValueError(f"{name} = {value}: it must be less than 2**53.")
    steps = arguments.max_steps
    if 0 < steps <= arguments.get_warmup_steps(steps):
        raise ValueError(f"warmup_steps = {arguments.warmup_steps}: must be less than max_steps = {steps}.")
