"""Make several tables and figures, or all of both papers, and a page about them."""

from dataclasses import replace
from typing import Any

from accelerate import PartialState
from rich.console import Console

from lex_hf.evaluation.loading import find_device
from lex_hf.records import check_file, write_text
from lex_hf.reproduce import models, summary
from lex_hf.reproduce.corpora import Corpora
from lex_hf.reproduce.running import Plan, Request, check_output, run
from lex_hf.reproduce.tables import TABLES

ALL = "all"


def is_several(table: str) -> bool:
    """Return whether a request's `table` names more than one."""
    return table == ALL or "," in table


def plans(request: Request) -> list[Plan]:
    """Plan several tables.

    Args:
        request: What to make; its `table` is `all`, or names with commas between them.

    Raises:
        ValueError: If a name is given twice, or the request cannot be met for one of them.
    """
    names = list(TABLES) if request.table == ALL else [name.strip() for name in request.table.split(",")]
    if request.also:
        raise ValueError(f"--also {request.also[0]} is for one table, not for {request.table}: give one table's name.")
    if alone := [name for name in names if name not in TABLES]:
        raise ValueError(
            f"{request.table}: {alone[0]!r} cannot be one of several. Give names of tables with commas between them "
            f"({', '.join(TABLES)}), or 'all', or one name."
        )
    if len(set(names)) < len(names):
        raise ValueError(f"{request.table}: a table is named twice.")
    texts = Corpora(request.data, request.tests)
    return [Plan(replace(request, table=name), texts) for name in names]


def run_several(request: Request, *, console: Console) -> dict[str, dict[str, Any]]:
    """Make several tables; models, which they share, and measurements that are there are not made again.

    After each table, the page about those that are done is written to `summary.md` in the output folder.

    Args:
        request: As of [`plans`].
        console: Where progress is reported.

    Returns:
        The record of each table, by its name.

    Raises:
        KeyboardInterrupt: If training was stopped; the same call resumes it.
        ValueError: As [`run`], before any work.
    """
    planned, records, folders = plans(request), dict[str, dict[str, Any]](), dict[str, dict[str, Any]]()
    find_device(request.device)
    models.join_processes(request.output)
    is_main = PartialState().is_main_process

    def say(text: str) -> None:
        if is_main:
            console.print(text, soft_wrap=True, highlight=False)

    if request.output.is_dir():
        check_file(request.output / summary.SUMMARY, "--output:")
    for plan in planned:
        check_output(plan)
    for plan in planned:
        say(plan.table.name)
        records[plan.table.name] = folders[plan.folder.name] = run(plan.request, plan.texts, console=console)
        if is_main:
            text = summary.render(folders, missing=len(planned) - len(folders))
            write_text(request.output / summary.SUMMARY, text)
    say(f"The page about all of them is {request.output / summary.SUMMARY}")
    return records
