"""The folder of a training: one run at a time, no file of others replaced, and checkpoints that can be trusted."""

import contextlib
import filecmp
import json
import zipfile
from collections.abc import Callable, Collection, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel, TrainingArguments
from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import sort_checkpoints
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, logging

from lex_hf.model.configuration_lex import LexConfig
from lex_hf.records import check_folder

logger = logging.get_logger(__name__)

RECIPE_NAME = "recipe.yaml"
LOCK_NAME = ".training.lock"
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
_VOCABULARY = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "merges.txt", "added_tokens.json")
_TEMPLATES = ("chat_template.jinja", "additional_chat_templates")
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", *_VOCABULARY, *_TEMPLATES)
_MODEL = (CONFIG_NAME, "generation_config.json", *_WEIGHTS, *_TOKENIZER, "*_lex.py")
_CHECKPOINTS = ("checkpoint-[0-9]*",)
# Added to config.json by transformers, or taken from the tokenizer: no difference between two models.
_OF_TRANSFORMERS = {"architectures", "auto_map", "dtype", "transformers_version", "use_cache"}
_OF_TOKENIZER = {"bos_token_id", "eos_token_id", "pad_token_id"}


@contextlib.contextmanager
def claimed(
    arguments: TrainingArguments, *, resume: bool, overwrite: bool, also: Collection[str] = ()
) -> Iterator[None]:
    """Hold `arguments.output_dir` for one training while the context lasts; a second one gets an error at once.

    The operating system frees the folder when the process ends, however it ends. Of several processes of one launcher
    the main process holds it. May be entered again by the thread that holds it. The names in `also` are files that are
    written beside the model and its checkpoints.

    Raises:
        ValueError: If it is not a folder that can be written to, another training runs in it, or it holds files that
            this one would replace.
    """
    folder = Path(arguments.output_dir)
    with contextlib.ExitStack() as stack:

        def claim() -> None:
            check_folder(folder, "output_dir")
            stack.enter_context(_existing(folder))
            stack.enter_context(_locked(folder))
            if not overwrite:
                _check_nothing_is_lost(folder, resume, also)

        on_main_process(arguments, claim)
        yield


def on_main_process(arguments: TrainingArguments, work: Callable[[], None]) -> None:
    """Do some work on the main process; if it fails, all processes raise its error."""
    failed: list[Exception | None] = [None]
    if arguments.process_index == 0:
        try:
            work()
        except (ValueError, OSError) as error:
            failed = [error]
    if arguments.world_size > 1:
        broadcast_object_list(failed)
    if failed[0] is not None:
        raise failed[0]


def last_checkpoint(output_dir: str | Path) -> Path | None:
    """Find the newest good checkpoint in a folder, if any; half-written ones and those with NaN or ∞ are skipped."""
    return next((path for path in reversed(checkpoints(output_dir)) if _is_good(path)), None)


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


def checkpoints(output_dir: str | Path) -> list[Path]:
    """Return all checkpoints of a folder, good or not, the oldest first."""
    return list(map(Path, sort_checkpoints(str(output_dir))))


def read_state(checkpoint: Path) -> dict[str, Any]:
    """Read the state of the Trainer in a checkpoint.

    Raises:
        ValueError: If it is not a state of the Trainer.
    """
    state = json.loads((checkpoint / TRAINER_STATE_NAME).read_bytes())
    if not isinstance(state, dict) or not isinstance(state.get("stateful_callbacks"), dict):
        raise ValueError(f"{checkpoint / TRAINER_STATE_NAME} is not a state of the Trainer.")
    return state


def _weight_files(checkpoint: Path) -> set[Path]:
    """Return the safetensors files of a checkpoint, including missing ones that its index names."""
    files = set(checkpoint.glob("*.safetensors"))
    index = checkpoint / SAFE_WEIGHTS_INDEX_NAME
    if index.exists():
        files |= {checkpoint / name for name in json.loads(index.read_bytes())["weight_map"].values()}
    return files


def replace_model(folder: Path, staging: Path) -> None:
    """Move a saved model into a folder, replacing the one in it.

    Weights come first and the config last: a folder with a config has all the rest, and one with any file of a
    training's model has its weights. Files of an earlier model that would be loaded with this one are removed.
    """
    files = sorted(staging.iterdir(), key=lambda file: (file.name == CONFIG_NAME, not _is_one_of(file, _WEIGHTS)))
    new = {file.name for file in files}
    for file in files:
        file.replace(folder / file.name)
    for stale in folder.iterdir():
        if _is_one_of(stale, (*_WEIGHTS, *_TOKENIZER)) and stale.is_file() and stale.name not in new:
            stale.unlink()
    staging.rmdir()


def _check_nothing_is_lost(folder: Path, resume: bool, also: Collection[str]) -> None:
    """Refuse to replace existing files, unless they belong to the training that is resumed."""
    there = list(folder.iterdir())
    if resume and any(_is_one_of(path, _WEIGHTS) for path in there):
        return  # it was finished once, and continues: the model is its own
    newest = next(reversed(checkpoints(folder)), None) if resume else None
    kinds = _MODEL if resume else (*_MODEL, *_CHECKPOINTS, *also)
    found = sorted(path.name for path in there if _is_one_of(path, kinds) and not _is_copy(path, newest))
    if not found:
        return
    names = ", ".join(found[:5]) + (f" and {len(found) - 5} more" if len(found) > 5 else "")
    is_run = any(_is_one_of(folder / name, (*_WEIGHTS, *_CHECKPOINTS)) for name in found)
    what = "a trained model or checkpoints" if is_run else "files that the training would replace"
    going_on = "continue that run with resume=True (--resume), " if is_run else ""
    raise ValueError(
        f"{folder} holds {what}: {names}; {going_on}choose another folder, or have them replaced with overwrite=True "
        "(--overwrite)."
    )


def _is_copy(path: Path, checkpoint: Path | None) -> bool:
    other = None if checkpoint is None else checkpoint / path.name
    return other is not None and other.is_file() and path.is_file() and filecmp.cmp(path, other, shallow=False)


def _is_one_of(path: Path, patterns: Collection[str]) -> bool:
    return any(fnmatchcase(path.name, pattern) for pattern in patterns)


@contextlib.contextmanager
def _existing(folder: Path) -> Iterator[None]:
    """Make a folder and its parents; those that are empty when the context ends are removed."""
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # not empty
            for each in made:
                each.rmdir()


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    lock = FileLock(folder.resolve() / LOCK_NAME, timeout=0, is_singleton=True)
    is_outermost = not lock.is_locked
    try:
        lock.acquire()
    except Timeout:
        raise ValueError(
            f"{folder} is in use by another training: wait until it has ended, or choose another folder."
        ) from None
    except (OSError, NotImplementedError) as error:  # some network file systems have no locks
        logger.warning("%s cannot be locked (%s): make sure that no other training runs in it.", folder, error)
        yield
        return
    try:
        yield
    finally:
        if is_outermost:  # while it is held: a process that waits for the old file finds that it is gone
            Path(lock.lock_file).unlink(missing_ok=True)
        lock.release()


def _is_good(checkpoint: Path) -> bool:
    """Return whether a checkpoint is complete and its weights finite; the Trainer writes its state last."""
    try:
        read_state(checkpoint)
        json.loads((checkpoint / CONFIG_NAME).read_bytes())
        if not all(map(_is_finite, _weight_files(checkpoint))):
            logger.warning("%s is skipped: not all of its weights are finite numbers.", checkpoint)
            return False
    except (OSError, ValueError, SafetensorError):
        return False
    states = [*checkpoint.glob("*.pt"), *checkpoint.glob("*.pth")]
    return (checkpoint / SCHEDULER_NAME).exists() and all(map(zipfile.is_zipfile, states))


def _is_finite(weights: Path) -> bool:
    with safe_open(weights, framework="pt") as file:
        return all(bool(torch.isfinite(file.get_tensor(name)).all()) for name in file.keys())  # noqa: SIM118


def _check_same_model(model: PreTrainedModel, checkpoint: Path) -> None:
    # Weights of other positions or another attention pattern would fit, and train on without an error.
    saved = json.loads((checkpoint / CONFIG_NAME).read_bytes())
    given = json.loads(model.config.to_json_string())
    later = given.keys() - saved.keys()
    if later:  # fields that an earlier version did not have
        defaults = json.loads(type(model.config)().to_json_string())
        saved |= {name: defaults[name] for name in later & defaults.keys()}
    names = {name for name in saved | given if saved.get(name) != given.get(name)} - _OF_TRANSFORMERS - _OF_TOKENIZER
    if names:
        changes = [f"{name} = {saved.get(name)!r}, not {given.get(name)!r}" for name in sorted(names)]
        raise ValueError(f"The model is not the one of {checkpoint}, which has {'; '.join(changes)}.")


def _check_shapes(model: PreTrainedModel, checkpoint: Path) -> None:
    """Compare the weights with what the config promises; the Trainer would silently skip those that are missing."""
    expected = {name: list(weight.shape) for name, weight in model.state_dict().items()}
    saved: dict[str, list[int]] = {}
    for weights in _weight_files(checkpoint):
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
