"""The `Trainer` as this package needs it: streams, no cache while training, finite weights only, hyperparameters."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from safetensors import SafetensorError
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import (
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    default_data_collator,
)
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from lex_hf.data.streaming import PackedStream
from lex_hf.model.loss_lex import IGNORED
from lex_hf.training.divergence import diverged
from lex_hf.training.run_folder import last_checkpoint


class LexTrainer(Trainer):
    """The Trainer, reading streams, without a cache while it trains, and saving finite weights only.

    Attributes:
        hyperparameters: Settings of each parameter group and base learning rates, as given for this run; a checkpoint
            brings its own.
    """

    hyperparameters: tuple[list[dict[str, Any]], list[float | torch.Tensor]] = ([], [])

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Compute the loss of a batch without a cache; the batch itself may be sent between processes."""
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
        """Load batches to evaluate on, without an effect on the training."""
        return _with_a_generator(super().get_eval_dataloader(*args, **kwargs))

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        """Make the schedule, and note the hyperparameters before a checkpoint is loaded over them."""
        try:
            scheduler = super().create_scheduler(*args, **kwargs)
        except TypeError as error:
            raise ValueError(f"lr_scheduler_kwargs = {self.args.lr_scheduler_kwargs}: {error}.") from error
        if isinstance(scheduler, LambdaLR):
            given = [{name: value for name, value in each.items() if name != "params"} for each in _groups(scheduler)]
            self.hyperparameters = given, list(scheduler.base_lrs)
        return scheduler

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model, unless it diverged in the last steps, which no loss has shown yet.

        Raises:
            TrainingDiverged: If a weight of any process is not finite.
        """
        if not all(bool(_local(weight).isfinite().all()) for weight in self.model.parameters()):
            self.accelerator.set_trigger()
        if self.accelerator.check_trigger():
            raise diverged("not all weights are finite numbers", self.args, self.state)
        super().save_model(output_dir, _internal_call)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Save a checkpoint; one that cannot be saved is removed, which frees its space."""
        folder = Path(self.args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        with removed_on_failure(folder):
            super()._save_checkpoint(*args, **kwargs)


class GivenHyperparameters(TrainerCallback):
    """Lets the optimiser continue with the hyperparameters of this run, where the Trainer takes the checkpoint's."""

    def __init__(self, trainer: LexTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Set learning rate, weight decay and the rest; nothing changes if they are what they were."""
        schedule = self.trainer.lr_scheduler
        if not state.global_step or not isinstance(schedule, LambdaLR):
            return
        groups, schedule.base_lrs = self.trainer.hyperparameters
        for group, given, rate, factor in zip(
            _groups(schedule), groups, schedule.base_lrs, schedule.lr_lambdas, strict=True
        ):
            group.update(given | {"lr": rate * factor(schedule.last_epoch)})
        schedule._last_lr = [group["lr"] for group in _groups(schedule)]


@contextlib.contextmanager
def removed_on_failure(folder: Path) -> Iterator[None]:
    """Remove a folder that could not be written.

    Raises:
        OSError: If writing failed; the message names the folder and the checkpoint that is kept.
    """
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


def as_tensors(dataset: Dataset) -> Dataset:
    """Return examples as tensors, without columns that the model does not take."""
    columns = [name for name in ("input_ids", "position_ids") if name in dataset.column_names]
    return dataset.with_format("torch", columns=columns)


def collate(examples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Make a batch whose labels are its tokens, all of them: end-of-text is learnt though it also pads.

    Where documents are kept apart, nothing predicts the first token of one.

    Args:
        examples: `input_ids`, and perhaps `position_ids`, of shape `(length,)` each.

    Returns:
        The same with `labels`, of shape `(batch, length)` each.
    """
    batch: dict[str, torch.Tensor] = default_data_collator(examples)
    labels = batch["input_ids"].clone()
    if "position_ids" in batch:
        labels[batch["position_ids"] == 0] = IGNORED
    return {**batch, "labels": labels}


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
    """Return the part of a weight that this process has."""
    return weight.to_local() if isinstance(weight, DTensor) else weight
