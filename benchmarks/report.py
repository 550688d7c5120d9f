"""From a record to tables and a picture, in a terminal and in README."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from derived import (
    arithmetic_share,
    decode_cost,
    decode_floor,
    half_spread,
    per_token,
    precision_floor,
    rate,
    ratio,
    targets,
)
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from precision import PRECISIONS, SYSTEMS_MEASURED, name_of, of_name
from record import Peak, Record, Sample, find, write_whole
from rich.table import Table as RichTable
from systems import SYSTEMS

from lex_hf.evaluation import plots
from lex_hf.evaluation.drawing import length_axis, log_axis, new_figure
from lex_hf.evaluation.labels import name_curves
from lex_hf.evaluation.styles import styles

FOLDER = Path(__file__).parent
NONE = "-"
PREFILL = {
    "prefill": "Prefill in one pass",
    "chunked": "Prefill in chunks of l; at each length, the chunks since the length before",
}
MOVES = {"lex": "LEX", "blockwise_llama": "the blockwise Llama"}
TRAINING = {
    "none": "LEX without positions",
    "lex": "LEX",
    "lex_checkpointed": "LEX, gradient checkpointing",
    "none_compiled": "LEX without positions, compiled",
    "lex_compiled": "LEX, compiled",
    "gpt_neox": "GPT-NeoX",
    "llama": "Llama",
    "mistral": "Mistral",
}
MEMORY = {
    "streaming": "streaming evaluation",
    "training": "training step",
    "checkpointed": "training step, gradient checkpointing",
}


@dataclass(frozen=True)
class Table:
    """A table, the same in a terminal and in Markdown.

    Attributes:
        title: What it shows, with the unit.
        columns: Names of the columns; the first one names the rows.
        rows: Cells.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        """The title, then the table."""
        lines = [self.columns, ["---", *["---:"] * (len(self.columns) - 1)], *self.rows]
        return "\n".join([f"{self.title}\n", *(f"| {' | '.join(line)} |" for line in lines)]) + "\n"

    def rich(self) -> RichTable:
        """For a terminal."""
        table = RichTable(title=self.title)
        for number, column in enumerate(self.columns):
            table.add_column(column, justify="right" if number else "left")
        for row in self.rows:
            table.add_row(*row)
        return table


def verdict(record: Record) -> Table:
    """The targets as a table; of a record of precisions alone, those that are about them."""
    is_partial = {each.measure for each in record.samples} == {"precision"}
    rows = [
        [
            each.text,
            NONE if each.value is None else f"{each.value:.3f}",
            f"{'≥' if each.at_least else '≤'} {each.bound:g}",
            each.verdict,
        ]
        for each in targets(record)
        if each.value is not None or not is_partial
    ]
    return Table("Targets", ["target", "measured", "bound", "verdict"], rows)


def tables(record: Record) -> Iterator[Table]:
    """All that was measured; what was not has no table."""
    for measure, title in PREFILL.items():
        yield from _by_length(record, measure, title, "µs", 1e6)
    yield from _by_length(record, "decode", "Decoding, by tokens in the cache", "ms", 1e3)
    for system in MOVES:
        yield from _moves(record, system)
    yield from _caches(record)
    yield from _precisions(record)
    yield from _training(record)
    yield from _prefill_memory(record)
    yield from _other_memory(record)


def _by_length(record: Record, measure: str, title: str, unit: str, per_second: float) -> Iterator[Table]:
    """Times with their spread, and what they are in units of the floor and of LEX."""
    samples = [each for each in record.samples if each.measure == measure]
    if not samples:
        return
    systems, lengths = ({getattr(each, name): None for each in samples} for name in ("system", "length"))
    columns = ["system", *map(str, sorted(lengths))]
    times, ratios = [], []
    for system in systems:
        found = {length: find(samples, measure, system, length) for length in sorted(lengths)}
        times.append([system, *(_time(record, each, per_second) for each in found.values())])
        ratios.append([system, *(_ratios(record, measure, system, length) for length in found)])
    yield Table(f"{title}: {unit} for a token, median ± half the interquartile range", columns, times)
    floor = "bandwidth floor" if measure == "decode" else "linear layers"
    yield Table(f"{title}: in units of the {floor} (in units of LEX)", columns, ratios)


def _time(record: Record, sample: Sample | None, per_second: float) -> str:
    if sample is None:
        return NONE
    if sample.skipped:
        return f"{NONE} ({sample.skipped})"
    seconds = per_token(record, sample.measure, sample.system, sample.length)
    assert seconds is not None
    return _with_spread(seconds * per_second, half_spread(sample) * per_second)


def _with_spread(value: float, half: float) -> str:
    """A value with at least three digits, and its spread with as many decimals."""
    decimals = max(0, 2 - math.floor(math.log10(value)))
    return f"{value:.{decimals}f} ± {half:.{decimals}f}"


def _ratios(record: Record, measure: str, system: str, length: int) -> str:
    seconds = per_token(record, measure, system, length)
    if measure == "decode":
        floor = decode_floor(record, system, length)
    else:
        floor = per_token(record, measure, "linear", length)
    to_floor, to_lex = ratio(seconds, floor), ratio(seconds, per_token(record, measure, "lex", length))
    return NONE if to_floor is None or to_lex is None else f"{to_floor:.3f} ({to_lex:.3f})"


def _moves(record: Record, system: str) -> Iterator[Table]:
    samples = [each for each in record.samples if (each.measure, each.system) == ("decode", system) and each.seconds]
    costs = {each.length: decode_cost(record, each) for each in samples}
    if costs:
        rows = [
            [str(context), *(NONE if each is None else f"{each * 1e3:.4g}" for each in vars(cost).values())]
            for context, cost in costs.items()
        ]
        block = record.settings.block
        title = f"Decoding with {MOVES[system]}: ms for a token, and for the one in {block} before which blocks move"
        yield Table(title, ["context", "ordinary", "moving", "amortised"], rows)


def _caches(record: Record) -> Iterator[Table]:
    samples = [each for each in record.samples if each.measure == "decode" and each.cache is not None]
    systems, contexts = ({getattr(each, name): None for each in samples} for name in ("system", "length"))
    rows = [
        [system, *(_kibibytes(find(samples, "decode", system, context)) for context in contexts)] for system in systems
    ]
    if rows:
        title = "Decoding, by tokens in the cache: KiB of memory that hold keys and values in the end"
        yield Table(title, ["system", *map(str, contexts)], rows)


def _kibibytes(sample: Sample | None) -> str:
    return NONE if sample is None or sample.cache is None else f"{sample.cache / 2**10:.0f}"


def _precisions(record: Record) -> Iterator[Table]:
    """Times in each precision, what they are in units of float32 and of the floor, and what the floor is made of."""
    context = record.settings.contexts[0]
    times, ratios = [], []
    for system in SYSTEMS_MEASURED:
        names = [name_of(system, precision) for precision in PRECISIONS]
        found = [find(record.samples, "precision", name, context) for name in names]
        if any(found):
            times.append([system, *(_time(record, each, 1e3) for each in found)])
            ratios.append([system, *(_in_floors(record, name) for name in names)])
    if not times:
        return
    title = f"Decoding after {context} tokens, by the dtype of weights"
    yield Table(f"{title}: ms for a token, median ± half the interquartile range", ["system", *PRECISIONS], times)
    yield Table(f"{title}: in units of float32 (in units of the floor of that dtype)", ["system", *PRECISIONS], ratios)
    rows = [
        [each.what.removeprefix("read "), each.how, f"{each.amount / float(np.median(each.seconds)) / 1e9:.1f}"]
        for each in record.rates
        if each.what.startswith("read ")
    ]
    yield Table("GB/s at which products read weights; the fastest is the floor", ["weights", "product", "GB/s"], rows)


def _in_floors(record: Record, name: str) -> str:
    context = record.settings.contexts[0]
    seconds = per_token(record, "precision", name, context)
    whole = per_token(record, "precision", name_of(of_name(name)[0], "float32"), context)
    to_whole, to_floor = ratio(seconds, whole), ratio(seconds, precision_floor(record, name))
    return NONE if to_whole is None or to_floor is None else f"{to_whole:.3f} ({to_floor:.3f})"


def _training(record: Record) -> Iterator[Table]:
    samples = [each for each in record.samples if each.measure == "training"]
    if not samples:
        return
    without, rows = per_token(record, "training", "none", record.settings.training_length), []
    for sample in sorted(samples, key=lambda each: list(TRAINING).index(each.system)):
        seconds = float(np.median(sample.seconds))
        share, relative = arithmetic_share(record, sample), ratio(seconds / sample.tokens, without)
        rows.append(
            [
                TRAINING[sample.system],
                _with_spread(seconds * 1e3, half_spread(sample) * sample.tokens * 1e3),
                f"{sample.tokens / seconds:.0f}",
                NONE if relative is None else f"{relative:.3f}",
                NONE if share is None else f"{share:.1%}",
            ]
        )
    batch, length = record.settings.training_batch, record.settings.training_length
    columns = ["system", "ms", "tokens/s", "in units of LEX without positions", "of the speed of matrix products"]
    yield Table(f"Training, forwards and backwards: a step of {batch} by {length} tokens", columns, rows)


def _prefill_memory(record: Record) -> Iterator[Table]:
    peaks = [each for each in record.peaks if each.task == "prefill"]
    if peaks:
        lengths = sorted({each.length for each in peaks})
        rows = [
            [system, *(_mebibytes(find(peaks, "prefill", system, length)) for length in lengths)]
            for system in dict.fromkeys(each.system for each in peaks)
        ]
        title = "Prefill in one pass: peak memory in MiB (of it, above the model)"
        yield Table(title, ["system", *map(str, lengths)], rows)


def _mebibytes(peak: Peak | None) -> str:
    if peak is None:
        return NONE
    if peak.skipped:
        return f"{NONE} ({peak.skipped})"
    return f"{peak.peak / 2**20:.0f} ({(peak.peak - peak.built) / 2**20:.0f})"


def _other_memory(record: Record) -> Iterator[Table]:
    rows = [
        [MEMORY[each.task], str(each.length), _mebibytes(each), f"{each.seconds:.3g}"]
        for each in record.peaks
        if each.task in MEMORY
    ]
    if rows:
        title = "LEX: peak memory in MiB (of it, above the model)"
        yield Table(title, ["task", "tokens", "peak", "seconds"], rows)


def picture(record: Record) -> Figure | None:
    """Draw time for a token and peak memory against length, one curve for each system.

    Returns:
        A panel for each of prefill, decoding and memory that was measured; `None` if none of them was.
    """
    panels = {
        ("Prefill in one pass", "Length of the text (tokens)", "Time for a token (µs)"): _times(
            record, "prefill", 1e6
        ),
        ("Decoding", "Tokens in the cache", "Time for a token (ms)"): _times(record, "decode", 1e3),
        ("Prefill in one pass", "Length of the text (tokens)", "Memory above the model (MiB)"): _memories(record),
    }
    panels = {names: curves for names, curves in panels.items() if any(curves.values())}
    if not panels:
        return None
    figure = new_figure((1 + 3.9 * len(panels), 4.4), _hardware(record))
    drawn, looks = dict[Axes, list[Line2D]](), styles(SYSTEMS)
    for place, ((title, xlabel, ylabel), curves) in enumerate(panels.items(), start=1):
        axes = figure.add_subplot(1, len(panels), place)
        drawn[axes] = [
            axes.plot(list(curve), list(curve.values()), label=system, markersize=5, **looks[system])[0]
            for system, curve in curves.items()
        ]
        length_axis(axes, [length for curve in curves.values() for length in curve])
        axes.set(title=title, xlabel=xlabel, ylabel=ylabel, yscale="log")
        log_axis(axes.yaxis)
    name_curves(drawn)
    return figure


def save_picture(record: Record, folder: Path) -> None:
    """Write the picture, if there is something to draw, under the name of the preset."""
    figure = picture(record)
    if figure is not None:
        plots.save(figure, folder / f"{record.preset}.png")


def _times(record: Record, measure: str, per_second: float) -> dict[str, dict[int, float]]:
    """Time for a token of each system at each length."""
    curves: dict[str, dict[int, float]] = {system: {} for system in SYSTEMS}
    for sample in record.samples:
        if sample.measure == measure and sample.system in curves and sample.seconds:
            seconds = per_token(record, measure, sample.system, sample.length)
            assert seconds is not None
            curves[sample.system][sample.length] = seconds * per_second
    return {system: curve for system, curve in curves.items() if curve}


def _memories(record: Record) -> dict[str, dict[int, float]]:
    """Memory above the model, in MiB, of each system at each length of the prefill."""
    curves: dict[str, dict[int, float]] = {}
    for peak in record.peaks:
        if peak.task == "prefill" and not peak.skipped:
            curves.setdefault(peak.system, {})[peak.length] = (peak.peak - peak.built) / 2**20
    return curves


def _hardware(record: Record) -> str:
    machine, settings = record.machine, record.settings
    device = machine["accelerator"] or f"{machine['cpu']}, {machine['threads']} threads"
    return f"{device}, {settings.dtype}, {settings.layers} layers of {settings.hidden_size}"


def summary(record: Record) -> str:
    """What was measured where, in Markdown."""
    machine, software = record.machine, record.software
    versions = ", ".join(f"{name} {version}" for name, version in software.items())
    speeds = [
        text.format(speed / 1e9)
        for text, speed in (
            ("memory is read at {:.1f} GB/s", rate(record, "read")),
            ("matrices are multiplied at {:.0f} GFLOP/s", rate(record, "multiply")),
        )
        if speed is not None
    ]
    systems = [
        f"- `{name}`: {each['description']}; {each['linear_weights']:,} numbers in its linear layers"
        for name, each in record.systems.items()
    ]
    lines = [
        f"`{record.command}`, {record.date}. {_hardware(record)}; {machine['cores']} cores, "
        f"{machine['memory'] / 2**30:.0f} GiB; {versions}. Processes that wanted to run, on average over a minute: "
        f"{machine['load_before']} before, {machine['load_after']} after.",
        f"In the same run, {' and '.join(speeds)}." if speeds else "",
    ]
    return "\n\n".join(filter(None, ("\n".join(filter(None, lines)), "\n".join(systems)))) + "\n"


def section(record: Record) -> str:
    """What README says about a record, in Markdown."""
    parts = [summary(record)]
    if picture(record) is not None:
        parts.append(f"![Time and memory against length]({record.preset}.png)\n")
    parts += [table.markdown() for table in (verdict(record), *tables(record))]
    return "\n".join(parts)


def markers(preset: str) -> tuple[str, str]:
    """Return the lines of README between which a preset's record is shown."""
    return f"<!-- record: {preset}.json -->\n", f"<!-- end of {preset}.json -->"


def render(record: Record, folder: Path = FOLDER) -> None:
    """Keep a record beside README, with its picture, and show it there.

    Args:
        record: The record; it replaces that of the same preset.
        folder: Where README is.

    Raises:
        ValueError: If README has no place for it.
    """
    readme = folder / "README.md"
    begin, end = markers(record.preset)
    text = readme.read_text(encoding="utf-8")
    if text.count(begin) != 1 or end not in text.split(begin)[1]:
        raise ValueError(
            f"{readme} has no place for {record.preset}.json: it needs the lines {begin.strip()} and {end}."
        )
    before, rest = text.split(begin)
    record.write(folder / f"{record.preset}.json")
    save_picture(record, folder)
    write_whole(readme, f"{before}{begin}{section(record)}{rest[rest.index(end) :]}")
