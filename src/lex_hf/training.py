"""Training with transformers' `Trainer`: the paper's constants, exact resumption, safe interruption."""

import contextlib
import json
import os
import shutil
import signal
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from accelerate import Accelerator
from datasets import Dataset
from safetensors import SafetensorError, safe_open
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
from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME, TRAINING_ARGS_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import IntervalStrategy, sort_checkpoints
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, logging

from lex_hf.loss_lex import IGNORED
from lex_hf.streaming import PackedStream

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
    """

    model_folder: Path
    steps: int
    train_loss: float
    losses: list[tuple[int, float]]
    eval_losses: list[tuple[int, float]]
    tokens: int


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
        ValueError: If the warm-up is not shorter than the training.
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
        # A diverged loss shall be seen; the filter would put the mean of the others in its place.
        "logging_nan_inf_filter": False,
        "save_total_limit": 2,
        "disable_tqdm": False,
        "dataloader_pin_memory": torch.accelerator.is_available(),
        "ddp_find_unused_parameters": False,
    } | overrides
    if settings["lr_scheduler_type"] == "polynomial":
        settings.setdefault("lr_scheduler_kwargs", {"lr_end": 0.0, "power": 1.0})
    arguments = TrainingArguments(output_dir=str(output_dir), **settings)
    steps = arguments.max_steps
    if 0 < steps <= arguments.get_warmup_steps(steps):
        raise ValueError(f"warmup_steps = {arguments.warmup_steps}: must be less than max_steps = {steps}.")
    return arguments


def train(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    dataset: Dataset | PackedStream,
    arguments: TrainingArguments,
    *,
    eval_dataset: Dataset | None = None,
    resume: bool = False,
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
        resume: Continue from the last complete checkpoint in `arguments.output_dir`. Half-written ones after
            it, left by a process that was killed, are removed. On one device the result is the same, to the
            bit, as that of an uninterrupted run.

    Raises:
        TrainingInterrupted: When a signal stopped the training.
        ValueError: If the data, the tokenizer or the checkpoint does not fit; if there is nothing to resume;
            if there is something to resume, but `resume` is false; if FSDP is asked for where there is no accelerator.
    """
    _check_sharding(arguments)
    if isinstance(dataset, PackedStream):
        _check_stream(arguments)
    else:
        _check_examples(dataset)
    _check_evaluation(arguments, eval_dataset)
    _check_vocabulary(model, tokenizer)
    if not resume:
        _check_fresh(arguments)
    checkpoint = _checkpoint_to_resume(model, arguments) if resume else None
    if checkpoint is not None:
        _resume_data(dataset, Path(checkpoint))
    trainer = _build_trainer(model, tokenizer, dataset, arguments, eval_dataset)
    interruption = _Interruption(trainer.accelerator)
    trainer.add_callback(interruption)
    with interruption.listening(), contextlib.suppress(_NothingLeft):
        trainer.train(resume_from_checkpoint=checkpoint)
    state = trainer.state
    if interruption.stopped:
        last = Path(arguments.output_dir) / f"checkpoint-{state.global_step}"
        raise TrainingInterrupted(last, state.global_step, state.max_steps)
    _save_model(trainer)
    if interruption.signal is not None:
        signal.raise_signal(interruption.signal)  # It came after the last step: the work is done, pass it on.
    return _result(trainer)


def last_checkpoint(output_dir: str | Path) -> Path | None:
    """Find the newest complete checkpoint in a folder; half-written ones are passed over.

    Returns:
        The folder of the checkpoint, or `None` if there is none.
    """
    newest_first = reversed(sort_checkpoints(str(output_dir)))
    return next((path for path in map(Path, newest_first) if _is_complete(path)), None)


class _LexTrainer(Trainer):
    """The Trainer, reading streams, and without a cache while it trains."""

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
        prepared = self.accelerator.prepare(loader)
        # A loader without one draws from torch's own, and dropout would differ in a run that is resumed.
        prepared.base_dataloader.generator = torch.Generator()
        return prepared


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


def _check_stream(arguments: TrainingArguments) -> None:
    if arguments.max_steps <= 0:
        raise ValueError(f"max_steps = {arguments.max_steps}: a stream has no end, so say how many steps to take.")
    if arguments.dataloader_num_workers:
        raise ValueError(
            f"dataloader_num_workers = {arguments.dataloader_num_workers}: a stream is read in the process that "
            "trains, so it must be 0."
        )


def _resume_data(dataset: Dataset | PackedStream, checkpoint: Path) -> None:
    state = json.loads((checkpoint / TRAINER_STATE_NAME).read_bytes())
    position = state["stateful_callbacks"].get(_StreamPosition.__name__)
    if isinstance(dataset, PackedStream) != (position is not None):
        raise ValueError(f"{checkpoint} is of a training {'without' if position is None else 'with'} streaming.")
    if isinstance(dataset, PackedStream):
        dataset.load_state_dict(position["attributes"]["position"])


def _check_examples(dataset: Dataset) -> None:
    if "input_ids" not in dataset.column_names:
        raise ValueError(
            f"The dataset has the columns {dataset.column_names}, not 'input_ids': make examples with "
            "lex_hf.data.pack."
        )
    if len(dataset) == 0:
        raise ValueError("The dataset has no examples.")


def _check_evaluation(arguments: TrainingArguments, eval_dataset: Dataset | None) -> None:
    if eval_dataset is None:
        return
    _check_examples(eval_dataset)
    if arguments.eval_strategy == IntervalStrategy.NO:
        raise ValueError("eval_dataset would not be used: set eval_strategy='steps' or 'epoch' in arguments.")


def _check_vocabulary(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    size = model.config.vocab_size
    if len(tokenizer) > size:
        raise ValueError(f"The tokenizer has {len(tokenizer)} tokens, but the model vocab_size = {size}.")


def _check_fresh(arguments: TrainingArguments) -> None:
    folder = Path(arguments.output_dir)
    if sort_checkpoints(str(folder)) or any(folder.glob("*.safetensors")):
        raise ValueError(
            f"{folder} holds a trained model or checkpoints: continue that run with resume=True, or choose "
            "another output_dir."
        )


def _checkpoint_to_resume(model: PreTrainedModel, arguments: TrainingArguments) -> str:
    with arguments.main_process_first(local=False):
        last = last_checkpoint(arguments.output_dir)
        if last is None:
            raise ValueError(
                f"resume=True, but {arguments.output_dir} has no complete checkpoint: start anew with "
                "resume=False and an empty output_dir."
            )
        _check_same_model(model, last)
        # The Trainer deletes old checkpoints by age or number: it could keep a broken one and delete this.
        newest_first = sort_checkpoints(str(arguments.output_dir))[::-1]
        for incomplete in newest_first[: newest_first.index(str(last))]:
            logger.warning("Removing %s, which is incomplete.", incomplete)
            shutil.rmtree(incomplete)
    return str(last)


def _check_same_model(model: PreTrainedModel, checkpoint: Path) -> None:
    # Weights of other positions or another attention pattern would fit, and train on without an error.
    saved = json.loads((checkpoint / CONFIG_NAME).read_bytes())
    given = json.loads(model.config.to_json_string())
    names = {name for name in saved | given if saved.get(name) != given.get(name)} - _NOT_THE_MODEL
    if names:
        changes = [f"{name} = {saved.get(name)!r}, not {given.get(name)!r}" for name in sorted(names)]
        raise ValueError(f"The model is not the one of {checkpoint}, which has {'; '.join(changes)}.")


def _is_complete(checkpoint: Path) -> bool:
    """Whether all files of a checkpoint are there in full; the Trainer writes its state last."""
    try:
        json.loads((checkpoint / TRAINER_STATE_NAME).read_bytes())
        json.loads((checkpoint / CONFIG_NAME).read_bytes())
        for weights in _weight_files(checkpoint):
            with safe_open(weights, framework="pt"):
                pass
    except (OSError, ValueError, SafetensorError):
        return False
    states = [*checkpoint.glob("*.pt"), *checkpoint.glob("*.pth")]
    return (checkpoint / SCHEDULER_NAME).exists() and all(map(zipfile.is_zipfile, states))


def _weight_files(checkpoint: Path) -> set[Path]:
    files = set(checkpoint.glob("*.safetensors"))
    index = checkpoint / SAFE_WEIGHTS_INDEX_NAME
    if index.exists():
        files |= {checkpoint / name for name in json.loads(index.read_bytes())["weight_map"].values()}
    return files


def _save_model(trainer: Trainer) -> None:
    folder = Path(trainer.args.output_dir)
    staging = folder / ".saving"
    trainer.save_model(str(staging))
    if not trainer.is_world_process_zero():
        return
    # A pickle of the arguments: of use in a checkpoint only, and nothing to publish with a model.
    (staging / TRAINING_ARGS_NAME).unlink()
    # The config comes last: a folder that has one has all the rest.
    for file in sorted(staging.iterdir(), key=lambda file: file.name == CONFIG_NAME):
        file.replace(folder / file.name)
    staging.rmdir()


def _result(trainer: Trainer) -> TrainingResult:
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
    )
