"""Measurements of positions: check, resolution, receptive-field."""

from typing import Annotated, Any, cast

import typer

from lex_hf.cli import options
from lex_hf.cli.printing import new_table, number, session, show


def check(
    model: options.Model,
    text: Annotated[str | None, typer.Option(help="The text to try; by default one of 600 characters.")] = None,
    shift: Annotated[int, typer.Option(min=1, help="Tokens of padding or text that are prepended or appended.")] = 7,
    attention_pattern: options.Pattern = None,
    blockwise: options.Blockwise = None,
    sinks: options.Sinks = 0,
    device: options.Device = None,
    dtype: options.Dtype = None,
    trust_remote_code: options.Trust = False,
    as_json: options.Json = False,
) -> None:
    """Check order variance and translation invariance of a model (LEX paper, equations 1 and 2)."""
    from lex_hf.evaluation.invariance import check_positions
    from lex_hf.evaluation.loading import load_for_evaluation
    from lex_hf.evaluation.sweep import of_pattern

    with session(as_json) as console:
        loading = options.loading(device, dtype, trust_remote_code, blockwise, sinks)
        sample = "A block sees itself and the one before. " * 15 if text is None else options.typed(text, "--text")
        network, tokenizer = load_for_evaluation(model, **loading, **of_pattern(attention_pattern))
        result = check_positions(network, tokenizer(sample, return_tensors="pt")["input_ids"], shift=shift)
    shifted, longer = (
        "refused" if value is None else f"{value:.2e}" for value in (result.shifted_positions, result.text_in_front)
    )
    rows = (
        ("earlier tokens are permuted", f"{result.order_variance:.2e}", _says(result.is_order_variant, "knows order")),
        (f"{shift} tokens of padding are prepended", f"{result.left_padding:.2e}", ""),
        (f"{shift} tokens of padding are appended", f"{result.right_padding:.2e}", ""),
        ("", "", _says(result.ignores_padding, "padding changes nothing")),
        (f"positions start at {shift}", shifted, _says(result.ignores_shifts, "positions are relative")),
        (f"{shift} tokens of text are prepended", longer, "a longer context"),
    )
    table = new_table(f"{model}: largest change of a logit", ("when", number("change"), "so"), rows)
    show(console, as_json, vars(result), table)


def resolution(
    model: options.Model,
    files: options.Files,
    length: options.Length = 1024,
    segments: options.Segments = 4,
    reading: Annotated[str, typer.Option(help="A, B or C: readings of Eq. 4 at the end of the curve.")] = "A",
    attention_pattern: options.Patterns = None,
    output: options.Output = None,
    blockwise: options.Blockwise = None,
    sinks: options.Sinks = 0,
    device: options.Device = None,
    dtype: options.Dtype = None,
    trust_remote_code: options.Trust = False,
    text_field: options.TextField = "text",
    as_json: options.Json = False,
) -> None:
    """Measure attention resolution, layer by layer (LEX paper, equations 3, 4 and 13)."""
    import torch

    from lex_hf.data.documents import load_documents
    from lex_hf.evaluation import plots
    from lex_hf.evaluation.resolution import attention_resolution, measure_resolution
    from lex_hf.evaluation.sweep import check_patterns, with_patterns
    from lex_hf.evaluation.writing import check_measurements, write_measurements

    patterns = attention_pattern or ()
    with session(as_json) as console:
        check_patterns(patterns)
        if output is not None:
            check_measurements(output, "resolution", *(f"curves-{name}" for name in patterns))
        attention_resolution(torch.tensor([1.0, 0.0]), reading=cast(Any, reading))  # fails before any work
        loading = options.loading(device, dtype, trust_remote_code, blockwise, sinks)
        texts = load_documents(files, text_field=text_field)
        loaded = with_patterns(model, texts, patterns, loading=loading, length=length, count=segments)
        results = {name: measure_resolution(*given, reading=cast(Any, reading)) for name, *given in loaded}
    columns = [[*result.by_layer, result.mean] for result in results.values()]
    rows = [
        ("mean" if layer == len(columns[0]) - 1 else str(layer), *(f"{value:.4f}" for value in row))
        for layer, row in enumerate(zip(*columns, strict=True))
    ]
    heads = map(number, ("layer", *results))
    table = new_table(f"{model}: attention resolution at {length} tokens", heads, rows)
    title = f"{model}: resolution at {length} tokens"
    pictures = {"resolution": lambda: plots.resolution_by_layer(results, title=title)} | {
        f"curves-{name}": result.plot for name, result in results.items()
    }
    numbers = {name: result.to_dict() for name, result in results.items()}
    show(
        console,
        as_json,
        numbers,
        table,
        lambda: None if output is None else write_measurements(output, "resolution", numbers, pictures),
    )


def receptive_field(
    model: options.Model,
    files: options.Files,
    length: options.Length = 1024,
    segments: options.Segments = 4,
    threshold: Annotated[
        float, typer.Option(callback=options.finite, help="Share of the gradient that the tokens counted hold.")
    ] = 0.99,
    batch_size: Annotated[int, typer.Option(min=1, help="Segments at once.")] = 1,
    attention_pattern: options.Patterns = None,
    output: options.Output = None,
    blockwise: options.Blockwise = None,
    sinks: options.Sinks = 0,
    device: options.Device = None,
    dtype: options.Dtype = None,
    trust_remote_code: options.Trust = False,
    text_field: options.TextField = "text",
    as_json: options.Json = False,
) -> None:
    """Measure how many tokens act on a prediction (arXiv 2212.10356, section 5.1)."""
    from lex_hf.data.documents import load_documents
    from lex_hf.evaluation import plots
    from lex_hf.evaluation.receptive_field import receptive_field as measure
    from lex_hf.evaluation.sweep import check_patterns, with_patterns
    from lex_hf.evaluation.writing import check_measurements, write_measurements

    patterns = attention_pattern or ()
    with session(as_json) as console:
        check_patterns(patterns)
        if output is not None:
            check_measurements(output, "receptive-field")
        loading = options.loading(device, dtype, trust_remote_code, blockwise, sinks)
        texts = load_documents(files, text_field=text_field)
        loaded = with_patterns(model, texts, patterns, loading=loading, length=length, count=segments)
        results = {name: measure(*given, threshold=threshold, batch_size=batch_size) for name, *given in loaded}
    heads = map(number, ("pattern", f"empirical ({threshold:g})", "theoretical"))
    rows = [
        (name, str(result.erf), "not known" if result.theoretical is None else str(result.theoretical))
        for name, result in results.items()
    ]
    table = new_table(f"{model}: receptive field in tokens, {segments} segments of {length}", heads, rows)
    title = f"{model}: what acts on the prediction after {length} tokens"
    pictures = {"receptive-field": lambda: plots.receptive_fields(results, title=title)}
    numbers = {name: result.to_dict() for name, result in results.items()}
    show(
        console,
        as_json,
        numbers,
        table,
        lambda: None if output is None else write_measurements(output, "receptive-field", numbers, pictures),
    )


def _says(holds: bool, what: str) -> str:
    return what if holds else f"not: {what}"
