"""Records: files that appear only when they are whole, JSON, fingerprints, and versions and hardware of results."""

import contextlib
import hashlib
import json
import math
import os
import platform
import secrets
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def check_file(path: Path, name: str) -> None:
    """Check, before any work, that a file can be written.

    A regular file that exists is replaced later; devices and pipes are written to; symbolic links are followed.

    Args:
        path: The file.
        name: Its name for the user, e.g. `--csv`.

    Raises:
        ValueError: If its folder does not exist or cannot be written to, or the path is a folder.
    """
    with _explained(path, name):
        target = _target(path)
        if target.is_dir():
            raise ValueError(f"{name} {path} is a folder: give the path of a file.")
        if path.absolute().parts[:2] == ("/", "dev") and target.is_file():  # the text printed there would be lost
            raise ValueError(f"{name} {path} is redirected to the file {target}: give another file.")
        if target.exists() and not os.access(target, os.W_OK):
            raise ValueError(f"{name} {path} cannot be written to: choose another file, or change its permissions.")
        if not target.exists() or target.is_file():
            _check_writable(target.parent, path, name)


def check_folder(path: Path, name: str) -> None:
    """Check, before any work, that files can be written into a folder, which need not exist yet; see [`check_file`].

    Raises:
        ValueError: If the path, or the first part of it that exists, is not a folder or cannot be written to.
    """
    with _explained(path, name):
        if path.is_symlink() and not path.exists():
            raise ValueError(f"{name} {path} is a symbolic link to a missing folder; choose another path.")
        existing = Path(os.path.realpath(path))
        while not existing.exists() and existing != existing.parent:
            existing = existing.parent
        if not existing.is_dir():
            raise ValueError(f"{name} {path}: {existing} is a file, not a folder; choose another path.")
        _check_writable(existing, path, name)


def check_new_folder(path: Path, name: str) -> None:
    """Check, as [`check_folder`] does, that files can be written into a folder, and that it is new or empty.

    Raises:
        ValueError: If not.
    """
    check_folder(path, name)
    try:
        os.path.realpath(path).encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} {path} is not UTF-8: weights and tokenizers cannot be saved there.") from error
    with _explained(path, name):
        if path.is_dir() and any(path.iterdir()):
            raise ValueError(f"{name} {path} exists and is not empty: choose another folder.")


@contextlib.contextmanager
def whole_file(path: str | Path) -> Iterator[Path]:
    """Yield a path to write to; what was written there becomes `path` if the block ends without an error.

    Symbolic links are followed. An existing path that is not a regular file, such as a device, is written to.
    """
    target = _target(path)
    if target.exists() and not target.is_file():
        yield target
        return
    # On file systems that machines share, others have processes of the same number.
    partial = target.with_name(f".{target.name[:200]}.{os.getpid()}-{secrets.token_hex(4)}.partial")
    try:
        yield partial
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


@contextlib.contextmanager
def whole_folder(path: str | Path) -> Iterator[Path]:
    """Yield a folder to write to; what was written there is in the folder `path` if the block ends without an error.

    The folder must be new or empty; see [`check_new_folder`].
    """
    target = Path(os.path.realpath(path))
    is_there = target.is_dir()  # it may be the current folder or a mount, which cannot be replaced
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = (target if is_there else target.parent) / f".{target.name[:200]}.{os.getpid()}.partial"
    partial.mkdir()
    try:
        yield partial
        if not is_there:
            partial.replace(target)
        for each in list(partial.iterdir()) if is_there else ():
            each.replace(target / each.name)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_text(path: str | Path, text: str) -> None:
    """Write a text in UTF-8; see [`whole_file`]. Bytes of file names that are not UTF-8 become escapes."""
    with whole_file(path) as place, place.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file:
        file.write(text)


def write_json(path: str | Path, value: Any) -> None:
    """Write a value for [`read_json`], in a folder that is made if need be: as Python's JSON, with NaN and Infinity.

    For JSON that other programs read, see [`to_json`].
    """
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def read_json(path: str | Path) -> Any:
    """Read a JSON file.

    Raises:
        OSError: If it cannot be read.
        ValueError: If it is not JSON in UTF-8; the message names it.
    """
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}.") from error


def to_json(value: Any, **options: Any) -> str:
    """Return dictionaries, lists, tuples, texts and numbers as JSON; options are those of `json.dumps`.

    Numbers that JSON does not have (NaN, ±Infinity) become `null`.
    """
    return json.dumps(_finite(value), allow_nan=False, **options)


def fingerprint(value: Any) -> str:
    """Return the SHA-256 of a value as JSON, in hexadecimal digits; the order of keys does not count."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def content_hash(parts: Iterable[bytes]) -> str:
    """Return a hash of bytes, however they are divided: 16 hexadecimal digits, to see whether they changed."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def versions(*libraries: str) -> dict[str, str]:
    """Return the versions of Python and of libraries, which are named as distributions are, e.g. `"torch"`."""
    return {"python": platform.python_version()} | {name: _version(name) for name in libraries}


def hardware() -> dict[str, Any]:
    """Return the hardware that this process computes on, and the number of processes."""
    import torch  # here: commands that compute nothing start without it
    from accelerate import PartialState

    return {
        "machine": platform.machine(),
        "system": platform.system(),
        "threads": torch.get_num_threads(),
        "accelerators": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "processes": PartialState().num_processes,
    }


def command() -> str:
    """Return the command line of this process, as it is typed."""
    return shlex.join(["lex-hf", *sys.argv[1:]])


def origin(*libraries: str) -> dict[str, Any]:
    """Return how a record is made: the time, the command, and versions and hardware; see [`versions`]."""
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command(),
        "versions": versions(*libraries),
        "hardware": hardware(),
    }


def _version(library: str) -> str:
    if library == "torch":
        import torch

        return str(torch.__version__)  # with the build, e.g. 2.13.0+cu130, unlike its metadata
    if library == "lex-hf":
        return str(sys.modules["lex_hf"].__version__)  # of the code that runs, whatever was installed last
    try:
        return version(library)
    except PackageNotFoundError:  # run from its sources, without being installed
        return "not installed"


def _target(path: str | Path) -> Path:
    """Follow symbolic links to a file; a pipe behind `/dev/stdout` has no other name."""
    path = Path(path)
    return path if path.exists() and not path.is_file() else Path(os.path.realpath(path))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value


def _check_writable(folder: Path, path: Path, name: str) -> None:
    if not folder.is_dir():
        raise ValueError(f"{name} {path}: there is no folder {folder}; create it first, or choose another path.")
    with tempfile.TemporaryFile(dir=folder):  # permissions alone do not show a read-only file system
        pass


@contextlib.contextmanager
def _explained(path: Path, name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(f"{name} {path} cannot be written: {error.strerror or error}.") from error
