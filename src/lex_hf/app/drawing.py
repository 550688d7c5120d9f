"""Charts, tables and patterns as HTML: drawn here, so that a page loads nothing from elsewhere.

Lines are SVG that is stretched to the width of the page; words beside them are HTML, whose size stays. Colours are in
`page.css`, for a bright page and a dark one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from lex_hf.app.patterns import Seen

NOTHING = "\N{EN DASH}"  # in the place of a number
_NAMES_OF_SIZES = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True)
class Curve:
    """A curve in a chart.

    Attributes:
        points: Pairs of a place and a value, in order.
        style: Its class in `page.css`, e.g. `"first"`.
    """

    points: Sequence[tuple[float, float]]
    style: str


def chart(
    curves: Sequence[Curve],
    end: float,
    *,
    title: str,
    xlabel: str,
    mark: tuple[float, str] | None = None,
    is_bytes: bool = False,
) -> str:
    """Draw curves.

    Args:
        curves: Curves; where there is no point, the axes alone.
        end: End of the horizontal axis, which begins at 0.
        title: What the values are.
        xlabel: What the places are.
        mark: A place that is marked, and its name.
        is_bytes: Whether values are bytes, drawn from 0.
    """
    values = [value for curve in curves for _, value in curve.points if math.isfinite(value)]
    low, high = _range(values, from_zero=is_bytes)
    ticks = [low + (high - low) * share for share in (0, 0.25, 0.5, 0.75, 1)]
    named = [size(tick) if is_bytes else f"{tick:.1f}" for tick in ticks] if values else [""] * len(ticks)
    rows = "".join(
        f'<span style="bottom:{100 * index / (len(ticks) - 1):.2f}%">{name}</span>' for index, name in enumerate(named)
    )
    columns = "".join(
        f'<span style="left:{100 * share:.2f}%">{_short(share * end)}</span>' for share in (0, 0.25, 0.5, 0.75, 1)
    )
    lines = "".join(f'<line x1="0" x2="100" y1="{y}" y2="{y}"/>' for y in (0, 25, 50, 75, 100))
    paths = "".join(_path(curve, end, low, high) for curve in curves)
    marked = ""
    if mark is not None and 0 < mark[0] < end:
        left = 100 * mark[0] / end
        marked = f'<div class="mark" style="left:{left:.2f}%"><span>{escape(mark[1])}</span></div>'
    return (
        f'<figure class="chart"><figcaption>{escape(title)}</figcaption>'
        f'<div class="area"><div class="rows">{rows}</div>'
        f'<svg viewBox="0 0 100 100" preserveAspectRatio="none" role="img" aria-label="{escape(title)}">'
        f'<g class="grid">{lines}</g>{paths}</svg>{marked}<div class="columns">{columns}</div></div>'
        f'<p class="xlabel">{escape(xlabel)}</p></figure>'
    )


def _range(values: Sequence[float], *, from_zero: bool) -> tuple[float, float]:
    if not values:
        return 0.0, 1.0
    low, high = (0.0 if from_zero else min(values)), max(values)
    margin = 0.06 * (high - low) or 0.5
    return (0.0 if from_zero else max(0.0, low - margin)), high + margin


def _path(curve: Curve, end: float, low: float, high: float) -> str:
    places = [
        (100 * place / end, 100 - 100 * (value - low) / (high - low))
        for place, value in curve.points
        if math.isfinite(value)
    ]
    if not places:
        return ""
    line = " ".join(f"{x:.2f},{y:.2f}" for x, y in places)
    if len(places) == 1:  # a line of no length, whose ends are round
        line += " " + line
    return f'<polyline class="{escape(curve.style)}" points="{line}"/>'


def pattern(found: Seen, style: str) -> str:
    """Draw which keys queries see, and the words that are needed to read it."""
    places = len(found.visible)
    cells = "".join(f"M{key} {query}h{count}v1h-{count}z" for query, key, count in found.runs())
    each = "every token" if found.step == 1 else f"every {found.step:,}th token"
    return (
        f'<div class="pattern"><svg viewBox="0 0 {places} {places}" role="img" aria-label="keys that queries see" '
        f'shape-rendering="crispEdges"><path class="{escape(style)}" d="{cells}"/></svg>'
        f"<p>A row is a query, a column a key: {each} of {found.tokens:,}, from the first on.</p></div>"
    )


@dataclass(frozen=True)
class Card:
    """Figures of a reader or a writer.

    Attributes:
        title: Its name.
        subtitle: What its queries see.
        figures: Pairs of a name and a value.
        share: Which part of its text it has read, 0 to 1; `None` if there is no end.
        problem: Why it has ended; `None` if it has not, or with its text.
        style: Its class in `page.css`.
    """

    title: str
    subtitle: str
    figures: Sequence[tuple[str, str]]
    share: float | None = None
    problem: str | None = None
    style: str = "first"


def cards(each: Sequence[Card]) -> str:
    """Draw cards beside each other; on a phone, one above the other."""
    return f'<div class="cards">{"".join(map(_card, each))}</div>'


def _card(card: Card) -> str:
    figures = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in card.figures)
    bar = "" if card.share is None else f'<div class="bar"><i style="width:{100 * card.share:.1f}%"></i></div>'
    problem = "" if card.problem is None else f'<p class="problem">{escape(card.problem)}</p>'
    return (
        f'<section class="card {escape(card.style)}"><h4>{escape(card.title)}</h4><p>{escape(card.subtitle)}</p>'
        f"{bar}<dl>{figures}</dl>{problem}</section>"
    )


def note(text: str) -> str:
    """Return a paragraph that stands in the place of a drawing."""
    return f'<p class="note">{escape(text)}</p>'


def size(count: float) -> str:
    """Return bytes with a unit, in three digits."""
    power = 0
    while count >= 1024 and power < len(_NAMES_OF_SIZES) - 1:
        count, power = count / 1024, power + 1
    digits = 0 if power == 0 or count >= 100 else 1 if count >= 10 else 2
    return f"{count:.{digits}f} {_NAMES_OF_SIZES[power]}"


def rate(tokens_per_second: float | None) -> str:
    """Return tokens per second, whole ones if there are many."""
    if tokens_per_second is None:
        return NOTHING
    return f"{tokens_per_second:,.0f}" if tokens_per_second >= 10 else f"{tokens_per_second:.1f}"


def _short(count: float) -> str:
    if count < 10_000:
        return f"{count:,.0f}"
    return f"{count / 1000:,.0f}k" if count < 1e6 else f"{count / 1e6:,.1f}M"
