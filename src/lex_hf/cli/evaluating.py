"""Perplexity: evaluate, compare."""

from collections.abc import Callable
from csv import DictWriter
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group

from lex_hf.cli import options
from lex_hf.cli.printing import is_main_process, new_table, number, session, show
from lex_hf.records import check_file, whole_file


def evaluate(
    model: options.Model,
    files: options.Files,
    protocol: options.Protocol = "chunked",
    length: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Tokens in a segment, window or chunk; give it several times for a table."),
    ] = None,
    stride: options.Stride = None,
    contexts: options.Contexts = None,
    batch_size: options.BatchSize = "8",
    start_token: options.StartToken = True,
    records: options.Records = None,
    attention_pattern: options.Pattern = None,
    blockwise: options.Blockwise = None,
    sinks: options.Sinks = 0,
    device: options.Device = None,
    dtype: options.Dtype = None,
    weights: options.Weights = None,
    trust_remote_code: options.Trust = False,
    text_field: options.TextField = "text",
    csv: Annotated[Path | None, typer.Option(help="Write the table to this file, unrounded.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw perplexity against length to this PNG file.")] = None,
    as_json: options.Json = False,
) -> None:
    """Measure perplexity on texts, at one length or several.

    Under torchrun or accelerate launch the texts are shared out between the processes.
    """
    from lex_hf.data.documents import load_documents
    from lex_hf.evaluation.loading import load_for_evaluation
    from lex_hf.evaluation.perplexity import PerplexityOptions
    from lex_hf.evaluation.sweep import at_lengths, measure_lengths, of_pattern

    with session(as_json) as console:
        if plot is not None and len(set(length or ())) < 2:
            raise ValueError("--plot draws perplexity against length: give --length at least twice.")
        _check_files(files, csv=csv, plot=plot, records=records)
        settings = PerplexityOptions(
            protocol=protocol,
            stride=stride,
            contexts=contexts,
            batch_size=_batch_size(batch_size),
            add_start_token=start_token,
            records=records,
        )
        by_length = at_lengths(settings, length or ())
        loading = options.loading(device, dtype, trust_remote_code, blockwise, sinks)
        loading |= options.packing(weights, device)
        texts = list(load_documents(files, text_field=text_field)["text"])
        network, tokenizer = load_for_evaluation(model, **loading, **of_pattern(attention_pattern))
        draw = None if plot is None else _picture(plot, model, network.config)
        results = measure_lengths(network, tokenizer, texts, by_length)
        if not is_main_process():
            return
        rows = [row for result in results for row in _perplexity_rows(result)]
    show(
        console,
        as_json,
        [result.to_dict() for result in results],
        _perplexity_table(f"{model}: {_texts(texts)}, {protocol}", rows),
        lambda: None if csv is None else _write_csv(csv, rows),
        lambda: None if draw is None else draw(results),
    )


def compare(
    model_a: Annotated[str, typer.Argument(help="Folder or Hub id of model A with its tokenizer.")],
    model_b: Annotated[str, typer.Argument(help="The same of model B; it may be the same model.")],
    files: options.Files,
    protocol: options.Protocol = "chunked",
    length: Annotated[
        int | None, typer.Option(min=1, help="Tokens in a segment, window or chunk; A's training length by default.")
    ] = None,
    stride: options.Stride = None,
    batch_size: options.BatchSize = "8",
    start_token: options.StartToken = True,
    records: options.Records = None,
    attention_pattern: Annotated[
        list[str] | None,
        typer.Option(help="blockwise, sliding or full; twice for A and for B, once for both."),
    ] = None,
    blockwise: Annotated[
        list[str] | None,
        typer.Option(
            help="Let models with rotary positions read in blocks: the training length in tokens, 'auto' or 'none'; "
            "twice for A and for B, once for both."
        ),
    ] = None,
    sinks: Annotated[
        list[int] | None,
        typer.Option(
            min=0,
            help="With --blockwise: tokens at the start of a text that every later one sees, too; "
            "twice for A and for B, once for both.",
        ),
    ] = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    trust_remote_code: options.Trust = False,
    text_field: options.TextField = "text",
    as_json: options.Json = False,
) -> None:
    """Compare two models on the same texts, paired by text: t-test, bootstrap interval, ratio of perplexities."""
    from lex_hf.data.documents import load_documents
    from lex_hf.evaluation import comparison
    from lex_hf.evaluation.perplexity import PerplexityOptions
    from lex_hf.evaluation.sweep import measure_pair, of_pattern

    with session(as_json) as console:
        patterns, blocks = _two("--attention-pattern", attention_pattern), _two("--blockwise", blockwise)
        loading = [
            options.loading(device, dtype, trust_remote_code, None if length == "none" else length, kept or 0)
            | of_pattern(name)
            for length, kept, name in zip(blocks, _two("--sinks", sinks), patterns, strict=True)
        ]
        _check_files(files, records=records)
        settings = PerplexityOptions(
            protocol=protocol,
            length=length,
            stride=stride,
            batch_size=_batch_size(batch_size),
            add_start_token=start_token,
            records=records,
        )
        texts = list(load_documents(files, text_field=text_field)["text"])
        results = measure_pair((model_a, model_b), (loading[0], loading[1]), texts, options=settings)
    if not is_main_process():
        return
    rows = [{"model": name} | _perplexity_rows(result)[-1] for name, result in zip("AB", results, strict=True)]
    if not as_json:  # also if they do not compare, as with different tokenizers
        console.print(_perplexity_table(f"A: {model_a}, B: {model_b}: {_texts(texts)}, {protocol}", rows))
    paired = comparison.compare(*results)
    both = {name: result.to_dict() for name, result in zip("ab", results, strict=True)}
    show(console, as_json, paired.to_dict() | both, _comparison(paired))


def _texts(texts: list[str]) -> str:
    return f"{len(texts)} text{'' if len(texts) == 1 else 's'}"


def _batch_size(text: str) -> Any:
    """Read a number of windows, or auto."""
    return int(text) if text.isdecimal() else text


def _perplexity_rows(result: Any) -> list[dict[str, Any]]:
    """Return one row, or under `last_token` one for each context, of which the last has all the numbers."""
    low, high = result.confidence_interval or (None, None)
    numbers = {"perplexity": result.perplexity, "low": low, "high": high, "bits/byte": result.bits_per_byte}
    rows = [{"length": result.length, "tokens": result.tokens, "nats/token": result.nll} | numbers]
    if result.protocol != "last_token":
        return rows
    empty = dict.fromkeys(numbers)
    return [
        {"length": result.length, "context": each.start, "tokens": each.tokens, "nats/token": each.nll}
        | (empty | {"perplexity": each.perplexity} if each.start < result.options["contexts"][-1] else numbers)
        for each in result.loss_by_position
    ]


def _perplexity_table(title: str, rows: list[dict[str, Any]]) -> Group:
    has_interval = any(row["low"] is not None for row in rows)
    caption = "low and high: 95 % interval of the perplexity, from a bootstrap over texts" if has_interval else None
    return new_table(title, [number(name) for name in rows[0]], (map(_cell, row.values()) for row in rows), caption)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:#.5g}" if isinstance(value, float) else str(value)


def _comparison(paired: Any) -> str:
    low, high = paired.confidence_interval
    return (
        f"A minus B: {paired.difference:+.4f} nats per token, mean over {paired.n} texts "
        f"(95 % interval {low:+.4f} to {high:+.4f}); ratio of perplexities {paired.perplexity_ratio:.4f}\n"
        f"paired two-sided t-test: p = {paired.p_value:.3g}, {paired.verdict}"
    )


def _write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows under their names; the file appears only when it is whole."""
    with whole_file(path) as place, place.open("w", encoding="utf-8", newline="") as file:
        writer = DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def _check_files(sources: list[str], **files: Path | None) -> None:
    """Check the files of options before any work: each can be written, and nothing that is needed is replaced."""
    taken = {Path(source).resolve(): source for source in sources}
    for option, path in files.items():
        if path is None:
            continue
        check_file(path, f"--{option}")
        other = taken.setdefault(path.resolve(), f"--{option}")
        if other != f"--{option}" and (path.is_file() or not path.exists()):
            raise ValueError(f"--{option} {path} is the same file as {other}: choose another path.")
        if option == "records" and path.exists() and not path.is_file():
            raise ValueError(f"--records {path} is no regular file: what is written there cannot be read again.")


def _picture(path: Path, model: str, config: Any) -> Callable[[list[Any]], Path]:
    """Return what draws results to a file; what it needs of the configuration is there before they are measured."""
    from lex_hf.evaluation import plots, writing  # only here, because they take matplotlib

    known = writing.known_length(model, config)
    return lambda results: plots.save(writing.plot_lengths(model, known, results), path)


def _two(option: str, values: list[Any] | None) -> tuple[Any, Any]:
    """Read the values of an option for A and B."""
    given: list[Any] = [*values] if values else [None]
    if len(given) > 2:
        raise ValueError(f"{option} is given {len(given)} times: once for both models, or twice.")
    return given[0], given[-1]
