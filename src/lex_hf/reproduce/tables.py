"""The papers' tables and figures as data: systems, lengths, measurement, and what the text claims.

Lengths, windows and training lengths stand here as the papers print them, in tokens; at another training length l they
are scaled by l over the printed one. To add a table, add a row to `TABLES` and its printed figures to `papers/`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

Measure = Literal["chunked", "last_token", "resolution", "receptive_field", "expectation"]
Relation = Literal["<", ">", "≈"]
Place = tuple[str, str]  # system and column

LEX, SANDWICH = "lex", "sandwich"
PRINTED_LENGTH = {LEX: 1024, SANDWICH: 512}

# Columns of receptive fields. What is measured in tokens is divided by a training length, so that scales compare.
ERF, SHARE, JUMP = "ERF / l", "share of newest l", "jump / l"
# Columns of the curves of expected attention.
VARIATION, RESOLUTION = "total variation beyond l/2", "resolution R(g)"


@dataclass(frozen=True)
class System:
    """Row of a table: a model, and how it is evaluated.

    Attributes:
        name: Name of the row, the one in `papers/` if the paper prints the row.
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
    """Statement of a paper about a table: all links hold."""

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
    columns: Sequence[str] | None = field(default=None)

    @property
    def printed_length(self) -> int:
        """The paper's l in tokens."""
        return PRINTED_LENGTH[self.paper]

    @property
    def column_names(self) -> list[str]:
        """Names of the columns, as in `papers/`."""
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


def lower(a: str, b: str, length: int, *, or_equal: bool = False) -> Claim:
    """Claim that the perplexity of one system is lower than that of another."""
    sign = "≤" if or_equal else "<"
    return Claim(f"{a} {sign} {b} at {_printed(length)}", [Link((a, str(length)), "<", (b, str(length)))])


def higher(a: str, b: str, length: int) -> Claim:
    """Claim that the resolution of one system is higher than that of another."""
    return Claim(f"{a} > {b} at {_printed(length)}", [Link((a, str(length)), ">", (b, str(length)))])


def holds(system: str, start: int, stop: int, factor: float = 1.1) -> Claim:
    """Claim that perplexity stays the same, within a factor."""
    link = Link((system, str(stop)), "≈", (system, str(start)), factor)
    return Claim(f"{system} stays within a factor of {factor:g} from {_printed(start)} to {_printed(stop)}", [link])


def _printed(length: int) -> str:
    return f"{{{length}}}"  # the report puts the length of its scale here


def _scheme(name: str, **fields: Any) -> dict[str, Any]:
    return {"position_embedding_type": name, **fields}


_SINUSOIDAL, _ALIBI, _ROPE, _XPOS = map(_scheme, ("sinusoidal", "alibi", "rope", "xpos"))
_OURS = "LEX Transformer"
_LEX_SYSTEMS = (
    System("Transformer", _SINUSOIDAL),
    System("Alibi", _ALIBI),
    System("Roformer", _ROPE),
    System(_OURS, _XPOS, "blockwise"),
)
_ROPE_BCA = System("Roformer + BCA", _ROPE, "blockwise", group="not in this table")
_TO_8192 = (256, 512, 1024, 2048, 4096, 8192)
_TO_4096 = _TO_8192[:-1]
_BEYOND_512 = (1024, 2048, 4096, 8192)
_FROM_512 = (512, *_BEYOND_512)


def _lex_claims(lengths: Sequence[int]) -> list[Claim]:
    beyond = [length for length in lengths if length > 1024]
    return [
        falls(_OURS, lengths),
        rises("Transformer", 1024, beyond),
        rises("Roformer", 1024, beyond),
        lower(_OURS, "Roformer + BCA", lengths[-1], or_equal=True),
        lower(_OURS, "Alibi", lengths[-1]),
    ]


def _shifted(delta: int) -> System:
    return System(f"Δ = {delta}", _scheme("alibi", alibi_slope_shift=delta) if delta else _ALIBI, group="shift")


def _shared(exponent: int) -> System:
    return System(f"h = {exponent}", _scheme("alibi", alibi_shared_slope=exponent), group="same slope")


def _windowed(width: int, **options: Any) -> System:
    return System(f"w = {width}", _scheme("none"), "sliding", width, trained_with_window=True, group="window")


_SHIFTS = tuple(map(_shifted, (-3, 0, 2, 4, 6, 8)))
_SHARED = tuple(map(_shared, (0, 2, 4, 6, 8)))
_WINDOWS = tuple(map(_windowed, (40, 80, 100, 120, 160, 320)))
_FIXED_SLOPES = System("Δ = 6, longer training", _scheme("alibi", alibi_slope_shift=6), trained_at=2048)
_FIXED_WINDOW = System(
    "w = 160, longer training", _scheme("none"), "sliding", 160, trained_with_window=True, trained_at=1024
)
_FREE = tuple(
    System(name, _scheme(scheme), group="without parameters")
    for name, scheme in (
        ("Sandwich", "sandwich"),
        ("Smoothed", "smoothed_sandwich"),
        ("ALiBi", "alibi"),
        ("Sinusoidal", "sinusoidal"),
        ("Rotary", "rope"),
    )
)
_LEARNED = tuple(
    System(name, _scheme(scheme), group="with parameters") for name, scheme in (("KERPLE", "kerple"), ("T5", "t5"))
)

_ALL = (
    Table("lex-table2", LEX, "chunked", (*_LEX_SYSTEMS, _ROPE_BCA), _TO_8192, _OURS, _lex_claims(_TO_8192)),
    Table(
        "lex-table3",
        LEX,
        "resolution",
        (
            System("Transformer", _SINUSOIDAL),
            System("Alibi", _ALIBI),
            System("Roformer", _ROPE),
            System("LEX", _XPOS, "blockwise"),
            System("LEX without BCA", _XPOS),
        ),
        (1024, 2048),
        "LEX",
        [
            *(higher("LEX", name, length) for length in (1024, 2048) for name in ("Transformer", "Alibi", "Roformer")),
            higher("LEX", "LEX without BCA", 2048),
        ],
    ),
    Table(
        "lex-table4",
        LEX,
        "chunked",
        (
            System("LEX", _XPOS, "blockwise"),
            System("w/o Rotation", _scheme("xpos", xpos_rotation=False), "blockwise"),
            System("ζ = 0", _ROPE, "blockwise"),
            System("Scalar ζ", _scheme("xpos", xpos_scale="scalar"), "blockwise"),
        ),
        (1024, 8192),
        "LEX",
        [lower("LEX", name, length) for length in (1024, 8192) for name in ("w/o Rotation", "ζ = 0", "Scalar ζ")],
    ),
    Table(
        "lex-table5",
        LEX,
        "chunked",
        (
            System("Absolute", _SINUSOIDAL),
            System("Absolute + BCA", _SINUSOIDAL, "blockwise"),
            System("RoPE", _ROPE),
            System("RoPE + BCA", _ROPE, "blockwise"),
            System("Alibi", _ALIBI),
            System("Alibi + BCA", _ALIBI, "blockwise"),
            System("xPos", _XPOS),
            System("xPos + BCA", _XPOS, "blockwise"),
            System("xPos + Sliding Window", _XPOS, "sliding"),
        ),
        (2048, 8192),
        "xPos + BCA",
        [
            lower("RoPE + BCA", "RoPE", 8192),
            lower("Absolute", "Absolute + BCA", 8192),
            lower("Alibi", "Alibi + BCA", 2048),
            lower("Alibi + BCA", "Alibi", 8192),
            lower("xPos + BCA", "xPos", 8192),
            lower("xPos + BCA", "RoPE + BCA", 8192),
            lower("xPos + Sliding Window", "xPos + BCA", 8192),
        ],
    ),
    Table("lex-table6", LEX, "chunked", (*_LEX_SYSTEMS, _ROPE_BCA), _TO_4096, _OURS, _lex_claims(_TO_4096)),
    Table(
        "lex-figure1",
        LEX,
        "chunked",
        _LEX_SYSTEMS,
        _TO_8192,
        _OURS,
        [falls(_OURS, _TO_8192), *(rises(name, 1024, (4096, 8192)) for name in ("Transformer", "Alibi", "Roformer"))],
    ),
    Table(
        "lex-figure2",
        LEX,
        "expectation",
        (System("RoPE", _ROPE), System("xPos", _XPOS)),
        (4096,),
        claims=[
            Claim(
                "xPos's curve oscillates less than RoPE's at long distances",
                [Link(("xPos", VARIATION), "<", ("RoPE", VARIATION))],
            ),
            Claim("xPos resolves distances better", [Link(("xPos", RESOLUTION), ">", ("RoPE", RESOLUTION))]),
        ],
        columns=(VARIATION, RESOLUTION),
    ),
    Table(
        "sandwich-table1",
        SANDWICH,
        "last_token",
        (*_SHIFTS, *_SHARED, *_WINDOWS),
        _FROM_512,
        claims=[
            *(holds(f"w = {width}", 512, 8192) for width in (40, 80, 100)),
            *(rises(f"w = {width}", 512, (8192,)) for width in (120, 160, 320)),
            *(rises(f"Δ = {delta}", 512, (8192,)) for delta in (0, 4, 6, 8)),
            *(holds(f"h = {exponent}", 512, 8192) for exponent in (0, 2)),
            *(rises(f"h = {exponent}", 512, (8192,)) for exponent in (4, 6, 8)),
        ],
    ),
    Table(
        "sandwich-table2",
        SANDWICH,
        "last_token",
        (_FIXED_SLOPES, _FIXED_WINDOW, _shifted(6), _windowed(160)),
        (2048, 4096, 8192),
        claims=[
            holds(_FIXED_SLOPES.name, 4096, 8192),
            holds(_FIXED_WINDOW.name, 2048, 8192),
            lower(_FIXED_SLOPES.name, "Δ = 6", 8192),
            lower(_FIXED_WINDOW.name, "w = 160", 8192),
        ],
    ),
    Table(
        "sandwich-table3",
        SANDWICH,
        "last_token",
        (*_FREE, *_LEARNED),
        _FROM_512,
        "Sandwich",
        [
            lower("Sandwich", "ALiBi", 8192),
            lower("Sandwich", "Sinusoidal", 8192),
            lower("Sandwich", "Rotary", 8192),
            lower("KERPLE", "Sandwich", 8192),
            lower("Sandwich", "T5", 8192),
            falls("Sandwich", (512, 1024)),
            rises("Sinusoidal", 512, _BEYOND_512),
            rises("Rotary", 512, _BEYOND_512),
        ],
    ),
    Table(
        "sandwich-table5",
        SANDWICH,
        "last_token",
        (
            System("Sandwich", _scheme("sandwich"), "sliding", 2048, group="window"),
            System("ALiBi", _ALIBI, "sliding", 2048, group="window"),
            System("Sandwich, full attention", _scheme("sandwich"), group="full"),
            System("ALiBi, full attention", _ALIBI, group="full"),
        ),
        (4096, 8192, 16384),
        "Sandwich",
        [
            holds("Sandwich", 4096, 16384),
            holds("ALiBi", 4096, 16384),
            Claim(
                "with and without a window ALiBi is the same at {8192}",
                [Link(("ALiBi", "8192"), "≈", ("ALiBi, full attention", "8192"), 1.01)],
            ),
            lower("Sandwich, full attention", "Sandwich", 4096),
        ],
    ),
    Table(
        "sandwich-figure4",
        SANDWICH,
        "receptive_field",
        _WINDOWS,
        (2048,),
        claims=[
            *(Claim(f"ERF of w = {w} is less than l", [Link((f"w = {w}", ERF), "<", 1.0)]) for w in (40, 80, 100)),
            *(Claim(f"ERF of w = {w} is more than l", [Link((f"w = {w}", ERF), ">", 1.0)]) for w in (120, 160, 320)),
        ],
        columns=(ERF, SHARE),
    ),
    Table(
        "sandwich-figure5",
        SANDWICH,
        "receptive_field",
        _SHIFTS,
        (2048,),
        claims=[
            *(Claim(f"ERF of Δ = {d} is more than l", [Link((f"Δ = {d}", ERF), ">", 1.0)]) for d in (-3, 0, 2)),
            *(Claim(f"Δ = -3 has a smaller ERF than Δ = {d}", [Link(("Δ = -3", ERF), "<", (f"Δ = {d}", ERF))])
              for d in (0, 2, 4, 6, 8)),
        ],
        columns=(ERF, SHARE),
    ),
    Table(
        "sandwich-figure6",
        SANDWICH,
        "receptive_field",
        (System("Rotary", _ROPE),),
        (2048,),
        claims=[Claim("ERF of Rotary is more than l", [Link(("Rotary", ERF), ">", 1.0)])],
        columns=(ERF, SHARE),
    ),
    Table(
        "sandwich-figure7",
        SANDWICH,
        "receptive_field",
        (System("Sinusoidal", _SINUSOIDAL), System("Sinusoidal, short training", _SINUSOIDAL, trained_at=128)),
        (2048,),
        claims=[
            Claim(f"{name}: the gradient jumps at the token where training ended", [Link((name, JUMP), "≈", 1.0)])
            for name in ("Sinusoidal", "Sinusoidal, short training")
        ],
        columns=(ERF, SHARE, JUMP),
    ),
    Table(
        "sandwich-figure11",
        SANDWICH,
        "receptive_field",
        (*_FREE[:2], *_LEARNED),
        (2048,),
        claims=[
            *(Claim(f"ERF of {name} is more than l", [Link((name, ERF), ">", 1.0)])
              for name in ("Sandwich", "Smoothed", "KERPLE", "T5")),
            Claim("Sandwich gives about 60 % to the newest l tokens", [Link(("Sandwich", SHARE), "≈", 0.6, 1.2)]),
        ],
        columns=(ERF, SHARE),
    ),
)  # fmt: skip
TABLES: dict[str, Table] = {table.name: table for table in _ALL}


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
    return System(text.replace("+", " + "), _scheme(scheme), patterns[pattern], group="not in this table")
