"""Names of curves at their ends, which take the place of a legend where they fit."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.path import Path
from matplotlib.text import Annotation, Text
from matplotlib.transforms import Bbox

from lex_hf.evaluation.drawing import legend_below

_FONT = 9.0  # points
_LINE = 1.35 * _FONT  # from one name to the next
_LETTER, _SAMPLE = 6.0, 62.0  # points in a legend: about the width of a letter, and of a line with its margins
_AWAY = 18.0  # points from the axes to names beside it
_WIDEST = 0.3  # share of the figure that names beside its axes may take
_CLEAR = 2.0  # points around a name within the axes
# Where a name within the axes may stand: steps from the end of its curve, in points; the nearest that is free counts.
_STEPS = tuple(
    (across * away, up * away)
    for away in (8, 16, 28)
    for across, up in ((1, 0), (1, 1), (1, -1), (-1, 1), (0, 1), (0, -1), (-1, -1))
)


def name_curves(curves: Mapping[Axes, Sequence[Line2D]], *, columns: int = 4) -> None:
    """Write the name of each curve at its end; if one finds no place there, all are in a legend below instead.

    Call it last: names are placed by the limits and sizes of axes as they are then.

    Args:
        curves: The curves of each axes of one figure, whose labels are their names.
        columns: Columns of the legend.
    """
    figure = next(iter(curves)).get_figure(root=True)
    assert figure is not None
    figure.draw_without_rendering()  # lays out the axes
    if all(_fits_beside(axes, lines) for axes, lines in curves.items()):
        written = [text for axes, lines in curves.items() for text in _beside(axes, lines)]
        if _are_narrow(figure, written) and _within(figure, curves, written):
            return
        for text in written:
            text.remove()
    entries = {str(line.get_label()): line for line in chain.from_iterable(curves.values())}
    fitting = int(72 * figure.get_figwidth() / (_LETTER * max(map(len, entries)) + _SAMPLE))
    legend_below(figure, handles=entries.values(), labels=entries, ncols=max(1, min(columns, fitting)))


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Return positions at least `gap` apart, between two ends, as near to those wanted as can be (least squares).

    Args:
        wanted: Positions wanted, in any order, which is kept.
        gap: Least distance of two positions.
        low: Lower end.
        high: Upper end.

    Raises:
        ValueError: If they do not fit.
    """
    if (len(wanted) - 1) * gap > high - low:
        raise ValueError(f"{len(wanted)} positions that are {gap:g} apart do not fit between {low:g} and {high:g}.")
    order = sorted(range(len(wanted)), key=lambda place: wanted[place])
    # Less the gaps below, positions need only not fall: neighbours that would are pooled, and take their mean.
    pools: list[tuple[float, int]] = []
    for rank, place in enumerate(order):
        pools.append((wanted[place] - rank * gap, 1))
        while len(pools) > 1 and pools[-2][0] >= pools[-1][0]:
            (upper, more), (lower, some) = pools.pop(), pools.pop()
            pools.append(((upper * more + lower * some) / (more + some), more + some))
    level = [value for value, count in pools for _ in range(count)]
    top = high - (len(wanted) - 1) * gap
    found = {place: min(max(level[rank], low), top) + rank * gap for rank, place in enumerate(order)}
    return [found[place] for place in range(len(wanted))]


def _fits_beside(axes: Axes, lines: Sequence[Line2D]) -> bool:
    """Return whether all curves have an end, and their names fit below each other."""
    return len(lines) * _LINE <= _size(axes)[1] and all(len(_points(line)) for line in lines)


def _size(axes: Axes) -> tuple[float, float]:
    """Width and height of axes in points."""
    figure, box = axes.get_figure(root=True), axes.get_window_extent()
    assert figure is not None
    return box.width * 72 / figure.dpi, box.height * 72 / figure.dpi


def _points(line: Line2D) -> np.ndarray:
    """Finite points of a curve, shape `(points, 2)`."""
    points = np.asarray(line.get_xydata(), dtype=float)
    return points[np.isfinite(points).all(axis=1)]


def _reach_last(lines: Sequence[Line2D]) -> list[Line2D]:
    """Return the curves that reach as far to the right as any."""
    ends = [_points(line)[-1, 0] for line in lines]
    return [line for line, end in zip(lines, ends, strict=True) if end == max(ends)]


def _beside(axes: Axes, lines: Sequence[Line2D]) -> Iterator[Annotation]:
    """Write names to the right of the axes, each joined with the end of its curve by a thin line.

    A curve that has left the axes has an arrow in the place of the line, at the side where it left.
    """
    wide, high = _size(axes)
    ending = _reach_last(lines)
    ends = [axes.transAxes.inverted().transform(axes.transData.transform(_points(line)[-1])) for line in ending]
    places = spread([float(np.clip(y, 0, 1)) * high for _, y in ends], _LINE, 0, high)
    for line, (x, y), place in zip(ending, ends, places, strict=True):
        is_shown = 0 <= y <= 1
        arrow = "" if is_shown else " ↑" if y > 1 else " ↓"
        yield axes.annotate(
            f"{line.get_label()}{arrow}",
            (x, y),
            xycoords="axes fraction",
            xytext=(1 + _AWAY / wide, place / high),
            textcoords="axes fraction",
            verticalalignment="center_baseline",
            fontsize=_FONT,
            fontweight="bold" if line.get_linewidth() > 2 else "normal",
            parse_math=False,
            annotation_clip=False,
            arrowprops=_leader(line) if is_shown else None,
        )


def _leader(line: Line2D) -> dict[str, object]:
    return {
        "arrowstyle": "-",
        "color": line.get_color(),
        "linewidth": 0.8,
        "shrinkA": 1,
        "shrinkB": line.get_markersize() / 2,
        "relpos": (0, 0.5),
    }


def _are_narrow(figure: Figure, written: Sequence[Annotation]) -> bool:
    """Return whether names beside the axes leave enough room for these."""
    renderer = FigureCanvasAgg(figure).get_renderer()
    widest: dict[object, float] = {}
    for text in written:
        widest[text.axes] = max(widest.get(text.axes, 0.0), _box(text, renderer).width)
    return sum(widest.values()) <= _WIDEST * figure.bbox.width


def _box(text: Annotation, renderer: object) -> Bbox:
    """The box of a name in pixels, without the line that joins it with its curve."""
    text.update_positions(renderer)  # type: ignore[arg-type]
    return Text.get_window_extent(text, renderer)  # type: ignore[arg-type]


def _within(figure: Figure, curves: Mapping[Axes, Sequence[Line2D]], written: list[Annotation]) -> bool:
    """Write the names of curves that end before others, where they cover no curve and no other name.

    Returns:
        Whether all found a place; those that did are in `written`.
    """
    figure.draw_without_rendering()  # names beside the axes have made them narrower
    for axes, lines in curves.items():
        taken, beside = list[Bbox](), _reach_last(lines)
        for line in (each for each in lines if each not in beside):
            text = _free_name(axes, line, taken)
            if text is None:
                return False
            written.append(text)
    return True


def _free_name(axes: Axes, line: Line2D, taken: list[Bbox]) -> Annotation | None:
    """Write a name near the end of its curve, at the first place that is free; `None` if there is none."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    renderer = FigureCanvasAgg(figure).get_renderer()
    inside, pixels = axes.get_window_extent(), figure.dpi / 72
    drawn = [each.get_path().transformed(each.get_transform()) for each in axes.lines]
    end = axes.transData.transform(_points(line)[-1])
    for across, up in _STEPS:
        text = axes.annotate(
            str(line.get_label()),
            tuple(_points(line)[-1]),
            xytext=(across, up),
            textcoords="offset points",
            horizontalalignment={1: "left", 0: "center", -1: "right"}[int(np.sign(across))],
            verticalalignment={1: "bottom", 0: "center", -1: "top"}[int(np.sign(up))],
            fontsize=_FONT,
            parse_math=False,
            arrowprops=_leader(line) if max(abs(across), abs(up)) > _STEPS[0][0] else None,
        )
        box = _box(text, renderer).padded(_CLEAR * pixels)
        leader = Path([end + np.sign([across, up]) * 4 * pixels, end + np.array([across, up]) * pixels])
        is_covering = any(path.intersects_bbox(box, filled=False) for path in drawn) or any(map(box.overlaps, taken))
        is_inside = all(inside.contains(*corner) for corner in (box.min, box.max))
        if is_inside and not is_covering and not any(path.intersects_path(leader, filled=False) for path in drawn):
            taken.append(box)
            return text
        text.remove()
    return None
