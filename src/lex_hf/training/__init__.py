"""Training with transformers' `Trainer`: recipes and estimates, checkpoints, exact resumption, safe interruption."""

from lex_hf.lazy import exports

__getattr__, __dir__ = exports(
    __name__,
    {
        "TrainingDiverged": "divergence",
        "TrainingInterrupted": "interruption",
        "TrainingResult": "trainer",
        "last_checkpoint": "run_folder",
        "train": "trainer",
        "training_arguments": "arguments",
    },
)
