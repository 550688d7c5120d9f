"""Training with transformers' `Trainer`: recipes, what they take, checkpoints and how they go on."""

from lex_hf.lazy import exports

__getattr__, __dir__ = exports(
    __name__,
    {
        "TrainingDiverged": "trainer",
        "TrainingInterrupted": "trainer",
        "TrainingResult": "trainer",
        "last_checkpoint": "run_folder",
        "train": "trainer",
        "training_arguments": "trainer",
    },
)
