"""The record of the study of recall as a report: text and pictures, from the record alone."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure

from lex_hf.evaluation.recall_plot import plot_panels
from lex_hf.reproduce.earlier import Made, seeds_and_tests, training_texts
from lex_hf.reproduce.recall_systems import LAYERS
from lex_hf.reproduce.report import RECORD, REPORT, making, markdown_table, write_files
from lex_hf.reproduce.statements import Cell

RECALL, PERPLEXITY = "recall.png", "perplexity.png"
FILES = (RECORD, REPORT, RECALL, PERPLEXITY)
_ASKED, _READ = 8, 16  # training lengths: of the distance that counts for the aim, and of the texts
_RECALLS, _SHARE_OF_CACHE = 0.9, 1 / 3
_KIB = 1024

System = Mapping[str, Any]


def made(record: Mapping[str, Any]) -> Made:
    """Return what the report of a record is of."""
    settings = {name: record[name] for name in ("training_length", "multiples", "steps", "samples")}
    return Made(settings | training_texts(record), seeds_and_tests(record))


def write(folder: Path, record: Mapping[str, Any]) -> None:
    """Write record, report and pictures; see [`write_files`]."""
    write_files(folder, record, render(record), pictures(record))


def render(record: Mapping[str, Any]) -> str:
    """Render the report as Markdown."""
    blocks = [
        "# Who remembers: recall by distance, and what it costs",
        *_introduction(record),
        *_recall(record),
        "## Perplexity",
        *_perplexity(record),
        "## Costs",
        *_costs(record),
        "## What was asked of a hybrid",
        *_aim(record),
        "## How it was made",
        *making(record),
    ]
    return "\n\n".join(blocks) + "\n"


def _introduction(record: Mapping[str, Any]) -> Iterator[str]:
    length, seeds, unit = record["training_length"], len(record["seeds"]), record["unit"]
    asked = " that ask for what they said before, within the same text," if _asks(record) else ""
    yield (
        f"Models of {LAYERS} layers were trained on texts of l = {length} {unit}{asked} and read texts of up to "
        f"{record['multiples'][-1]} l. There are {seeds} of each system, with other seeds. Blocks have l/2 {unit}, "
        "those of hybrids l/8: a layer with blocks sees its own block and the one before."
    )
    yield (
        "± is half of the 95 % interval of the t distribution over the seeds. Systems of one scheme are trained with "
        "causal attention; only their reading differs."
    )
    yield (
        "Llama is that of transformers, of as many layers and about as many parameters, trained on the "
        "same texts with full attention, and read unchanged and under `lex_hf.blockwise` with blocks of l/2: in all "
        "layers, and with `layers=`, which leaves one layer in 4 or in 2 with full attention, the same ones as in the "
        "hybrids, or one in 4 from layer 1 on: with one full layer at a time, this one looked back. Unlike "
        "hybrids, it was trained without blocks. YaRN has the factor of the longest text, and is in all layers, or "
        "with `yarn_factor=` in those with full attention alone."
    )


def _asks(record: Mapping[str, Any]) -> bool:
    """Return whether recall was measured."""
    return record["systems"][0]["recall"][0] is not None


def _recall(record: Mapping[str, Any]) -> Iterator[str]:
    if not _asks(record):
        return
    yield "## Recall"
    points = record["systems"][0]["recall"][0]["points"]
    asked = [point["distance"] for point in points]
    chance = record["systems"][0]["recall"][0]["chance"]
    pairs = record["systems"][0]["recall"][0]["num_pairs"]
    yield (
        f"A text hides {pairs} keys with their values among filler, and ends with one of the keys. Share of "
        f"{record['samples']} texts after which greedy decoding writes its value, by the distance from the value to "
        "the question:"
    )
    yield _table(record, asked, lambda system, distance: _cell(_shares(system, "exact_match", distance)))
    yield f"![Recall by distance]({RECALL})"
    yield (
        f"The value is the most probable of {round(1 / chance)} (chance is {chance:.3g}; who knows the values of the "
        f"text, and not whose they are, has {1 / pairs:.3g}):"
    )
    yield _table(record, asked, lambda system, distance: _cell(_shares(system, "accuracy", distance)))


def _perplexity(record: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"{record['about_tests']}, cut into segments of a length, each read alone; the same {record['unit']} count at "
        "every length:"
    )
    for test in _tests(record):
        if len(_tests(record)) > 1:
            yield f"### {test[:1].upper()}{test[1:]}"
        yield _table(record, _lengths(record), partial(_perplexity_cell, test))
    yield from (f"![Perplexity by length]({name})" for name in pictures(record) if name != RECALL)


def _costs(record: Mapping[str, Any]) -> Iterator[str]:
    length = _READ * record["training_length"]
    yield (
        f"Keys and values in the cache after {_READ} l = {length} {record['unit']}, also as a share of those of full "
        "attention in all layers; time to read them, and to decode one after them (the fastest of several rounds in "
        "turns; of models so small, much of it is overhead):"
    )
    rows = []
    for system in record["systems"]:
        costs = system["costs"][str(length)]
        size, whole = costs["cache_bytes"], _whole_cache(record, length)
        times = (f"{1000 * costs[name]:.1f} ms" for name in ("prefill_seconds", "decode_seconds"))
        full = f"{system['full_layers']} of {LAYERS}"
        rows.append([system["name"], full, f"{size / _KIB:,.0f} KiB", f"{size / whole:.2f}", *times])
    yield markdown_table(["system", "full layers", "cache", "share", "prefill", "decode"], rows)


def _aim(record: Mapping[str, Any]) -> Iterator[str]:
    recalls = f"Recall of at least {_RECALLS:.0%} at {_ASKED} l, where blocks alone are at chance; p"
    yield (
        f"{recalls if _asks(record) else 'P'}erplexity that falls at every doubling up to {_READ} l; a cache of at "
        f"most a third of that of full attention at {_READ} l. Means over the seeds:"
    )
    rows = []
    for system in record["systems"]:
        if 0 < system["full_layers"] < LAYERS:
            found = aims(record, system)
            rows.append([system["name"], *("yes" if each else "no" for each in found.values()), _verdict(found)])
    yield markdown_table(["hybrid", *aims(record, record["systems"][0]), "all"], rows)


def aims(record: Mapping[str, Any], system: System) -> dict[str, bool]:
    """Return which parts of the aim a hybrid reaches, by means over the seeds."""
    length = record["training_length"]
    lengths = [each for each in _lengths(record) if each <= _READ * length]
    curves = [[fmean(_perplexities(system, test, each)) for each in lengths] for test in _tests(record)]
    size = system["costs"][str(_READ * length)]["cache_bytes"]
    found = {
        "perplexity falls": all(after < before for curve in curves for before, after in pairwise(curve)),
        "small cache": size <= _SHARE_OF_CACHE * _whole_cache(record, _READ * length),
    }
    if not _asks(record):
        return found
    return {"recalls": fmean(_shares(system, "exact_match", _ASKED * length)) >= _RECALLS, **found}


def _verdict(found: Mapping[str, bool]) -> str:
    return "**yes**" if all(found.values()) else "no"


def _whole_cache(record: Mapping[str, Any], length: int) -> int:
    """Bytes of the cache of full attention in all layers."""
    found = [each for each in record["systems"] if each["full_layers"] == LAYERS]
    return int(found[0]["costs"][str(length)]["cache_bytes"])


def _lengths(record: Mapping[str, Any]) -> list[int]:
    return [each * record["training_length"] for each in record["multiples"]]


def _shares(system: System, name: str, distance: int) -> list[float]:
    """Shares at a distance, one for each seed; none where it cannot be read."""
    points = [point for seed in system["recall"] for point in seed["points"] if point["distance"] == distance]
    return [point[name] for point in points if point["problem"] is None]


def _tests(record: Mapping[str, Any]) -> list[str]:
    return list(record["systems"][0]["perplexity"][0])


def _perplexities(system: System, test: str, length: int) -> list[float]:
    return [seed[test][str(length)] for seed in system["perplexity"] if str(length) in seed[test]]


def _perplexity_cell(test: str, system: System, length: int) -> str:
    return _cell(_perplexities(system, test, length))


def _cell(values: Sequence[float]) -> str:
    if not values:
        return "refused"
    cell = Cell(values, ())
    interval = cell.seed_interval()
    half = "" if interval is None else f" ± {(interval[1] - interval[0]) / 2:.2f}"
    return f"{cell.mean:.2f}{half}"


def _table(record: Mapping[str, Any], columns: Sequence[int], cell: Any) -> str:
    head = ["system", *(_multiple(each, record["training_length"]) for each in columns)]
    rows = [[system["name"], *(cell(system, each) for each in columns)] for system in record["systems"]]
    return markdown_table(head, rows)


def _multiple(tokens: int, length: int) -> str:
    share = tokens / length
    return f"{share:g} l" if share >= 1 else f"l/{round(1 / share)}"


def pictures(record: Mapping[str, Any]) -> dict[str, Figure]:
    """Draw the pictures of a record; return them by file name."""
    length, found = record["training_length"], {}
    seeds = f"{len(record['seeds'])} seed{'s' if len(record['seeds']) > 1 else ''}"
    title = f"Trained on l = {length} {record['unit']}, {seeds}"
    if _asks(record):
        asked = [point["distance"] for point in record["systems"][0]["recall"][0]["points"]]
        shares = _by_group(record, lambda system: {each: _shares(system, "exact_match", each) for each in asked})
        found[RECALL] = plot_panels(
            shares,
            length,
            title=f"{title}: share of values that are recalled",
            xlabel=f"Distance in {record['unit']}",
            are_shares=True,
        )
    for number, test in enumerate(_tests(record)):
        curves = _by_group(record, partial(_by_length, _lengths(record), test))
        name = PERPLEXITY if number == 0 else PERPLEXITY.replace(".", f"-{number + 1}.")
        xlabel = f"Length of the text in {record['unit']}"
        found[name] = plot_panels(
            curves, length, title=f"{title}: perplexity, {test}", xlabel=xlabel, are_shares=False
        )
    return found


def _by_group(record: Mapping[str, Any], curve: Callable[[System], Any]) -> dict[str, dict[str, Any]]:
    groups: dict[str, dict[str, Any]] = {}
    for system in record["systems"]:
        groups.setdefault(system["group"], {})[system["name"]] = curve(system)
    return groups


def _by_length(lengths: Sequence[int], test: str, system: System) -> dict[int, list[float]]:
    return {length: _perplexities(system, test, length) for length in lengths}
