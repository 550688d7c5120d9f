"""What an earlier report has and one that would replace it has not."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lex_hf.records import read_json, to_json


@dataclass(frozen=True)
class Made:
    """What a report is of.

    Attributes:
        settings: What a report has one of, by name.
        parts: What a report may have more of: a name for an error, and what it stands for.
    """

    settings: Mapping[str, Any]
    parts: Mapping[str, Any]

    def otherwise(self, new: "Made") -> Iterator[str]:
        """Yield the settings that another report has not."""
        for name in {**self.settings, **new.settings}:
            if self.settings.get(name) != new.settings.get(name):
                yield f"{name}={self.settings.get(name, 'default')}"

    def lost(self, new: "Made") -> Iterator[str]:
        """Yield what another report has not."""
        yield from self.otherwise(new)
        yield from (name for name, part in self.parts.items() if name not in new.parts or new.parts[name] != part)


def check_nothing_is_lost(place: Path, made: Callable[[Any], Made], new: Mapping[str, Any]) -> None:
    """Check, before any work, that a new report may replace an earlier one.

    It may if it is made with the same settings, and has all that the earlier one has: a run that is resumed, further
    seeds, systems and test texts.

    Args:
        place: Record of the earlier report, if there is one.
        made: What a record says that its report is of.
        new: Record of the new report, or what it begins with.

    Raises:
        ValueError: If something would be lost.
    """
    if not place.is_file():
        return
    try:
        before = made(read_json(place))
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(
            f"{place} is not the record of such a report. Give another --output, or --overwrite to replace it."
        ) from error
    lost = list(before.lost(made(as_read(new))))
    if lost:
        raise ValueError(
            f"The report in {place.parent} has {', '.join(lost)}, which this one would not have. Give another "
            "--output, or --overwrite to replace the report; models and measurements are kept."
        )


def as_read(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record as it is read once it is written."""
    found: dict[str, Any] = json.loads(to_json(record))
    return found


def training_texts(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the training texts of a record as a setting of its report."""
    return {"sha256 of the training texts": (record["data"] or {}).get("sha256")}


def seeds_and_tests(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return seeds and sets of test texts of a record as parts of its report."""
    tests = {f"the test texts {name}": texts["sha256"] for name, texts in record["tests"].items()}
    return {f"seed {seed}": None for seed in record["seeds"]} | tests
