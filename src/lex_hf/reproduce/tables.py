"""The papers' tables and figures, from `papers/`: systems, lengths, measurement, and what the text claims.

Lengths, windows and training lengths stand there as the papers print them, in tokens; at another training length l
they are scaled by l over the printed one. To add a table, add its file to `papers/` and its name to `_NAMES`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from lex_hf.reproduce import published

Measure = Literal["chunked", "last_token", "resolution", "receptive_field", "expectation"]
Relation = Literal["<", ">", "≈"]
Place = tuple[str, str]  # system and column

LEX, SANDWICH = "lex", "sandwich"
PRINTED_LENGTH = {LEX: 1024, SANDWICH: 512}
_NAMES = {
    LEX: "table2 table3 table4 table5 table6 figure1 figure2",
    SANDWICH: "table1 table2 table3 table5 figure4 figure5 figure6 figure7 figure11",
}


@dataclass(frozen=True)
class System:
    """Row of a table: a model, and how it is evaluated.

    Attributes:
        name: Name of the row, as printed if the paper prints the row.
        model: Fields of the model's `LexConfig` that make the system.
        pattern: Attention pattern at evaluation.
        window: Printed width of the sliding window in tokens; `None` is l.
        trained_with_window: Whether the window is there in training too. Else training sees plain causal attention.
        trained_at: Printed length of the training examples in tokens; `None` is l.
        group: Rows are ranked among those of their group.
    """

    name: str
    model: Mapping[str, Any]
    pattern: str = "full"
    window: int | None = None
    trained_with_window: bool = False
    trained_at: int | None = None
    group: str = ""


@dataclass(frozen=True)
class Link:
    """Relation between two measurements, or a measurement and a number, that should hold."""

    left: Place
    relation: Relation
    right: Place | float
    factor: float = 1.1  # of `≈`: how far one may be from the other


@dataclass(frozen=True)
class Claim:
    """Statement about a table, of a paper or of its numbers: all links hold."""

    text: str
    links: Sequence[Link]


@dataclass(frozen=True)
class Table:
    """Table or figure.

    Attributes:
        name: Its name, e.g. `lex-table2`.
        paper: `LEX` or `SANDWICH`.
        measure: What is measured, and under which protocol.
        systems: Its rows, and further ones that its claims need.
        lengths: Printed lengths, in tokens; of a receptive field or a curve, the one it extends to.
        reference: The system that the others are tested against, with marks; or `None`.
        claims: What the paper's text says of it.
        columns: Names of what is measured; `None` means the lengths.
    """

    name: str
    paper: str
    measure: Measure
    systems: Sequence[System]
    lengths: Sequence[int]
    reference: str | None = None
    claims: Sequence[Claim] = ()
    columns: Sequence[str] | None = None

    @property
    def printed_length(self) -> int:
        """The paper's l in tokens."""
        return PRINTED_LENGTH[self.paper]

    @property
    def column_names(self) -> list[str]:
        """Names of the columns, as the paper's numbers have them."""
        return list(self.columns) if self.columns is not None else [str(length) for length in self.lengths]

    def scaled(self, printed: int, length: int) -> int:
        """Return a printed number of tokens at the training length `length`, at least 1."""
        return max(1, round(printed * length / self.printed_length))


def falls(system: str, lengths: Sequence[int]) -> Claim:
    """Claim that perplexity falls from each length to the next."""
    links = [Link((system, str(b)), "<", (system, str(a))) for a, b in pairwise(lengths)]
    return Claim(f"{system} falls at every step from {_printed(lengths[0])} to {_printed(lengths[-1])}", links)


def rises(system: str, start: int, lengths: Sequence[int]) -> Claim:
    """Claim that perplexity is higher at each of the lengths than at the start."""
    links = [Link((system, str(each)), ">", (system, str(start))) for each in lengths]
    return Claim(f"{system} is higher at every length beyond {_printed(start)}", links)


def differs(left: str, sign: Literal["<", "≤", ">"], right: str, length: int) -> Claim:
    """Claim that one system's value is lower or higher than another's; "lower or equal" is tested as lower."""
    link = Link((left, str(length)), ">" if sign == ">" else "<", (right, str(length)))
    return Claim(f"{left} {sign} {right} at {_printed(length)}", [link])


def holds(system: str, start: int, stop: int, factor: float = 1.1) -> Claim:
    """Claim that perplexity stays the same, within a factor."""
    link = Link((system, str(stop)), "≈", (system, str(start)), factor)
    return Claim(f"{system} stays within a factor of {factor:g} from {_printed(start)} to {_printed(stop)}", [link])


def _states(text: str, links: Sequence[Mapping[str, Any]]) -> Claim:
    """Claim anything else."""
    return Claim(text, [_link(**each) for each in links])


def _link(left: Sequence[str], right: Sequence[str] | float, **relation: Any) -> Link:
    place = right if isinstance(right, int | float) else (right[0], right[1])
    return Link((left[0], left[1]), right=place, **relation)


def _printed(length: int) -> str:
    return f"{{{length}}}"  # the report puts the length of its scale here


_CLAIMS: Mapping[str, Callable[..., Claim]] = {
    "falls": falls,
    "rises": rises,
    "differs": differs,
    "holds": holds,
    "states": _states,
}


def _load(paper: str, name: str) -> Table:
    fields = published.read(name)["experiment"]
    systems = [System(**each) for each in fields.pop("systems")]
    claims = [_CLAIMS[each.pop("claim")](**each) for each in fields.pop("claims")]
    return Table(name, paper, systems=systems, claims=claims, **fields)


TABLES = {
    f"{paper}-{name}": _load(paper, f"{paper}-{name}") for paper, names in _NAMES.items() for name in names.split()
}


def find(name: str) -> Table:
    """Look up a table.

    Raises:
        ValueError: If there is none of that name.
    """
    if name not in TABLES:
        raise ValueError(f"TABLE = {name!r}: it must be one of {', '.join(TABLES)}.")
    return TABLES[name]


def further_system(text: str) -> System:
    """Return a system that no table has, from a scheme and a pattern: `sandwich`, `kerple+bca`, `rope+sliding`.

    Raises:
        ValueError: If the pattern is unknown. An unknown scheme fails in its `LexConfig`.
    """
    scheme, _, pattern = text.partition("+")
    patterns = {"": "full", "bca": "blockwise", "sliding": "sliding"}
    if pattern not in patterns:
        raise ValueError(f"also = {text!r}: after the plus sign comes bca or sliding, as in {scheme}+bca.")
    model = {"position_embedding_type": scheme}
    return System(text.replace("+", " + "), model, patterns[pattern], group="not in this table")
