"""The figures that the papers print, as data of the package: `papers/<table>.json`, each with its source."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any


@dataclass(frozen=True)
class Published:
    """One table or figure of a paper."""

    name: str  # its name here, e.g. `lex-table2`
    paper: str  # title of the paper
    id: str  # its arXiv number
    where: str  # the table's number in the paper
    title: str  # what it shows
    metric: str  # what its values are
    training_length: int  # the paper's l in tokens
    note: str  # what to know when reading the values; may be empty
    values: Mapping[str, Mapping[str, Mapping[str, float]]]  # by corpus, row and column
    printed: Mapping[str, Mapping[str, Mapping[str, str]]]  # the same, as printed: with ± and marks

    def corpus_for(self, name: str) -> str | None:
        """Return the corpus of the paper that a set of texts stands for: the one of its name or kind, else the first.

        Returns:
            Its name, or `None` if the paper prints no numbers.
        """
        by_name = {corpus.lower(): corpus for corpus in self.values}
        wanted = name.lower()
        return by_name.get(wanted) or by_name.get(_STANDS_FOR.get(wanted, ""), next(iter(self.values), None))


# Kinds of texts, by the names people give them, that one of the papers' corpora is of.
_STANDS_FOR = {"books": "pg22", "meetings": "qmsum", "code": "github", "python": "github"}


def read(name: str) -> dict[str, Any]:
    """Read the file of a table, e.g. `lex-table2`: source and printed figures, and the experiment that repeats it."""
    content: dict[str, Any] = json.loads((files("lex_hf.reproduce") / "papers" / f"{name}.json").read_text("utf-8"))
    return content


def load(name: str) -> Published:
    """Read the printed figures of a table, e.g. `lex-table2`."""
    content = {"note": ""} | read(name)
    del content["experiment"]
    values: dict[str, dict[str, dict[str, float]]] = {}
    printed: dict[str, dict[str, dict[str, str]]] = {}
    for entry in content.pop("values"):
        corpus, row, column = entry["corpus"], entry["row"], entry["column"]
        values.setdefault(corpus, {}).setdefault(row, {})[column] = entry["value"]
        printed.setdefault(corpus, {}).setdefault(row, {})[column] = _as_printed(entry)
    return Published(**content, values=values, printed=printed)


def _as_printed(entry: Mapping[str, Any]) -> str:
    spread = f" ± {entry['plus_minus']:g}" if "plus_minus" in entry else ""
    return f"{round(entry['value'], 4):.8g}{spread}{entry.get('mark', '')}"
