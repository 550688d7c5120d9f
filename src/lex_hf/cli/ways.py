"""Ways to read beyond the training length, beside each other: ways-to-read."""

from typing import Annotated, Any

import typer
from rich.console import Group
from rich.table import Column

from lex_hf.cli import options
from lex_hf.cli.printing import new_table, notices, number, session, show

_BYTES_PER_KIB = 1024


def ways_to_read(
    model: Annotated[str, typer.Argument(help="Folder or Hub id of a model with rotary positions.")],
    files: Annotated[
        list[str],
        typer.Argument(help="Texts, as of evaluate; or .jsonl with lists of token ids in input_ids, for any model."),
    ],
    training_length: Annotated[
        int | None, typer.Option(min=1, help="Tokens that it was trained to read; as its configuration says if none.")
    ] = None,
    length: Annotated[
        int | None, typer.Option(min=2, help="Tokens of a text that are read; at most 32 training lengths by default.")
    ] = None,
    texts: Annotated[int, typer.Option(min=1, help="Number of texts, the first ones.")] = 8,
    way: Annotated[
        list[str] | None,
        typer.Option(
            help="unchanged, linear, dynamic, yarn, self-extend, dual-chunk, sliding, streaming, blockwise, "
            "blockwise-sinks; several times; all by default."
        ),
    ] = None,
    start_token: options.StartToken = True,
    output: options.Output = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    trust_remote_code: options.Trust = False,
    text_field: options.TextField = "text",
    as_json: options.Json = False,
) -> None:
    """Read long texts with a model in all ways that need no training: perplexity by position, memory, time.

    Self-Extend, Dual Chunk Attention and StreamingLLM are references that are slow, so they are not timed.
    """
    import torch

    from lex_hf.data.token_ids import load_token_ids
    from lex_hf.evaluation.loading import load_without_tokenizer
    from lex_hf.evaluation.ways import measure_ways, read_texts
    from lex_hf.evaluation.writing import check_measurements, write_measurements

    with session(as_json) as console:
        if output is not None:
            check_measurements(output, "ways-to-read")
        loading: dict[str, Any] = {"device": device, "dtype": dtype, "trust_remote_code": trust_remote_code}
        ids = load_token_ids(files)
        if ids is None:
            network, read = read_texts(model, files, texts, text_field, start_token, length, loading)
        else:
            network, read = load_without_tokenizer(model, **loading), [torch.tensor(each) for each in ids[:texts]]
        result = measure_ways(
            network, read, training_length, name=model, longest=length, ways=way, report=notices().print
        )
    numbers, pictures = result.to_dict(), {"ways-to-read": result.plot}
    show(
        console,
        as_json,
        numbers,
        tables(result),
        lambda: None if output is None else write_measurements(output, "ways-to-read", numbers, pictures),
    )


def tables(result: Any) -> Group:
    """Return perplexities, costs, and what could not be measured."""
    measured = [way for way in result.ways if way.problem is None]
    buckets = [f"{first}-{last}" for first, last in result.buckets]
    title = f"{result.model}: perplexity by tokens read before, training length {result.training_length}"
    names = Column("way to read", overflow="fold")
    perplexity = new_table(
        title, [names, *map(number, buckets)], ([way.name, *map(_cell, way.perplexity)] for way in measured)
    )
    costs = new_table(
        f"{result.model}: after {result.longest} tokens",
        [names, "memory", *map(number, ("keys and values", "prefill", "per token"))],
        ([way.name, way.memory, _kib(way), _time(way.prefill_seconds), _time(way.decode_seconds)] for way in measured),
        "KiB that are kept, as counted in the cache; of references without a cache, and without times, as computed",
    )
    problems = [f"{way.name}: {way.problem}" for way in result.ways if way.problem is not None]
    return Group(perplexity, costs, *problems)


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:#.3g}".removesuffix(".")


def _kib(way: Any) -> str:
    size = way.bytes_kept if way.bytes_counted is None else way.bytes_counted
    return f"{size / _BYTES_PER_KIB:,.1f} KiB"


def _time(seconds: float | None) -> str:
    return "" if seconds is None else f"{1000 * seconds:.2f} ms"
