"""What an earlier report has and one that would replace it has not."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lex_hf.records import to_json

_WITHOUT_EFFECT = ("tokens_at_once", "needs_data")  # settings of a preset that change no result


def check_nothing_is_lost(old: Mapping[str, Any], new: Mapping[str, Any], folder: Path) -> None:
    """Check that a new report may replace an earlier one.

    It may if it is made with the same settings and training texts, and has all that the earlier one has: a run that is
    resumed, further seeds, systems and test texts.

    Args:
        old: Record of the earlier report.
        new: That of the new one, or what it says of how it is made.
        folder: Where the report is.

    Raises:
        ValueError: If something would be lost.
    """
    lost = list(_lost(old, json.loads(to_json(new))))
    if lost:
        raise ValueError(
            f"The report in {folder} has {', '.join(lost)}, which this one would not have. Give another --output, or "
            "--overwrite to replace the report; models and measurements are kept."
        )


def made_alike(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Return whether two records, of any tables, are of the same settings and training texts."""
    return not list(_made_otherwise(old, json.loads(to_json(new))))


def _made_otherwise(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    before, now = (dict(_settings(each["preset"])) for each in (old, new))
    for name in [name for name in {**before, **now} if before.get(name) != now.get(name)]:
        yield f"{name}={before.get(name, 'default')}"
    if (old["data"] or {}).get("sha256") != (new["data"] or {}).get("sha256"):
        yield "other training texts"


def _lost(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    yield from _made_otherwise(old, new)
    for name, texts in old["tests"].items():
        if texts["sha256"] != new["tests"].get(name, {}).get("sha256"):
            yield f"the test texts {name}"
    for seed in old["seeds"]:
        if seed not in new["seeds"]:
            yield f"seed {seed}"
    for system, made in old["systems"].items():
        if made != new["systems"].get(system):
            yield f"the system {system}"


def _settings(preset: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield all settings of a preset: those of models and training beside the others."""
    for name, value in preset.items():
        if isinstance(value, Mapping):
            yield from value.items()
        elif name not in _WITHOUT_EFFECT:
            yield name, value
