"""Settings of a training: kept in every checkpoint, and compared when the training is resumed.

Settings that change the result are compared: the fields of `TrainingArguments` that are not known to be harmless, the
examples of a step over all devices, the tokenizer, and the data. How a step is divided between devices may change;
the result is then the same up to rounding and dropout. Examples in memory are compared by a hash of all token ids: the
fingerprints of `datasets` depend on how a dataset was made, and need not change with its content, or stay with it. Of
a stream, which cannot be read to its end, settings and sources are compared, and the examples around the position
where it resumes.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState
from transformers.utils import logging

from lex_hf.data.streaming import PackedStream
from lex_hf.records import content_hash
from lex_hf.training.arguments import examples_per_step
from lex_hf.training.recipe_files import SCHEDULE
from lex_hf.training.run_folder import read_state

logger = logging.get_logger(__name__)

# Fields of TrainingArguments that change no result: where to, how often, how fast, and how a step is divided.
_OUTPUT = ("output_dir", "run_name", "project", "report_to", "*hub*", "trackio_*", "log*", "disable_tqdm", "debug")
_EVALUATION = ("*eval*", "do_*", "include_*", "prediction_loss_only", "skip_memory_metrics")
_SAVING = ("save_*", "*_from_checkpoint", "ignore_data_skip", "enable_jit_checkpoint")
_COLUMNS = ("label_names", "length_column_name", "remove_unused_columns")
_PROCESSES = ("local_rank", "ddp_*", "dataloader_num_workers", "dataloader_p*", "dataloader_multiprocessing_context")
_DEVICES = ("use_cpu", "use_cache", "torch_empty_cache_steps", "auto_find_batch_size", "per_device_*")
_DIVISION = ("gradient_*", "activation_*", *_PROCESSES, *_DEVICES)
_FREE = (*_OUTPUT, *_EVALUATION, *_SAVING, *_COLUMNS, *_DIVISION)
# The state of these in a checkpoint fits nothing else.
_FIXED = ("optim", "optim_args", "optim_target_modules", "fsdp", "fsdp_config", "deepspeed")
# Schedules that derive the learning rate from the losses, not from the step.
_OF_LOSSES = ("reduce_lr_on_plateau", "greedy")
_NO_RECORD = (
    "%s has no record of its settings: it was written by lex-hf 0.1.0. Whether data, tokenizer, seed, learning rate, "
    "number of steps and the other settings are the same cannot be checked; those given now apply from here on."
)


@dataclass(frozen=True)
class Change:
    """A setting that was changed when a training was resumed."""

    step: int  # steps taken before; the new value applies from the next one on
    name: str  # e.g. `learning_rate`; `"all"` where a checkpoint had no record of its settings
    was: Any  # the value until then; `None` if it is not known
    now: Any

    def __str__(self) -> str:
        if self.name == "all":
            return f"up to step {self.step} the settings were not recorded"
        return f"up to step {self.step} {self.name} was {self.was!r}, then {self.now!r}"


class RunRecord(TrainerCallback, ExportableState):
    """The settings of a training, and when they were changed; every checkpoint keeps it in its state file.

    Its `data` are the settings of a stream as `data.NAME`, or a description of the examples as `data`.

    Attributes:
        settings: All settings that change the result of the training, as JSON has them.
        changes: Changes when it was resumed, the oldest first.
    """

    def __init__(
        self, arguments: TrainingArguments, tokenizer: PreTrainedTokenizerBase, data: Mapping[str, Any]
    ) -> None:
        values = {
            name: value
            for name, value in arguments.to_dict().items()
            if not any(fnmatchcase(name, pattern) for pattern in _FREE)
        }
        values.pop("num_train_epochs" if arguments.max_steps > 0 else "max_steps")
        values |= {"examples_per_step": examples_per_step(arguments), "tokenizer": _tokenizer_digest(tokenizer)}
        self.settings: dict[str, Any] = json.loads(json.dumps({**values, **data}, default=str))
        self.changes: list[Change] = []

    def state(self) -> dict[str, Any]:
        """Return the entry for the state file of a checkpoint."""
        changes = [asdict(change) for change in self.changes]
        return {"args": {}, "attributes": {"settings": self.settings, "changes": changes}}

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Let a resumed training save its record, and log, save and evaluate as often as its arguments say now."""
        # The Trainer takes both from the checkpoint, and fails where that has no such entry.
        state.stateful_callbacks.setdefault(type(self).__name__, self.state())
        state.compute_steps(args, state.max_steps)

    def resume(self, checkpoint: Path, dataset: Dataset | PackedStream, allowed: Collection[str]) -> None:
        """Compare with the checkpoint to resume from, note what changed, and move a stream to its position there.

        Raises:
            ValueError: If a setting differs that is not among those `allowed` to, or that cannot; the message lists
                all of them. If the checkpoint has more steps than the training.
        """
        state = read_state(checkpoint)
        step, kept = int(state["global_step"]), state["stateful_callbacks"]
        position = kept.get(_StreamPosition.__name__)
        if isinstance(dataset, PackedStream) != (position is not None):
            raise ValueError(f"{checkpoint} is of a training {'without' if position is None else 'with'} streaming.")
        if self.settings.get("max_steps", step) < step:
            raise ValueError(f"max_steps = {self.settings['max_steps']}: {checkpoint} has {step} steps already.")
        of_stream = {}
        if isinstance(dataset, PackedStream):
            of_stream = dataset.differences(position["attributes"]["position"])
        found = {f"data.{name}": values for name, values in of_stream.items()}
        if type(self).__name__ in kept:
            before = kept[type(self).__name__]["attributes"]
            self.changes = [Change(**change) for change in before["changes"]]
            found |= _differences(before["settings"], self.settings)
        else:
            logger.warning(_NO_RECORD, checkpoint)
            self.changes = [Change(step, "all", None, "as given")]
        changes = [Change(step, name, was, now) for name, (was, now) in found.items()]
        self._check(changes, checkpoint, allowed)
        self.changes += changes
        if isinstance(dataset, PackedStream) and not of_stream:
            dataset.go_to(position["attributes"]["position"])

    def _check(self, changes: list[Change], checkpoint: Path, allowed: Collection[str]) -> None:
        known = {*self.settings, *(change.name for change in changes)}
        known |= {name.partition(".")[0] for name in known}
        unknown = [name for name in allowed if name not in known]
        if unknown:
            raise ValueError(
                f"allow_changes: there is no setting {unknown[0]!r}; there are: {', '.join(sorted(known))}."
            )
        _check_possible(changes, checkpoint, self.settings["lr_scheduler_type"])
        refused = [change for change in changes if not {change.name, change.name.partition(".")[0]} & set(allowed)]
        if not refused:
            return
        lines = "; ".join(f"{each.name}: was {each.was!r}, now {each.now!r}" for each in refused)
        names = list(dict.fromkeys(each.name for each in refused))
        options = " ".join(f"--allow-change {name}" for name in names)
        raise ValueError(
            f"This is not the training of {checkpoint}: {lines}. Give the values it had, or let them change from step "
            f"{refused[0].step + 1} on with allow_changes={names} ({options})."
        )


def stream_position(stream: PackedStream, arguments: TrainingArguments) -> TrainerCallback:
    """Make the callback that reports consumed examples to a stream, and saves its position in every checkpoint."""
    return _StreamPosition(stream, examples_per_step(arguments))


class _StreamPosition(TrainerCallback, ExportableState):
    """Position in a stream; checkpoints hold it under the name of this class."""

    def __init__(self, stream: PackedStream, examples_per_step: int) -> None:
        self.stream = stream
        self.examples_per_step = examples_per_step

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.stream.consume(self.examples_per_step)

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"position": self.stream.state_dict()}}


def _tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    content = sorted(tokenizer.get_vocab().items()), sorted(map(str, tokenizer.special_tokens_map.items()))
    return f"{len(tokenizer)} tokens, {content_hash([json.dumps(content).encode()])}"


def _differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return settings that differ, `(was, now)`; a field that only one release of transformers has does not count."""
    lengths = {"max_steps", "num_train_epochs"}  # a training has one of them
    names = [name for name in {**was, **now} if name in lengths or (name in was and name in now)]
    found = {name: (was.get(name), now.get(name)) for name in names if was.get(name) != now.get(name)}
    return {name: values for name, values in found.items() if not name.startswith("data.")}


def _check_possible(changes: list[Change], checkpoint: Path, schedule: str) -> None:
    """Refuse changes that would not take effect, even if they are allowed."""
    for change in changes:
        follows_losses = change.name in SCHEDULE and (schedule in _OF_LOSSES or change.was in _OF_LOSSES)
        if change.name in _FIXED or follows_losses:
            raise ValueError(
                f"{change.name}: was {change.was!r}, now {change.now!r}. It cannot be changed by resuming, for the "
                f"state in {checkpoint} would not fit; start another training with the weights of that folder as its "
                "model (--model)."
            )
