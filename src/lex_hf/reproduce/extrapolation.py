"""Perplexity beyond the training length for every position scheme, with and without blockwise attention.

The comparison of the LEX paper's Tables 2 and 5 at the size of `tiny.py`, with several seeds.
"""

import contextlib
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from lex_hf.cli.terminal import plain_console
from lex_hf.evaluation import plots
from lex_hf.evaluation.perplexity import load_for_evaluation
from lex_hf.model.positions_lex import SCHEMES
from lex_hf.records import check_file, check_folder, to_json, write_text
from lex_hf.reproduce.tiny import (
    LENGTHS,
    TRAINING_LENGTH,
    check_seeds,
    check_steps,
    perplexity_by_length,
    standard_library,
    tiny_config,
    train_tiny,
)

PATTERNS = {"full": "", "blockwise": " + BCA"}
RESULTS, TABLE, PLOT = "extrapolation.json", "extrapolation.md", "extrapolation.png"


@dataclass(frozen=True)
class Extrapolation:
    """Perplexities of trained models.

    Attributes:
        steps: Optimiser steps of each model.
        seeds: Seeds of weights and data order; one model for each and each scheme.
        perplexity: By system (a scheme, with or without BCA), then by length, one value for each seed. Lengths that a
            scheme cannot read, as learned positions beyond their table, are missing.
    """

    steps: int
    seeds: list[int]
    perplexity: dict[str, dict[int, list[float]]]

    def means(self) -> dict[str, dict[int, float]]:
        """Mean over the seeds, by system and length."""
        return {
            system: {length: statistics.fmean(values) for length, values in curve.items()}
            for system, curve in self.perplexity.items()
        }

    def markdown(self) -> str:
        """A table of means, with half the range of the seeds behind ±."""
        lengths = sorted({length for curve in self.perplexity.values() for length in curve})
        rows = [["system", *map(str, lengths)], ["---", *["---:"] * len(lengths)]]
        for system, curve in self.perplexity.items():
            rows.append([system, *(_cell(curve.get(length)) for length in lengths)])
        return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def _cell(values: list[float] | None) -> str:
    if values is None:
        return "error"
    return f"{statistics.fmean(values):.3f} ± {(max(values) - min(values)) / 2:.3f}"


def run(
    folder: Path,
    *,
    schemes: Sequence[str] = tuple(SCHEMES),
    seeds: Sequence[int] = (0, 1),
    steps: int = 1500,
    console: Console | None = None,
) -> Extrapolation:
    """Train a tiny model for each scheme and seed, evaluate each at all lengths, write table, plot and JSON.

    Models that `folder` already holds, trained for as many steps, are not trained again.

    Args:
        folder: Where models and results go.
        schemes: Position schemes.
        seeds: Seeds.
        steps: Optimiser steps of each model.
        console: Where to print.

    Raises:
        ValueError: If a scheme is unknown or there twice, a seed is impossible or there twice, there is no step, or
            the folder cannot be written to; all that before any work.
    """
    console = console or plain_console()
    configs = {scheme: tiny_config(scheme) for scheme in schemes}
    check_steps(steps)
    check_seeds(seeds)
    if len(configs) < len(schemes):
        raise ValueError(f"schemes = {', '.join(schemes)}: one is there twice.")
    _check_output(folder)
    corpus = standard_library()
    examples, texts = corpus.examples(), corpus.test_texts()
    perplexity: dict[str, dict[int, list[float]]] = {}
    for scheme, config in configs.items():
        for seed in seeds:
            model_folder = folder / f"{scheme}-{steps}-steps-seed-{seed}"
            if not (model_folder / "config.json").is_file():  # written last
                train_tiny(config, model_folder, examples, steps=steps, seed=seed)
            for pattern, suffix in PATTERNS.items():
                model, tokenizer = load_for_evaluation(str(model_folder), device="cpu", attention_pattern=pattern)
                for length, value in perplexity_by_length(model, tokenizer, texts, LENGTHS).items():
                    perplexity.setdefault(scheme + suffix, {}).setdefault(length, []).append(value)
        console.print(f"{scheme}: done")
    result = Extrapolation(steps, list(seeds), perplexity)
    with contextlib.ExitStack() as last:  # is printed also if it cannot be written
        last.callback(console.print, result.markdown(), markup=False, soft_wrap=True)
        _write(folder, result)
    return result


def _check_output(folder: Path) -> None:
    check_folder(folder, "--output")
    for name in (RESULTS, TABLE, PLOT) if folder.is_dir() else ():
        check_file(folder / name, "--output:")


def _write(folder: Path, result: Extrapolation) -> None:
    write_text(folder / RESULTS, to_json(asdict(result), indent=1) + "\n")
    write_text(folder / TABLE, result.markdown())
    title = f"Held-back files of the Python standard library, {result.steps} steps, {len(result.seeds)} seeds"
    means = result.means()
    panels = {
        pattern: {scheme: means[scheme + suffix] for scheme in SCHEMES if scheme + suffix in means}
        for pattern, suffix in PATTERNS.items()
    }
    plots.save(plots.perplexity_by_scheme(panels, TRAINING_LENGTH, title=title), folder / PLOT)
