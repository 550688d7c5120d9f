"""Pictures show the numbers they were given."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.models import random_ids, tiny_model
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from lex_hf import LexConfig
from lex_hf.evaluation import plots
from lex_hf.evaluation.receptive_field import ReceptiveField, receptive_field
from lex_hf.evaluation.resolution import Resolution, expected_attention, measure_resolution

CURVES = {"one": {8: 3.0, 16: 2.5, 32: 2.25}, "other": {8: 3.5, 16: 4.0}}


def labels(figure: Figure) -> list[str]:
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def lines(axes: Any) -> dict[str, list[float]]:
    return {line.get_label(): list(line.get_ydata()) for line in axes.lines}


def drawn(figure: Figure, tmp_path: Path) -> np.ndarray:
    """Save the figure; every axis must have a title or labels."""
    path = plots.save(figure, tmp_path / "figure.png")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert list(tmp_path.iterdir()) == [path]
    for axes in figure.axes:
        assert axes.get_ylabel()
        assert axes.get_xlabel() or axes.get_label() == "<colorbar>"
    return np.asarray(figure.canvas.buffer_rgba())  # type: ignore[attr-defined]


def names(figure: Figure) -> set[str]:
    """Names of curves, wherever they stand: in legends, or at the ends of curves."""
    legends = [*figure.legends, *filter(None, (axes.get_legend() for axes in figure.axes))]
    texts = [text for legend in legends for text in legend.get_texts()] + [
        t for axes in figure.axes for t in axes.texts
    ]
    return {text.get_text() for text in texts}


def values(axes: Any, name: str) -> list[float]:
    """The heights of a curve; NaN compares as equal."""
    return [math.inf if math.isnan(value) else value for value in lines(axes)[name]]


def test_perplexity_by_length_shows_values_and_differences(tmp_path: Path) -> None:
    figure = plots.perplexity_by_length(CURVES, 16, title="texts")
    whole, differences = figure.axes
    for system, curve in CURVES.items():
        assert lines(whole)[system] == list(curve.values())
    assert values(differences, "one") == [0.0, 0.0, 0.0]
    assert values(differences, "other") == pytest.approx([100 * 0.5 / 3.0, 100 * 1.5 / 2.5])
    assert differences.get_ylabel() == "Difference from one (%)"
    assert not whole.collections
    drawn(figure, tmp_path)


def test_a_single_system_has_no_differences() -> None:
    (axes,) = plots.perplexity_by_length({"one": {8: 3.0}}, 16, title="a single point").axes
    low, high = axes.get_ylim()
    assert low < 3.0 < high


@pytest.mark.parametrize(
    ("systems", "reference", "chosen"),
    [
        (["a", "b"], None, "a"),
        (["a", "b"], "b", "b"),
        (["rope", "xPos", "xPos + BCA"], None, "xPos + BCA"),
        (["Roformer + BCA", "LEX Transformer"], None, "LEX Transformer"),
        (["rope", "LEX Transformer"], "rope", "rope"),
    ],
)
def test_differences_are_from_lex_or_the_system_named(systems: list[str], reference: str | None, chosen: str) -> None:
    curves = {system: {8: place + 2.0, 16: place + 3.0} for place, system in enumerate(systems)}
    differences = plots.perplexity_by_length(curves, 16, title="texts", reference=reference).axes[1]
    base = curves[chosen]
    for system, curve in curves.items():
        expected = [100 * (value - base[length]) / base[length] for length, value in curve.items()]
        assert values(differences, system) == pytest.approx(expected)
    assert chosen in differences.get_ylabel()


def test_a_reference_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="reference = third: it must be one of one, other"):
        plots.perplexity_by_length(CURVES, 16, title="texts", reference="third")


def test_what_breaks_leaves_the_differences(tmp_path: Path) -> None:
    curves = {"xPos + BCA": {8: 5.0, 16: 4.0}, "alibi": {8: 5.5, 16: 4.2}, "rope": {8: 5.0, 16: 80.0}}
    figure = plots.perplexity_by_length(curves, 8, title="texts")
    low, high = figure.axes[1].get_ylim()
    assert low < 0
    assert 10 < high < 20
    assert {"alibi", "rope ↑"} <= {text.get_text() for text in figure.axes[1].texts}
    assert {"alibi", "rope"} <= {text.get_text() for text in figure.axes[0].texts}
    drawn(figure, tmp_path)


def test_perplexity_by_text_shows_changes_from_the_training_length(tmp_path: Path) -> None:
    curves = {"books": {8: 5.0, 16: 4.0, 32: 3.0}, "talks": {8: 150.0, 16: 100.0, 32: 98.0}}
    figure = plots.perplexity_by_text(curves, 16, title="model")
    whole, changes = figure.axes
    assert lines(whole)["talks"] == [150.0, 100.0, 98.0]
    assert values(changes, "books") == pytest.approx([25, 0, -25])
    assert values(changes, "talks") == pytest.approx([50, 0, -2])
    assert changes.get_ylabel() == "Change from 16 tokens (%)"
    drawn(figure, tmp_path)
    assert plots.perplexity_by_text(curves, 31, title="model").axes[1].get_ylabel() == "Change from 16 tokens (%)"
    assert len(plots.perplexity_by_text(curves, 7, title="model").axes) == 1  # nothing was read within it


def test_intervals_of_perplexity(tmp_path: Path) -> None:
    intervals = {"one": {8: (2.5, 3.5), 16: (2.0, 2.75), 32: (1.75, 2.5)}}
    figure = plots.perplexity_by_length(CURVES, 16, title="texts", intervals=intervals)
    (band,) = figure.axes[0].collections
    corners = {(x, y) for x, y in band.get_paths()[0].vertices.tolist()}
    assert corners == {(float(length), end) for length, ends in intervals["one"].items() for end in ends}
    assert figure.axes[0].get_ylim()[0] < 1.75
    assert not figure.axes[1].collections  # intervals of two systems do not give that of their ratio
    drawn(figure, tmp_path)


def test_wide_intervals_do_not_flatten_curves() -> None:
    figure = plots.perplexity_by_length(CURVES, 16, title="texts", intervals={"one": {8: (0.01, 5000.0)}})
    low, high = figure.axes[0].get_ylim()
    assert 1 < low < 2.25
    assert 4 < high < 8


def test_a_system_looks_the_same_in_all_pictures() -> None:
    """Whatever else is drawn, and in which order."""
    curve = {8: 3.0, 16: 2.5}
    figures = [
        plots.perplexity_by_length({"xPos": curve, "LEX Transformer": curve, "Roformer": curve}, 8, title="t"),
        plots.perplexity_by_length(
            {"kerple": curve, "rope": curve, "xpos + BCA": curve, "my own": curve}, 8, title="t"
        ),
        plots.perplexity_by_scheme({"full": {"alibi": curve, "RoPE": curve}, "b": {"xpos": curve}}, 8, title="t"),
    ]
    looks = [
        {line.get_label(): (line.get_color(), line.get_marker(), line._dash_pattern) for line in axes.lines}
        for figure in figures
        for axes in figure.axes
    ]
    first, _, second, _, full, blocks = looks
    assert first["Roformer"] == second["rope"] == full["RoPE"]
    assert first["LEX Transformer"] == second["xpos + BCA"]
    assert first["xPos"] == blocks["xpos"]
    assert first["xPos"][:2] == first["LEX Transformer"][:2]
    assert first["xPos"][2] != first["LEX Transformer"][2]


def test_schemes_that_are_emphasised_are_thick() -> None:
    curve = {8: 3.0, 16: 2.5}
    (axes,) = plots.perplexity_by_scheme({"full": {"a": curve, "b": curve}}, 8, title="t", emphasis=["b"]).axes
    widths = {line.get_label(): line.get_linewidth() for line in axes.lines}
    assert widths["b"] > 2 * widths["a"]


@pytest.mark.parametrize(
    ("curve", "said"),
    [
        ({8: 3.0, 16: math.inf}, " (not finite at 16)"),
        ({8: math.nan, 16: 2.0}, " (not finite at 8)"),
        ({1: math.inf, 2: math.nan, 4: -math.inf, 8: math.inf}, " (not finite at 1, 2, 4, …)"),
        ({8: 1.7e308, 16: 2.0}, " (not finite at 8)"),  # the axis would end beyond float64
    ],
)
def test_perplexities_that_are_not_finite(curve: dict[int, float], said: str, tmp_path: Path) -> None:
    bands = {"one": {length: (1.0, value) for length, value in curve.items()}}
    figures = [
        plots.perplexity_by_length({"one": curve, "other": {8: 3.0, 16: 2.0}}, 8, title="texts", intervals=bands),
        plots.perplexity_by_length({"one": curve}, 8, title="texts"),
        plots.perplexity_by_scheme({"full": {"one": curve}, "blockwise": {"one": {8: 2.0}}}, 8, title="texts"),
    ]
    for figure in figures:
        drawn(figure, tmp_path)
        assert f"one{said}" in names(figure)
    finite = [value for value in curve.values() if abs(value) < 1e300]
    assert [value for value in lines(figures[0].axes[0])[f"one{said}"] if not math.isnan(value)] == finite


def test_attention_to_first_tokens(tmp_path: Path) -> None:
    weights = torch.rand(3, 2, 5, dtype=torch.float64)
    figure = plots.attention_to_first_tokens(weights, 0.25, title="texts")
    by_place, by_layer = figure.axes
    for layer, curve in enumerate(weights.mean(dim=1).tolist(), start=1):
        assert lines(by_place)[f"layer {layer}"] == curve
    assert [bar.get_height() for bar in by_layer.patches] == weights[:, :, 0].mean(dim=1).tolist()
    points = [list(line.get_ydata()) for line in by_layer.lines if line.get_label() == "_"]
    assert points == weights[:, :, 0].tolist()
    assert labels(figure) == ["layer 1", "layer 2", "layer 3", "spread evenly"]
    drawn(figure, tmp_path)


def test_curves_that_are_not_finite(tmp_path: Path) -> None:
    curve = torch.tensor([1.0, math.inf, 2.0, math.nan])
    found = Resolution((curve, curve), (curve, curve), [1.0, math.inf], math.inf, "A", 4, 1, None)
    field = ReceptiveField(curve[None, None].double(), [3], 0.99, None, 2)
    figures = {
        "a (not finite at 1, 3)": plots.attention_expectation({"a": curve}, title="t", training_length=2),
        "a (mean inf) (not finite at 2)": plots.resolution_by_layer({"a": found}, title="t"),
        "a: ERF 1 tokens (not finite at 2, 4)": plots.receptive_fields({"a": field}, title="t"),
    }
    for said, figure in figures.items():
        drawn(figure, tmp_path)
        assert said in labels(figure)
    drawn(plots.bias_by_distance({"a": curve}, title="t", fit=True), tmp_path)
    drawn(plots.bias_by_distance({"a": torch.full((3,), math.inf)}, title="t", fit=True), tmp_path)
    drawn(plots.bias_matrices({"a": curve.view(2, 2)}, title="t"), tmp_path)
    assert plots.logarithmic_fit(torch.tensor([1.0, math.nan, 1.0])) == pytest.approx((0, 1))
    with pytest.raises(ValueError, match="bias has 1 finite values"):
        plots.logarithmic_fit(torch.tensor([1.0, math.nan]))


def test_names_are_no_formulas(tmp_path: Path) -> None:
    figure = plots.perplexity_by_length({"$x_{$": CURVES["one"], "_b": CURVES["other"]}, 8, title="$\\frac{$ \udc80")
    drawn(figure, tmp_path)
    assert {"$x_{$", " _b"} <= names(figure)
    assert figure.axes[1].get_ylabel() == "Difference from $x_{$ (%)"
    drawn(plots.bias_matrices({"$x_{$": torch.zeros(2, 2)}, title="$x_{$"), tmp_path)
    drawn(plots.attention_expectation({"$x_{$": torch.zeros(2)}, title="$x_{$"), tmp_path)


def test_a_picture_goes_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "link.png").symlink_to("target.png")
    plots.save(plots.attention_expectation({"a": torch.zeros(2)}, title="t"), tmp_path / "link.png")
    assert (tmp_path / "link.png").is_symlink()
    assert (tmp_path / "target.png").read_bytes().startswith(b"\x89PNG")


def test_attention_expectation(tmp_path: Path) -> None:
    curves = {
        name: expected_attention(LexConfig(position_embedding_type=name), torch.arange(300))
        for name in ("rope", "xpos")
    }
    figure = plots.attention_expectation(curves, title="Expected attention", training_length=128)
    shown = lines(figure.axes[0])
    assert {name: shown[name] for name in curves} == {name: curve.tolist() for name, curve in curves.items()}
    assert labels(figure) == ["rope", "xpos"]
    assert [text.get_text() for text in figure.axes[0].texts] == ["training length 128"]
    assert not plots.attention_expectation(curves, title="Expected attention").axes[0].texts
    drawn(figure, tmp_path)


def test_resolution_by_layer(tmp_path: Path) -> None:
    results = {
        name: measure_resolution(tiny_model(attention_pattern=name), random_ids(30), progress=False)
        for name in ("blockwise", "full")
    }
    figure = plots.resolution_by_layer(results, title="random tokens")
    expected = {f"{name} (mean {result.mean:.3g})": result.by_layer for name, result in results.items()}
    assert labels(figure) == list(expected)
    assert {name: lines(figure.axes[0])[name] for name in expected} == expected
    assert figure.axes[0].get_xticks().tolist() == [1, 2]
    drawn(figure, tmp_path)
    drawn(results["full"].plot(), tmp_path)


def test_receptive_fields(tmp_path: Path) -> None:
    fields = {
        "BCA": receptive_field(tiny_model(), random_ids(2, 40), progress=False),
        "full": receptive_field(tiny_model(attention_pattern="full"), random_ids(2, 40), progress=False),
    }
    figure = plots.receptive_fields(fields, title="random tokens")
    shown = lines(figure.axes[0])
    for name, field in fields.items():
        assert shown[f"{name}: ERF {field.erf} tokens"] == field.cumulative.tolist()
        (mark,) = [line for line in figure.axes[0].lines if list(line.get_xdata()) == [field.erf]]
        assert list(mark.get_ydata()) == [field.cumulative[field.erf - 1]]
    assert labels(figure)[2:] == ["threshold 0.99", "training length 14"]
    assert shown["threshold 0.99"] == [0.99, 0.99]
    drawn(figure, tmp_path)
    drawn(fields["BCA"].plot(), tmp_path)


def test_bias_matrices(tmp_path: Path) -> None:
    positions = torch.arange(12)
    matrices = {
        name: tiny_model(position_embedding_type=name).position_bias(positions, positions)[1]
        for name in ("alibi", "t5", "kerple", "sandwich", "smoothed_sandwich")
    }
    figure = plots.bias_matrices(matrices, title="head 2")
    panels = [axes for axes in figure.axes if axes.images]
    assert [axes.get_title() for axes in panels] == list(matrices)
    for axes, matrix in zip(panels, matrices.values(), strict=True):
        shown = np.ma.filled(axes.images[0].get_array(), np.nan)
        np.testing.assert_array_equal(np.isnan(shown), np.triu(np.ones((12, 12), dtype=bool), 1))
        np.testing.assert_array_equal(np.tril(np.nan_to_num(shown)), np.tril(matrix.numpy()))
    drawn(figure, tmp_path)


@pytest.mark.parametrize(("first", "expected"), [(1, (-0.841, -0.611)), (0, (-0.832, -0.794))])
def test_logarithmic_fit_of_sandwich(first: int, expected: tuple[float, float], tmp_path: Path) -> None:
    # One head has the compression ratio 8, which the Sandwich paper draws; i = 0 gives the coefficients it prints.
    fields = {"hidden_size": 8, "num_attention_heads": 1, "sandwich_first_index": first}
    bias = expected_attention(LexConfig(position_embedding_type="sandwich", **fields), torch.arange(8192))
    slope, offset = plots.logarithmic_fit(bias)
    assert (slope, offset) == pytest.approx(expected, abs=1e-3)
    figure = plots.bias_by_distance({"Sandwich": bias}, title="ratio 8", fit=True)
    assert labels(figure) == ["Sandwich", f"{slope:.3f} log(1 + n) - {-offset:.3f}"]
    curves = list(lines(figure.axes[0]).values())
    assert curves[0] == bias.tolist()
    np.testing.assert_allclose(curves[1], slope * np.log(1 + np.arange(8192)) + offset, rtol=1e-5)
    drawn(figure, tmp_path)
    assert len(plots.bias_by_distance({"Sandwich": bias}, title="ratio 8").axes[0].lines) == 1


def test_attention_patterns(tmp_path: Path) -> None:
    config = LexConfig(training_length=8, sliding_window=6)
    figure = plots.attention_patterns(config, 13)
    assert [axes.get_title() for axes in figure.axes] == ["blockwise, blocks of 4", "sliding, window of 6", "full"]
    sees = (
        lambda query, key: query // 4 - key // 4 <= 1,
        lambda query, key: query - key < 6,
        lambda query, key: True,
    )
    for axes, sees_key in zip(figure.axes, sees, strict=True):
        shown = np.ma.filled(axes.images[0].get_array(), np.nan)
        for query in range(13):
            for key in range(13):
                if key <= query and sees_key(query, key):
                    assert shown[query, key] == min(query // 4 - key // 4, 2)
                else:
                    assert np.isnan(shown[query, key])
    assert labels(figure) == ["key in the query's own block", "in the block before", "further back"]
    pixels = np.unique(drawn(figure, tmp_path).reshape(-1, 4)[:, :3], axis=0)
    colours = {to_hex(pixel / 255) for pixel in pixels}
    assert {"#0072b2", "#56b4e9", "#f0e442"} <= colours
