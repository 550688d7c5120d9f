"""Figures of measurements; drawn without a display, readable in print and without colour vision.

Infinite values and NaN cannot be drawn: the rest is, and the name of the curve says what is missing. A title should
say what the texts are, or the curves or heads.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from torch import Tensor

from lex_hf.evaluation.drawing import (
    GRID,
    curve_name,
    heights,
    legend_below,
    log_axis,
    mark_training_length,
    new_figure,
    printable,
)
from lex_hf.evaluation.perplexity_plot import perplexity_by_length as perplexity_by_length
from lex_hf.evaluation.perplexity_plot import perplexity_by_scheme as perplexity_by_scheme
from lex_hf.evaluation.perplexity_plot import perplexity_by_text as perplexity_by_text
from lex_hf.evaluation.styles import styles
from lex_hf.model.configuration_lex import ATTENTION_PATTERNS, LexConfig
from lex_hf.model.masking_lex import PATTERNS, FullPattern
from lex_hf.records import whole_file

# A scale for ordered values whose brightness rises evenly, also in print.
_ORDERED = "cividis"


class LayerResolutions(Protocol):
    """The part of a result of `measure_resolution` that is drawn."""

    @property
    def by_layer(self) -> Sequence[float]:
        """R of each layer."""

    @property
    def mean(self) -> float:
        """Mean of `by_layer`."""

    @property
    def curves(self) -> Sequence[Tensor]:
        """Scores of each layer at distance 0, 1, …, shape `(distances,)`."""

    @property
    def length(self) -> int:
        """Length of the texts in tokens."""


class CumulativeGradient(Protocol):
    """The part of a result of `receptive_field` that is drawn."""

    @property
    def cumulative(self) -> Tensor:
        """Shares of the newest 1, 2, … tokens, shape `(tokens,)`."""

    @property
    def erf(self) -> int:
        """Empirical receptive field in tokens."""

    @property
    def threshold(self) -> float:
        """Share that `erf` exceeds."""

    @property
    def training_length(self) -> int | None:
        """`l` in tokens, if known."""


_Curve = TypeVar("_Curve")


def attention_expectation(curves: Mapping[str, Tensor], *, title: str, training_length: int | None = None) -> Figure:
    """Draw the expected attention score against distance, one curve for each system (LEX paper, Figure 2).

    Args:
        curves: For each system, s[n] at distances n = 0, 1, …, shape `(distances,)`.
        title: Title; say what the curves are of.
        training_length: `l`, marked by a line, if given.
    """
    figure, axes = _by_distance(title, curves, "Expected attention score s[n]")
    if training_length is not None:
        mark_training_length(axes, training_length)
    legend_below(figure)
    return figure


def resolution(result: LayerResolutions) -> Figure:
    """Draw a result of `measure_resolution`: the score by distance and the attention resolution of each layer."""
    layers = dict(enumerate(result.by_layer, start=1))
    title = f"Attention resolution, texts of {result.length} tokens: mean over layers {result.mean:.3g}"
    figure = new_figure((10, 4.3), curve_name(title, layers))
    by_distance, by_layer = figure.subplots(1, 2)
    scale = ScalarMappable(Normalize(1, max(2, len(layers))), _ORDERED)
    shades = scale.to_rgba(np.array([*layers]))
    for shade, curve in zip(shades, result.curves, strict=True):
        by_distance.plot(curve.numpy(), color=shade, linewidth=1)
    by_distance.set(xlabel="Distance n (tokens)", ylabel="Mean attention score s[n]")
    by_distance.grid(visible=True, color=GRID)
    figure.colorbar(scale, ax=by_distance, label="Layer", ticks=_whole_numbers(len(layers)))
    by_layer.bar(list(layers), heights(layers), color=shades)
    _layer_axis(by_layer, len(layers))
    return figure


def resolution_by_layer(results: Mapping[str, LayerResolutions], *, title: str) -> Figure:
    """Draw results of `measure_resolution`: R of each layer, one line for each system, e.g. with and without BCA."""
    figure, axes = _single(title)
    for system, result, style in _styled(results):
        layers = dict(enumerate(result.by_layer, start=1))
        named = curve_name(f"{system} (mean {result.mean:.3g})", layers)
        axes.plot(list(layers), result.by_layer, label=named, markersize=5, **style)
    _layer_axis(axes, max(len(result.by_layer) for result in results.values()))
    legend_below(figure)
    return figure


def receptive_fields(fields: Mapping[str, CumulativeGradient], *, title: str) -> Figure:
    """Draw results of `receptive_field`, with thresholds and ERFs (Sandwich paper, Figures 4 to 7 and 11)."""
    figure, axes = _single(title)
    for system, field, style in _styled(fields):
        tokens = range(1, len(field.cumulative) + 1)
        line = style | {"marker": None}
        named = curve_name(f"{system}: ERF {field.erf} tokens", dict(enumerate(field.cumulative.tolist(), start=1)))
        axes.plot(tokens, field.cumulative.numpy(), label=named, **line)
        at_erf = field.cumulative[field.erf - 1].item()
        axes.vlines(field.erf, 0, at_erf, color=style["color"], linewidth=1)
        axes.plot(field.erf, at_erf, color=style["color"], marker=style["marker"], zorder=3)
    for threshold in sorted({field.threshold for field in fields.values()}):
        axes.axhline(threshold, color="0.4", linewidth=1, zorder=1, label=f"threshold {threshold:g}")
    lengths = {field.training_length for field in fields.values() if field.training_length is not None}
    for length in sorted(lengths):
        axes.axvline(length, color="0.4", linewidth=1, zorder=1, linestyle=":", label=f"training length {length}")
    axes.set(xlabel="Newest tokens of the text", ylabel="Share of the gradient", ylim=(0, 1.03))
    axes.set_xlim(left=0)
    legend_below(figure)
    return figure


def bias_matrices(matrices: Mapping[str, Tensor], *, title: str) -> Figure:
    """Draw what position schemes add to attention scores (Sandwich paper, Figure 8).

    Args:
        matrices: For each scheme, the bias of one head for queries and keys from the start of a text, shape
            `(query, key)`, as `model.position_bias` returns it. Keys after their query are left out.
        title: Title; name the heads and settings.
    """
    columns = min(4, len(matrices))
    rows = -(-len(matrices) // columns)
    figure = new_figure((3.6 * columns + 0.4, 3.2 * rows + 0.4), title)
    for place, (scheme, matrix) in enumerate(matrices.items(), start=1):
        axes = figure.add_subplot(rows, columns, place)
        seen = FullPattern().visible(torch.arange(matrix.shape[0]), torch.arange(matrix.shape[1]))
        image = axes.imshow(matrix.cpu().masked_fill(~seen, torch.nan).numpy(), cmap=_ORDERED, interpolation="nearest")
        axes.set(xlabel="Key (position)", ylabel="Query (position)")
        axes.set_title(printable(scheme), parse_math=False)
        figure.colorbar(image, ax=axes, label="Added to the score", shrink=0.8)
    return figure


def bias_by_distance(biases: Mapping[str, Tensor], *, title: str, fit: bool = False) -> Figure:
    """Draw what position schemes add to attention scores by distance (Sandwich paper, Figures 9 and 10).

    Args:
        biases: For each scheme, the bias of one head at distances 0, 1, …, shape `(distances,)`.
        title: Title; name the heads and settings.
        fit: Whether to draw the logarithmic curve nearest to each; see [`logarithmic_fit`].
    """
    figure, axes = _by_distance(title, biases, "Added to the attention score")
    for bias in biases.values() if fit else ():
        if bias.isfinite().sum() < _POINTS_OF_A_FIT:
            continue
        slope, offset = logarithmic_fit(bias)
        sign = "-" if offset < 0 else "+"
        curve = slope * torch.arange(len(bias)).log1p() + offset
        axes.plot(curve.numpy(), color="black", linewidth=1, label=f"{slope:.3f} log(1 + n) {sign} {abs(offset):.3f}")
    legend_below(figure)
    return figure


def logarithmic_fit(bias: Tensor) -> tuple[float, float]:
    """Return the a and c for which a · log(1 + n) + c is nearest to a bias (Sandwich paper, §6.3; least squares).

    Args:
        bias: Bias at distances n = 0, 1, …, shape `(distances,)`; values that are not finite do not count.

    Raises:
        ValueError: If fewer than two values are finite.
    """
    values = bias.cpu().double().numpy()
    counted = np.isfinite(values)
    if counted.sum() < _POINTS_OF_A_FIT:
        raise ValueError(f"bias has {counted.sum()} finite values; a logarithmic curve needs at least two.")
    slope, offset = np.polyfit(np.log1p(np.arange(len(values)))[counted], values[counted], deg=1)
    return float(slope), float(offset)


def attention_to_first_tokens(weights: Tensor, even: float, *, title: str) -> Figure:
    """Draw the attention that the first tokens of a text draw, by place and, for the very first, by layer and head.

    Args:
        weights: Mean weights, shape `(layers, heads, places)`, as `first_tokens.attention_to_first_tokens` measures.
        even: What each place would draw if attention were spread evenly, marked by a line.
        title: Title; name the model and the texts.
    """
    layers = range(1, len(weights) + 1)
    figure = new_figure((10, 4.3), title)
    by_place, by_layer = figure.subplots(1, 2)
    shades = ScalarMappable(Normalize(1, max(2, len(layers))), _ORDERED).to_rgba(np.array([*layers]))
    for layer, shade, curve in zip(layers, shades, weights.mean(dim=1), strict=True):
        by_place.plot(curve.numpy(), color=shade, marker="o", markersize=4, linewidth=1, label=f"layer {layer}")
    by_place.set(xlabel="Place in the text (tokens)", ylabel="Mean attention weight", yscale="log")
    log_axis(by_place.yaxis)
    by_layer.bar(list(layers), weights[:, :, 0].mean(dim=1).numpy(), color=shades, alpha=0.6)
    for layer, shade, heads in zip(layers, shades, weights[:, :, 0], strict=True):
        by_layer.plot([layer] * len(heads), heads.numpy(), color=shade, marker="o", linestyle="", label="_")
    by_layer.set(xlabel="Layer (points are heads)", ylabel="Mean weight of the first token")
    by_layer.set(xticks=_whole_numbers(len(layers)), axisbelow=True, ylim=(0, None))
    for axes in (by_place, by_layer):
        axes.axhline(even, color="0.4", linewidth=1, linestyle=":", label="spread evenly")
        axes.grid(visible=True, color=GRID)
    handles, labels = by_place.get_legend_handles_labels()
    legend_below(figure, handles=handles, labels=labels, ncols=min(6, len(labels)))
    return figure


def attention_patterns(config: LexConfig, length: int) -> Figure:
    """Draw the keys that each query sees under each attention pattern (LEX paper, Figure 3).

    Args:
        config: Configuration whose training length, block length and window are drawn.
        length: Number of tokens of the text; up to a hundred can be distinguished.
    """
    figure = new_figure((10, 4), f"Which keys a query sees, training length {config.training_length}")
    block, positions = config.attention_span("blockwise") or 1, torch.arange(length)
    age = (positions[:, None] // block - positions // block).clamp(max=len(_AGES) - 1)
    for axes, pattern in zip(figure.subplots(1, len(ATTENTION_PATTERNS)), ATTENTION_PATTERNS, strict=True):
        span = config.attention_span(pattern)
        seen = PATTERNS[pattern](span).visible(positions, positions)
        shades = ListedColormap(list(_AGES.values()))
        shown = age.double().masked_fill(~seen, torch.nan).numpy()
        axes.imshow(shown, cmap=shades, vmin=-0.5, vmax=len(_AGES) - 0.5, interpolation="nearest")
        for border in range(block, length, block):
            axes.axvline(border - 0.5, color="0.5", linewidth=0.6)
            axes.axhline(border - 0.5, color="0.5", linewidth=0.6)
        axes.set(xticks=range(0, length, block), yticks=range(0, length, block))
        axes.set(title=pattern if span is None else f"{pattern}, {_SPANS[pattern]} {span}")
        axes.set(xlabel="Key (position)", ylabel="Query (position)")
    handles = [Patch(facecolor=colour, label=name) for name, colour in _AGES.items()]
    legend_below(figure, handles=handles, ncols=len(_AGES))
    return figure


def save(figure: Figure, path: Path) -> Path:
    """Write a figure as PNG; the file appears under its name only when it is complete."""
    with whole_file(path) as place, place.open("wb") as file:
        FigureCanvasAgg(figure).print_png(file)
    return path


# From dark to light, so that they differ in print.
_AGES = {"key in the query's own block": "#0072B2", "in the block before": "#56B4E9", "further back": "#F0E442"}
_SPANS = {"blockwise": "blocks of", "sliding": "window of"}
_POINTS_OF_A_FIT = 2


def _styled(curves: Mapping[str, _Curve]) -> Iterator[tuple[str, _Curve, dict[str, Any]]]:
    looks = styles(curves)
    for name, curve in curves.items():
        yield name, curve, looks[name]


def _single(title: str) -> tuple[Figure, Axes]:
    figure = new_figure((7, 4.6), title)
    axes = figure.subplots()
    axes.grid(visible=True, color=GRID)
    return figure, axes


def _by_distance(title: str, curves: Mapping[str, Tensor], ylabel: str) -> tuple[Figure, Axes]:
    figure, axes = _single(title)
    for name, curve, style in _styled(curves):
        named, every = curve_name(name, dict(enumerate(curve.tolist()))), max(1, len(curve) // 8)
        axes.plot(curve.cpu().numpy(), label=named, markersize=5, markevery=every, linewidth=1.2, **style)
    axes.set(xlabel="Distance n (tokens)", ylabel=ylabel)
    return figure, axes


def _layer_axis(axes: Axes, layers: int) -> None:
    axes.axhline(0, color="0.6", linewidth=1, zorder=0)
    axes.set(xlabel="Layer", ylabel="Attention resolution R(s)", xticks=_whole_numbers(layers), axisbelow=True)
    axes.grid(visible=True, axis="y", color=GRID)


def _whole_numbers(last: int) -> Iterable[int]:
    """Up to a dozen ticks, starting at 1."""
    return range(1, last + 1, -(-last // 12))
