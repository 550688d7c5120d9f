"""Time and memory of LEX, of the models a user would pick instead, and of the machine's limits, in one run."""

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from derived import targets
from measurements import measure
from record import Record, write_whole
from report import render, save_picture, section, summary, tables, verdict
from rich.console import Console
from settings import ON_CPUS, PARTS, PRESETS, Settings

app = typer.Typer(
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command()
def main(
    preset: Annotated[str, typer.Option(help=f"{' or '.join(PRESETS)}: what to begin with.")] = "cpu",
    layers: Annotated[int | None, typer.Option(help="Number of decoder layers.")] = None,
    lengths: Annotated[str | None, typer.Option(help="Lengths of the prefill in tokens, as 1024,4096.")] = None,
    contexts: Annotated[str | None, typer.Option(help="Contexts of decoding in tokens, as 1024,8192.")] = None,
    repeats: Annotated[int | None, typer.Option(help="Most calls of each system at each length.")] = None,
    only: Annotated[str | None, typer.Option(help=f"Some of {','.join(PARTS)}; all by default.")] = None,
    compiled: Annotated[
        bool, typer.Option("--compile", help="Measure compiled decoding (static cache) and training, too.")
    ] = False,
    output: Annotated[Path, typer.Option(help="Folder for record, tables and picture.")] = Path("measured/benchmark"),
    render_record: Annotated[
        Path | None, typer.Option("--render", help="Measure nothing; show this record in README, and keep it there.")
    ] = None,
    check_record: Annotated[
        Path | None, typer.Option("--check", help="Measure nothing; fail unless this record meets all targets.")
    ] = None,
) -> None:
    """Measure prefill, decoding, training and streaming evaluation, side by side."""
    console = Console()
    with _explained():
        if render_record is not None:
            render(Record.read(render_record))
        elif check_record is not None:
            record = Record.read(check_record)
            console.print(verdict(record).rich())
            raise typer.Exit(0 if all(each.verdict == "holds" for each in targets(record)) else 1)
        else:
            parts = _parts(only, preset)
            settings = _settings(preset, layers, repeats, _numbers("lengths", lengths), _numbers("contexts", contexts))
            record = Record.begin(preset, _command(sys.argv), settings)
            measure(record, parts, compiled=compiled, console=console)
            record.finish()
            _keep(record, output)
            _show(record, console)
            console.print(f"Written to {output}.", markup=False)


def _parts(only: str | None, preset: str) -> list[str]:
    is_on_cpu = PRESETS.get(preset, {}).get("device", "cpu") == "cpu"
    here = [part for part in PARTS if is_on_cpu or part not in ON_CPUS]
    if only is None:
        return [preset] if preset in PARTS else here
    parts = only.split(",")
    for part in parts:
        if part in PARTS and part not in here:
            raise ValueError(f"--only {only}: {part} is measured on a CPU; leave it out, or use --preset cpu.")
        if part not in PARTS:
            raise ValueError(f"--only {only}: {part!r} is none of {', '.join(PARTS)}. Separate them by commas.")
    return parts


def _numbers(option: str, text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError as error:
        raise ValueError(f"--{option} {text}: give whole numbers, separated by commas, as 1024,4096.") from error


def _settings(
    preset: str,
    layers: int | None,
    repeats: int | None,
    lengths: tuple[int, ...] | None,
    contexts: tuple[int, ...] | None,
) -> Settings:
    if preset not in PRESETS:
        raise ValueError(f"--preset {preset}: it must be one of {', '.join(PRESETS)}.")
    given: dict[str, Any] = {"layers": layers, "repeats": repeats, "lengths": lengths, "contexts": contexts}
    settings = replace(Settings(**PRESETS[preset]), **{name: each for name, each in given.items() if each is not None})
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--preset {preset}: torch finds no CUDA device here. Use --preset cpu.")
    return settings


def _command(arguments: list[str]) -> str:
    """What was typed, without the folders of this machine."""
    kept, rest = list[str](), iter(arguments[1:])
    for argument in rest:
        if argument == "--output":
            next(rest)
        elif not argument.startswith("--output="):
            kept.append(argument)
    return shlex.join(["python", "benchmarks/run.py", *kept])


def _keep(record: Record, folder: Path) -> None:
    """Write record, tables and picture."""
    folder.mkdir(parents=True, exist_ok=True)
    record.write(folder / "record.json")
    save_picture(record, folder)
    write_whole(folder / "tables.md", section(record))


def _show(record: Record, console: Console) -> None:
    console.print(summary(record), markup=False, highlight=False, soft_wrap=True)
    for table in (*tables(record), verdict(record)):
        console.print(table.rich())


@contextmanager
def _explained() -> Iterator[None]:
    """Say in a sentence what was wrong with the input."""
    try:
        yield
    except (ValueError, OSError) as error:
        Console(stderr=True).print(f"Error: {error}", markup=False, highlight=False)
        raise typer.Exit(1) from error


if __name__ == "__main__":
    app()
