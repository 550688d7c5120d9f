"""The `Trainer` as this package needs it: streams, no cache while training, finite weights only, hyperparameters."""

import contextlib
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from safetensors import SafetensorError
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import Trainer, default_data_collator
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from lex_hf.data.packing import columns_of
from lex_hf.data.streaming import PackedStream
from lex_hf.model.loss_lex import IGNORED
from lex_hf.training.divergence import TrainingDiverged
from lex_hf.training.run_folder import last_checkpoint


class LexTrainer(Trainer):
    """The Trainer, reading streams, without a cache while it trains, and saving finite weights only.

    Attributes:
        on_save: Called by the main process after each checkpoint, and before the model is saved.
    """

    on_save: Callable[[], None]

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Compute the loss of a batch without a cache; the batch itself may be sent between processes."""
        return super().compute_loss(model, {**inputs, "use_cache": False}, *args, **kwargs)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Load batches; a stream's are read by one process, which gives the others their share."""
        loader = super().get_train_dataloader()
        return _with_a_generator(loader) if isinstance(self.train_dataset, PackedStream) else loader

    def get_eval_dataloader(self, *args: Any, **kwargs: Any) -> DataLoader[Any]:
        """Load batches to evaluate on, without an effect on the training."""
        return _with_a_generator(super().get_eval_dataloader(*args, **kwargs))

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        """Make the schedule, if its options are possible."""
        try:
            return super().create_scheduler(*args, **kwargs)
        except TypeError as error:
            raise ValueError(f"lr_scheduler_kwargs = {self.args.lr_scheduler_kwargs}: {error}.") from error

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log, before every checkpoint and at the end, and end a training whose loss is not finite.

        Raises:
            TrainingDiverged: If a loss is not finite.
        """
        super().log(logs, *args, **kwargs)
        for name in ("loss", "eval_loss"):
            if not math.isfinite(logs.get(name, 0.0)):
                raise self._diverged(f"{name} is {logs[name]}")

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model, unless it diverged in the last steps, which no loss has shown yet.

        Raises:
            TrainingDiverged: If a weight of any process is not finite.
        """
        # Each process looks at the part of a weight that it has.
        weights = [each.to_local() if isinstance(each, DTensor) else each for each in self.model.parameters()]
        if not all(bool(weight.isfinite().all()) for weight in weights):
            self.accelerator.set_trigger()
        if self.accelerator.check_trigger():
            raise self._diverged("not all weights are finite numbers")
        super().save_model(output_dir, _internal_call)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Save a checkpoint; one that cannot be saved is removed, which frees its space."""
        folder = Path(self.args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        with removed_on_failure(folder):
            super()._save_checkpoint(*args, **kwargs)
        if self.is_world_process_zero():
            self.on_save()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load their state, but continue with learning rate, weight decay and the rest as given for this run."""
        schedule = self.lr_scheduler
        groups = self.optimizer.param_groups
        given = [{name: value for name, value in group.items() if name != "params"} for group in groups]
        rates = list(getattr(schedule, "base_lrs", ()))
        super()._load_optimizer_and_scheduler(checkpoint)
        if not isinstance(schedule, LambdaLR):
            return
        groups, schedule.base_lrs = self.optimizer.param_groups, rates  # loading made new groups
        for group, settings, rate, factor in zip(groups, given, rates, schedule.lr_lambdas, strict=True):
            group.update(settings | {"lr": rate * factor(schedule.last_epoch)})
        schedule._last_lr = [group["lr"] for group in groups]

    def _diverged(self, what: str) -> TrainingDiverged:
        return TrainingDiverged(what, self.state.global_step, last_checkpoint(self.args.output_dir))


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
    return dataset.with_format("torch", columns=columns_of(dataset))


def collate(examples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Make a batch whose labels, if it has none, are its tokens: end-of-text is learnt though it also pads.

    Nothing predicts the first token of an example, nor, where documents are kept apart, of one of these; they are no
    labels, as older versions of `Trainer` divide the loss by the number of all labels.

    `input_ids` and perhaps `position_ids` and `labels` of shape `(length,)` become batches of shape `(batch, length)`,
    as are the `labels`.
    """
    batch: dict[str, torch.Tensor] = default_data_collator(examples)
    labels = batch.get("labels", batch["input_ids"]).clone()
    labels[:, 0] = IGNORED
    if "position_ids" in batch:
        labels[batch["position_ids"] == 0] = IGNORED
    return {**batch, "labels": labels}


def _with_a_generator(prepared: Any) -> DataLoader[Any]:
    """Give a loader random numbers of its own.

    One without them draws from torch's, and dropout would differ in a run that is resumed, or evaluated more often.
    """
    prepared.base_dataloader.generator = torch.Generator()
    return prepared
