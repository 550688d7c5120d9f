"""Training with transformers' `Trainer`: the paper's constants, exact resumption, safe interruption."""

import contextlib
import json
import math
import os
import shutil
import signal
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils.memory import should_reduce_batch_size
from datasets import Dataset
from safetensors import SafetensorError, safe_open
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    default_data_collator,
)
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, IntervalStrategy
from transformers.utils import CONFIG_NAME, logging

from lex_hf.data.streaming import PackedStream
from lex_hf.model.configuration_lex import LexConfig
from lex_hf.model.loss_lex import IGNORED
from lex_hf.training.run_folder import (
    checkpoints,
    claimed,
    last_checkpoint,
    newer_checkpoints,
    on_main_process,
    read_state,
    replace_model,
    weight_files,
)
from lex_hf.training.run_record import Change, RunRecord, check_examples, data_settings, settings_of

__all__ = [
    "Change",
    "TrainingDiverged",
    "TrainingInterrupted",
    "TrainingResult",
    "check_arguments",
    "last_checkpoint",
    "train",
    "training_arguments",
]

logger = logging.get_logger(__name__)

# What transformers adds to config.json, or takes from the tokenizer: no difference between two models.
_NOT_THE_MODEL = {
    "architectures",
    "auto_map",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "pad_token_id",
    "transformers_version",
    "use_cache",
}

_SAMPLING = next(
    each.metadata["choices"] for each in fields(TrainingArguments) if each.name == "train_sampling_strategy"
)
# What numbers must be, beside finite; the Trainer takes others in silence, or fails after hours.
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


@dataclass(frozen=True)
class TrainingResult:
    """What a finished training run did, from its first step, also when it was interrupted and resumed.

    Attributes:
        model_folder: The folder of the trained model and its tokenizer.
        steps: Optimiser steps.
        train_loss: Mean loss over all steps, in nats per token.
        losses: `(step, loss)`, where loss is the mean since the entry before, in nats per token.
        eval_losses: `(step, loss)` on the evaluation data, in nats per token.
        tokens: Tokens the model was trained on, over all processes.
        changes: What was changed when the training was resumed, the earliest first.
    """

    model_folder: Path
    steps: int
    train_loss: float
    losses: list[tuple[int, float]]
    eval_losses: list[tuple[int, float]]
    tokens: int
    changes: list[Change] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON can hold it."""
        return asdict(self) | {"model_folder": str(self.model_folder)}


class TrainingDiverged(ValueError):  # noqa: N818 - named like TrainingInterrupted
    """A loss or a weight is not finite any more: nothing was saved, and the last good checkpoint is kept.

    Attributes:
        step: The step at which it was seen; it may have begun after the log before.
    """

    def __init__(self, what: str, step: int, checkpoint: Path | None) -> None:
        kept = f"the last good checkpoint, {checkpoint}, is kept" if checkpoint else "there is no checkpoint before it"
        allowed = "resume=True and allow_changes=['learning_rate'] (--resume --allow-change learning_rate)"
        again = f"go on from it with {allowed}" if checkpoint else "start again"
        super().__init__(
            f"Training diverged: {what} at step {step}. No model was saved; {kept}. Lower learning_rate and {again}; "
            "a longer warm-up or a smaller max_grad_norm helps, too."
        )
        self.step = step


class TrainingInterrupted(KeyboardInterrupt):
    """Training was stopped by a signal; a checkpoint was saved first.

    Attributes:
        checkpoint: The folder of the checkpoint, which is a model that loads like any other.
        steps: Optimiser steps done.
    """

    def __init__(self, checkpoint: Path, steps: int, max_steps: int) -> None:
        super().__init__(
            f"Training was interrupted after {steps} of {max_steps} steps; they are saved in {checkpoint}. "
            "To go on from there, train again with the same arguments and resume=True."
        )
        self.checkpoint = checkpoint
        self.steps = steps


def training_arguments(output_dir: str | Path, **overrides: Any) -> TrainingArguments:
    """Make `TrainingArguments` with the constants of the LEX paper (arXiv 2212.10554, Table 7).

    AdamW with β = (0.9, 0.98) and ε = 1e-6, learning rate 3e-4 with polynomial (linear) decay to 0, weight
    decay 0.01 (not on biases and norms, as `Trainer` does it), gradient clipping at 2.0. The scale of a run
    is for the caller to choose; the paper has `max_steps=50_000, warmup_steps=20_000`, 0.5M tokens a step.

    Args:
        output_dir: Where checkpoints and the trained model are written.
        overrides: Any other field of `TrainingArguments`, or another value for one of the above.

    Raises:
        ValueError: If a value is impossible, or the warm-up is not shorter than the training.
    """
    settings: dict[str, Any] = {
        "learning_rate": 3e-4,
        "lr_scheduler_type": "polynomial",
        "adam_beta1": 0.9,
        "adam_beta2": 0.98,
        "adam_epsilon": 1e-6,
        "weight_decay": 0.01,
        "max_grad_norm": 2.0,
        "logging_steps": 10,
        # The filter would put the mean of the others in the place of a diverged loss.
        "logging_nan_inf_filter": False,
        "save_total_limit": 2,
        "disable_tqdm": False,
        "dataloader_pin_memory": torch.accelerator.is_available(),
        "ddp_find_unused_parameters": False,
    } | overrides
    if settings["lr_scheduler_type"] == "polynomial":
        settings.setdefault("lr_scheduler_kwargs", {"lr_end": 0.0, "power": 1.0})
    try:
        arguments = TrainingArguments(output_dir=str(output_dir), **settings)
    except (TypeError, ImportError) as error:  # of fields that hold fields, and of what is not installed
        raise ValueError(f"TrainingArguments: {error}") from error
    _check_numbers(arguments)
    return arguments


def train(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    dataset: Dataset | PackedStream,
    arguments: TrainingArguments,
    *,
    eval_dataset: Dataset | None = None,
    resume: bool = False,
    allow_changes: Collection[str] = (),
    overwrite: bool = False,
    on_save: Callable[[list[Change]], None] | None = None,
) -> TrainingResult:
    """Train a causal language model on packed examples; save it and its tokenizer in `arguments.output_dir`.

    Every token but the first of an example (or, where documents are kept apart, of a document) is predicted; nothing
    is padding. SIGINT (Ctrl-C) and SIGTERM let
    the current step end, save a checkpoint and raise `TrainingInterrupted`; a second signal stops at once.
    (Python hands signals to the main thread only: a training in another thread does not see them.)

    Args:
        model: The model; trained in place.
        tokenizer: Saved with the model; its special tokens become those of the model.
        dataset: Examples of equal length in the column `input_ids`, and perhaps `position_ids`, as `lex_hf.data.pack`
            makes them, or a stream of such examples.
        arguments: As `training_arguments` makes them.
        eval_dataset: Examples for `arguments.eval_strategy`.
        resume: Continue from the last good checkpoint in `arguments.output_dir`. Those after it, half-written by a
            process that was killed or with weights that are not finite, are removed. On one device the result is the
            same, to the bit, as that of an uninterrupted run. What changes the result must be as it was: see
            [`lex_hf.training.run_record`].
        allow_changes: With `resume`, names of settings that may be other than they were, as `"learning_rate"`,
            `"max_steps"` or `"data"`. They are in force from the next step on, and the checkpoints keep a record. A
            stream that changed begins at its first document.
        overwrite: Replace the model, tokenizer and checkpoints that `arguments.output_dir` holds. All else in there
            is kept.
        on_save: Called by the main process after each checkpoint and before the model is saved, with what was changed
            in this resumption and earlier ones; to keep records beside them.

    Raises:
        TrainingInterrupted: When a signal stopped the training.
        TrainingDiverged: When a loss or a weight is not finite; nothing of it is saved.
        ValueError: If the data, the tokenizer, an argument or the checkpoint does not fit; if there is nothing to
            resume, or what is resumed was made with other settings; if files would be replaced, but `overwrite` is
            false; if another training runs in the folder; if FSDP is asked for where there is no accelerator.
        OSError: If a checkpoint or the model cannot be written; earlier checkpoints are kept.
    """
    check_arguments(arguments, resume, allow_changes)
    with claimed(arguments, resume=resume, overwrite=overwrite):
        _check_vocabulary(model, tokenizer)
        record = RunRecord(settings_of(arguments, tokenizer, _check_data(model, dataset, arguments, eval_dataset)))
        checkpoint = _checkpoint_to_resume(model, arguments) if resume else None
        if checkpoint is not None:
            record = _resumed(record, checkpoint, dataset, arguments, allow_changes)
        with _available():
            trainer = _build_trainer(model, tokenizer, dataset, arguments, eval_dataset, record)
            Trainer.get_optimizer_cls_and_kwargs(arguments, model)
        on_main_process(arguments, lambda: _clear(arguments, checkpoint))
        return _run(trainer, checkpoint, record, on_save or (lambda changes: None))


def _clear(arguments: TrainingArguments, checkpoint: Path | None) -> None:
    """Remove checkpoints that are not of this training; a later one would be taken for its last."""
    # The Trainer deletes old checkpoints by age or number: it could keep a broken one and delete the good one.
    for other in checkpoints(arguments.output_dir) if checkpoint is None else newer_checkpoints(checkpoint):
        logger.warning("Removing %s, which is %s.", other, "replaced" if checkpoint is None else "incomplete")
        shutil.rmtree(other)


def _run(
    trainer: Trainer, checkpoint: Path | None, record: RunRecord, on_save: Callable[[list[Change]], None]
) -> TrainingResult:
    interruption = _Interruption(trainer.accelerator)
    trainer.add_callback(interruption)
    trainer.add_callback(_Saved(lambda: on_save(record.changes)))
    with interruption.listening(), contextlib.suppress(_NothingLeft), _explained(trainer.args):
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    state = trainer.state
    if interruption.stopped:
        last = Path(trainer.args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        raise TrainingInterrupted(last, state.global_step, state.max_steps)
    _save_model(trainer, lambda: on_save(record.changes))
    if interruption.signal is not None:
        signal.raise_signal(interruption.signal)  # It came after the last step: the work is done, pass it on.
    return _result(trainer, record)


class _LexTrainer(Trainer):
    """The Trainer, reading streams, without a cache while it trains, and saving finite weights only."""

    hyperparameters: tuple[list[dict[str, Any]], list[float | torch.Tensor]] = ([], [])

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Compute the loss of a batch; not a part of the batch, since that may be sent on between processes."""
        return super().compute_loss(model, {**inputs, "use_cache": False}, *args, **kwargs)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Load batches; a stream's are read by one process, which gives the others their share."""
        if not isinstance(self.train_dataset, PackedStream):
            return super().get_train_dataloader()
        loader = DataLoader(
            self.train_dataset,
            batch_size=self.args.train_batch_size,
            collate_fn=self.data_collator,
            pin_memory=self.args.dataloader_pin_memory,
        )
        return _with_a_generator(self.accelerator.prepare(loader))

    def get_eval_dataloader(self, *args: Any, **kwargs: Any) -> DataLoader[Any]:
        """Load batches to evaluate on, without a trace in the training."""
        return _with_a_generator(super().get_eval_dataloader(*args, **kwargs))

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        """Make the schedule, and keep what the optimiser was told before a checkpoint is loaded over it."""
        try:
            scheduler = super().create_scheduler(*args, **kwargs)
        except TypeError as error:
            raise ValueError(f"lr_scheduler_kwargs = {self.args.lr_scheduler_kwargs}: {error}.") from error
        if isinstance(scheduler, LambdaLR):
            told = [{name: value for name, value in each.items() if name != "params"} for each in _groups(scheduler)]
            self.hyperparameters = told, list(scheduler.base_lrs)
        return scheduler

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model, unless it diverged in the last steps, which no loss has shown yet."""
        if not all(bool(_local(weight).isfinite().all()) for weight in self.model.parameters()):
            self.accelerator.set_trigger()
        if self.accelerator.check_trigger():
            raise _diverged("not all weights are finite numbers", self.args, self.state)
        super().save_model(output_dir, _internal_call)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Save a checkpoint; what there is of one that cannot be saved goes, and makes room."""
        folder = Path(self.args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        with _saving(folder):
            super()._save_checkpoint(*args, **kwargs)


def _with_a_generator(prepared: Any) -> DataLoader[Any]:
    """Give a loader random numbers of its own.

    One without them draws from torch's, and dropout would differ in a run that is resumed, or evaluated more often.
    """
    prepared.base_dataloader.generator = torch.Generator()
    loader: DataLoader[Any] = prepared
    return loader


def _groups(scheduler: Any) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = scheduler.optimizer.param_groups
    return groups


def _local(weight: torch.Tensor) -> torch.Tensor:
    """The part of a weight that this process has."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


@contextlib.contextmanager
def _saving(folder: Path) -> Iterator[None]:
    """Say which folder could not be written, and remove what there is of it."""
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        # torch.save has no error of its own for a disk that is full.
        if isinstance(error, RuntimeError) and "PytorchStreamWriter" not in str(error):
            raise
        shutil.rmtree(folder, ignore_errors=True)
        last = last_checkpoint(folder.parent)
        kept = f"The last checkpoint, {last}, is kept" if last else "There is no checkpoint before it"
        raise OSError(f"{folder} could not be written: {error}. {kept}. Is the disk full?") from error


def _diverged(what: str, arguments: TrainingArguments, state: TrainerState) -> TrainingDiverged:
    return TrainingDiverged(what, state.global_step, last_checkpoint(arguments.output_dir))


class _Settings(TrainerCallback):
    """Lets the optimiser go on with what it is told now, where the Trainer takes all from the checkpoint."""

    def __init__(self, trainer: "_LexTrainer") -> None:
        self.trainer = trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Set learning rate, weight decay and the rest; nothing changes if they are what they were."""
        schedule = self.trainer.lr_scheduler
        if not state.global_step or not isinstance(schedule, LambdaLR):
            return
        groups, schedule.base_lrs = self.trainer.hyperparameters
        for group, told, rate, factor in zip(
            _groups(schedule), groups, schedule.base_lrs, schedule.lr_lambdas, strict=True
        ):
            group.update(told | {"lr": rate * factor(schedule.last_epoch)})
        schedule._last_lr = [group["lr"] for group in _groups(schedule)]


class _Divergence(TrainerCallback):
    """Ends a training whose loss is not finite, when it is logged: before every checkpoint and at the end."""

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Look at the losses."""
        for name in ("loss", "eval_loss"):
            value = (logs or {}).get(name, 0.0)
            if not math.isfinite(value):
                raise _diverged(f"{name} is {value}", args, state)


class _Saved(TrainerCallback):
    """Calls the caller back after each checkpoint."""

    def __init__(self, call: Callable[[], None]) -> None:
        self.call = call

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Call, in the main process."""
        if state.is_world_process_zero:
            self.call()


class _StreamPosition(TrainerCallback, ExportableState):
    """Tells a stream what was trained on, and every checkpoint where the stream goes on."""

    def __init__(self, stream: PackedStream, examples_per_step: int) -> None:
        self.stream = stream
        self.examples_per_step = examples_per_step

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Consume the examples of a step."""
        self.stream.consume(self.examples_per_step)

    def state(self) -> dict[str, Any]:
        """Return what goes into the state file of a checkpoint."""
        return {"args": {}, "attributes": {"position": self.stream.state_dict()}}


def _build_trainer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    dataset: Dataset | PackedStream,
    arguments: TrainingArguments,
    eval_dataset: Dataset | None,
    record: RunRecord,
) -> Trainer:
    use_cache = model.config.use_cache
    is_stream = isinstance(dataset, PackedStream)
    # The Trainer would read a stream from its first document to the place where it goes on.
    added = {"include_num_input_tokens_seen": "all"} | ({"ignore_data_skip": True} if is_stream else {})
    trainer = _LexTrainer(
        model=model,
        args=replace(arguments, **added),
        data_collator=_collate,
        train_dataset=dataset if is_stream else _as_tensors(dataset),
        eval_dataset=eval_dataset and _as_tensors(eval_dataset),
        processing_class=tokenizer,
    )
    if is_stream:
        batch = arguments.train_batch_size * arguments.world_size
        trainer.add_callback(_StreamPosition(dataset, batch * arguments.gradient_accumulation_steps))
    for callback in (record, _Settings(trainer), _Divergence()):
        trainer.add_callback(callback)
    # Trainer turns the cache off in the config, and would save that; `compute_loss` does so for training alone.
    model.config.use_cache = use_cache
    return trainer


def _as_tensors(dataset: Dataset) -> Dataset:
    columns = [name for name in ("input_ids", "position_ids") if name in dataset.column_names]
    return dataset.with_format("torch", columns=columns)


def _collate(examples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Make a batch whose labels are its tokens, all of them: end-of-text is learnt though it also pads.

    Where documents are kept apart, nothing predicts the first token of one.
    """
    batch: dict[str, torch.Tensor] = default_data_collator(examples)
    labels = batch["input_ids"].clone()
    if "position_ids" in batch:
        labels[batch["position_ids"] == 0] = IGNORED
    return {**batch, "labels": labels}


@contextlib.contextmanager
def _available() -> Iterator[None]:
    """Say before the first step what an argument needs, and is not here."""
    try:
        yield
    except (ImportError, RuntimeError, NotImplementedError) as error:
        raise ValueError(f"An argument asks for what is not here: {error}") from error


@contextlib.contextmanager
def _explained(arguments: TrainingArguments) -> Iterator[None]:
    """Say what to do about a batch that is too large, and about what is loaded with the first step only."""
    try:
        yield
    except ImportError as error:
        raise ValueError(f"An argument asks for what is not here: {error}") from error
    except RuntimeError as error:
        if not should_reduce_batch_size(error):
            raise
        raise ValueError(
            f"Memory does not suffice for a batch of {arguments.per_device_train_batch_size} examples: set a smaller "
            "per_device_train_batch_size (with more gradient_accumulation_steps; a recipe sees to that), or "
            f"activation_checkpointing. ({str(error).splitlines()[0]})"
        ) from error


class _NothingLeft(Exception):  # noqa: N818 - no error: it ends a training that was complete before it began
    """All steps were done in the checkpoint that training resumes from."""


class _Interruption(TrainerCallback):
    """Turns a signal into a checkpoint and a stop after the current step, the same step on all processes."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.signal: signal.Signals | None = None
        self.stopped = False

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Receive SIGINT and SIGTERM while the context lasts."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = {number: signal.signal(number, self.receive) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def receive(self, number: int, frame: FrameType | None) -> None:
        """Note the first signal; give up at the second."""
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)
        logger.warning("%s: saving a checkpoint after this step. Again to stop at once.", self.signal.name)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Take no step more than `max_steps` when a complete run is resumed, as the Trainer would."""
        if state.global_step >= state.max_steps:
            raise _NothingLeft

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Stop if a signal came, to this process or another; log with every checkpoint and at the end."""
        if self.signal is not None:
            self.accelerator.set_trigger()
        if self.accelerator.check_trigger() and state.global_step < state.max_steps:
            self.stopped = True
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False
        # So the losses in a checkpoint are complete, and those of a resumed run join on to them.
        control.should_log |= control.should_save or control.should_training_stop

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Log with every checkpoint; a stopped run has saved its own before."""
        if self.stopped:
            control.should_save = control.should_evaluate = False
        control.should_log |= control.should_save


def _check_sharding(arguments: TrainingArguments) -> None:
    asked = arguments.fsdp or os.environ.get("ACCELERATE_USE_FSDP", "").lower() in ("1", "true")
    if asked and not torch.accelerator.is_available():
        raise ValueError(
            "FSDP is asked for, and there is no accelerator here: every process would keep the whole model, in "
            "silence. Leave fsdp unset."
        )


def check_arguments(arguments: TrainingArguments, resume: bool, allow_changes: Collection[str]) -> None:
    """Check all that can be known of a training before there are a model and data.

    Raises:
        ValueError: As [`train`].
    """
    _check_numbers(arguments)
    _check_sharding(arguments)
    if isinstance(allow_changes, str):
        raise ValueError(f"allow_changes = {allow_changes!r} is a single name: give a list, [{allow_changes!r}].")
    if allow_changes and not resume:
        raise ValueError("allow_changes is for a training that is resumed: set resume=True (--resume), too.")
    order = arguments.train_sampling_strategy
    if order not in _SAMPLING:
        raise ValueError(f"train_sampling_strategy = {order!r}: it must be one of {', '.join(_SAMPLING)}.")
    if arguments.restore_callback_states_from_checkpoint:
        raise ValueError("restore_callback_states_from_checkpoint must be false: this package restores its own.")


def _check_numbers(arguments: TrainingArguments) -> None:
    """Refuse what the Trainer would take in silence, or fail at later."""
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


def _check_data(
    model: PreTrainedModel,
    dataset: Dataset | PackedStream,
    arguments: TrainingArguments,
    eval_dataset: Dataset | None,
) -> dict[str, Any]:
    """Look at all data; return what is recorded of those to train on."""
    size = model.config.vocab_size
    if isinstance(dataset, PackedStream):
        _check_stream(arguments)
    settings = data_settings(dataset, size)
    if eval_dataset is not None:
        check_examples(eval_dataset, size)
        if arguments.eval_strategy == IntervalStrategy.NO:
            raise ValueError("eval_dataset would not be used: set eval_strategy='steps' or 'epoch' in arguments.")
    return settings


def _check_stream(arguments: TrainingArguments) -> None:
    if arguments.max_steps <= 0:
        raise ValueError(f"max_steps = {arguments.max_steps}: a stream has no end, so say how many steps to take.")
    if arguments.dataloader_num_workers:
        raise ValueError(
            f"dataloader_num_workers = {arguments.dataloader_num_workers}: a stream is read in the process that "
            "trains, so it must be 0."
        )
    if arguments.auto_find_batch_size:
        raise ValueError("auto_find_batch_size must be false: a stream has to know how many examples a step takes.")


def _check_vocabulary(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    size = model.config.vocab_size
    if len(tokenizer) > size:
        raise ValueError(f"The tokenizer has {len(tokenizer)} tokens, but the model vocab_size = {size}.")


def _checkpoint_to_resume(model: PreTrainedModel, arguments: TrainingArguments) -> Path:
    last = last_checkpoint(arguments.output_dir)
    if last is None:
        raise ValueError(
            f"resume=True, but {arguments.output_dir} has no complete checkpoint with finite weights: start again "
            "without it, in another output_dir or with overwrite=True (--overwrite)."
        )
    _check_same_model(model, last)
    _check_shapes(model, last)
    return last


def _resumed(
    record: RunRecord,
    checkpoint: Path,
    dataset: Dataset | PackedStream,
    arguments: TrainingArguments,
    allowed: Collection[str],
) -> RunRecord:
    """Compare the training with its checkpoint; let a stream go on where it was."""
    state = read_state(checkpoint)
    position = state["stateful_callbacks"].get(_StreamPosition.__name__)
    if isinstance(dataset, PackedStream) != (position is not None):
        raise ValueError(f"{checkpoint} is of a training {'without' if position is None else 'with'} streaming.")
    if 0 < arguments.max_steps < state["global_step"]:
        raise ValueError(f"max_steps = {arguments.max_steps}: {checkpoint} has {state['global_step']} steps already.")
    if not isinstance(dataset, PackedStream):
        return record.resumed(checkpoint, {}, allowed)
    place = position["attributes"]["position"]
    changed = dataset.differences(place)
    record = record.resumed(checkpoint, {f"data.{name}": values for name, values in changed.items()}, allowed)
    if not changed:
        dataset.go_to(place)
    return record


def _check_same_model(model: PreTrainedModel, checkpoint: Path) -> None:
    # Weights of other positions or another attention pattern would fit, and train on without an error.
    saved = json.loads((checkpoint / CONFIG_NAME).read_bytes())
    given = json.loads(model.config.to_json_string())
    names = {name for name in saved | given if saved.get(name) != given.get(name)} - _NOT_THE_MODEL
    if names:
        changes = [f"{name} = {saved.get(name)!r}, not {given.get(name)!r}" for name in sorted(names)]
        raise ValueError(f"The model is not the one of {checkpoint}, which has {'; '.join(changes)}.")


def _check_shapes(model: PreTrainedModel, checkpoint: Path) -> None:
    """Compare the weights with what the config promises; the Trainer would leave out in silence what is missing."""
    expected = {name: list(weight.shape) for name, weight in model.state_dict().items()}
    saved: dict[str, list[int]] = {}
    for weights in weight_files(checkpoint):
        with safe_open(weights, framework="pt") as file:
            saved |= {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    wrong = {name for name in saved.keys() & expected.keys() if saved[name] != expected[name]}
    if isinstance(model.config, LexConfig) and saved:
        wrong |= expected.keys() - saved.keys() - {*(model.all_tied_weights_keys or {})}
    if wrong:
        name = min(wrong)
        raise ValueError(
            f"{checkpoint} does not hold the weights of its config.json: {name} has the shape {saved.get(name)}, not "
            f"{expected[name]}. Remove that folder, and resume from the checkpoint before it."
        )


def _save_model(trainer: Trainer, on_save: Callable[[], None]) -> None:
    folder = Path(trainer.args.output_dir)
    staging = folder / ".saving"
    is_main = trainer.is_world_process_zero()
    if is_main:
        shutil.rmtree(staging, ignore_errors=True)  # of a process that was killed
    with _saving(staging):
        trainer.save_model(str(staging))
        if not is_main:
            return
        # A pickle of the arguments: of use in a checkpoint only, and nothing to publish with a model.
        (staging / TRAINING_ARGS_NAME).unlink()
        on_save()
        replace_model(folder, staging)


def _result(trainer: Trainer, record: RunRecord) -> TrainingResult:
    history = trainer.state.log_history
    losses = [(entry["step"], entry["loss"]) for entry in history if "loss" in entry]
    starts = [0, *(step for step, _ in losses)]
    total = sum(loss * (step - start) for start, (step, loss) in zip(starts, losses, strict=False))
    return TrainingResult(
        model_folder=Path(trainer.args.output_dir),
        steps=trainer.state.global_step,
        train_loss=total / trainer.state.global_step,
        losses=losses,
        eval_losses=[(entry["step"], entry["eval_loss"]) for entry in history if "eval_loss" in entry],
        tokens=trainer.state.num_input_tokens_seen,
        changes=record.changes,
    )
