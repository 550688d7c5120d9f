"""What pictures share: the figure, logarithmic axes, values that can be drawn, names as they are written."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, Locator, NullLocator

GRID = "0.92"
_MOST_TICKS = 8
_NARROW = 8  # up to this ratio of its ends, a logarithmic axis has evenly spaced numbers
_PLACES_NAMED = 3
_HANDLE = 3.2  # length of a line in a legend, in sizes of the font: gaps of dashes show beside the marker
_AS_GOOD_AS_INFINITE = 1e300  # beyond, the limits of an axis overflow
_Value = TypeVar("_Value", float, tuple[float, float])


def new_figure(size: tuple[float, float], title: str) -> Figure:
    """Return an empty figure of so many inches.

    Its background is opaque and white whatever the user's settings, so that one PNG is readable on white pages and on
    dark ones, where it is a white card.
    """
    figure = Figure(figsize=size, layout="constrained", facecolor="white", dpi=130)
    figure.suptitle(printable(title), parse_math=False)  # a dollar sign in a path is not a formula
    return figure


class FewTicks(Locator):
    """At most eight ticks of a logarithmic axis: round ones if it is narrow, else 1, 2, 5 of each decade or less."""

    def __call__(self) -> Sequence[float]:
        """Return the ticks of the axis as it is."""
        assert self.axis is not None
        return self.tick_values(*self.axis.get_view_interval())

    def tick_values(self, vmin: float, vmax: float) -> Sequence[float]:
        """Return the ticks between two positive numbers."""
        low, high = sorted((vmin, vmax))
        if high / low < _NARROW:
            return _round_numbers(low, high)
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        for digits in ((1, 2, 5), (1,)):
            ticks = [digit * 10.0**decade for decade in decades for digit in digits]
            shown = [tick for tick in ticks if low <= tick <= high]
            if len(shown) <= _MOST_TICKS:
                return shown
        return shown[:: -(-len(shown) // _MOST_TICKS)]


def _round_numbers(low: float, high: float) -> list[float]:
    """Return at most eight multiples of 1, 2 or 5 of the decade between two numbers, and as many as can be."""
    finest = math.floor(math.log10((high - low) / _MOST_TICKS))
    for digit in (1, 2, 5, 10, 20):
        step = digit * 10.0**finest
        first, last = math.ceil(low / step), math.floor(high / step)
        if last - first < _MOST_TICKS:
            break
    return [multiple * step for multiple in range(first, last + 1)]


def log_axis(axis: Axis) -> None:
    """Make the ticks of a logarithmic axis few, and plain numbers."""
    axis.set_major_locator(FewTicks())
    axis.set_major_formatter(FuncFormatter(lambda value, place: f"{value:.12g}"))
    axis.set_minor_locator(NullLocator())


def length_axis(axes: Axes, lengths: Iterable[int]) -> None:
    """Make the horizontal axis logarithmic, with ticks at measured lengths that have room beside each other."""
    axes.set_xscale("log", base=2)
    ticks = spaced(sorted(set(lengths)))
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(visible=True, color=GRID)
    axes.set_axisbelow(True)


def spaced(lengths: Sequence[int]) -> list[int]:
    """Return those of some lengths, in their order, that lie apart on a logarithmic axis; the last one is kept."""
    if not lengths or lengths[0] == 0:
        return list(lengths)
    least = math.log(lengths[-1] / lengths[0]) / _MOST_TICKS * (1 - 1e-9)  # doublings may fill it exactly
    kept: list[int] = []
    for length in reversed(lengths):
        if not kept or math.log(kept[-1] / length) >= least:
            kept.append(length)
    return kept[::-1]


def mark_training_length(axes: Axes, length: int, *, named: bool = True) -> None:
    """Draw a line at the training length, and name it above the axes, where it covers no curve."""
    axes.axvline(length, color="0.6", linewidth=1, zorder=1)
    if named:
        axes.annotate(
            f"training length {length}",
            (length, 1),
            xycoords=("data", "axes fraction"),
            xytext=(0, 3),
            textcoords="offset points",
            horizontalalignment="center",
            fontsize="small",
            color="0.35",
        )


def legend_below(figure: Figure, ncols: int = 2, **entries: Any) -> None:
    """Add a legend outside the axes, where it covers no curve."""
    legend = figure.legend(loc="outside lower center", ncols=ncols, frameon=False, handlelength=_HANDLE, **entries)
    for text in legend.get_texts():
        text.set_parse_math(False)


def finite(values: Mapping[int, _Value]) -> dict[int, _Value]:
    """Return the values that can be drawn: finite numbers, and pairs of them."""
    return {place: value for place, value in values.items() if (np.abs(value) < _AS_GOOD_AS_INFINITE).all()}


def heights(values: Mapping[int, float]) -> list[float]:
    """Return the values, with NaN for those that cannot be drawn."""
    drawn = finite(values)
    return [drawn.get(place, math.nan) for place in values]


def curve_name(name: str, curve: Mapping[int, float]) -> str:
    """Return the name of a curve, and the places where it is not drawn."""
    missing = [place for place, height in zip(curve, heights(curve), strict=True) if math.isnan(height)]
    text = printable(f" {name}" if name.startswith("_") else name)  # a legend leaves out names that begin with _
    if not missing:
        return text
    more = ", …" if len(missing) > _PLACES_NAMED else ""
    return f"{text} (not finite at {', '.join(map(str, missing[:_PLACES_NAMED]))}{more})"


def printable(text: str) -> str:
    """Escape lone surrogates, which stand for bytes of file names that are not UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()
