"""Calls of several systems in turns, so that whatever else the machine does falls on all of them alike."""

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch


@dataclass
class Job:
    """Something that is timed.

    Attributes:
        call: What is called, without arguments.
        turns: Number of rounds it takes part in, the first among them, spread evenly over all; `None` means every one.
        calls: Timed calls in each of its rounds.
        seconds: Their times, in order.
    """

    call: Callable[[], object]
    turns: int | None = None
    calls: int = 1
    seconds: list[float] = field(default_factory=list)

    def takes_part(self, number: int, rounds: int) -> bool:
        """Tell whether it has a turn in round `number`, counted from 0, of `rounds`."""
        turns = rounds if self.turns is None else min(self.turns, rounds)
        return number * turns % rounds < turns


def interleave(jobs: Sequence[Job], rounds: int, device: str, budget: float = float("inf")) -> None:
    """Time jobs in rounds; every other round runs backwards, so that none is always the one after another.

    Args:
        jobs: What is timed; each keeps its times.
        rounds: Most rounds.
        device: Its work is waited for before the clock is read.
        budget: No round is begun after so many seconds.
    """
    begin = time.perf_counter()
    collecting = gc.isenabled()
    gc.disable()
    try:
        for number in range(rounds):
            for job in jobs if number % 2 == 0 else reversed(jobs):
                if job.takes_part(number, rounds):
                    job.seconds += [timed(job.call, device) for _ in range(job.calls)]
            gc.collect()
            if time.perf_counter() - begin >= budget:
                break
    finally:
        if collecting:
            gc.enable()


def timed(call: Callable[[], object], device: str) -> float:
    """Return the seconds that a call takes, until the device has done its work."""
    synchronise(device)
    begin = time.perf_counter()
    result = call()
    synchronise(device)
    seconds = time.perf_counter() - begin
    del result  # freeing memory is no part of the call
    return round(seconds, 7)


def synchronise(device: str) -> None:
    """Wait until the device has nothing left to do."""
    if device == "cuda":
        torch.cuda.synchronize()
