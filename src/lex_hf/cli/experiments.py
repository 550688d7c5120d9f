"""Experiments: demo, extrapolation, reproduce."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Column

from lex_hf.cli.options import LARGEST_SEED, MOST, Assignments, Device, Json
from lex_hf.cli.printing import is_main_process, new_table, notices, number, print_json, session
from lex_hf.cli.ways import tables

if TYPE_CHECKING:
    from lex_hf.reproduce.running import Request

_STUDIES = ("ways-to-read", "recall")


def demo(
    output: Annotated[Path, typer.Option(help="Folder for models, results and the plot.")] = Path("demo_output"),
    steps: Annotated[int, typer.Option(min=1, max=MOST, help="Optimiser steps for each of the two models.")] = 600,
    generate: Annotated[int, typer.Option(min=1, max=MOST, help="Tokens to generate.")] = 2000,
) -> None:
    """Train a tiny LEX on Python's own library, evaluate it at 16 times its training length, generate."""
    from lex_hf.reproduce import demo as story

    with session() as console:
        story.run(output, steps=steps, generate=generate, console=console)


def extrapolation(
    output: Annotated[Path, typer.Option(help="Folder for models, table, plot and JSON; used again if it exists.")],
    scheme: Annotated[list[str] | None, typer.Option(help="A position scheme; all of them by default.")] = None,
    seed: Annotated[
        list[int] | None, typer.Option(min=0, max=LARGEST_SEED, help="A seed; 0 and 1 by default.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, max=MOST, help="Optimiser steps of each model.")] = 1500,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an earlier table of other steps, or of more schemes or seeds.")
    ] = False,
) -> None:
    """Train a tiny model for each position scheme and compare them at up to 16 times the training length."""
    from lex_hf.model.positions_lex import SCHEMES
    from lex_hf.reproduce import extrapolation as comparison

    with session() as console:
        comparison.run(
            output,
            schemes=scheme or tuple(SCHEMES),
            seeds=seed or (0, 1),
            steps=steps,
            overwrite=overwrite,
            console=console,
        )


def reproduce(
    table: Annotated[
        str,
        typer.Argument(
            help="lex-table2 … lex-table6, lex-figure1, lex-figure2 (arXiv 2212.10554); sandwich-table1, -table2, "
            "-table3, -table5, sandwich-figure4 … -figure7, -figure11 (arXiv 2212.10356); ways-to-read: a tiny Llama "
            "and GPT-NeoX, read beyond their training length in all ways that need no training; recall: which systems "
            "find what was said far back, and what it costs. Names with commas between them, or all for both papers: "
            "models are shared, and a page about the tables is written."
        ),
    ],
    preset: Annotated[
        str,
        typer.Option(
            help="tiny (two CPU cores), small (a night of them, or a GPU) or paper (as printed, on a cluster)."
        ),
    ] = "tiny",
    output: Annotated[
        Path, typer.Option(help="Folder for models, which all tables made there share, and reports.")
    ] = Path("reproduction"),
    data: Annotated[
        list[str] | None,
        typer.Option(help="Texts to train on, as of train; several times. With tiny, Python's own library if none."),
    ] = None,
    test: Annotated[
        list[str] | None,
        typer.Option(help="Texts to test on, NAME=FILE; several times, the same name to put files together."),
    ] = None,
    seeds: Annotated[str, typer.Option(help="Seeds, with commas between them.")] = "0,1,2",
    steps: Annotated[
        int | None, typer.Option(min=1, max=MOST, help="Optimiser steps; the preset's by default.")
    ] = None,
    length: Annotated[
        int | None, typer.Option(min=8, max=MOST, help="l: tokens in a training example; the preset's by default.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="bytes, bpe:SIZE, or a folder or Hub id; the preset's by default.")
    ] = None,
    also: Annotated[
        list[str] | None,
        typer.Option(help="A further system, e.g. sandwich, kerple+bca, rope+sliding; several times."),
    ] = None,
    assignments: Assignments = None,
    segments: Annotated[
        int | None, typer.Option(min=1, help="Segments whose last tokens are scored; the preset's by default.")
    ] = None,
    device: Device = None,
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="Replace an earlier report of other settings, or of more seeds or texts."),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Only list what would be trained and measured, and say if an earlier report would be lost.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Make tables or figures of the papers again: train what is missing, measure, compare, report.

    A run that was stopped or killed continues when the same command is given again.
    """
    if table in _STUDIES:
        own = {"data": data, "test": test, "overwrite": overwrite or None}
        sizes = {"length": length, "tokenizer": tokenizer, "set": assignments, "segments": segments}
        others = sizes | {"also": also, "device": device}
        _check_study(table, preset, {**others, "dry-run": dry_run or None, **({} if table == "recall" else own)})
        if table == "recall":
            _reproduce_recall(output, steps, _seeds(seeds), data or (), test or (), overwrite, as_json)
        else:
            _reproduce_ways(output, steps, _seeds(seeds)[:1], as_json)
        return
    from lex_hf.reproduce import everything, running

    with session(as_json) as console:
        request = running.Request(
            table=table,
            preset=preset,
            output=output,
            data=data or (),
            tests=test or (),
            seeds=_seeds(seeds),
            steps=steps,
            length=length,
            tokenizer=tokenizer,
            also=also or (),
            fields=assignments or (),
            segments=segments,
            device=device,
            overwrite=overwrite,
        )
        result: dict[str, Any]
        if dry_run:
            result = _plan(request, console, quiet=as_json)
        elif everything.is_several(table):
            result = everything.run_several(request, console=notices())
        else:
            result = running.run(request, console=notices())
    if as_json and is_main_process():
        print_json(result)


def _check_study(name: str, preset: str, others: Mapping[str, Any]) -> None:
    """Refuse options that a study does not have."""
    given = [f"--{option}" for option, value in others.items() if value is not None]
    if preset != "tiny" or given:
        raise ValueError(
            f"{name} has the preset tiny alone, and no {given[0] if given else '--preset ' + preset}; for models and "
            f"texts of your own, see lex-hf {name}."
        )


def _reproduce_ways(output: Path, steps: int | None, seeds: list[int], as_json: bool) -> None:
    """Train tiny models of other families, and read with them in all ways; the first seed counts."""
    from lex_hf.reproduce import ways

    with session(as_json) as console:
        results = ways.run(output, steps=steps or ways.STEPS, seed=seeds[0] if seeds else 0, console=notices())
    if as_json:
        print_json({kind: result.to_dict() for kind, result in results.items()})
        return
    console.print(*(tables(result.ways) for result in results.values()), sep="\n")
    for result in results.values():
        shares = ", ".join(f"{share:.1%}" for share in result.first_tokens[:, :, 0].mean(dim=1).tolist())
        console.print(f"{result.ways.model}: the first token draws {shares} of the attention, by layer")


def _reproduce_recall(
    output: Path,
    steps: int | None,
    seeds: list[int],
    data: Sequence[str],
    tests: Sequence[str],
    overwrite: bool,
    as_json: bool,
) -> None:
    """Train tiny models of many systems, and measure what they recall, by distance."""
    from lex_hf.reproduce import recall

    with session(as_json):
        record = recall.run(
            output,
            steps=steps or recall.STEPS,
            seeds=seeds,
            data=data,
            tests=tests,
            overwrite=overwrite,
            console=notices(),
        )
    if as_json and is_main_process():
        print_json(record)


def _seeds(text: str) -> list[int]:
    """Read whole numbers with commas or spaces between them."""
    words = text.replace(",", " ").split()
    if not all(word.isdecimal() for word in words):
        raise ValueError(f"--seeds {text}: they must be whole numbers with commas between them, e.g. 0,1,2.")
    return [int(word) for word in words]


def _plan(request: "Request", console: Console, *, quiet: bool) -> dict[str, Any]:
    """Return the plan of a table, or those of several by name; print them, and then why they would be refused."""
    from lex_hf.reproduce import everything, running

    is_several = everything.is_several(request.table)
    planned = everything.plans(request) if is_several else [running.Plan(request)]
    found = {plan.table.name: plan.to_dict() for plan in planned}
    result = found if is_several else found[request.table]
    if not quiet:
        (_print_several if is_several else _print_reproduction)(console, result)
    for plan in planned:
        if plan.has_data or not plan.trains:  # else texts are yet to be named, and so is what the report is of
            running.check_output(plan)
    return result


def _print_several(console: Console, plans: dict[str, Any]) -> None:
    """Print how much several tables train, together."""
    columns = [Column("table"), *map(number, ("models", "to train", "tokens to train on"))]
    rows, new = [], dict[str, int]()
    for name, plan in plans.items():
        missing = {model["name"]: model["tokens"] for model in plan["models"] if model["state"] != "trained"}
        rows.append((name, str(len(plan["models"])), str(len(missing)), str(sum(missing.values()))))
        new |= missing
    scale = next(iter(plans.values()))["preset"]
    caption = f"tables share models: {len(new)} are to be trained, on {sum(new.values())} tokens together"
    console.print(new_table(f"{len(plans)} tables at the scale {scale}", columns, rows, caption))


def _print_reproduction(console: Console, plan: dict[str, Any]) -> None:
    """Print what would be trained, and then measured."""
    missing = [model for model in plan["models"] if model["state"] != "trained"]
    title = f"{plan['table']} at the scale {plan['preset']}, l = {plan['training_length']}"
    tokens = sum(model["tokens"] for model in missing)
    caption = f"{len(missing)} of {len(plan['models'])} models are to be trained, on {tokens} tokens together"
    names = ("seed", "parameters", "steps", "tokens")
    columns = [Column("systems", overflow="fold"), *map(number, names), Column("state", no_wrap=True)]
    rows = [
        (", ".join(model["systems"]), *(str(model[name]) for name in names), model["state"])
        for model in plan["models"]
    ]
    console.print(new_table(title, columns, rows, caption))
    lengths = ", ".join(map(str, plan["lengths"]))
    console.print(
        f"Measured: {plan['measure']} at {lengths} tokens, of {len(plan['evaluations'])} systems, on "
        + (", ".join(texts["name"] for texts in plan["tests"]) or "no texts")
    )
