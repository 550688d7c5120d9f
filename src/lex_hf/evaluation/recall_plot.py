"""The picture of recall by distance."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Protocol

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lex_hf.evaluation.drawing import legend_below, length_axis, log_axis, mark_training_length, new_figure
from lex_hf.evaluation.styles import styles

_MEASURES = {
    "accuracy": ("right among the candidates", "accuracy_interval"),
    "exact_match": ("greedy decoding writes it", "exact_interval"),
}
_PANELS_IN_A_ROW = 3


class RecallPoint(Protocol):
    """The part of a point of [`RecallCurve`] that is drawn, besides shares and their intervals."""

    @property
    def distance(self) -> int:
        """Distance in tokens."""

    @property
    def problem(self) -> str | None:
        """Why there are no shares."""


class RecallCurve(Protocol):
    """The part of a result of `measure_recall` that is drawn."""

    @property
    def points(self) -> Sequence[RecallPoint]:
        """Recall at each distance."""

    @property
    def chance(self) -> float:
        """Accuracy of a model that knows nothing."""

    @property
    def training_length(self) -> int | None:
        """`l` in tokens, if known."""


def plot_recall(results: Mapping[str, RecallCurve], *, title: str) -> Figure:
    """Draw accuracy and exact match by distance, with intervals, chance and training length.

    Args:
        results: Of each system, by its name; distances that a system could not read are named in the legend.
        title: Title; name the model and the task.
    """
    figure = new_figure((10, 4.5), title)
    every = [point.distance for result in results.values() for point in result.points]
    for axes, measure in zip(figure.subplots(1, 2, sharey=True), _MEASURES, strict=True):
        _draw(axes, results, measure)
        length_axis(axes, every)
        axes.set(xlabel="Distance (tokens)", title=_MEASURES[measure][0], ylim=(-0.03, 1.03))
    figure.axes[0].set(ylabel="Share of texts")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    legend_below(figure, handles=handles, labels=labels)
    return figure


def plot_panels(
    panels: Mapping[str, Mapping[str, Mapping[int, Sequence[float]]]],
    length: int,
    *,
    title: str,
    xlabel: str,
    are_shares: bool,
) -> Figure:
    """Draw what was measured of many systems, by distance or length: means over seeds as lines, each seed as a dot.

    Args:
        panels: By panel, system and place in tokens, a number for each seed; none where it could not be read.
        length: Training length in tokens, marked by a line.
        title: Title; say what the numbers are.
        xlabel: What the places are.
        are_shares: Whether the numbers lie between 0 and 1. Else their axis is logarithmic, and ends above what is
            highest at the first place, so that what breaks leaves the picture.
    """
    columns = min(len(panels), _PANELS_IN_A_ROW)
    rows = -(-len(panels) // columns)
    figure = new_figure((3.6 * columns, 4 * rows), title)
    every = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).ravel()
    for axes, (name, curves) in zip(every, panels.items(), strict=False):
        for (system, curve), style in zip(curves.items(), styles(curves).values(), strict=True):
            known = {place: numbers for place, numbers in curve.items() if numbers}
            means = [fmean(numbers) for numbers in known.values()]
            axes.plot(list(known), means, label=system, markersize=5, **style)
            for place, numbers in known.items():
                axes.plot([place] * len(numbers), numbers, ".", color=style["color"], alpha=0.4, markersize=4)
        mark_training_length(axes, length, named=False)
        length_axis(axes, [place for curve in curves.values() for place in curve])
        axes.set_title(name, parse_math=False, fontsize="medium", wrap=True)
        axes.tick_params(labelbottom=True, labelsize="small")
        # Below its panel a legend covers no curve; names are too long for the ends of curves.
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.08), fontsize="small", frameon=False, handlelength=4)
    _number_axis(every[0], [curve for curves in panels.values() for curve in curves.values()], are_shares)
    for place, axes in enumerate(every):
        axes.set_visible(place < len(panels))
    figure.supxlabel(f"{xlabel}; the vertical line is the training length, {length}")
    return figure


def _number_axis(axes: Axes, curves: Sequence[Mapping[int, Sequence[float]]], are_shares: bool) -> None:
    """Set the vertical axis, which all panels share."""
    if are_shares:
        axes.set(ylim=(-0.03, 1.03))
        return
    first = [max(numbers) for curve in curves for place, numbers in curve.items() if numbers and place == min(curve)]
    lowest = min(min(numbers) for curve in curves for numbers in curve.values() if numbers)
    axes.set(yscale="log", ylim=(lowest / 1.05, 1.1 * max(first)))
    log_axis(axes.yaxis)


def _draw(axes: Axes, results: Mapping[str, RecallCurve], measure: str) -> None:
    for (name, result), style in zip(results.items(), styles(results).values(), strict=True):
        points = [point for point in result.points if point.problem is None]
        refused = [str(point.distance) for point in result.points if point.problem is not None]
        label = f"{name} (not at {', '.join(refused)})" if refused else name
        places = [point.distance for point in points]
        axes.plot(places, [getattr(point, measure) for point in points], label=label, markersize=5, **style)
        low, high = ([_interval(point, measure)[end] for point in points] for end in (0, 1))
        axes.fill_between(places, low, high, color=style["color"], alpha=0.15, linewidth=0)
    for chance in sorted({result.chance for result in results.values()}) if measure == "accuracy" else ():
        axes.axhline(chance, color="0.4", linewidth=1, linestyle="--", zorder=1, label=f"chance, {chance:.3g}")
    for length in sorted({result.training_length for result in results.values() if result.training_length}):
        label = f"training length, {length} tokens"
        axes.axvline(length, color="0.4", linewidth=1, linestyle=":", zorder=1, label=label)


def _interval(point: RecallPoint, measure: str) -> tuple[float, float]:
    found: tuple[float, float] = getattr(point, _MEASURES[measure][1])
    return found
