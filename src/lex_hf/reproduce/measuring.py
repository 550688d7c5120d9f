"""Measurements of a trained model, column by column; each result is kept with the model and never made twice.

A cell has one value for each seed, and with it values for each document or segment, in the same order for all
systems, so that differences can be tested in pairs. Perplexities are kept as mean losses in nats per token.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from accelerate import PartialState
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lex_hf.evaluation.loading import load_for_evaluation
from lex_hf.evaluation.perplexity import compute_perplexity
from lex_hf.evaluation.receptive_field import empirical_receptive_field, receptive_field
from lex_hf.evaluation.resolution import attention_resolution, expected_attention, measure_resolution
from lex_hf.model.configuration_lex import LexConfig
from lex_hf.records import fingerprint, read_json, write_json
from lex_hf.reproduce.corpora import Texts, check_length, long_enough, segments
from lex_hf.reproduce.models import can_read
from lex_hf.reproduce.presets import Preset
from lex_hf.reproduce.tables import System, Table

# Columns of receptive fields. What is measured in tokens is divided by a training length, so that scales compare.
ERF, SHARE, JUMP = "ERF / l", "share of newest l", "jump / l"
# Columns of the curves of expected attention.
VARIATION, RESOLUTION = "total variation beyond l/2", "resolution R(g)"

# Of what is measured and how it is kept; a higher one repeats all measurements of its kind.
_VERSIONS = {"chunked": 1, "last_token": 1, "resolution": 2, "receptive_field": 2}
_THRESHOLD = 0.99


@dataclass(frozen=True)
class Measurement:
    """Measurement of one model in one column."""

    value: float  # mean loss in nats per token, or what the column says
    documents: list[float]  # the same for each document or segment, or pseudo-values of it; empty if there are none
    weights: list[int]  # number of scored tokens of each document; empty if all count alike
    curve: list[float]  # what is drawn: scores by distance, or the cumulative gradient; empty if the value is

    @property
    def perplexity(self) -> float:
        """exp(`value`) of a mean loss; infinite if that exceeds float64."""
        return torch.tensor(self.value, dtype=torch.float64).exp().item()


@dataclass(frozen=True)
class Setting:
    """A table, its scale, and where its models are measured."""

    table: Table
    preset: Preset
    device: str | None  # a GPU if there is one, if `None`

    def length(self, printed: int) -> int:
        """Tokens at this scale."""
        return self.table.scaled(printed, self.preset.length)


def check_texts(setting: Setting, texts: Texts, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check, before models are trained, that one of the texts is as long as the longest that is measured.

    Raises:
        ValueError: If not.
    """
    if setting.table.measure != "chunked":  # which reads texts of any length
        check_length(texts, tokenizer, setting.length(max(setting.table.lengths)))


def measure(
    setting: Setting, system: System, folder: Path, texts: Texts, report: Callable[[str], None]
) -> dict[str, Measurement]:
    """Measure a trained model; what was measured before is read.

    Args:
        setting: Table and scale.
        system: The system that the model is of.
        folder: Folder of the model.
        texts: Texts to measure it on.
        report: Called with a line about what is about to be computed.

    Returns:
        By column; those of lengths that the model cannot read are missing.
    """
    results: dict[str, Measurement] = {}
    loaded: tuple[PreTrainedModel, PreTrainedTokenizerBase] | None = None
    config = setting.preset.config(setting.table, system)
    for printed in (each for each in setting.table.lengths if can_read(config, setting.length(each))):
        place = folder / "measurements" / f"{_key(setting, system, texts, printed)}.json"
        found = _read(place)
        if found is None:
            report(f"Measuring {system.name}, {setting.table.measure}, {setting.length(printed)} tokens, {texts.name}")
            if loaded is None:
                loaded = load_for_evaluation(str(folder), device=setting.device, **_pattern(setting, system))
            found = _MEASURES[setting.table.measure](setting, *loaded, list(texts.documents["text"]), printed)
            if PartialState().is_main_process:
                write_json(place, {column: asdict(each) for column, each in found.items()})
            PartialState().wait_for_everyone()
        results |= found
    return results


def _read(place: Path) -> dict[str, Measurement] | None:
    if not place.is_file():
        return None
    return {name: Measurement(**each) for name, each in read_json(place).items()}


def _key(setting: Setting, system: System, texts: Texts, printed: int) -> str:
    """Hash of what decides a measurement, but for the model, in whose folder it lies."""
    preset, table = setting.preset, setting.table
    sizes: dict[str, int | None] = {"segments": preset.measured_segments}
    if table.measure == "chunked":
        sizes = {"tokens": preset.test_tokens}
    if table.measure == "last_token":
        sizes = {"segments": preset.segments, "longest": setting.length(table.lengths[-1])}
    content = {
        "version": _VERSIONS[table.measure],
        "measure": table.measure,
        "column": setting.length(printed),
        "l": preset.length,
        "columns": list(table.columns or (str(printed),)),
        "pattern": _pattern(setting, system),
        "texts": texts.sha256,
        **sizes,
    }
    return f"{table.measure}-{setting.length(printed)}-{fingerprint(content)[:12]}"


def _pattern(setting: Setting, system: System) -> dict[str, Any]:
    pattern: dict[str, Any] = {"attention_pattern": system.pattern}
    if system.pattern == "sliding":
        width = setting.preset.length if system.window is None else setting.length(system.window)
        pattern["sliding_window"] = width
    return pattern


def _perplexity(
    setting: Setting, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], printed: int
) -> dict[str, Measurement]:
    length, options = setting.length(printed), dict[str, Any]()
    if setting.table.measure == "chunked":
        options |= {"length": length, "max_length": setting.preset.test_tokens}
    else:  # the last tokens of segments of the longest length, after `length` - 1 tokens (Sandwich paper, §3.4)
        longest = setting.length(setting.table.lengths[-1])
        texts = long_enough(texts, tokenizer, longest)
        most = longest * -(-setting.preset.segments // len(texts))
        options |= {"protocol": "last_token", "length": longest, "contexts": [length - 1], "max_length": most}
    batch_size = max(1, setting.preset.tokens_at_once // length)
    result = compute_perplexity(model, tokenizer, texts, batch_size=batch_size, progress=False, **options)
    losses = [each.nll / each.tokens for each in result.documents]
    return {str(printed): Measurement(result.nll, losses, [each.tokens for each in result.documents], [])}


def _resolution(
    setting: Setting, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], printed: int
) -> dict[str, Measurement]:
    ids = segments(texts, tokenizer, setting.length(printed), setting.preset.measured_segments)
    found = [measure_resolution(model, segment[None], progress=False) for segment in ids]
    # All layers have the same pattern, and every segment as many pairs at each distance. So the curves of all
    # segments are the means of theirs. Shape `(segments, layers, distances)`.
    curves = torch.stack([torch.stack(each.curves) for each in found])

    def resolution(layers: torch.Tensor) -> float:
        return fmean(map(attention_resolution, layers))

    value, mean = resolution(curves.mean(dim=0)), curves.mean(dim=(0, 1))
    return {str(printed): Measurement(value, jackknife(resolution, curves), [], mean.tolist())}


def _receptive_field(
    setting: Setting, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], printed: int
) -> dict[str, Measurement]:
    ids = segments(texts, tokenizer, setting.length(printed), setting.preset.measured_segments)
    field = receptive_field(model, ids, threshold=_THRESHOLD, batch_size=1, progress=False)
    curves, mean, length = field.curves[:, 0], field.cumulative, setting.preset.length
    own = int(model.config.training_length)

    def erf(curve: torch.Tensor) -> float:
        return float(empirical_receptive_field(curve, _THRESHOLD)) / length

    columns = {
        ERF: Measurement(erf(mean), jackknife(erf, curves), [], mean.tolist()),
        SHARE: Measurement(float(mean[length - 1]), curves[:, length - 1].tolist(), [], []),
        # The place of a maximum is no smooth function of a curve, so that pseudo-values say nothing about it.
        JUMP: Measurement(_jump(mean, own) / own, [], [], []),
    }
    return {name: columns[name] for name in setting.table.column_names}


def jackknife(statistic: Callable[[torch.Tensor], float], curves: torch.Tensor) -> list[float]:
    """Return pseudo-values of a statistic of a mean curve (Tukey, 1958).

    Such a statistic, e.g. the number of tokens at which the mean curve crosses a threshold, is not the mean of what
    it is for each curve. Its pseudo-values n T - (n - 1) T_i, where T_i is what it is without curve i, have its value
    as their mean but for the bias, and are tested and resampled like values of documents.

    Args:
        statistic: Takes a mean curve; must be a smooth function of it.
        curves: Shape `(curves, ...)`.

    Returns:
        One for each curve; of a single curve, the statistic itself.
    """
    mean, count = curves.mean(dim=0), len(curves)
    if count == 1:
        return [statistic(mean)]
    whole = count * statistic(mean)
    return [whole - (count - 1) * statistic((count * mean - curve) / (count - 1)) for curve in curves]


def _jump(curve: torch.Tensor, recent: int) -> int:
    """Return the place from the start, in tokens, that has the largest share but for the newest `recent` tokens."""
    shares = torch.diff(curve, prepend=curve.new_zeros(1))  # newest first
    newest_first = recent + int(shares[recent:].argmax())
    return len(curve) - newest_first


_MEASURES: dict[str, Callable[..., dict[str, Measurement]]] = {
    "chunked": _perplexity,
    "last_token": _perplexity,
    "resolution": _resolution,
    "receptive_field": _receptive_field,
}


def expectation(setting: Setting, config: LexConfig) -> dict[str, Measurement]:
    """Measure a scheme's curve of expected attention up to the table's length (LEX paper, Eq. 10 and Figure 2).

    Returns:
        The sum of all rises and falls beyond l/2, by the curve's value at 0, and its attention resolution.
    """
    curve = expected_attention(config, torch.arange(setting.length(setting.table.lengths[-1])))
    variation = curve[setting.preset.length // 2 :].diff().abs().sum() / curve[0]
    return {
        VARIATION: Measurement(float(variation), [], [], curve.tolist()),
        RESOLUTION: Measurement(attention_resolution(curve), [], [], []),
    }
