"""The folder of a generation over a corpus: its settings, what each process has written, and all of it in order."""

import contextlib
import glob
import hashlib
import json
import os
from array import array
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from filelock import FileLock, Timeout
from transformers.utils import logging

from lex_hf.records import check_folder, read_json, whole_file, write_json

logger = logging.get_logger(__name__)

RESULT = "continuations.jsonl"
SETTINGS = "settings.json"

_PART = "continuations.part-{}.jsonl"  # of the process of that rank
_LOCK = ".corpus.lock"
_LINE = b'{"number": '  # how each line begins
_MISSING = -1


def hash_of(prompt: str) -> str:
    """Return the SHA-256 of the bytes of a prompt, as hexadecimal digits."""
    return hashlib.sha256(prompt.encode()).hexdigest()


def survey(prompts: Iterable[str]) -> "array[int]":
    """Read all prompts once, one at a time, and return the beginnings of their hashes: 8 bytes for each."""
    return array("Q", (_short(hash_of(prompt)) for prompt in prompts))


def _short(digest: str) -> int:
    return int(digest[:16], 16)


class CorpusFolder:
    """Continuations of the prompts of a corpus, as JSON lines.

    Each process appends to a file of its own and reads those of all, so no two ever write to the same one; in the end
    they become one file, in the order of the prompts. In memory there are 16 bytes for each prompt.

    Args:
        path: The folder; made by [`CorpusFolder.opened`] if it does not exist.
        settings: What the continuations depend on, as JSON can hold it.

    Attributes:
        path: The folder.
        finished: Number of prompts whose continuation was there when the folder was opened.

    Raises:
        ValueError: If the folder cannot be written to, holds something else, or holds continuations that were
            generated with other settings.
    """

    def __init__(self, path: str | Path, settings: Mapping[str, Any]) -> None:
        self.path, self.finished = Path(path), 0
        self._settings = json.loads(json.dumps(settings))
        self._part = self.path / _PART.format(PartialState().process_index)
        self._files: list[Path] = []
        self._places = array("q")
        self._check()

    def _check(self) -> None:
        check_folder(self.path, "output =")
        if not self.path.is_dir() or not {each.name for each in self.path.iterdir()} - {_LOCK}:
            return
        if not (self.path / SETTINGS).is_file():
            raise ValueError(
                f"output = {self.path} is not empty, and holds no {SETTINGS} of an earlier run to continue: choose "
                "another folder."
            )
        was = read_json(self.path / SETTINGS)
        if not isinstance(was, dict):
            raise ValueError(f"{self.path / SETTINGS} does not hold settings: choose another folder.")
        names = [*self._settings, *(name for name in was if name not in self._settings)]
        changed = [
            f"{name} = {was.get(name)!r}, not {self._settings.get(name)!r}"
            for name in names
            if was.get(name) != self._settings.get(name)
        ]
        if changed:
            raise ValueError(
                f"The continuations in {self.path} were generated with {'; '.join(changed)}. Take the same settings "
                "to continue, or choose another folder."
            )

    @contextlib.contextmanager
    def opened(self, prompts: "array[int]") -> Iterator[None]:
        """Read what is finished, and lock the folder for this run; all processes of a launcher enter together.

        Args:
            prompts: What [`survey`] returned.

        Raises:
            ValueError: If another run uses the folder, or what is there belongs to other prompts; before anything is
                written.
            OSError: If files cannot be read or written.
        """
        with contextlib.ExitStack() as stack:
            with self._explained(), MainFirst() as turn:
                if turn.is_main_process:
                    self._prepare(stack)
            with self._explained():
                self._read(prompts)
                self.finished = sum(place != _MISSING for place in self._places)
                if self._part.exists():
                    os.truncate(self._part, _whole_lines(self._part))
            yield

    def _prepare(self, stack: contextlib.ExitStack) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.path.resolve() / _LOCK, timeout=0)
        try:
            stack.enter_context(lock)
            stack.callback(Path(lock.lock_file).unlink, missing_ok=True)
        except Timeout as error:
            raise ValueError(
                f"Another run writes to {self.path}: wait for its end, or choose another folder."
            ) from error
        except (OSError, NotImplementedError) as error:  # some network file systems have no locks
            logger.warning("%s cannot be locked (%s): make sure that no other run writes to it.", self.path, error)
        self._check()  # what came before the lock
        if not (self.path / SETTINGS).exists():
            write_json(self.path / SETTINGS, self._settings)

    def is_finished(self, number: int) -> bool:
        """Return whether the continuation of a prompt was there when the folder was opened."""
        return self._places[number] != _MISSING

    def add(self, continuation: Mapping[str, Any]) -> None:
        """Append a continuation to the file of this process; its first field is the number of the prompt."""
        with self._explained(), self._part.open("a", encoding="ascii") as file:
            file.write(json.dumps(continuation) + "\n")

    def merge(self, prompts: "array[int]") -> dict[str, Any]:
        """Wait for all processes, and make one file of theirs, in the order of the prompts.

        Returns:
            In all processes: `prompts`, their number; `tokens`, that of the new ones; `prompt_tokens`; `cut`, the
            number of prompts of which only the last tokens were read; `finish_reasons`, how many ended for which.

        Raises:
            ValueError: If there is no continuation for a prompt.
        """
        with self._explained(), MainFirst() as turn:
            if turn.is_main_process:
                self._read(prompts)
                if parts := [each for each in self._files if each.name != RESULT]:
                    with whole_file(self.path / RESULT) as place, place.open("wb") as file:
                        file.writelines(self._in_order())
                for part in parts:
                    part.unlink()
                turn.result = _summary(self.path / RESULT)
        found: dict[str, Any] = turn.result
        return found

    def _read(self, prompts: "array[int]") -> None:
        """Find the continuation of each prompt: in which file it is, and where."""
        parts = self.path.glob(glob.escape(_PART.split("{}")[0]) + "[0-9]*.jsonl")
        self._files = [each for each in (self.path / RESULT, *sorted(parts)) if each.exists()]
        self._places = array("q", [_MISSING]) * len(prompts)
        for index, path in enumerate(self._files):
            for offset, line in _lines(path):
                number, digest = _key(path, offset, line)
                if not 0 <= number < len(prompts):
                    raise ValueError(
                        f"{path} holds a continuation of prompt {number} (counted from 0), and there are only "
                        f"{len(prompts)} prompts: give all texts of the earlier run, or choose another folder."
                    )
                if _short(digest) != prompts[number]:
                    raise ValueError(
                        f"Prompt {number} (counted from 0) is not the text that is continued in {path}: give the "
                        "texts of the earlier run, in the same order, or choose another folder."
                    )
                self._places[number] = offset * len(self._files) + index

    def _in_order(self) -> Iterator[bytes]:
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(path.open("rb")) for path in self._files]
            for number, place in enumerate(self._places):
                if place == _MISSING:
                    raise ValueError(f"{self.path} holds no continuation of prompt {number}: run the same call again.")
                offset, index = divmod(place, len(files))
                files[index].seek(offset)
                yield files[index].readline()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OSError(
                f"output = {str(self.path)!r} cannot be read or written: {error}. What was finished before is still "
                "there; once there is space and permission, the same call continues from it."
            ) from error


class MainFirst:
    """A block that the first process of a launcher works in, and whose result, or error, all have at its end.

    Attributes:
        is_main_process: Whether this is that process.
        result: What it found.
    """

    def __init__(self) -> None:
        self.is_main_process: bool = PartialState().is_main_process
        self.result: Any = None

    def __enter__(self) -> "MainFirst":
        PartialState().wait_for_everyone()
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if error is not None and not isinstance(error, ValueError | OSError):
            return
        message, self.result = broadcast_object_list([None if error is None else str(error), self.result])
        if message is not None and error is None:
            raise ValueError(message)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield whole lines and where they begin; a last one that was cut off, as by a kill, is skipped."""
    offset = 0
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                _check_rest(path, line)
                return
            yield offset, line
            offset += len(line)


def _check_rest(path: Path, rest: bytes) -> None:
    if not rest.startswith(_LINE[: len(rest)]):
        raise ValueError(f"{path} ends with something that is not a continuation. Choose another folder.")


def _whole_lines(path: Path) -> int:
    """Return the number of bytes of the whole lines of a file."""
    return max((offset + len(line) for offset, line in _lines(path)), default=0)


def _key(path: Path, offset: int, line: bytes) -> tuple[int, str]:
    try:
        fields = json.loads(line)
        number, digest = fields["number"], fields["prompt_sha256"]
        if not isinstance(number, int) or len(bytes.fromhex(digest)) != hashlib.sha256().digest_size:
            raise ValueError
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{path}: the line at byte {offset} is no continuation. Choose another folder, or delete the line: its "
            "prompt is then continued again."
        ) from error
    return number, digest


def _summary(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"prompts": 0, "tokens": 0, "prompt_tokens": 0, "cut": 0, "finish_reasons": {}}
    for _, line in _lines(path):
        fields = json.loads(line)
        found["prompts"] += 1
        found["tokens"] += len(fields["tokens"])
        found["prompt_tokens"] += fields["prompt_tokens"]
        found["cut"] += fields["cut"] > 0
        reasons = found["finish_reasons"]
        reasons[fields["finish_reason"]] = reasons.get(fields["finish_reason"], 0) + 1
    return found
