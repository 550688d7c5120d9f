"""What a benchmark leaves: every time and peak it measured, and on what; JSON in and out."""

import json
import os
import platform
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch
import transformers
from settings import Settings

import lex_hf


@dataclass(frozen=True)
class Sample:
    """Times of one system at one length.

    Attributes:
        measure: `"prefill"`, `"chunked"`, `"decode"`, `"training"` or `"precision"`.
        system: Name of the system; of `"precision"`, with that of the precision behind it.
        length: Tokens of the text that is prefilled, in the cache before decoding, or of a training example.
        tokens: Tokens that one call reads.
        seconds: Time of every call, in order.
        skipped: Why there are none.
        cache: Bytes that hold the keys and values after decoding; `None` for other measures, without a cache, and in
            records that are older than this field.
    """

    measure: str
    system: str
    length: int
    tokens: int
    seconds: list[float]
    skipped: str | None = None
    cache: int | None = None


@dataclass(frozen=True)
class Rate:
    """What the machine itself can do, measured in turns with the models.

    Attributes:
        what: `"read"` (of memory), the same with the name of a precision, or `"multiply"` (of matrices).
        how: The operation.
        amount: Bytes, or floating-point operations, of one call.
        seconds: Time of every call.
    """

    what: str
    how: str
    amount: int
    seconds: list[float]


@dataclass(frozen=True)
class Peak:
    """Memory of one process that did one thing.

    Attributes:
        task: `"prefill"`, `"streaming"`, `"training"` or `"checkpointed"`.
        system: Name of the system.
        length: Tokens.
        built: Bytes of the process when the model stood.
        peak: Most bytes it ever had.
        seconds: How long the task took.
        skipped: Why it was not done.
    """

    task: str
    system: str
    length: int
    built: int
    peak: int
    seconds: float
    skipped: str | None = None


@dataclass
class Record:
    """One run of the benchmark.

    Attributes:
        preset: Name of the preset it began with.
        command: What was typed.
        date: When it began, UTC.
        machine: Processor, cores, threads, memory, accelerator, load before and after.
        software: Versions.
        settings: All settings.
        systems: Of each system its description, numbers in linear layers, and bytes of weights without embeddings.
        rates: What the machine can do.
        samples: Times.
        peaks: Memory.
    """

    preset: str
    command: str
    date: str
    machine: dict[str, Any]
    software: dict[str, str]
    settings: Settings
    systems: dict[str, dict[str, Any]] = field(default_factory=dict)
    rates: list[Rate] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    peaks: list[Peak] = field(default_factory=list)

    @classmethod
    def begin(cls, preset: str, command: str, settings: Settings) -> "Record":
        """Make an empty record of this machine."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        return cls(preset, command, now, _machine(settings.device), _software(), settings)

    def finish(self) -> None:
        """Note how busy the machine was in the end."""
        self.machine["load_after"] = _load()

    def to_json(self) -> str:
        """Write everything as JSON, with one line for each list of times."""
        return "{\n" + ",\n".join(f'"{name}": {_json(value)}' for name, value in asdict(self).items()) + "\n}\n"

    @classmethod
    def read(cls, path: Path) -> "Record":
        """Read a record.

        Raises:
            ValueError: If the file holds something else.
            OSError: If it cannot be read.
        """
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            content["settings"] = Settings(**content["settings"])
            for name, kind in (("rates", Rate), ("samples", Sample), ("peaks", Peak)):
                content[name] = [kind(**each) for each in content[name]]
            return cls(**content)
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path} is no record of this benchmark ({error}). Give a file that it wrote.") from error

    def write(self, path: Path) -> None:
        """Write the record; the file appears under its name only when it is whole."""
        write_whole(path, self.to_json())


_Item = TypeVar("_Item", Sample, Peak)


def find(items: list[_Item], kind: str, system: str, length: int | None = None) -> _Item | None:
    """Return the first sample of a measure, or peak of a task, of a system at a length; `None` if there is none."""
    for item in items:
        name = item.measure if isinstance(item, Sample) else item.task
        if (name, item.system) == (kind, system) and length in (None, item.length):
            return item
    return None


def write_whole(path: Path, text: str) -> None:
    """Write a text under a temporary name, then rename it."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def _json(value: Any) -> str:
    if isinstance(value, list):
        return "[\n" + ",\n".join(f" {json.dumps(each)}" for each in value) + "\n]" if value else "[]"
    return json.dumps(value, indent=1)


def _machine(device: str) -> dict[str, Any]:
    return {
        "cpu": _cpu(),
        "cores": psutil.cpu_count(logical=False),
        "threads": torch.get_num_threads(),
        "memory": psutil.virtual_memory().total,
        "accelerator": torch.cuda.get_device_name() if device == "cuda" else None,
        "load_before": _load(),
        "load_after": None,
    }


def _cpu() -> str:
    info = Path("/proc/cpuinfo")  # elsewhere than on Linux, the platform knows
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _load() -> float:
    """Processes that wanted to run, on average over the last minute."""
    return round(os.getloadavg()[0], 2)


def _software() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "lex_hf": lex_hf.__version__,
    }
