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
_STEPS = 5  # of an axis, at most
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
    levels = _levels(values, is_bytes=is_bytes)
    low, high = levels[0], levels[-1]
    heights = [100 * (level - low) / (high - low) for level in levels]
    named = [size(level) if is_bytes else f"{level:g}" for level in levels] if values else [""] * len(levels)
    rows = "".join(
        f'<span style="bottom:{height:.2f}%">{name}</span>' for height, name in zip(heights, named, strict=True)
    )
    columns = "".join(f'<span style="left:{100 * place / end:.2f}%">{_short(place)}</span>' for place in _places(end))
    lines = "".join(f'<line x1="0" x2="100" y1="{y:.2f}" y2="{y:.2f}"/>' for y in heights)
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


def _levels(values: Sequence[float], *, is_bytes: bool) -> list[float]:
    """Return round values, in equal steps, that hold those given."""
    if not values:
        return [0.0, 0.5, 1.0]
    low, high = 0.0 if is_bytes else min(values), max(values)
    step = _step(high - low or max(abs(high), 1.0), is_bytes=is_bytes)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(step * index, 9) for index in range(first, max(last, first + 1) + 1)]


def _places(end: float) -> list[float]:
    """Return round places from 0 to the end."""
    step = max(1.0, _step(end))
    return [step * index for index in range(math.floor(end / step) + 1)]


def _step(width: float, *, is_bytes: bool = False) -> float:
    """Return a round number of which there are two to five in a width; of bytes, a power of two."""
    if is_bytes:
        return float(2.0 ** math.ceil(math.log2(width / _STEPS)))
    power = 10.0 ** math.floor(math.log10(width / _STEPS))
    return power * next(factor for factor in (1, 2, 5, 10) if factor * power * _STEPS >= width * (1 - 1e-9))


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


@dataclass(frozen=True)
class Picture:
    """Which keys queries see.

    Attributes:
        title: What they see, in words.
        seen: Which ones; `None` if that is not known.
        problem: Why it is not known.
        style: Its class in `page.css`.
    """

    title: str
    seen: Seen | None
    problem: str = ""
    style: str = "first"


def patterns(pictures: Sequence[Picture]) -> str:
    """Draw which keys queries see, in several pictures beside each other, with the words needed to read them."""
    sizes = dict.fromkeys((each.seen.step, each.seen.tokens) for each in pictures if each.seen is not None)
    words = [f"{_every(step)} of {tokens:,}, from the first on" for step, tokens in sizes]
    legend = f"A row is a query, a column a key: {'; '.join(words)}." if words else ""
    return f'<div class="patterns">{"".join(map(_picture, pictures))}</div><p class="note">{legend}</p>'


def _every(step: int) -> str:
    return "every token" if step == 1 else f"one token in {step:,}"


def _picture(picture: Picture) -> str:
    title = f"<h4>{escape(picture.title)}</h4>"
    if picture.seen is None:
        return f'<div class="pattern">{title}<p class="problem">{escape(picture.problem)}</p></div>'
    places = len(picture.seen.visible)
    cells = "".join(f"M{key} {query}h{count}v1h-{count}z" for query, key, count in picture.seen.runs())
    return (
        f'<div class="pattern">{title}<svg viewBox="0 0 {places} {places}" role="img" shape-rendering="crispEdges" '
        f'aria-label="keys that queries see"><path class="{escape(picture.style)}" d="{cells}"/></svg></div>'
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


def text(written: str) -> str:
    """Return a text as it is; `page.css` keeps its end in sight while it grows."""
    return f"<pre>{escape(written)}</pre>"


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
