"""Output of commands: tables, JSON, and results that are printed whatever becomes of the files."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

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


def print_after(printing: Callable[[], None], *writing: Callable[[], None]) -> None:
    """Write results and print them; each is done whatever becomes of the others, printing last."""
    with contextlib.ExitStack() as stack:
        for each in (printing, *reversed(writing)):
            stack.callback(each)


def new_table(title: str, caption: str | None = None) -> Table:
    """Return a table whose cells have space between them and no lines."""
    return Table(title=title, caption=caption, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
