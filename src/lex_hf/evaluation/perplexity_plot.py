"""Pictures of perplexity by length."""

import math
import textwrap
from collections.abc import Collection, Iterable, Mapping

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.typing import ColorType

from lex_hf.evaluation.drawing import (
    curve_name,
    finite,
    heights,
    length_axis,
    log_axis,
    mark_training_length,
    new_figure,
    printable,
)
from lex_hf.evaluation.labels import name_curves
from lex_hf.evaluation.styles import is_lex, styles

_SMALL = 20  # percent: curves that differ by no more lie together
_LONGEST_LINE = 40  # letters beside an axis
_WIDE = 1.5  # ratio to the curves up to which intervals are shown whole
Curves = Mapping[str, Mapping[int, float]]
Intervals = Mapping[str, Mapping[int, tuple[float, float]]]


def perplexity_by_length(
    curves: Curves,
    training_length: int,
    *,
    title: str,
    intervals: Intervals | None = None,
    reference: str | None = None,
) -> Figure:
    """Draw perplexity against length, one curve for each system (LEX paper, Figure 1), and differences from one.

    The differences are between what is drawn, without intervals: those of two systems do not give that of their ratio,
    as systems have texts and seeds in common.

    Args:
        curves: For each system, its perplexity at each length in tokens.
        training_length: `l`, marked by a line.
        title: Title; say what the texts are.
        intervals: For some of the systems, the lower and upper end of an interval at lengths in tokens, drawn as a
            band.
        reference: The system from which the others differ by the percentages of the second panel; by default LEX, i.e.
            xPos with BCA, if it is there, else the first one. A single system has no second panel.

    Raises:
        ValueError: If there is no system of that name.
    """
    if reference is None:
        reference = next(filter(is_lex, curves), next(iter(curves)))
    elif reference not in curves:
        raise ValueError(f"reference = {reference}: it must be one of {', '.join(curves)}.")
    other = {system: relative(curve, curves[reference]) for system, curve in curves.items()}
    ylabel = f"Difference from {printable(reference)} (%)"
    return _perplexities(curves, training_length, title, intervals, other if len(curves) > 1 else {}, ylabel)


def perplexity_by_text(
    curves: Curves, training_length: int, *, title: str, intervals: Intervals | None = None
) -> Figure:
    """Draw perplexity of one system against length, one curve for each kind of text, and what longer texts change.

    Args:
        curves: For each kind of text, the perplexity at each length in tokens.
        training_length: `l`, marked by a line. The second panel shows changes from the perplexity at that length, or
            at the longest length below that all have; if there is none, there is no second panel.
        title: Title; name the system.
        intervals: As of [`perplexity_by_length`].
    """
    common = set.intersection(*(set(finite(curve)) for curve in curves.values()))
    base = max((length for length in common if length <= training_length), default=None)
    other = {} if base is None else {text: relative(curve, curve[base]) for text, curve in curves.items()}
    return _perplexities(curves, training_length, title, intervals, other, f"Change from {base} tokens (%)")


def relative(curve: Mapping[int, float], base: Mapping[int, float] | float) -> dict[int, float]:
    """Return differences of values from others, in percent of these; NaN where either cannot be drawn.

    Args:
        curve: Values at places.
        base: What they are compared with: positive values at places, or one for all.
    """
    known = finite(base) if isinstance(base, Mapping) else dict.fromkeys(curve, base)
    values = finite(curve)
    return {
        place: 100 * (values[place] / known[place] - 1) if place in values and place in known else math.nan
        for place in curve
    }


def _perplexities(
    curves: Curves, training_length: int, title: str, intervals: Intervals | None, other: Curves, ylabel: str
) -> Figure:
    """Draw perplexities, with intervals, and in a second panel, if there is something to draw, percentages."""
    has_other = any(map(finite, other.values())) and len(set[int]().union(*curves.values())) > 1
    figure = new_figure((10.5, 4.3) if has_other else (7, 4.3), title)
    panels = figure.subplots(1, 2 if has_other else 1, squeeze=False)[0]
    drawn = {panels[0]: _lines(panels[0], curves, curves)}
    for line, system in zip(drawn[panels[0]], curves, strict=True):
        _band(panels[0], finite((intervals or {}).get(system, {})), line.get_color())
    _log_perplexity(panels[0], curves.values(), (intervals or {}).values())
    panels[0].set(ylabel="Perplexity")
    _length_axis(panels[0], curves.values())
    if has_other:
        panels[1].axhline(0, color="0.6", linewidth=1, zorder=1)
        drawn[panels[1]] = _lines(panels[1], other, curves)
        panels[1].set(ylim=_where_curves_lie_together(other.values()))
        panels[1].set_ylabel(textwrap.fill(ylabel, _LONGEST_LINE), parse_math=False)
        _length_axis(panels[1], map(finite, other.values()))
    for axes in panels:
        mark_training_length(axes, training_length)
    name_curves(drawn)
    return figure


def _lines(axes: Axes, curves: Curves, names: Curves) -> list[Line2D]:
    """Draw curves under their names, with what is missing in those of the same name."""
    looks = styles(curves)
    lines = []
    for system, curve in curves.items():
        named = curve_name(system, names[system])
        lines += axes.plot(list(curve), heights(curve), label=named, markersize=5, **looks[system])
    return lines


def _band(axes: Axes, ends: Mapping[int, tuple[float, float]], colour: ColorType) -> None:
    if ends:
        lower, upper = zip(*ends.values(), strict=True)
        axes.fill_between(list(ends), lower, upper, color=colour, alpha=0.15, linewidth=0)


def _length_axis(axes: Axes, curves: Iterable[Mapping[int, float]]) -> None:
    length_axis(axes, set[int]().union(*curves))
    axes.set(xlabel="Length of the text (tokens)")


def _log_perplexity(
    axes: Axes, curves: Iterable[Mapping[int, float]], bands: Iterable[Mapping[int, tuple[float, float]]] = ()
) -> None:
    """Make the axis logarithmic, and end it beyond the curves: of their bands, those that are far wider leave it."""
    values = [value for curve in curves for value in finite(curve).values() if value > 0]
    if values:  # a logarithmic axis needs a number to scale to
        low, high = min(values) / _WIDE, max(values) * _WIDE
        ends = [end for band in bands for pair in finite(band).values() for end in pair if low < end < high]
        lowest, highest = min([*values, *ends]), max([*values, *ends])
        margin = 1.02 * (highest / lowest) ** 0.04
        axes.set(yscale="log", ylim=(lowest / margin, highest * margin))
        log_axis(axes.yaxis)


def _where_curves_lie_together(curves: Iterable[Mapping[int, float]]) -> tuple[float, float]:
    """Return limits in percent: around all differences that are small, so that what breaks leaves the picture."""
    small = [value for curve in curves for value in finite(curve).values() if abs(value) <= _SMALL]
    low, high = min(small, default=0.0), max(small, default=0.0)
    margin = 0.08 * max(high - low, 1)
    return low - margin, high + margin


def perplexity_by_scheme(
    panels: Mapping[str, Curves],
    length: int,
    *,
    title: str,
    xlabel: str = "Length of the text (tokens)",
    legend_columns: int = 5,
    emphasis: Collection[str] = (),
) -> Figure:
    """Draw perplexity against length for many position schemes, one panel for each attention pattern.

    Args:
        panels: For each pattern and scheme, its perplexity at each length in tokens.
        length: Training length in tokens, marked by a line where lengths reach around it.
        title: Title; say what the texts are.
        xlabel: What the lengths are.
        legend_columns: Columns of the legend, if names do not fit at the ends of curves; fewer for long names.
        emphasis: Schemes that are drawn thick.
    """
    figure = new_figure((11, 4.8), title)
    schemes = list(dict.fromkeys(scheme for curves in panels.values() for scheme in curves))
    looks, missing = styles(schemes), {scheme: _everywhere(panels, scheme) for scheme in schemes}
    drawn: dict[Axes, list[Line2D]] = {}
    every = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (pattern, curves) in zip(every, panels.items(), strict=True):
        drawn[axes] = _lines(axes, curves, missing)
        for scheme, line in zip(curves, drawn[axes], strict=True):
            is_thick = scheme in emphasis
            line.set(**looks[scheme], linewidth=3 if is_thick else 1.3, zorder=1.9 if is_thick else 2)
        _length_axis(axes, curves.values())
        axes.set(xlabel=xlabel, ylabel="Perplexity")
        axes.set_title(printable(pattern), parse_math=False, pad=18)
        lengths = set[int]().union(*curves.values())
        if lengths and min(lengths) <= length <= max(lengths):
            mark_training_length(axes, length)
    _log_perplexity(every[0], [curve for curves in panels.values() for curve in curves.values()])
    name_curves(drawn, columns=legend_columns)
    return figure


def _everywhere(panels: Mapping[str, Curves], scheme: str) -> dict[int, float]:
    """Sums of a scheme's values over all panels, finite where all of them are."""
    curves = [curves[scheme] for curves in panels.values() if scheme in curves]
    return {place: sum(curve.get(place, 0.0) for curve in curves) for curve in curves for place in curve}
