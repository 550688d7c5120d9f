"""A console for experiments and commands."""

from typing import IO

from rich.console import Console


def plain_console(*, file: IO[str] | None = None, stderr: bool = False, quiet: bool = False) -> Console:
    """Return a console that prints texts as they are: `[red]` and `:smile:` in a path are part of its name."""
    return Console(file=file, stderr=stderr, quiet=quiet, markup=False, emoji=False, highlight=False)
