"""One page about all tables and figures: what the papers claim, and whether it holds here; from the records alone."""

from collections.abc import Iterator, Mapping
from typing import Any

from lex_hf.reproduce.report import (
    REPORT,
    comparison_table,
    counted,
    evidence,
    heading_of,
    markdown_table,
    picture_names,
    relation,
    with_lengths,
)

SUMMARY = "summary.md"
_KINDS = {"claim": "claims of the text", "order": "pairs of systems", "trend": "steps in length"}
_ANSWERED = "agrees"

Record = Mapping[str, Any]


def render(records: Mapping[str, Record], missing: int = 0) -> str:
    """Render the summary as Markdown.

    Args:
        records: By the name of the folder that holds it, beside the summary, the record of each table or figure.
        missing: How many tables and figures were not made.
    """
    blocks = [
        "# The tables and figures of the papers, made again",
        *_introduction(records, missing),
        _overview(records),
        "## What does not agree",
        *_open(records),
    ]
    for folder, record in records.items():
        blocks += [f"## {_title(record)}", *_details(folder, record)]
    return "\n\n".join(blocks) + "\n"


def _introduction(records: Mapping[str, Record], missing: int) -> Iterator[str]:
    if missing:
        yield f"**{missing} of {missing + len(records)} are not made yet.**"
    yield (
        "A claim is a sentence of a paper's text. Pairs of systems and steps in length are relations of the numbers "
        "that a paper prints: which of two systems is lower at a length, and whether one rises or falls from a length "
        "to the next. Each is tested here by a paired two-sided t-test over the seeds, at 0.05: it agrees or "
        "disagrees if the test is significant. Whoever tests hundreds of relations finds some by chance, about one in "
        "forty of those that do not exist in each direction."
    )


def _overview(records: Mapping[str, Record]) -> str:
    head = ["made again", "what it shows", "seeds", "texts", *_KINDS.values()]
    return markdown_table(head, [row for each in records.items() for row in _overview_rows(*each)], words=len(head))


def _overview_rows(folder: str, record: Record) -> Iterator[list[str]]:
    link, seeds = f"[{_title(record)}]({folder}/{REPORT})", str(len(record["seeds"]) or "")
    for name, result in record["results"].items():
        counts = [counted(_verdicts(result, kind)) for kind in _KINDS]
        yield [link, record["published"]["title"], seeds, heading_of(name, result), *counts]


def _title(record: Record) -> str:
    return f"{record['published']['where']} of {record['published']['id']}"


def _verdicts(result: Mapping[str, Any], kind: str) -> list[str]:
    """Verdicts of the claims, or of all relations of numbers."""
    chosen = [each for each in result["statements"] if each["kind"] == kind]
    if kind == "claim":
        return [each["verdict"] for each in chosen]
    return [part["verdict"] for each in chosen for part in each["parts"]]


def _open(records: Mapping[str, Record]) -> Iterator[str]:
    """Say which claims do not agree, with the evidence, and what is known of the printed figures."""
    yield "Claims of the papers' text that our measurements contradict, or leave open:"
    for record in records.values():
        lines = [line for name, result in record["results"].items() for line in _open_claims(record, name, result)]
        if lines:
            note = record["published"]["note"]
            yield "\n".join([f"**{_title(record)}**" + (f" ({note})" if note else ""), "", *lines])


def _open_claims(record: Record, name: str, result: Mapping[str, Any]) -> Iterator[str]:
    for each in result["statements"]:
        if each["kind"] == "claim" and each["verdict"] != _ANSWERED:
            yield f"- {name}, **{each['verdict']}**: {with_lengths(record, each['text'])}"
            parts = [part for part in each["parts"] if part["verdict"] != _ANSWERED]
            yield from (f"  - {relation(record, part)}: {evidence(record, part)}" for part in parts)


def _details(folder: str, record: Record) -> Iterator[str]:
    paper = record["published"]
    yield f"{paper['title']}. [Report with all tests]({folder}/{REPORT})."
    if paper["note"]:
        yield f"On the printed figures: {paper['note']}"
    for name, result in record["results"].items():
        yield f"### {heading_of(name, result)}"
        claims = [each for each in result["statements"] if each["kind"] == "claim"]
        if claims:
            yield "\n".join(f"- **{each['verdict']}**: {with_lengths(record, each['text'])}" for each in claims)
        yield comparison_table(record, result)
        yield from (f"![{heading_of(name, result)}]({folder}/{file})" for file in picture_names(record, name))
