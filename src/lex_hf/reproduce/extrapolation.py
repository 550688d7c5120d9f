"""Perplexity beyond the training length for every position scheme, with and without blockwise attention.

The comparison of the LEX paper's Tables 2 and 5 at the size of `tiny.py`, with several seeds.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from datasets import Dataset
from rich.console import Console

from lex_hf.data.tokenizers import byte_tokenizer
from lex_hf.evaluation import plots
from lex_hf.model.positions_lex import SCHEMES
from lex_hf.records import check_file, check_folder, origin, to_json, write_text
from lex_hf.reproduce import models
from lex_hf.reproduce.console import plain_console
from lex_hf.reproduce.corpora import STANDARD_LIBRARY, Texts
from lex_hf.reproduce.earlier import Made, check_nothing_is_lost
from lex_hf.reproduce.experiment import Experiment, Measured
from lex_hf.reproduce.measuring import Setting
from lex_hf.reproduce.models import Job
from lex_hf.reproduce.presets import preset
from lex_hf.reproduce.report import markdown_table
from lex_hf.reproduce.tables import LEX, PRINTED_LENGTH, System, Table
from lex_hf.reproduce.tiny import (
    EXAMPLES_PER_STEP,
    LENGTHS,
    PATTERNS,
    STEPS,
    TRAINING_LENGTH,
    check_seeds,
    check_steps,
    standard_library,
    tiny_config,
    tiny_training,
)

RESULTS, TABLE, PLOT = "extrapolation.json", "extrapolation.md", "extrapolation.png"
_PANELS = {"full": "full attention", "blockwise": "blockwise causal attention (BCA)"}
_SCALE = PRINTED_LENGTH[LEX] // TRAINING_LENGTH


@dataclass(frozen=True)
class Extrapolation:
    """Perplexities of trained models.

    Attributes:
        steps: Optimiser steps of each model.
        seeds: Seeds of weights and data order; one model for each and each scheme.
        perplexity: By system (a scheme, with or without BCA), then by length, one value for each seed. Lengths that a
            scheme cannot read, e.g. learned positions beyond their table, are missing.
    """

    steps: int
    seeds: list[int]
    perplexity: dict[str, dict[int, list[float]]]

    def means(self) -> dict[str, dict[int, float]]:
        """Return means over the seeds, by system and length."""
        return {
            system: {length: statistics.fmean(values) for length, values in curve.items()}
            for system, curve in self.perplexity.items()
        }

    def markdown(self) -> str:
        """Return a table of means, each ± half the range over the seeds."""
        lengths = sorted({length for curve in self.perplexity.values() for length in curve})
        rows = [[name, *(_cell(curve.get(length)) for length in lengths)] for name, curve in self.perplexity.items()]
        return markdown_table(["system", *map(str, lengths)], rows) + "\n"


def _cell(values: list[float] | None) -> str:
    if values is None:
        return "error"
    return f"{statistics.fmean(values):.3f} ± {(max(values) - min(values)) / 2:.3f}"


def run(
    folder: Path,
    *,
    schemes: Sequence[str] = tuple(SCHEMES),
    seeds: Sequence[int] = (0, 1),
    steps: int = STEPS,
    overwrite: bool = False,
    console: Console | None = None,
) -> Extrapolation:
    """Train a tiny model for each scheme and seed, evaluate each at all lengths, write table, plot and JSON.

    Models that `folder` already holds, trained for as many steps, are not trained again. The table is printed also if
    it cannot be written. A table of other settings, or of more schemes or seeds, is replaced only with `overwrite`.

    Raises:
        ValueError: If a scheme is unknown or there twice, a seed is impossible or there twice, there is no step, the
            folder cannot be written to, or an earlier table there would be lost; all that before any work.
    """
    console = console or plain_console()
    configs = {scheme: tiny_config(scheme) for scheme in schemes}
    check_steps(steps)
    check_seeds(seeds)
    if len(configs) < len(schemes):
        raise ValueError(f"schemes = {', '.join(schemes)}: one is given twice.")
    table = _table(schemes)
    _check_output(folder)
    if not overwrite:
        heading = {"steps": steps, "seeds": seeds, "perplexity": [system.name for system in table.systems]}
        check_nothing_is_lost(folder / RESULTS, _made, heading)
    models.join_processes(folder)
    experiment = _experiment(folder, table, seeds, steps)
    measured: Measured = {}
    trained: list[dict[str, Any]] = []
    for scheme in schemes:
        systems = [scheme + suffix for suffix in PATTERNS.values()]
        trained += [{**each, "systems": served} for each, served in experiment.train(byte_tokenizer(), systems)]
        measured |= experiment.measure(systems)[STANDARD_LIBRARY]
        console.print(f"{scheme}: done")
    result = Extrapolation(steps, list(seeds), _perplexities(measured))
    try:
        _write(folder, result, trained)
    finally:
        console.print(result.markdown(), markup=False, soft_wrap=True)
    return result


def _table(schemes: Sequence[str]) -> Table:
    """Return the comparison as a table; its lengths are given at the scale of the LEX paper."""
    systems = [
        System(scheme + suffix, {"position_embedding_type": scheme}, pattern)
        for scheme in schemes
        for pattern, suffix in PATTERNS.items()
    ]
    return Table("extrapolation", LEX, "chunked", systems, [_SCALE * length for length in LENGTHS])


def _experiment(folder: Path, table: Table, seeds: Sequence[int], steps: int) -> Experiment:
    corpus = standard_library()
    beginnings = Dataset.from_dict({"text": corpus.test_texts()})
    return Experiment(
        Setting(table, replace(preset("tiny", LEX), test_tokens=None), "cpu"),
        {(system.name, seed): _job(system, seed, steps) for system in table.systems for seed in seeds},
        models=folder,
        training=corpus.documents(),
        tests=[Texts(STANDARD_LIBRARY, (), beginnings)],
        report=lambda line: None,
    )


def _job(system: System, seed: int, steps: int) -> Job:
    config = tiny_config(system.model["position_embedding_type"])
    return Job(config, tiny_training(steps), EXAMPLES_PER_STEP, seed, "bytes", STANDARD_LIBRARY)


def _perplexities(measured: Measured) -> dict[str, dict[int, list[float]]]:
    """Return perplexities by system and by length at the scale of `tiny.py`, one for each seed."""
    return {
        system: {int(column) // _SCALE: [each[column].perplexity for each in seeds] for column in seeds[0]}
        for system, seeds in measured.items()
    }


def _made(record: Mapping[str, Any]) -> Made:
    """Return what the table of a record, or of its names alone, is of."""
    seeds = {f"seed {seed}": None for seed in record["seeds"]}
    return Made({"steps": record["steps"]}, seeds | {f"the system {name}": None for name in record["perplexity"]})


def _check_output(folder: Path) -> None:
    check_folder(folder, "--output")
    for name in (RESULTS, TABLE, PLOT) if folder.is_dir() else ():
        check_file(folder / name, "--output:")


def _write(folder: Path, result: Extrapolation, trained: Sequence[Mapping[str, Any]]) -> None:
    record = {**asdict(result), "models": trained, **origin(*models.LIBRARIES)}
    write_text(folder / RESULTS, to_json(record, indent=1) + "\n")
    write_text(folder / TABLE, result.markdown())
    title = f"Held-back files of the Python standard library, {result.steps} steps, {len(result.seeds)} seeds"
    means = result.means()
    panels = {
        _PANELS[pattern]: {scheme: means[scheme + suffix] for scheme in SCHEMES if scheme + suffix in means}
        for pattern, suffix in PATTERNS.items()
    }
    plots.save(plots.perplexity_by_scheme(panels, TRAINING_LENGTH, title=title), folder / PLOT)
