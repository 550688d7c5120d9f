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
from transformers import TrainingArguments
from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import sort_checkpoints
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, logging

from lex_hf.records import check_folder

logger = logging.get_logger(__name__)

RECIPE_NAME = "recipe.yaml"
LOCK_NAME = ".training.lock"
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
_TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "chat_template.jinja",
    "additional_chat_templates",
)
_MODEL = (CONFIG_NAME, "generation_config.json", *_WEIGHTS, *_TOKENIZER, "*_lex.py")
_CHECKPOINTS = ("checkpoint-[0-9]*",)


@contextlib.contextmanager
def claimed(
    arguments: TrainingArguments, *, resume: bool, overwrite: bool, also: Collection[str] = ()
) -> Iterator[None]:
    """Hold `arguments.output_dir` for one training while the context lasts; a second one gets an error at once.

    The operating system frees the folder when the process ends, however it ends. Of several processes of one launcher
    the main process holds it. May be entered again by the thread that holds it.

    Args:
        arguments: Those of the training.
        resume: Whether a training in the folder is continued.
        overwrite: Whether existing files may be replaced.
        also: Names of files that are written beside the model and its checkpoints.

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
    """Find the newest good checkpoint in a folder; half-written ones and those with NaN or ∞ are skipped.

    Returns:
        The folder of the checkpoint, or `None` if there is none.
    """
    newest_first = reversed(sort_checkpoints(str(output_dir)))
    return next((path for path in map(Path, newest_first) if _is_good(path)), None)


def newer_checkpoints(checkpoint: Path) -> list[Path]:
    """Return the checkpoints in the same folder that have a higher number, the newest first."""
    newest_first = list(map(Path, sort_checkpoints(str(checkpoint.parent))))[::-1]
    return newest_first[: newest_first.index(checkpoint)]


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


def weight_files(checkpoint: Path) -> set[Path]:
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
        if not all(map(_is_finite, weight_files(checkpoint))):
            logger.warning("%s is skipped: not all of its weights are finite numbers.", checkpoint)
            return False
    except (OSError, ValueError, SafetensorError):
        return False
    states = [*checkpoint.glob("*.pt"), *checkpoint.glob("*.pth")]
    return (checkpoint / SCHEDULER_NAME).exists() and all(map(zipfile.is_zipfile, states))


def _is_finite(weights: Path) -> bool:
    with safe_open(weights, framework="pt") as file:
        return all(bool(torch.isfinite(file.get_tensor(name)).all()) for name in file.keys())  # noqa: SIM118
