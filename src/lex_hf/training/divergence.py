"""Divergence: a training whose loss or weights are not finite ends, and saves nothing of it."""

import math
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from lex_hf.training.run_folder import last_checkpoint


class TrainingDiverged(ValueError):  # noqa: N818 - named like TrainingInterrupted
    """A loss or a weight is no longer finite: nothing was saved, and the last good checkpoint is kept.

    Attributes:
        step: Step at which it was seen; it may have begun at any step since the previous log.
    """

    def __init__(self, what: str, step: int, checkpoint: Path | None) -> None:
        kept = f"the last good checkpoint, {checkpoint}, is kept" if checkpoint else "there is no checkpoint before it"
        allowed = "resume=True and allow_changes=['learning_rate'] (--resume --allow-change learning_rate)"
        again = f"resume from it with {allowed}" if checkpoint else "start again"
        super().__init__(
            f"Training diverged: {what} at step {step}. No model was saved; {kept}. Lower learning_rate and {again}; "
            "a longer warm-up or a smaller max_grad_norm helps, too."
        )
        self.step = step


def diverged(what: str, arguments: TrainingArguments, state: TrainerState) -> TrainingDiverged:
    """Make the error for a training in this state."""
    return TrainingDiverged(what, state.global_step, last_checkpoint(arguments.output_dir))


class Divergence(TrainerCallback):
    """Ends a training whose loss is not finite, when it is logged: before every checkpoint and at the end."""

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Check the losses.

        Raises:
            TrainingDiverged: If one is not finite.
        """
        for name in ("loss", "eval_loss"):
            value = (logs or {}).get(name, 0.0)
            if not math.isfinite(value):
                raise diverged(f"{name} is {value}", args, state)
