"""Settings of a training: kept in every checkpoint, and compared when the training is resumed.

Settings that change the result are compared: the fields of `TrainingArguments` that are not known to be harmless, the
examples of a step over all devices, the tokenizer, and the data. How a step is divided between devices may change;
the result is then the same up to rounding and dropout. Examples in memory are compared by a hash of all token ids: the
fingerprints of `datasets` depend on how a dataset was made, and need not change with its content, or stay with it. Of
a stream, which cannot be read to its end, settings and sources are compared, and the examples around the position
where it resumes.
"""

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
from datasets import Dataset
from transformers import (
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_callback import ExportableState
from transformers.utils import logging

from lex_hf.data.streaming import PackedStream
from lex_hf.records import content_hash
from lex_hf.training.run_folder import read_state

logger = logging.get_logger(__name__)

# Fields of TrainingArguments that say where, how often and how fast, or how a step is divided between devices.
_FREE = (
    "output_dir",
    "*eval_*",
    "*full_eval",
    "logging_*",
    "log_*",
    "save_*",
    "do_*",
    "hub_*",
    "push_to_hub",
    "trackio_*",
    "ddp_*",
    "include_*",
    "gradient_*",
    "activation_*",
    "per_device_*",
    "dataloader_num_workers",
    "dataloader_p*",
    "dataloader_multiprocessing_context",
    "auto_find_batch_size",
    "debug",
    "disable_tqdm",
    "enable_jit_checkpoint",
    "ignore_data_skip",
    "label_names",
    "length_column_name",
    "local_rank",
    "prediction_loss_only",
    "project",
    "remove_unused_columns",
    "report_to",
    "restore_callback_states_from_checkpoint",
    "resume_from_checkpoint",
    "run_name",
    "skip_memory_metrics",
    "torch_empty_cache_steps",
    "use_cache",
    "use_cpu",
)
# The state of these in a checkpoint fits nothing else.
_FIXED = ("optim", "optim_args", "optim_target_modules", "fsdp", "fsdp_config", "deepspeed")
# Schedules that derive the learning rate from the losses, not from the step.
_OF_LOSSES = ("reduce_lr_on_plateau", "greedy")
_OF_SCHEDULE = ("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs")
_ROWS_AT_ONCE = 1000
_NO_RECORD = (
    "%s has no record of its settings: it was written by lex-hf 0.1.0. Whether data, tokenizer, seed, learning rate, "
    "number of steps and the other settings are the same cannot be checked; those given now apply from here on."
)


@dataclass(frozen=True)
class Change:
    """A setting that was changed when a training was resumed.

    Attributes:
        step: Steps taken before; the new value applies from the next one on.
        name: Name of the setting, e.g. `learning_rate`; `"all"` where a checkpoint had no record of its settings.
        was: The value until then; `None` if it is not known.
        now: The value from then on.
    """

    step: int
    name: str
    was: Any
    now: Any

    def __str__(self) -> str:
        if self.name == "all":
            return f"up to step {self.step} the settings were not recorded"
        return f"up to step {self.step} {self.name} was {self.was!r}, then {self.now!r}"


class RunRecord(TrainerCallback, ExportableState):
    """The settings of a training, and when they were changed; every checkpoint keeps it in its state file.

    Attributes:
        settings: Values by name, as JSON has them.
        changes: Changes at earlier resumptions, the oldest first.
    """

    def __init__(self, settings: Mapping[str, Any], changes: Collection[Change] = ()) -> None:
        self.settings = dict(settings)
        self.changes = list(changes)

    def state(self) -> dict[str, Any]:
        """Return the entry for the state file of a checkpoint."""
        changes = [asdict(change) for change in self.changes]
        return {"args": {}, "attributes": {"settings": self.settings, "changes": changes}}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Let a resumed training save its record, and log, save and evaluate as often as its arguments say now."""
        # The Trainer takes both from the checkpoint, and fails where that has no such entry.
        state.stateful_callbacks.setdefault(type(self).__name__, self.state())
        state.compute_steps(args, state.max_steps)

    def resumed(
        self, checkpoint: Path, of_stream: Mapping[str, tuple[Any, Any]], allowed: Collection[str]
    ) -> "RunRecord":
        """Compare with a checkpoint; return the record of the training that resumes from it.

        Args:
            checkpoint: The checkpoint.
            of_stream: Differences in the data of a stream, `(was, now)` by name.
            allowed: Names of settings that may differ.

        Raises:
            ValueError: If a setting differs and is not allowed to, or cannot differ; the message lists all of them.
        """
        state = read_state(checkpoint)
        kept = state["stateful_callbacks"].get(type(self).__name__)
        step, found = int(state["global_step"]), dict(of_stream)
        if kept is None:
            logger.warning(_NO_RECORD, checkpoint)
            earlier = [Change(step, "all", None, "as given")]
        else:
            earlier = [Change(**change) for change in kept["attributes"]["changes"]]
            found |= _differences(kept["attributes"]["settings"], self.settings)
        changes = [Change(step, name, was, now) for name, (was, now) in found.items()]
        self._check(changes, checkpoint, allowed)
        return RunRecord(self.settings, [*earlier, *changes])

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


def settings_of(
    arguments: TrainingArguments, tokenizer: PreTrainedTokenizerBase, data: Mapping[str, Any]
) -> dict[str, Any]:
    """Return all settings that change the result of a training, as JSON has them.

    Args:
        arguments: Those of the training.
        tokenizer: Its tokenizer.
        data: The result of [`data_settings`].
    """
    values = {
        name: value
        for name, value in arguments.to_dict().items()
        if not any(fnmatchcase(name, pattern) for pattern in _FREE)
    }
    values.pop("num_train_epochs" if arguments.max_steps > 0 else "max_steps")
    examples = arguments.train_batch_size * arguments.world_size * arguments.gradient_accumulation_steps
    values |= {"examples_per_step": examples, "tokenizer": _tokenizer_digest(tokenizer), **data}
    result: dict[str, Any] = json.loads(json.dumps(values, default=str))
    return result


def data_settings(dataset: Dataset | PackedStream, vocab_size: int) -> dict[str, Any]:
    """Describe the data of a training: the settings of a stream, or the content of examples.

    Raises:
        ValueError: If the examples are not of equal length, or hold ids that are not tokens of the model.
    """
    if isinstance(dataset, PackedStream):
        return {f"data.{name}": value for name, value in dataset.settings.items()}
    return {"data": check_examples(dataset, vocab_size)}


def check_examples(dataset: Dataset, vocab_size: int) -> str:
    """Read all examples once; return their number, length and a hash of their content.

    Args:
        dataset: Examples in the column `input_ids`, and perhaps `position_ids`.
        vocab_size: Number of ids that the model knows.

    Raises:
        ValueError: If there are none, they are not of equal length of at least 2, or an id is out of range.
    """
    if "input_ids" not in dataset.column_names:
        raise ValueError(
            f"The dataset has the columns {dataset.column_names}, not 'input_ids': make examples with "
            "lex_hf.data.pack."
        )
    if len(dataset) == 0:
        raise ValueError("The dataset has no examples.")
    columns = [name for name in ("input_ids", "position_ids") if name in dataset.column_names]
    length = len(dataset[0]["input_ids"])
    digest = content_hash(_checked(dataset.select_columns(columns), length, vocab_size))
    return f"{len(dataset)} examples of {length} tokens, {digest}"


def _checked(dataset: Dataset, length: int, vocab_size: int) -> Iterator[bytes]:
    """Yield the content of all columns, some rows at a time."""
    for table in dataset.with_format("arrow").iter(_ROWS_AT_ONCE):
        for name in dataset.column_names:
            values = _numbers(table[name], name, length)
            if name == "input_ids":
                _check_ids(values, vocab_size)
            yield values.tobytes()


def _numbers(column: pa.ChunkedArray, name: str, length: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Return the values of rows of equal length, joined."""
    try:
        lengths = pc.unique(pc.list_value_length(column)).to_pylist()
        flat = np.concatenate([np.asarray(chunk.flatten()) for chunk in column.chunks])
    except (pa.ArrowException, NotImplementedError) as error:
        raise ValueError(f"The column {name!r} must hold lists of whole numbers: {error}.") from error
    if lengths != [length] or length < 2:
        raise ValueError(
            f"The examples must be of equal length, at least 2 tokens; {name!r} has rows of "
            f"{', '.join(map(str, sorted({length, *lengths}, key=str)))}."
        )
    if flat.dtype.kind not in "iu":
        raise ValueError(f"The column {name!r} must hold whole numbers, not {flat.dtype}.")
    return flat.astype("<i4")


def _check_ids(ids: np.ndarray[Any, np.dtype[np.int32]], vocab_size: int) -> None:
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"The examples hold the token {low if low < 0 else high}, but the model has the tokens 0 to "
            f"{vocab_size - 1}: they were made with another tokenizer."
        )


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
        follows_losses = change.name in _OF_SCHEDULE and (schedule in _OF_LOSSES or change.was in _OF_LOSSES)
        if change.name in _FIXED or follows_losses:
            raise ValueError(
                f"{change.name}: was {change.was!r}, now {change.now!r}. It cannot be changed by resuming, for the "
                f"state in {checkpoint} would not fit; start another training with the weights of that folder as its "
                "model (--model)."
            )
