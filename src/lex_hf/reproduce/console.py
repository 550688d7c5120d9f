"""A console for experiments and commands."""

from rich.console import Console


def plain_console(*, stderr: bool = False, quiet: bool = False) -> Console:
    """Return a console that prints texts as they are: `[red]` and `:smile:` in a path are part of its name."""
    return Console(stderr=stderr, quiet=quiet, markup=False, emoji=False, highlight=False)
