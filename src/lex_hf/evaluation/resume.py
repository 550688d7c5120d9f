"""Resuming: a file of the texts that are finished, which a later run reads."""

import glob
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
from accelerate import PartialState
from transformers import PreTrainedModel

from lex_hf.evaluation.protocols import ProtocolSettings
from lex_hf.evaluation.results import Outcome
from lex_hf.evaluation.texts import Document
from lex_hf.rope.blockwise import reader_of

_NOT_OF_THE_MODEL = ("_name_or_path", "transformers_version")  # in a config: where and with what it was saved
# Fields that came after there were records: with their default a model computes what it did without them.
_ADDED = {"full_attention_log_scaling": False, "shaw_max_distance": 16}
_RECORD = b'{"key": "'  # how each line of a file of records begins


class Records:
    """Outcomes of finished documents, in a file of JSON lines.

    Each process appends to a file of its own and reads those of all, so no two ever write to the same one.

    Args:
        path: The file of the first process; the others append `.1`, `.2`, … to its name.
        settings: Protocol, length and options of the measurement.
        model: The model that is measured.

    Raises:
        ValueError: If a file is not a regular one or holds something else than records.
        OSError: If a file cannot be read or written.
    """

    def __init__(self, path: str | Path, settings: ProtocolSettings, model: PreTrainedModel) -> None:
        path = Path(path)
        measurement = {"protocol": settings.protocol, "length": settings.length, "model": model_fingerprint(model)}
        self._measurement = json.dumps(measurement | settings.options, sort_keys=True).encode()
        rank = PartialState().process_index
        self._file = path.with_name(f"{path.name}.{rank}") if rank else path
        self._finished: dict[str, Outcome] = {}
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise ValueError(
                f"records = {str(path)!r} is not a regular file, so what is written there cannot be read again. "
                "Choose another path."
            )
        with self._explained():
            for each in [path, *sorted(path.parent.glob(f"{glob.escape(path.name)}.[0-9]*"))]:
                if each.exists():
                    self._finished.update(_read_records(each))
            with self._file.open("ab") as file:  # fails before any work if it cannot be written to
                file.truncate(len(_whole_lines(self._file)))

    def get(self, document: Document) -> Outcome | None:
        """Return the outcome of a document, if it is recorded for this measurement."""
        return self._finished.get(self._key(document))

    def add(self, document: Document, outcome: Outcome) -> None:
        """Append the outcome of a document to this process's file."""
        key = self._key(document)
        line = {"key": key, "text": document.text, "bytes": document.size, **asdict(outcome)}
        with self._explained(), self._file.open("a", encoding="ascii") as file:
            file.write(json.dumps(line) + "\n")
        self._finished[key] = outcome

    def _key(self, document: Document) -> str:
        digest = hashlib.sha256(self._measurement)
        digest.update(document.text.encode() + document.tokens.numpy().tobytes())
        return digest.hexdigest()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OSError(
                f"records = {str(self._file)!r} cannot be read or written: {error}. What was recorded before is "
                "still there; once there is space and permission, the same call resumes from it."
            ) from error


def _read_records(path: Path) -> Iterator[tuple[str, Outcome]]:
    """Keys and outcomes of one file; a last line that was cut off, as by a kill, is skipped."""
    whole = _whole_lines(path)
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            fields = json.loads(line)
            yield fields["key"], Outcome(float(fields["nll"]), int(fields["tokens"]), fields["positions"])
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"records: line {number} of {path} is not a record of a finished text. Choose another file, or delete "
                "the line: its text is then computed again."
            ) from error


def _whole_lines(path: Path) -> bytes:
    content = path.read_bytes()
    end = content.rfind(b"\n") + 1
    rest = content[end:]
    if not rest.startswith(_RECORD[: len(rest)]):
        raise ValueError(f"records: {path} ends with something that is not a record. Choose another file.")
    return content[:end]


def model_fingerprint(model: PreTrainedModel) -> str:
    """Return the SHA-256 of configuration and weights, wherever the model is stored: a folder's content may change."""
    given = model.config.to_dict()
    config = {
        name: value
        for name, value in given.items()
        if name not in _NOT_OF_THE_MODEL and not (name in _ADDED and value == _ADDED[name])
    }
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, weight in sorted(model.state_dict().items()):
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
        digest.update(weight.cpu().contiguous().flatten().view(torch.uint8).numpy())
    if (reader := reader_of(model)) is not None:  # it is not in the configuration
        digest.update(repr((reader.patterns, reader.bound)).encode())
        if reader.yarn_factor is not None:
            digest.update(repr(("yarn_factor", float(reader.yarn_factor))).encode())
    return digest.hexdigest()
