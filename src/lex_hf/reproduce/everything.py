"""Make several tables and figures, or all of both papers, and a page about them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from accelerate import PartialState
from rich.console import Console

from lex_hf.records import check_file, read_json, write_text
from lex_hf.reproduce import summary
from lex_hf.reproduce.corpora import Corpora
from lex_hf.reproduce.earlier import as_read
from lex_hf.reproduce.report import RECORD
from lex_hf.reproduce.running import Plan, Request, begin, heading, made, make
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

    After each table, the page about those that are done is written to `summary.md` in the output folder. It is also
    about other tables that were made there at the same scale, with the same settings and training texts.

    Args:
        request: As of [`plans`].
        console: Where progress is reported.

    Returns:
        The record of each table, by its name.

    Raises:
        KeyboardInterrupt: If training was stopped; the same call resumes it.
        ValueError: As [`begin`], before any work.
    """
    planned, records = plans(request), dict[str, dict[str, Any]]()
    if request.output.is_dir():
        check_file(request.output / summary.SUMMARY, "--output:")
    begin(planned)
    is_main = PartialState().is_main_process

    def say(text: str) -> None:
        if is_main:
            console.print(text, soft_wrap=True, highlight=False)

    others = _made_before(request, planned)
    for plan in planned:
        say(plan.table.name)
        records[plan.table.name] = make(plan, console)
        if is_main:
            done = {**others, **records}
            folders = {f"{name}-{plan.preset.name}": done[name] for name in TABLES if name in done}
            text = summary.render(folders, missing=len(planned) - len(records))
            write_text(request.output / summary.SUMMARY, text)
    say(f"The page about all of them is {request.output / summary.SUMMARY}")
    return records


def _made_before(request: Request, planned: Sequence[Plan]) -> dict[str, dict[str, Any]]:
    """Return the records of other tables that are in the output folder and were made as those planned."""
    found = {}
    for name in TABLES.keys() - {plan.table.name for plan in planned}:
        plan = Plan(replace(request, table=name), planned[0].texts)
        if (plan.folder / RECORD).is_file():
            record = read_json(plan.folder / RECORD)
            if not list(made(record).otherwise(made(as_read(heading(plan))))):
                found[name] = record
    return found
