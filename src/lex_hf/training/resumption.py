"""Exact resumption: the checkpoint to continue from, what it must agree with, and the position in a stream."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from datasets import Dataset
from safetensors import safe_open
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState
from transformers.utils import CONFIG_NAME

from lex_hf.data.streaming import PackedStream
from lex_hf.model.configuration_lex import LexConfig
from lex_hf.training.run_folder import last_checkpoint, read_state, weight_files
from lex_hf.training.run_record import RunRecord

# Added to config.json by transformers, or taken from the tokenizer: no difference between two models.
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


def checkpoint_to_resume(model: PreTrainedModel, arguments: TrainingArguments) -> Path:
    """Find the last good checkpoint in `arguments.output_dir`, and check that it is of this model.

    Raises:
        ValueError: If there is none, or it is of another model.
    """
    last = last_checkpoint(arguments.output_dir)
    if last is None:
        raise ValueError(
            f"resume=True, but {arguments.output_dir} has no complete checkpoint with finite weights: start again "
            "without it, in another output_dir or with overwrite=True (--overwrite)."
        )
    _check_same_model(model, last)
    _check_shapes(model, last)
    return last


def resumed(
    record: RunRecord,
    checkpoint: Path,
    dataset: Dataset | PackedStream,
    arguments: TrainingArguments,
    allowed: Collection[str],
) -> RunRecord:
    """Compare a training with its checkpoint; move a stream to its position there.

    Args:
        record: Settings of the training.
        checkpoint: The checkpoint.
        dataset: Its examples.
        arguments: Its arguments.
        allowed: Names of settings that may differ.

    Returns:
        The record of the training that resumes.

    Raises:
        ValueError: If more differs than is allowed, or the checkpoint has more steps than the training.
    """
    state = read_state(checkpoint)
    position = state["stateful_callbacks"].get(_StreamPosition.__name__)
    if isinstance(dataset, PackedStream) != (position is not None):
        raise ValueError(f"{checkpoint} is of a training {'without' if position is None else 'with'} streaming.")
    if 0 < arguments.max_steps < state["global_step"]:
        raise ValueError(f"max_steps = {arguments.max_steps}: {checkpoint} has {state['global_step']} steps already.")
    if not isinstance(dataset, PackedStream):
        return record.resumed(checkpoint, {}, allowed)
    place = position["attributes"]["position"]
    changed = dataset.differences(place)
    record = record.resumed(checkpoint, {f"data.{name}": values for name, values in changed.items()}, allowed)
    if not changed:
        dataset.go_to(place)
    return record


def stream_position(stream: PackedStream, arguments: TrainingArguments) -> TrainerCallback:
    """Make the callback that reports consumed examples to a stream, and saves its position in every checkpoint."""
    batch = arguments.train_batch_size * arguments.world_size
    return _StreamPosition(stream, batch * arguments.gradient_accumulation_steps)


class _StreamPosition(TrainerCallback, ExportableState):
    """Position in a stream; checkpoints hold it under the name of this class."""

    def __init__(self, stream: PackedStream, examples_per_step: int) -> None:
        self.stream = stream
        self.examples_per_step = examples_per_step

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Consume the examples of a step."""
        self.stream.consume(self.examples_per_step)

    def state(self) -> dict[str, Any]:
        """Return the entry for the state file of a checkpoint."""
        return {"args": {}, "attributes": {"position": self.stream.state_dict()}}


def _check_same_model(model: PreTrainedModel, checkpoint: Path) -> None:
    # Weights of other positions or another attention pattern would fit, and train on without an error.
    saved = json.loads((checkpoint / CONFIG_NAME).read_bytes())
    given = json.loads(model.config.to_json_string())
    names = {name for name in saved | given if saved.get(name) != given.get(name)} - _NOT_THE_MODEL
    if names:
        changes = [f"{name} = {saved.get(name)!r}, not {given.get(name)!r}" for name in sorted(names)]
        raise ValueError(f"The model is not the one of {checkpoint}, which has {'; '.join(changes)}.")


def _check_shapes(model: PreTrainedModel, checkpoint: Path) -> None:
    """Compare the weights with what the config promises; the Trainer would silently skip those that are missing."""
    expected = {name: list(weight.shape) for name, weight in model.state_dict().items()}
    saved: dict[str, list[int]] = {}
    for weights in weight_files(checkpoint):
        with safe_open(weights, framework="pt") as file:
            saved |= {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    wrong = {name for name in saved.keys() & expected.keys() if saved[name] != expected[name]}
    if isinstance(model.config, LexConfig) and saved:
        wrong |= expected.keys() - saved.keys() - {*(model.all_tied_weights_keys or {})}
    if wrong:
        name = min(wrong)
        raise ValueError(
            f"{checkpoint} does not hold the weights of its config.json: {name} has the shape {saved.get(name)}, not "
            f"{expected[name]}. Remove that folder, and resume from the checkpoint before it."
        )
