"""Safe interruption: a signal ends a training after the current step, with a checkpoint."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from accelerate import Accelerator
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.utils import logging

logger = logging.get_logger(__name__)


class TrainingInterrupted(KeyboardInterrupt):
    """Training was stopped by a signal; a checkpoint was saved first.

    Attributes:
        checkpoint: Folder of the checkpoint, which is a model that loads like any other.
        steps: Optimiser steps done.
    """

    def __init__(self, checkpoint: Path, steps: int, max_steps: int) -> None:
        super().__init__(
            f"Training was interrupted after {steps} of {max_steps} steps; they are saved in {checkpoint}. "
            "To resume from there, train again with the same arguments and resume=True."
        )
        self.checkpoint = checkpoint
        self.steps = steps


class NothingLeft(Exception):  # noqa: N818 - not an error: it ends a training that was complete before it began
    """All steps were done in the checkpoint that training resumes from."""


class Interruption(TrainerCallback):
    """Turns a signal into a checkpoint and a stop after the current step, the same step on all processes."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator  # that of the Trainer; it tells the other processes
        self.signal: signal.Signals | None = None  # the first received, if any
        self.stopped = False  # whether the training was stopped by one

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

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """End a complete training that is resumed; the Trainer would take one step beyond `max_steps`."""
        if state.global_step >= state.max_steps:
            raise NothingLeft

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Stop if a signal came, to this process or another; log with every checkpoint and at the end."""
        if self.signal is not None:
            self.accelerator.set_trigger()
        if self.accelerator.check_trigger() and state.global_step < state.max_steps:
            self.stopped = True
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False
        # So the losses in a checkpoint are complete, and those of a resumed run continue them.
        control.should_log |= control.should_save or control.should_training_stop

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Log with every checkpoint; a stopped run has saved its own before."""
        if self.stopped:
            control.should_save = control.should_evaluate = False
        control.should_log |= control.should_save
