"""Pictures of measurements; drawn without a display, readable in print and without colour vision."""

from collections.abc import Mapping
from itertools import cycle
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

# Okabe and Ito's palette, which stays apart for colour-blind readers; markers and dashes for black and white.
STYLES: tuple[dict[str, Any], ...] = (
    {"color": "#0072B2", "marker": "o", "linestyle": "-"},
    {"color": "#D55E00", "marker": "s", "linestyle": "--"},
    {"color": "#009E73", "marker": "^", "linestyle": "-."},
    {"color": "#CC79A7", "marker": "D", "linestyle": ":"},
    {"color": "#E69F00", "marker": "v", "linestyle": (0, (5, 1, 1, 1, 1, 1))},
    {"color": "#56B4E9", "marker": "P", "linestyle": (0, (8, 2))},
)


def perplexity_by_length(curves: Mapping[str, Mapping[int, float]], training_length: int, *, title: str) -> Figure:
    """Draw perplexity against length, one curve for each system (LEX paper, Figure 1), on two scales.

    Args:
        curves: For each system, its perplexity at each length in tokens.
        training_length: `l`, marked by a line.
        title: What the texts are.
    """
    figure = Figure(figsize=(10, 4.3), layout="constrained")
    figure.suptitle(title)
    whole, close = figure.subplots(1, 2)
    for axes in (whole, close):
        for (system, curve), style in zip(curves.items(), cycle(STYLES), strict=False):
            axes.plot(list(curve), list(curve.values()), label=system, markersize=5, **style)
        axes.axvline(training_length, color="0.6", linewidth=1, zorder=0)
        lengths = sorted({length for curve in curves.values() for length in curve})
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [str(length) for length in lengths])
        axes.set(xlabel="Length of the text (tokens)", ylabel="Perplexity")
        axes.grid(visible=True, which="both", color="0.92")
    whole.set(yscale="log", title="all of it")
    whole.yaxis.set_major_formatter("{x:g}")
    whole.yaxis.set_minor_formatter("{x:g}")
    whole.legend()
    lowest = min(min(curve.values()) for curve in curves.values())
    highest = max(curve[min(curve)] for curve in curves.values())
    margin = 0.05 * (highest - lowest)
    close.set(ylim=(lowest - margin, highest + margin), title="the lower end, larger")
    close.annotate(
        f"training length {training_length}",
        (training_length, 1),
        xycoords=("data", "axes fraction"),
        xytext=(4, -12),
        textcoords="offset points",
        color="0.35",
    )
    return figure


def save(figure: Figure, path: Path) -> Path:
    """Write a figure as PNG; the file appears under its name only when it is whole."""
    partial = path.with_suffix(".partial.png")
    FigureCanvasAgg(figure).print_png(partial)
    return partial.replace(path)
