"""Measurements of positions: check, resolution, receptive-field."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.console import Console
from rich.table import Table

from lex_hf.cli.options import (
    Device,
    Dtype,
    Files,
    Json,
    Length,
    Model,
    Output,
    Pattern,
    Patterns,
    Segments,
    TextField,
    Trust,
    finite,
    typed,
)
from lex_hf.cli.printing import print_after, print_json, session


def check(
    model: Model,
    text: Annotated[str | None, typer.Option(help="The text to try; by default one of 600 characters.")] = None,
    shift: Annotated[int, typer.Option(min=1, help="Tokens of padding or text that are prepended or appended.")] = 7,
    attention_pattern: Pattern = None,
    device: Device = None,
    dtype: Dtype = None,
    trust_remote_code: Trust = False,
    as_json: Json = False,
) -> None:
    """Check order variance and translation invariance of a model (LEX paper, Eq. 1 and 2)."""
    from lex_hf.evaluation.invariance import check_positions
    from lex_hf.evaluation.loading import load_for_evaluation
    from lex_hf.evaluation.sweep import of_pattern

    with session(as_json) as console:
        sample = "A block sees itself and the one before. " * 15 if text is None else typed(text, "--text")
        network, tokenizer = load_for_evaluation(
            model, device=device, dtype=dtype, trust_remote_code=trust_remote_code, **of_pattern(attention_pattern)
        )
        result = check_positions(network, tokenizer(sample, return_tensors="pt")["input_ids"], shift=shift)
    if as_json:
        print_json(vars(result))
        return
    table = Table(title=f"{model}: largest change of a logit")
    table.add_column("when")
    table.add_column("change", justify="right")
    table.add_column("so")
    shifted, longer = (
        "refused" if value is None else f"{value:.2e}" for value in (result.shifted_positions, result.text_in_front)
    )
    for row in (
        ("earlier tokens are permuted", f"{result.order_variance:.2e}", _says(result.is_order_variant, "knows order")),
        (f"{shift} tokens of padding are prepended", f"{result.left_padding:.2e}", ""),
        (f"{shift} tokens of padding are appended", f"{result.right_padding:.2e}", ""),
        ("", "", _says(result.ignores_padding, "padding changes nothing")),
        (f"positions start at {shift}", shifted, _says(result.ignores_shifts, "positions are relative")),
        (f"{shift} tokens of text are prepended", longer, "a longer context"),
    ):
        table.add_row(*row)
    console.print(table)


def resolution(
    model: Model,
    files: Files,
    length: Length = 1024,
    segments: Segments = 4,
    reading: Annotated[str, typer.Option(help="A, B or C: readings of Eq. 4 at the end of the curve.")] = "A",
    attention_pattern: Patterns = None,
    output: Output = None,
    device: Device = None,
    dtype: Dtype = None,
    trust_remote_code: Trust = False,
    text_field: TextField = "text",
    as_json: Json = False,
) -> None:
    """Measure attention resolution, layer by layer (LEX paper, Eq. 3, 4, 13)."""
    import torch

    from lex_hf.data.documents import load_documents
    from lex_hf.evaluation import plots
    from lex_hf.evaluation.resolution import attention_resolution, measure_resolution
    from lex_hf.evaluation.sweep import check_patterns, with_patterns
    from lex_hf.evaluation.writing import check_measurements

    with session(as_json) as console:
        check_patterns(attention_pattern or ())
        if output is not None:
            check_measurements(output, "resolution", *(f"curves-{name}" for name in attention_pattern or ()))
        attention_resolution(torch.tensor([1.0, 0.0]), reading=cast(Any, reading))  # fails before any work
        texts = load_documents(files, text_field=text_field)
        loading = {"device": device, "dtype": dtype, "trust_remote_code": trust_remote_code}
        results = {
            name: measure_resolution(network, ids, reading=cast(Any, reading))
            for name, network, ids in with_patterns(
                model, texts, attention_pattern or (), loading=loading, length=length, count=segments
            )
        }
    table = Table(title=f"{model}: attention resolution at {length} tokens")
    for column in ("layer", *results):
        table.add_column(column, justify="right")
    columns = [[*result.by_layer, result.mean] for result in results.values()]
    for layer, row in enumerate(zip(*columns, strict=True)):
        table.add_row("mean" if layer == len(columns[0]) - 1 else str(layer), *(f"{value:.4f}" for value in row))
    title = f"{model}: resolution at {length} tokens"
    pictures = {"resolution": lambda: plots.resolution_by_layer(results, title=title)} | {
        f"curves-{name}": result.plot for name, result in results.items()
    }
    _show_measurements(console, as_json, table, output, "resolution", results, pictures)


def receptive_field(
    model: Model,
    files: Files,
    length: Length = 1024,
    segments: Segments = 4,
    threshold: Annotated[
        float, typer.Option(callback=finite, help="Share of the gradient that the tokens counted hold.")
    ] = 0.99,
    batch_size: Annotated[int, typer.Option(min=1, help="Segments at once.")] = 1,
    attention_pattern: Patterns = None,
    output: Output = None,
    device: Device = None,
    dtype: Dtype = None,
    trust_remote_code: Trust = False,
    text_field: TextField = "text",
    as_json: Json = False,
) -> None:
    """Measure how many tokens act on a prediction (arXiv 2212.10356, section 5.1)."""
    from lex_hf.data.documents import load_documents
    from lex_hf.evaluation import plots
    from lex_hf.evaluation.receptive_field import receptive_field as measure
    from lex_hf.evaluation.sweep import check_patterns, with_patterns
    from lex_hf.evaluation.writing import check_measurements

    with session(as_json) as console:
        check_patterns(attention_pattern or ())
        if output is not None:
            check_measurements(output, "receptive-field")
        texts = load_documents(files, text_field=text_field)
        loading = {"device": device, "dtype": dtype, "trust_remote_code": trust_remote_code}
        results = {
            name: measure(network, ids, threshold=threshold, batch_size=batch_size)
            for name, network, ids in with_patterns(
                model, texts, attention_pattern or (), loading=loading, length=length, count=segments
            )
        }
    table = Table(title=f"{model}: receptive field, {segments} segments of {length} tokens")
    for column in ("pattern", f"empirical ({threshold:g})", "theoretical"):
        table.add_column(column, justify="right")
    for name, result in results.items():
        theoretical = "the whole text" if result.theoretical is None else str(result.theoretical)
        table.add_row(name, str(result.erf), theoretical)
    title = f"{model}: what acts on the prediction after {length} tokens"
    pictures = {"receptive-field": lambda: plots.receptive_fields(results, title=title)}
    _show_measurements(console, as_json, table, output, "receptive-field", results, pictures)


def _show_measurements(
    console: Console,
    as_json: bool,
    table: Table,
    folder: Path | None,
    name: str,
    results: dict[str, Any],
    pictures: dict[str, Callable[[], Any]],
) -> None:
    """Write numbers and pictures, if there is a folder for them, and print the numbers."""
    from lex_hf.evaluation.writing import write_measurements

    numbers = {key: result.to_dict() for key, result in results.items()}
    print_after(
        lambda: print_json(numbers) if as_json else console.print(table),
        lambda: None if folder is None else write_measurements(folder, name, numbers, pictures),
    )


def _says(holds: bool, what: str) -> str:
    return what if holds else f"not: {what}"
