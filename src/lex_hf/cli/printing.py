"""Output of commands: tables, JSON, and results that are printed whatever becomes of the files."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Column, Table

from lex_hf.records import to_json
from lex_hf.reproduce.console import plain_console

_IS_QUIET = ContextVar("_IS_QUIET", default=False)
# What libraries read when they are imported, which commands do after their options are known.
_WITHOUT_PROGRESS = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",  # transformers' bars, too
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "TQDM_DISABLE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "DATASETS_VERBOSITY": "error",
}


@contextlib.contextmanager
def quietly(wanted: bool) -> Iterator[None]:
    """Let libraries and [`notices`] say nothing, if that is wanted."""
    if wanted:
        os.environ.update(_WITHOUT_PROGRESS)
    token = _IS_QUIET.set(wanted)
    try:
        yield
    finally:
        _IS_QUIET.reset(token)


def notices() -> Console:
    """Return the console for what is said on the way to a result: standard error, or nothing with `--quiet`."""
    return plain_console(stderr=True, quiet=_IS_QUIET.get())


@contextlib.contextmanager
def session(as_json: bool = False, *, prints: bool = False) -> Iterator[Console]:
    """Keep standard output free for results: what libraries print goes to standard error, or nowhere with `--quiet`.

    Args:
        as_json: Whether the result is JSON, beside which nothing else may be printed.
        prints: Whether the command writes a text to standard output meanwhile.

    Yields:
        A console for results in words: standard output, or standard error if the result is JSON.
    """
    console = plain_console(file=sys.stderr if as_json else sys.stdout)
    with contextlib.ExitStack() as stack:
        if as_json or not prints:
            nowhere = stack.enter_context(Path(os.devnull).open("w")) if _IS_QUIET.get() else None
            stack.enter_context(contextlib.redirect_stdout(nowhere or sys.stderr))
        yield console


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
) -> Group:
    """Return a table with its title above and its caption below; columns without any entry are left out."""
    cells = [list(row) for row in rows]
    filled = [any(column) for column in zip(*cells, strict=True)]
    heads = [Column(head) if isinstance(head, str) else head for head in columns]
    table = Table(
        *(head for head, shown in zip(heads, filled or [True] * len(heads), strict=True) if shown),
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
    )
    for row in cells:
        table.add_row(*(cell for cell, shown in zip(row, filled, strict=True) if shown))
    return Group(title, table, *([] if caption is None else [caption]))
