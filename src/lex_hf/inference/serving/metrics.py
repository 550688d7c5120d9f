"""Figures of a server in the text format of Prometheus."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

FORMAT = "text/plain; version=0.0.4; charset=utf-8"
OUTCOMES = ("stop", "length", "tool_calls", "cancelled", "failed", "refused", "turned_away")

_FIRST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)  # seconds
_EACH = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
# Of the manager's counts: their names and kinds here, and what they are.
_COUNTS = {
    "rows": ("rows", "gauge", "Rows of the batch."),
    "running": ("rows_in_use", "gauge", "Rows in which a request is writing."),
    "reading": ("requests_reading", "gauge", "Requests whose prompt is being read."),
    "waiting": ("requests_waiting", "gauge", "Requests that wait for a row."),
    "tokens_read": ("prompt_tokens_total", "counter", "Tokens of prompts that were read."),
    "tokens_written": ("generated_tokens_total", "counter", "Tokens that were written."),
    "steps": ("steps_total", "counter", "Steps of the batch."),
    "session_bytes": ("session_bytes", "gauge", "Bytes of the sessions that are kept."),
}


class Histogram:
    """Durations, counted in buckets.

    Args:
        name: Name of the metric.
        text: What it is.
        bounds: Upper ends of the buckets in seconds, ascending.
    """

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self.name, self.text, self.bounds = name, text, bounds
        self.counts, self.sum = [0] * (len(bounds) + 1), 0.0

    def observe(self, seconds: float) -> None:
        """Count a duration."""
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.sum += seconds

    def lines(self) -> Iterable[str]:
        """Yield the metric as text."""
        yield from _head(self.name, "histogram", self.text)
        total = 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            total += count
            yield f'{self.name}_bucket{{le="{bound}"}} {total}'
        yield f"{self.name}_sum {self.sum}"
        yield f"{self.name}_count {total}"


class Metrics:
    """What a server counts itself; the rest the manager counts."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.first = Histogram("lex_hf_time_to_first_token_seconds", "From a request to its first token.", _FIRST)
        self.each = Histogram("lex_hf_time_per_token_seconds", "Between two tokens of an answer.", _EACH)

    def ended(self, outcome: str, arrived: float, times: Sequence[float]) -> None:
        """Count a request that ended.

        Args:
            outcome: One of `OUTCOMES`.
            arrived: When it came, in seconds (`time.perf_counter`).
            times: When each of its tokens was written.
        """
        self.outcomes[outcome] += 1
        if times:
            self.first.observe(times[0] - arrived)
        for before, after in pairwise(times):
            self.each.observe(after - before)

    def render(self, counts: Mapping[str, int]) -> str:
        """Return all figures as text; `counts` are those of the manager."""
        lines = list(_head("lex_hf_requests_total", "counter", "Requests that ended, by outcome."))
        lines += [f'lex_hf_requests_total{{outcome="{name}"}} {self.outcomes[name]}' for name in OUTCOMES]
        for key, (name, kind, text) in _COUNTS.items():
            lines += [*_head(f"lex_hf_{name}", kind, text), f"lex_hf_{name} {counts[key]}"]
        return "\n".join([*lines, *self.first.lines(), *self.each.lines(), ""])


def _head(name: str, kind: str, text: str) -> tuple[str, str]:
    return f"# HELP {name} {text}", f"# TYPE {name} {kind}"
