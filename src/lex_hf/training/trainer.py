"""Training with transformers' `Trainer`: `train` and its result."""

import contextlib
import shutil
import signal
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from accelerate.utils.memory import should_reduce_batch_size
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer, TrainingArguments
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, IntervalStrategy
from transformers.utils import logging

from lex_hf.data.packing import check_examples
from lex_hf.data.streaming import PackedStream
from lex_hf.data.tokenizers import check_vocabulary
from lex_hf.training.arguments import check_arguments, check_streaming
from lex_hf.training.interruption import Interruption, NothingLeft, TrainingInterrupted
from lex_hf.training.lex_trainer import LexTrainer, as_tensors, collate, removed_on_failure
from lex_hf.training.run_folder import checkpoint_to_resume, checkpoints, claimed, on_main_process, replace_model
from lex_hf.training.run_record import Change, RunRecord, stream_position

logger = logging.get_logger(__name__)

_NO_WORKERS = {"dataloader_persistent_workers": False, "dataloader_multiprocessing_context": None}
_IN_THIS_PROCESS = {name: value for name, value in _NO_WORKERS.items() if hasattr(TrainingArguments, name)}


@dataclass(frozen=True)
class TrainingResult:
    """Result of a finished training, from its first step, also when it was interrupted and resumed.

    Attributes:
        model_folder: Folder of the trained model and its tokenizer.
        steps: Optimiser steps.
        train_loss: Mean loss over all steps, in nats per token.
        losses: `(step, loss)`, where loss is the mean since the entry before, in nats per token.
        eval_losses: `(step, loss)` on the evaluation data, in nats per token.
        tokens: Tokens the model was trained on, over all processes.
        changes: Settings that were changed when the training was resumed, the earliest first.
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

    Every token but the first of an example (or, where documents are kept apart, of a document) is predicted; there is
    no padding. SIGINT (Ctrl-C) and SIGTERM let the current step end, save a checkpoint and raise
    `TrainingInterrupted`; a second signal stops at once. (Python delivers signals to the main thread only: a training
    in another thread does not see them.)

    Args:
        model: The model; trained in place.
        tokenizer: Saved with the model; its special tokens become those of the model.
        dataset: Examples of equal length in the column `input_ids`, and perhaps `position_ids`, as `lex_hf.data.pack`
            makes them, or a stream of such examples.
        arguments: As `training_arguments` makes them.
        eval_dataset: Examples for `arguments.eval_strategy`.
        resume: Continue from the last good checkpoint in `arguments.output_dir`. Those after it, half-written by a
            process that was killed or with weights that are not finite, are removed. On one device the result is
            bit for bit that of an uninterrupted run. Settings that change the result must be as they were: see
            [`lex_hf.training.run_record`].
        allow_changes: With `resume`, names of settings that may differ from before, e.g. `"learning_rate"`,
            `"max_steps"` or `"data"`. They take effect with the next step, and the checkpoints keep a record. A
            stream that changed starts at its first document.
        overwrite: Replace the model, tokenizer and checkpoints that `arguments.output_dir` holds. All else in there
            is kept.
        on_save: Called by the main process after each checkpoint and before the model is saved, with the changes of
            this resumption and earlier ones; to keep records beside them.

    Raises:
        TrainingInterrupted: When a signal stopped the training.
        TrainingDiverged: When a loss or a weight is not finite; it is not saved.
        ValueError: If the data, the tokenizer, an argument or the checkpoint does not fit; if there is nothing to
            resume, or it was made with other settings; if files would be replaced, but `overwrite` is false; if
            another training runs in the folder; if FSDP was requested where there is no accelerator.
        OSError: If a checkpoint or the model cannot be written; earlier checkpoints are kept.
    """
    check_arguments(arguments, resume, allow_changes)
    with claimed(arguments, resume=resume, overwrite=overwrite):
        check_vocabulary(tokenizer, model.config.vocab_size)
        data = _check_data(dataset, arguments, eval_dataset, model.config.vocab_size)
        record = RunRecord(arguments, tokenizer, data)
        checkpoint = checkpoint_to_resume(model, arguments) if resume else None
        if checkpoint is not None:
            record.resume(checkpoint, dataset, allow_changes)
        with _available(ImportError, RuntimeError):
            trainer = _build_trainer(model, tokenizer, dataset, arguments, eval_dataset, record)
            Trainer.get_optimizer_cls_and_kwargs(arguments, model)
        trainer.on_save = partial(on_save or (lambda changes: None), record.changes)
        on_main_process(arguments, lambda: _clear(arguments, checkpoint))
        _run(trainer, checkpoint)
        return _result(trainer, record)


def _check_data(
    dataset: Dataset | PackedStream, arguments: TrainingArguments, eval_dataset: Dataset | None, size: int
) -> dict[str, Any]:
    """Check all data; return the settings of those to train on: of a stream, or the content of examples."""
    if isinstance(dataset, PackedStream):
        check_streaming(arguments)
        settings = {f"data.{name}": value for name, value in dataset.settings.items()}
    else:
        settings = {"data": check_examples(dataset, size)}
    if eval_dataset is not None:
        check_examples(eval_dataset, size)
        if arguments.eval_strategy == IntervalStrategy.NO:
            raise ValueError("eval_dataset would not be used: set eval_strategy='steps' or 'epoch' in arguments.")
    return settings


def _build_trainer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    dataset: Dataset | PackedStream,
    arguments: TrainingArguments,
    eval_dataset: Dataset | None,
    record: RunRecord,
) -> LexTrainer:
    use_cache = model.config.use_cache
    is_stream = isinstance(dataset, PackedStream)
    added: dict[str, Any] = {"include_num_input_tokens_seen": "all"}
    if is_stream:
        # The Trainer would read a stream from its first document to the position where it resumes.
        added |= {"ignore_data_skip": True, **_IN_THIS_PROCESS}
    trainer = LexTrainer(
        model=model,
        args=replace(arguments, **added),
        data_collator=collate,
        train_dataset=dataset if is_stream else as_tensors(dataset),
        eval_dataset=eval_dataset and as_tensors(eval_dataset),
        processing_class=tokenizer,
        callbacks=[*([stream_position(dataset, arguments)] if is_stream else []), record],
    )
    # Trainer turns the cache off in the config, and would save that; `compute_loss` does so for training alone.
    model.config.use_cache = use_cache
    return trainer


@contextlib.contextmanager
def _available(*errors: type[Exception]) -> Iterator[None]:
    """Say which package or device an argument needs and does not find."""
    try:
        yield
    except errors as error:
        raise ValueError(f"An argument needs what is not available here: {error}") from error


def _clear(arguments: TrainingArguments, checkpoint: Path | None) -> None:
    """Remove checkpoints that are not of this training; a later one would be taken for its last."""
    found = checkpoints(arguments.output_dir)
    # The Trainer deletes old checkpoints by age or number: it could keep a broken one and delete the good one.
    for other in found if checkpoint is None else found[found.index(checkpoint) + 1 :]:
        logger.warning("Removing %s, which is %s.", other, "replaced" if checkpoint is None else "incomplete")
        shutil.rmtree(other)


def _run(trainer: LexTrainer, checkpoint: Path | None) -> None:
    interruption = Interruption(trainer.accelerator)
    trainer.add_callback(interruption)
    # Some packages are imported with the first step.
    with (
        interruption.listening(),
        contextlib.suppress(NothingLeft),
        _available(ImportError),
        _fitting(trainer.args),
        _readable(checkpoint),
    ):
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    state = trainer.state
    if interruption.stopped:
        last = Path(trainer.args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        raise TrainingInterrupted(last, state.global_step, state.max_steps)
    _save_model(trainer)
    if interruption.signal is not None:
        signal.raise_signal(interruption.signal)  # It came after the last step: the work is done, pass it on.


@contextlib.contextmanager
def _fitting(arguments: TrainingArguments) -> Iterator[None]:
    """Say what to do about a batch that is too large."""
    try:
        yield
    except RuntimeError as error:
        if not should_reduce_batch_size(error):
            raise
        raise ValueError(
            f"Not enough memory for a batch of {arguments.per_device_train_batch_size} examples: set a smaller "
            "per_device_train_batch_size (with more gradient_accumulation_steps; a recipe sees to that), or "
            f"activation_checkpointing. ({str(error).splitlines()[0]})"
        ) from error


@contextlib.contextmanager
def _readable(checkpoint: Path | None) -> Iterator[None]:
    """Say why the state of a checkpoint, which holds random numbers of NumPy, cannot be read."""
    try:
        yield
    except UnpicklingError as error:
        raise ValueError(
            f"{checkpoint} cannot be resumed with NumPy {version('numpy')} and PyTorch {version('torch')}: its state "
            "is damaged, or was written with versions whose files these cannot read, as NumPy 1 cannot read those of "
            "NumPy 2. Resume with the versions that wrote it; its weights can be loaded with any."
        ) from error


def _save_model(trainer: LexTrainer) -> None:
    folder = Path(trainer.args.output_dir)
    staging = folder / ".saving"
    is_main = trainer.is_world_process_zero()
    if is_main:
        shutil.rmtree(staging, ignore_errors=True)  # of a process that was killed
    with removed_on_failure(staging):
        trainer.save_model(str(staging))
        if not is_main:
            return
        # A pickle of the arguments: of use in a checkpoint only, and nothing to publish with a model.
        (staging / TRAINING_ARGS_NAME).unlink()
        trainer.on_save()
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
