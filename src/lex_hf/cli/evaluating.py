"""Perplexity: evaluate, compare."""

from csv import DictWriter
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from lex_hf.cli.options import (
    BatchSize,
    Contexts,
    Device,
    Dtype,
    Files,
    Json,
    Model,
    Pattern,
    Protocol,
    Records,
    StartToken,
    Stride,
    TextField,
    Trust,
)
from lex_hf.cli.printing import is_main_process, new_table, print_after, print_json, session
from lex_hf.records import check_file, whole_file


def evaluate(
    model: Model,
    files: Files,
    protocol: Protocol = "chunked",
    length: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Tokens in a segment, window or chunk; give it several times for a table."),
    ] = None,
    stride: Stride = None,
    contexts: Contexts = None,
    batch_size: BatchSize = "8",
    start_token: StartToken = True,
    records: Records = None,
    attention_pattern: Pattern = None,
    device: Device = None,
    dtype: Dtype = None,
    trust_remote_code: Trust = False,
    text_field: TextField = "text",
    csv: Annotated[Path | None, typer.Option(help="Write the table to this file, unrounded.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw perplexity against length to this PNG file.")] = None,
    as_json: Json = False,
) -> None:
    """Measure perplexity on texts, at one length or several.

    Under torchrun or accelerate launch the texts are shared out between the processes.
    """
    from lex_hf.data.documents import load_documents
    from lex_hf.evaluation.loading import load_for_evaluation
    from lex_hf.evaluation.perplexity import PerplexityOptions
    from lex_hf.evaluation.sweep import at_lengths, measure_lengths, of_pattern

    with session(as_json) as console:
        _check_plot(plot, length)
        _check_files(files, csv=csv, plot=plot, records=records)
        _check_records(records)
        options = PerplexityOptions(
            protocol=protocol,
            stride=stride,
            contexts=contexts,
            batch_size=_batch_size(batch_size),
            add_start_token=start_token,
            records=records,
        )
        by_length = at_lengths(options, length or ())
        texts = list(load_documents(files, text_field=text_field)["text"])
        network, tokenizer = load_for_evaluation(
            model, device=device, dtype=dtype, trust_remote_code=trust_remote_code, **of_pattern(attention_pattern)
        )
        known = None if plot is None else _known_length(model, network.config)
        results = measure_lengths(network, tokenizer, texts, by_length)
        if not is_main_process():
            return
        rows = [row for result in results for row in _perplexity_rows(result)]

    def show() -> None:
        if as_json:
            print_json([result.to_dict() for result in results])
        else:
            console.print(_perplexity_table(f"{model}: {len(texts)} texts, {protocol}", rows))

    print_after(
        show,
        lambda: None if csv is None else _write_csv(csv, rows),
        lambda: None if plot is None or known is None else _plot(plot, model, known, results),
    )


def compare(
    model_a: Annotated[str, typer.Argument(help="Folder or Hub id of model A with its tokenizer.")],
    model_b: Annotated[str, typer.Argument(help="The same of model B; it may be the same model.")],
    files: Files,
    protocol: Protocol = "chunked",
    length: Annotated[
        int | None, typer.Option(min=1, help="Tokens in a segment, window or chunk; A's training length by default.")
    ] = None,
    stride: Stride = None,
    batch_size: BatchSize = "8",
    start_token: StartToken = True,
    records: Records = None,
    attention_pattern: Annotated[
        list[str] | None,
        typer.Option(help="blockwise, sliding or full; twice for A and for B, once for both."),
    ] = None,
    device: Device = None,
    dtype: Dtype = None,
    trust_remote_code: Trust = False,
    text_field: TextField = "text",
    as_json: Json = False,
) -> None:
    """Compare two models on the same texts, paired by text: t-test, bootstrap interval, ratio of perplexities."""
    from lex_hf.data.documents import load_documents
    from lex_hf.evaluation import comparison
    from lex_hf.evaluation.perplexity import PerplexityOptions
    from lex_hf.evaluation.sweep import measure_pair

    with session(as_json) as console:
        patterns = _two_patterns(attention_pattern)
        _check_files(files, records=records)
        _check_records(records)
        options = PerplexityOptions(
            protocol=protocol,
            length=length,
            stride=stride,
            batch_size=_batch_size(batch_size),
            add_start_token=start_token,
            records=records,
        )
        texts = list(load_documents(files, text_field=text_field)["text"])
        results = measure_pair(
            (model_a, model_b),
            patterns,
            texts,
            loading={"device": device, "dtype": dtype, "trust_remote_code": trust_remote_code},
            options=options,
        )
    if not is_main_process():
        return
    both = dict(zip("ab", (result.to_dict() for result in results), strict=True))
    rows = [{"model": name} | _perplexity_rows(result)[-1] for name, result in zip("AB", results, strict=True)]
    if not as_json:  # also if they do not compare, as with different tokenizers
        console.print(_perplexity_table(f"A: {model_a}, B: {model_b}: {len(texts)} texts, {protocol}", rows))
    paired = comparison.compare(*results)
    if as_json:
        print_json({**paired.to_dict(), **both})
    else:
        _print_comparison(console, paired)


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


def _perplexity_table(title: str, rows: list[dict[str, Any]]) -> Table:
    caption = "low and high: 95 % interval of the perplexity, from a bootstrap over texts"
    table = new_table(title, caption)
    for column in rows[0]:
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*map(_cell, row.values()))
    return table


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:#.5g}" if isinstance(value, float) else str(value)


def _print_comparison(console: Console, paired: Any) -> None:
    low, high = paired.confidence_interval
    console.print(
        f"A minus B: {paired.difference:+.4f} nats per token, mean over {paired.n} texts "
        f"(95 % interval {low:+.4f} to {high:+.4f}); ratio of perplexities {paired.perplexity_ratio:.4f}",
        f"paired two-sided t-test: p = {paired.p_value:.3g}, {paired.verdict}",
        sep="\n",
    )


def _write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows under their names; the file appears only when it is whole."""
    with whole_file(path) as place, place.open("w", encoding="utf-8", newline="") as file:
        writer = DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def _check_plot(path: Path | None, lengths: list[int] | None) -> None:
    if path is not None and len(set(lengths or ())) < 2:
        raise ValueError("--plot draws perplexity against length: give --length at least twice.")


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


def _check_records(path: Path | None) -> None:
    if path is not None and path.exists() and not path.is_file():
        raise ValueError(f"--records {path} is no regular file: what is written there cannot be read again.")


def _known_length(model: str, config: Any) -> int:
    from lex_hf.evaluation.writing import known_length

    return known_length(model, config)


def _plot(path: Path, model: str, known: int, results: list[Any]) -> None:
    from lex_hf.evaluation import plots
    from lex_hf.evaluation.writing import plot_lengths

    plots.save(plot_lengths(model, known, results), path)


def _two_patterns(names: list[str] | None) -> tuple[str | None, str | None]:
    """Read the attention patterns of A and B."""
    patterns: list[str | None] = [*names] if names else [None]
    if len(patterns) > 2:
        raise ValueError(f"--attention-pattern is given {len(patterns)} times: once for both models, or twice.")
    return patterns[0], patterns[-1]
