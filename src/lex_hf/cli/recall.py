"""How far back a model finds what it is asked for: recall."""

from typing import Annotated, Any

import typer
from rich.console import Group
from rich.table import Column

from lex_hf.cli import options
from lex_hf.cli.printing import new_table, number, session, show


def recall(
    model: options.Model,
    files: Annotated[
        list[str] | None,
        typer.Argument(
            help="Texts that hide the pairs, as of evaluate; or .jsonl with lists of token ids in input_ids, for any "
            "model; filler of our own by default."
        ),
    ] = None,
    distance: Annotated[
        list[int] | None,
        typer.Option(
            min=1, help="Tokens from a value to its question; several times; 1/2 to 8 training lengths by default."
        ),
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Texts for each distance.")] = 100,
    pairs: Annotated[int, typer.Option(min=1, help="Keys with values in a text, of which one is asked for.")] = 4,
    candidates: Annotated[
        int, typer.Option(min=2, help="Values that are compared: those of all pairs, and others.")
    ] = 8,
    sentence: Annotated[
        str | None, typer.Option(help="A pair, with {key} and {value}; 'The code of {key} is {value}.' if none.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=options.LARGEST_SEED, help="Of the texts.")] = 0,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Texts read at once; as many as have 32768 tokens together by default.")
    ] = None,
    attention_pattern: options.Patterns = None,
    way: Annotated[
        list[str] | None,
        typer.Option(help="A way to read of ways-to-read, e.g. unchanged, yarn or blockwise; several times."),
    ] = None,
    training_length: Annotated[
        int | None, typer.Option(min=2, help="Tokens that it was trained to read; as its configuration says if none.")
    ] = None,
    start_token: options.StartToken = True,
    output: options.Output = None,
    blockwise: options.Blockwise = None,
    sinks: options.Sinks = 0,
    blockwise_layer: options.BlockwiseLayers = None,
    yarn_factor: options.YarnFactor = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    trust_remote_code: options.Trust = False,
    text_field: options.TextField = "text",
    as_json: options.Json = False,
) -> None:
    """Measure how often a model finds a value hidden far back in a text, by distance."""
    from lex_hf.evaluation.recall import RecallOptions
    from lex_hf.evaluation.recall_plot import plot_recall
    from lex_hf.evaluation.recall_readings import loader, measure_readings
    from lex_hf.evaluation.recall_tasks import SENTENCE
    from lex_hf.evaluation.writing import check_measurements, write_measurements

    with session(as_json) as console:
        if output is not None:
            check_measurements(output, "recall")
        chosen = RecallOptions(
            distances=distance or None,
            num_samples=samples,
            num_pairs=pairs,
            num_candidates=candidates,
            seed=seed,
            batch_size=batch_size,
        )
        if way and blockwise is not None:
            raise ValueError(
                f"--blockwise {blockwise}: with --way, blocks are a way of their own; give --way blockwise."
            )
        loading = options.loading(device, dtype, trust_remote_code, blockwise, sinks, blockwise_layer, yarn_factor)
        asked = SENTENCE if sentence is None else options.typed(sentence, "--sentence")
        load = loader(
            model,
            files or (),
            text_field=text_field,
            sentence=asked,
            add_start_token=start_token,
            loading=loading,
        )
        results = measure_readings(
            load, chosen, patterns=attention_pattern or (), ways=way or (), training_length=training_length
        )
    title = f"{model}: recall, {samples} texts for each distance"
    numbers = {name: result.to_dict() for name, result in results.items()}
    pictures = {"recall": lambda: plot_recall(results, title=title)}
    show(
        console,
        as_json,
        numbers,
        tables(results, title),
        lambda: None if output is None else write_measurements(output, "recall", numbers, pictures),
    )


def tables(results: dict[str, Any], title: str) -> Group:
    """Return a row for each distance of each reading, and what could not be measured."""
    first = next(iter(results.values()))
    columns = ("distance", "right (95 %)", "written (95 %)", "margin")
    rows, problems = [], []
    for name, result in results.items():
        measured = [point for point in result.points if point.problem is None]
        names = [name, *[""] * len(measured)]
        rows += [[shown, *_cells(point)] for shown, point in zip(names, measured, strict=False)]
        refused = [point for point in result.points if point.problem is not None]
        problems += [f"{name}, distance {point.distance}: {point.problem}" for point in refused]
    caption = (
        f"% of texts; right: the most probable of {first.num_candidates} values, chance {100 * first.chance:.1f}; "
        "written: by greedy decoding; margin: log-probability above the best other value, in nats"
    )
    table = new_table(title, [Column("reading", overflow="fold"), *map(number, columns)], rows, caption)
    return Group(table, *problems)


def _cells(point: Any) -> list[str]:
    right, written = _share(point.accuracy, point.accuracy_interval), _share(point.exact_match, point.exact_interval)
    return [str(point.distance), right, written, f"{point.margin:+.2f}"]


def _share(share: float, interval: tuple[float, float]) -> str:
    """Percent, with an interval in whole percent."""
    low, high = (f"{100 * end:.0f}" for end in interval)
    return f"{100 * share:.1f} ({low:>2} - {high:>3})"
