"""Where our numbers agree with a paper and where not, each by a paired two-sided t-test (α = 0.05).

Differences are paired by seed where there are at least two, for what a paper says of systems must hold whatever the
seed; with a single seed they are paired by document (or segment), and then hold for these trained models alone. The
differences of perplexities are those of mean losses in nats per token, so that they are ratios of perplexities.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Any, Literal

import numpy as np
from scipy import stats

from lex_hf.evaluation.comparison import SIGNIFICANCE_LEVEL, compare_values
from lex_hf.evaluation.statistics import CONFIDENCE_LEVEL, bootstrap_interval
from lex_hf.reproduce.published import Published
from lex_hf.reproduce.tables import Claim, Link, Place, Relation, Table

Verdict = Literal["agrees", "disagrees", "not significant", "not tested"]
Pairing = Literal["seeds", "documents", "none", "exact"]
Kind = Literal["claim", "order", "trend"]  # a claim is of the paper's text, the others are of its numbers


@dataclass(frozen=True)
class Cell:
    """Measurements of one system in one column."""

    values: Sequence[float]  # one for each seed; of perplexities the mean loss in nats per token
    documents: Sequence[Sequence[float]]  # for each seed, the same of each document; empty if there are none
    weights: Sequence[int] = ()  # number of scored tokens of each document; empty if all count alike
    exact: bool = False  # whether the value is computed, not measured: nothing is left to test

    @property
    def mean(self) -> float:
        """Mean over the seeds."""
        return float(np.mean(self.values))

    def seed_interval(self) -> tuple[float, float] | None:
        """Interval of the t distribution over the seeds; `None` for a single one."""
        return None if len(self.values) < 2 else _t_interval(self.values)

    def document_interval(self) -> tuple[float, float] | None:
        """Bootstrap interval over documents of the mean over the seeds; `None` if there are fewer than two."""
        if not self.documents or len(self.documents[0]) < 2:
            return None
        means = self.document_means()
        weights = np.asarray(self.weights or [1] * len(means), dtype=np.float64)
        return bootstrap_interval(lambda x, w, axis: (x * w).sum(axis) / w.sum(axis), means, weights)

    def document_means(self) -> Any:
        """Mean over the seeds of each document, shape `(documents,)`."""
        return np.asarray(self.documents, dtype=np.float64).mean(axis=0)


Cells = Mapping[str, Mapping[str, Cell]]  # by system and column
Values = Mapping[str, Mapping[str, float]]  # printed, by system and column


@dataclass(frozen=True)
class Difference:
    """Left minus right; interval and p-value are `None` if nothing could be paired."""

    mean: float  # of the paired differences
    interval: tuple[float, float] | None  # a t interval at the level `CONFIDENCE_LEVEL`
    p_value: float | None  # of the paired two-sided t-test
    pairing: Pairing
    pairs: int

    def shows(self, relation: Relation, bound: float = 0.0) -> Verdict:
        """Return whether left is lower or higher, at `SIGNIFICANCE_LEVEL`, or `≈` right within a bound."""
        if relation == "≈":
            return self._is_within(bound)
        if self.p_value is None:
            return "not tested"
        if not self.p_value < SIGNIFICANCE_LEVEL:  # or if it is NaN
            return "not significant"
        return "agrees" if (self.mean < 0) == (relation == "<") else "disagrees"

    def _is_within(self, bound: float) -> Verdict:
        if self.interval is None:
            return "not tested"
        low, high = self.interval
        if -bound <= low and high <= bound:
            return "agrees"
        return "disagrees" if low > bound or high < -bound else "not significant"


def difference(left: Cell, right: Cell | float) -> Difference:
    """Test how two cells, or a cell and a number, differ."""
    other = right if isinstance(right, Cell) else _constant(left, right)
    if left.exact and other.exact:
        exact = left.mean - other.mean
        return Difference(exact, (exact, exact), float(exact == 0), "exact", 1)
    if len(left.values) > 1 and len(left.values) == len(other.values):
        return _paired(left.values, other.values, "seeds")
    return document_difference(left, other) or Difference(left.mean - other.mean, None, None, "none", 0)


def document_difference(left: Cell, right: Cell | float) -> Difference | None:
    """Test how two cells, or a cell and a number, differ over documents, each the mean over the seeds.

    Returns:
        The difference of the means of all documents, which count alike; `None` if fewer than two are in pairs.
    """
    other = right if isinstance(right, Cell) else _constant(left, right)
    if left.documents and other.documents and len(left.documents[0]) == len(other.documents[0]) > 1:
        return _paired(list(left.document_means()), list(other.document_means()), "documents")
    return None


def _constant(like: Cell, number: float) -> Cell:
    return Cell([number] * len(like.values), [[number] * len(each) for each in like.documents], exact=True)


def _paired(left: Sequence[float], right: Sequence[float], pairing: Pairing) -> Difference:
    found = compare_values(left, right)
    interval = _t_interval(np.asarray(left) - np.asarray(right))
    return Difference(found.difference, interval, found.p_value, pairing, found.n)


def _t_interval(values: Any) -> tuple[float, float]:
    values = np.asarray(values, dtype=np.float64)
    half = stats.t.ppf((1 + CONFIDENCE_LEVEL) / 2, len(values) - 1) * values.std(ddof=1) / math.sqrt(len(values))
    return float(values.mean() - half), float(values.mean() + half)


@dataclass(frozen=True)
class Statement:
    """Sentence of a report."""

    text: str
    kind: Kind
    verdict: Verdict  # whether ours agree: all parts do, or one of them does not
    parts: list[dict[str, Any]]  # the comparisons it rests on, with numbers


def statements(table: Table, published: Published, corpus: str | None, cells: Cells) -> list[Statement]:
    """Compare what was measured with what the paper says and with the numbers it prints of a corpus.

    Returns:
        The claims of the paper's text; the order of the systems in each column; the trend of each system along the
        columns, if they are lengths.
    """
    printed: Values = {} if corpus is None else published.values[corpus]
    found: dict[Kind, Iterable[Claim]] = {"claim": table.claims, "order": _orders(table, printed)}
    if table.columns is None:
        found["trend"] = _trends(table, printed)
    return [_statement(kind, claim, table, cells) for kind, claims in found.items() for claim in claims]


def is_perplexity(table: Table) -> bool:
    """Return whether cells hold mean losses, of which the report shows the exponential."""
    return table.measure in ("chunked", "last_token")


def _orders(table: Table, printed: Values) -> Iterator[Claim]:
    """Claim for each column that the systems of a group are in the paper's order."""
    for column in table.column_names:
        rows = [system for system in table.systems if column in printed.get(system.name, {})]
        pairs = [((a.name, column), (b.name, column)) for a, b in combinations(rows, 2) if a.group == b.group]
        place = f"{{{column}}}" if table.columns is None else column
        yield from _as_printed(f"order of the systems at {place}", pairs, printed)


def _trends(table: Table, printed: Values) -> Iterator[Claim]:
    """Claim for each system that it rises and falls as in the paper from one length to the next."""
    for system in (each.name for each in table.systems):
        columns = [column for column in table.column_names if column in printed.get(system, {})]
        pairs = [((system, b), (system, a)) for a, b in pairwise(columns)]
        yield from _as_printed(f"rises and falls of {system} from length to length", pairs, printed)


def _as_printed(text: str, pairs: Iterable[tuple[Place, Place]], printed: Values) -> Iterator[Claim]:
    """Claim the relations of printed values, if any of them differ."""
    links = []
    for left, right in pairs:
        a, b = (printed[system][column] for system, column in (left, right))
        if a != b:
            links.append(Link(left, "<" if a < b else ">", right))
    if links:
        yield Claim(text, links)


def _part(link: Link, cells: Cells, logarithmic: bool) -> dict[str, Any]:
    left = _cell(cells, link.left)
    right = _cell(cells, link.right) if isinstance(link.right, tuple) else link.right
    part: dict[str, Any] = {"left": link.left, "relation": link.relation, "right": link.right}
    if left is None or right is None:
        return {**part, "verdict": "not tested", "reason": "there is no measurement"}
    found, by_document = difference(left, right), document_difference(left, right)
    bound = _bound(link, right, logarithmic)
    return {
        **part,
        "difference": found.mean,
        "interval": found.interval,
        "p_value": found.p_value,
        "pairing": found.pairing,
        "pairs": found.pairs,
        "document_p_value": None if by_document is None else by_document.p_value,
        "documents": 0 if by_document is None else by_document.pairs,
        "bound": bound if link.relation == "≈" else None,
        "verdict": found.shows(link.relation, bound),
    }


def _bound(link: Link, right: Cell | float, logarithmic: bool) -> float:
    """Return how far apart `≈` allows the two to be."""
    if logarithmic:
        return math.log(link.factor)
    return (link.factor - 1) * abs(right.mean if isinstance(right, Cell) else right)


def _cell(cells: Cells, place: Place) -> Cell | None:
    return cells.get(place[0], {}).get(place[1])


def _statement(kind: Kind, claim: Claim, table: Table, cells: Cells) -> Statement:
    parts = [_part(link, cells, is_perplexity(table)) for link in claim.links]
    verdicts = {part["verdict"] for part in parts}
    order: tuple[Verdict, ...] = ("disagrees", "not tested", "not significant", "agrees")
    return Statement(claim.text, kind, next(verdict for verdict in order if verdict in verdicts), parts)


def marks(table: Table, cells: Cells) -> dict[tuple[str, str], str]:
    """Marks as in the Sandwich paper's Table 3: † the reference is significantly better, * significantly worse."""
    if table.reference is None:
        return {}
    better: Relation = "<" if is_perplexity(table) else ">"
    found = {}
    for system, row in cells.items():
        for column, cell in row.items():
            reference = _cell(cells, (table.reference, column))
            if system == table.reference or reference is None:
                continue
            verdict = difference(reference, cell).shows(better)
            mark = {"agrees": "†", "disagrees": "*"}.get(verdict)
            if mark is not None:
                found[system, column] = mark
    return found
