"""The picture of recall by distance."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from statistics import fmean
from typing import Protocol

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lex_hf.evaluation import plots

_MEASURES = {
    "accuracy": ("right among the candidates", "accuracy_interval"),
    "exact_match": ("greedy decoding writes it", "exact_interval"),
}
_PANELS_IN_A_ROW = 3
_TICKS = 8  # that fit beside each other


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
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    figure.suptitle(title, parse_math=False)
    every = [point.distance for result in results.values() for point in result.points]
    for axes, measure in zip(figure.subplots(1, 2, sharey=True), _MEASURES, strict=True):
        _draw(axes, results, measure)
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted(set(every)), [str(distance) for distance in sorted(set(every))])
        axes.minorticks_off()
        axes.tick_params(axis="x", labelrotation=45 if len(set(every)) > _TICKS else 0)
        axes.set(xlabel="Distance (tokens)", title=_MEASURES[measure][0], ylim=(-0.03, 1.03))
        axes.grid(visible=True, color="0.92")
        axes.set_axisbelow(True)
    figure.axes[0].set(ylabel="Share of texts")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    legend = figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
    for text in legend.get_texts():
        text.set_parse_math(False)
    return figure


def plot_shares(
    panels: Mapping[str, Mapping[str, Mapping[int, Sequence[float]]]], length: int, *, title: str
) -> Figure:
    """Draw shares by distance for many systems: means over seeds as lines, and each seed as a dot.

    Args:
        panels: By panel, system and distance in tokens, a share for each seed; none where it could not be read.
        length: Training length in tokens, marked by a line.
        title: Title; say what the shares are of.
    """
    columns = min(len(panels), _PANELS_IN_A_ROW)
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(3.6 * columns, 3.6 * rows), layout="constrained")
    figure.suptitle(title, parse_math=False)
    every = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).ravel()
    for axes, (name, curves) in zip(every, panels.items(), strict=False):
        for (system, curve), style in zip(curves.items(), cycle(plots.STYLES), strict=False):
            known = {distance: shares for distance, shares in curve.items() if shares}
            means = [fmean(shares) for shares in known.values()]
            axes.plot(list(known), means, label=system, markersize=5, **style)
            for distance, shares in known.items():
                axes.plot([distance] * len(shares), shares, ".", color=style["color"], alpha=0.4, markersize=4)
        axes.axvline(length, color="0.4", linewidth=1, linestyle=":", zorder=1)
        axes.set_xscale("log", base=2)
        axes.set(title=name, ylim=(-0.03, 1.03))
        axes.title.set(parse_math=False, fontsize="medium", wrap=True)
        axes.grid(visible=True, color="0.92")
        axes.legend(loc="best", fontsize="x-small", frameon=False)
    for axes in every[len(panels) :]:
        axes.set_visible(False)
    figure.supxlabel(f"Distance (tokens); dotted: the training length, {length}")
    return figure


def _draw(axes: Axes, results: Mapping[str, RecallCurve], measure: str) -> None:
    for (name, result), style in zip(results.items(), cycle(plots.STYLES), strict=False):
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
