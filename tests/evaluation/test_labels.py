"""Names of curves overlap neither each other nor curves, and ticks are few."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Annotation, Text
from matplotlib.transforms import Bbox

from lex_hf.evaluation import plots
from lex_hf.evaluation.drawing import FewTicks, spaced
from lex_hf.evaluation.labels import name_curves, spread


@given(st.lists(st.floats(-50, 150), min_size=1, max_size=8))
def test_positions_are_apart_and_in_order(wanted: list[float]) -> None:
    found = spread(wanted, 10, 0, 100)
    assert min(found) >= -1e-9
    assert max(found) <= 100 + 1e-9
    ordered = sorted(found)
    assert all(after - before >= 10 - 1e-9 for before, after in itertools.pairwise(ordered))
    for (one, at), (other, beside) in itertools.combinations(zip(wanted, found, strict=True), 2):
        assert one >= other or at < beside


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ([50, 20], [50, 20]),
        ([50, 50], [45, 55]),
        ([50, 54, 90], [47, 57, 90]),
        ([30, 30, 30], [20, 30, 40]),
        ([99, 100], [90, 100]),
        ([-5], [0]),
    ],
)
def test_positions_stay_near_what_is_wanted(wanted: list[float], found: list[float]) -> None:
    assert spread(wanted, 10, 0, 100) == pytest.approx(found)


def test_positions_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="12 positions that are 10 apart do not fit between 0 and 100"):
        spread([0.0] * 12, 10, 0, 100)


def boxes(figure: Figure) -> dict[Axes, list[Bbox]]:
    """Boxes of the names in each axes, without the lines to their curves."""
    figure.draw_without_rendering()
    renderer = FigureCanvasAgg(figure).get_renderer()
    found: dict[Axes, list[Bbox]] = {}
    for axes in figure.axes:
        for text in axes.texts:
            assert isinstance(text, Annotation)
            if text.get_text().startswith("training length"):
                continue  # above the axes, where curves that have left them are not drawn
            text.update_positions(renderer)
            found.setdefault(axes, []).append(Text.get_window_extent(text, renderer))
    return found


def check(figure: Figure) -> None:
    """Names overlap no other name and no curve."""
    for axes, names in boxes(figure).items():
        for one, other in itertools.combinations(names, 2):
            assert not one.overlaps(other)
        for line in axes.lines:
            path = line.get_path().transformed(line.get_transform())
            assert not any(path.intersects_bbox(name, filled=False) for name in names)


CLOSE = {f"system {place}": {8: 3.0, 16: 2.5 + 0.001 * place, 32: 2.25} for place in range(9)}
ENDING = {
    "first": {8: 3.0, 16: 2.8},
    "second": {8: 3.1, 16: 2.9, 32: 2.7},
    "third": {8: 4.0, 16: 3.0, 32: 2.0, 64: 1.0},
}


@pytest.mark.parametrize("curves", [CLOSE, ENDING])
def test_names_at_curves_cover_nothing(curves: dict[str, dict[int, float]]) -> None:
    figures = [
        plots.perplexity_by_length(curves, 16, title="t"),
        plots.perplexity_by_text(curves, 16, title="t"),
        plots.perplexity_by_scheme({"full": curves, "blockwise": curves}, 16, title="t"),
    ]
    for figure in figures:
        assert not figure.legends
        check(figure)


@pytest.mark.parametrize(
    "curves",
    [
        {f"system {place}": {8: 3.0, 16: 2.5} for place in range(40)},
        {f"{place}: a system with a long name, and with settings that are named, too": {8: 3.0} for place in range(2)},
        {"one": {8: 3.0}, "other": {8: float("inf")}},
    ],
)
def test_names_that_do_not_fit_are_in_a_legend(curves: dict[str, dict[int, float]], tmp_path: Path) -> None:
    figure = plots.perplexity_by_scheme({"full": curves}, 16, title="t")
    assert all(text.get_text().startswith("training length") for text in figure.axes[0].texts)
    assert len(figure.legends[0].get_texts()) == len(curves)
    plots.save(figure, tmp_path / "figure.png")


def test_a_legend_has_as_many_columns_as_fit() -> None:
    figure = Figure(figsize=(5, 4), layout="constrained")
    axes = figure.subplots()
    lines = [axes.plot([1, 2], [1, place], label=str(place) * 30)[0] for place in range(4)]
    name_curves({axes: lines})
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw_without_rendering()
    assert figure.legends[0].get_window_extent(renderer).width <= figure.bbox.width


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (4.2, 5.7, [4.2, 4.4, 4.6, 4.8, 5.0, 5.2, 5.4, 5.6]),
        (5.4, 20, [6, 8, 10, 12, 14, 16, 18, 20]),
        (4, 4000, [10, 100, 1000]),
        (4, 110, [5, 10, 20, 50, 100]),
        (1e-7, 1e9, None),
        (3.0, 3.0001, None),
    ],
)
def test_a_logarithmic_axis_has_few_ticks(low: float, high: float, ticks: Sequence[float] | None) -> None:
    found = FewTicks().tick_values(low, high)
    assert 2 <= len(found) <= 8
    assert all(low <= tick <= high for tick in found)
    if ticks is not None:
        np.testing.assert_allclose(found, ticks)


def test_ticks_of_a_picture_are_plain_numbers() -> None:
    curves = {"a": {8: 4.0, 16: 12_000.0}, "b": {8: 4.0, 16: 5.0}}
    axes = plots.perplexity_by_length(curves, 8, title="t").axes[0]
    FigureCanvasAgg(axes.figure).draw()
    assert [text.get_text() for text in axes.get_yticklabels()] == ["10", "100", "1000", "10000"]
    assert not axes.get_yticklabels(minor=True)


def test_lengths_on_an_axis_are_apart() -> None:
    assert spaced([32, 64, 128, 256]) == [32, 64, 128, 256]
    assert spaced([64, 100, 128, 4096]) == [64, 128, 4096]
    assert len(spaced([2**place for place in range(20)])) <= 9
    assert spaced([2**place for place in range(20)])[-1] == 2**19
    assert spaced([7]) == [7]
    assert spaced([]) == []
