"""Output of commands: tables, JSON, and results that are printed whatever becomes of the files."""

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from rich import box
from rich.console import Console, RenderableType
from rich.table import Column, Table

from lex_hf.records import to_json
from lex_hf.reproduce.console import plain_console


@contextlib.contextmanager
def session(as_json: bool = False) -> Iterator[Console]:
    """Keep standard output free for JSON, where libraries print."""
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        yield plain_console(stderr=as_json)


def is_main_process() -> bool:
    """Return whether this process, of those of a launcher, is the one that prints and writes."""
    from accelerate import PartialState

    return PartialState().is_main_process


def print_json(value: Any) -> None:
    """Print a result as JSON, in one line."""
    print(to_json(value))  # noqa: T201


def show(console: Console, as_json: bool, result: Any, shown: RenderableType, *writing: Callable[[], object]) -> None:
    """Write a result to files and print it, as JSON or as what is shown; each is done whatever becomes of the others.

    It is printed last, after a [`session`], which keeps standard output free.
    """
    with contextlib.ExitStack() as stack:
        if as_json:
            stack.callback(print_json, result)
        else:
            stack.callback(console.print, shown)
        for write in reversed(writing):
            stack.callback(write)


def number(name: str) -> Column:
    """Return a column of numbers, which are not wrapped."""
    return Column(name, justify="right", no_wrap=True)


def new_table(
    title: str, columns: Iterable[Column | str], rows: Iterable[Iterable[str]], caption: str | None = None
) -> Table:
    """Return a table whose cells have space between them and no lines."""
    table = Table(*columns, title=title, caption=caption, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for row in rows:
        table.add_row(*row)
    return table
