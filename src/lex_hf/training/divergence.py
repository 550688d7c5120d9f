"""The error of a training whose loss or weights are not finite."""

from pathlib import Path


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
