"""The machine at hand: how much memory a device has, and how fast it is read."""

import os
import time
from pathlib import Path

import torch

_READ = 2**29  # bytes, more than caches of processors hold
_SECONDS = 0.4
_FEWEST, _MOST = 3, 20  # reads
HOW_MEMORY_IS_FOUND = {"cpu": "available now", "cuda": "all of the device's"}
HOW_BANDWIDTH_IS_MEASURED = "measured, the fastest of a few sums of 512 MiB in float32"


def device_of(name: str | None) -> torch.device:
    """Return the device of a name; `None` and `"auto"` mean a CUDA device if there is one, else the CPU.

    Raises:
        ValueError: If it is not a CPU, or a CUDA device that is here.
    """
    if name in (None, "auto"):
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(str(name))
    except RuntimeError as error:
        raise ValueError(f"device = {name!r}: it must be a device of torch, e.g. 'cpu' or 'cuda:1'.") from error
    count = {"cpu": 1, "cuda": torch.cuda.device_count()}.get(device.type)
    if count is None:
        raise ValueError(f"device = {name!r}: memory and bandwidth are found for 'cpu' and 'cuda' only; give both.")
    if (device.index or 0) >= count:
        raise ValueError(
            f"device = {name!r}: torch finds {count} {device.type.upper()} device{'s' * (count != 1)} here; choose "
            "another, or give memory and bandwidth of the device."
        )
    return device


def memory_of(device: torch.device) -> int:
    """Return the bytes of a device: of a CPU those that are available now, of a CUDA device all that it has.

    Raises:
        ValueError: If the operating system does not say.
    """
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    available = _available(Path("/proc/meminfo"))
    if available is None:
        raise ValueError("This operating system does not say how much memory is available: give the device's memory.")
    return available


def _available(meminfo: Path) -> int | None:
    """Return the bytes that Linux would give to a process without swapping; elsewhere those of free pages."""
    if meminfo.is_file():
        for line in meminfo.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    if "SC_AVPHYS_PAGES" in getattr(os, "sysconf_names", {}):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def measure_bandwidth(device: torch.device, memory: int) -> float:
    """Return how many bytes a device reads in a second: in the fastest of a few sums of numbers, one after the other.

    It takes less than a second on most machines, and 512 MiB, or an eighth of the memory if that is less.

    Args:
        device: The device.
        memory: Bytes that it has.
    """
    # Zeros might be one page of memory, read many times.
    numbers = torch.full((max(1, min(_READ, memory // 8) // 4),), 1.0, dtype=torch.float32, device=device)
    times: list[float] = []
    while len(times) < _FEWEST or (sum(times) < _SECONDS and len(times) < _MOST):
        _wait_for(device)
        start = time.perf_counter()
        numbers.sum()
        _wait_for(device)
        times.append(time.perf_counter() - start)
    return numbers.nbytes / min(times)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
