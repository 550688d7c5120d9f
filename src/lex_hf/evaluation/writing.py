"""Results as files: numbers as JSON, pictures as PNG."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from transformers import PreTrainedConfig

from lex_hf.evaluation import plots
from lex_hf.evaluation.perplexity import PerplexityResult
from lex_hf.records import check_file, check_folder, to_json, write_text


def known_length(model: str, config: PreTrainedConfig) -> int:
    """Return the number of tokens that a model was trained to read, as its configuration gives it.

    Raises:
        ValueError: If it does not.
    """
    known = getattr(config, "training_length", None) or getattr(config, "max_position_embeddings", None)
    if known is None:
        raise ValueError(f"--plot marks the training length, but the configuration of {model} does not give it.")
    return int(known)


def plot_lengths(model: str, known: int, results: Sequence[PerplexityResult]) -> Figure:
    """Draw perplexity against length, with intervals where there are any.

    Args:
        model: Name in the title.
        known: Training length in tokens, which is marked.
        results: Results at several lengths, under one protocol.
    """
    ordered = sorted(results, key=lambda result: result.length)
    curve = {result.length: result.perplexity for result in ordered}
    intervals = {result.length: result.confidence_interval for result in ordered if result.confidence_interval}
    bands = {model: intervals} if intervals else None  # of a single text there are none
    title = f"{model}, {results[0].protocol}"
    return plots.perplexity_by_text({model: curve}, known, title=title, intervals=bands)


def check_measurements(folder: Path, *names: str) -> None:
    """Check, before any work, that [`write_measurements`] can write files of these names, that of the numbers first.

    Raises:
        ValueError: If not.
    """
    check_folder(folder, "--output")
    for file in (f"{names[0]}.json", *(f"{name}.png" for name in names)) if folder.is_dir() else ():
        check_file(folder / file, "--output:")


def write_measurements(
    folder: Path, name: str, numbers: Mapping[str, Any], pictures: Mapping[str, Callable[[], Figure]]
) -> None:
    """Write numbers as JSON and pictures, by the name of the file, as PNG: each appears only when it is whole."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / f"{name}.json", to_json(numbers) + "\n")
    for title, draw in pictures.items():
        plots.save(draw(), folder / f"{title}.png")
