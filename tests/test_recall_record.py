"""Pages show what the records of `lex-hf reproduce recall` say."""

import json
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from lex_hf.reproduce import recall_report
from lex_hf.reproduce.report import markdown_table

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "notebooks/recall"
BLOCKS, WHOLE = "xPos, blocks", "no positions, full"
HYBRIDS = [f"1 full in {share}, no positions" for share in (8, 4, 2)]
SCALED = [f"{name}, log scaling" for name in HYBRIDS]
ROTARY = [f"1 full in 4, {scheme}" for scheme in ("RoPE", "xPos")]
LONG_BLOCKS = "1 full in 4, no positions, blocks of l/2"
LLAMA = "Llama, blockwise, 1 full in 4, from layer 1"
YARN = f"{LLAMA}, YaRN in these"


@cache
def record(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / name / "record.json").read_text(encoding="utf-8"))
    return found


def system(texts: str, name: str) -> dict[str, Any]:
    (found,) = [each for each in record(texts)["systems"] if each["name"] == name]
    return found


def recalls(name: str, multiple: float) -> list[float]:
    """Percent of values that are written, at a multiple of l, one for each seed."""
    distance = multiple * record("words")["training_length"]
    points = [point for seed in system("words", name)["recall"] for point in seed["points"]]
    return [100 * point["exact_match"] for point in points if point["distance"] == distance]


def perplexities(texts: str, name: str, multiple: int, test: str | None = None) -> list[float]:
    """Perplexity at a multiple of l, of the first of the tests by default, one for each seed."""
    length = str(multiple * record(texts)["training_length"])
    found = system(texts, name)["perplexity"]
    return [seed[test or next(iter(seed))][length] for seed in found]


def costs(name: str) -> dict[str, float]:
    found: dict[str, float] = system("words", name)["costs"][str(16 * record("words")["training_length"])]
    return found


def share_of_cache(name: str) -> float:
    return costs(name)["cache_bytes"] / costs(WHOLE)["cache_bytes"]


def cell(values: list[float], places: int = 0) -> str:
    """Mean over the seeds; the lowest and the highest where they differ."""
    mean, low, high = (f"{value:.{places}f}" for value in (fmean(values), min(values), max(values)))
    return mean if low == high else f"{mean} ({low} to {high})"


def row(
    name: str, distances: Sequence[float], lengths: Sequence[int], costs_of: Callable[[str], list[str]]
) -> list[str]:
    found = [cell(recalls(name, each)) for each in distances]
    return [name, *found, *(cell(perplexities("words", name, each)) for each in lengths), *costs_of(name)]


def short() -> str:
    """Recall, perplexity and cache of the systems between which a user chooses."""
    distances, lengths = (1, 2, 8, 32), (1, 16)
    head = ["layers", *(f"recall at {_multiple(each)}, %" for each in distances)]
    head += [*(f"perplexity at {_multiple(each)}" for each in lengths), "cache at 16 *l*"]
    names = (BLOCKS, HYBRIDS[1], *SCALED[:2], WHOLE, YARN)
    return markdown_table(
        head, [row(name, distances, lengths, lambda n: [f"{share_of_cache(n):.2f}"]) for name in names]
    )


def long() -> str:
    """What distinguishes systems, and what they cost."""
    distances, lengths = (1, 4, 8, 16, 32), (1, 4, 16)
    head = ["layers", *(f"recall at {_multiple(each)}, %" for each in distances)]
    head += [*(f"perplexity at {_multiple(each)}" for each in lengths)]
    names = (
        BLOCKS,
        *HYBRIDS,
        *SCALED,
        *ROTARY,
        LONG_BLOCKS,
        "xPos, full",
        "RoPE, full",
        "ALiBi, full",
        WHOLE,
        LLAMA,
        YARN,
    )
    return markdown_table(head, [row(name, distances, lengths, lambda n: []) for name in names])


def price() -> str:
    """Cache, time of prefill and of a step after a text of 16 l, as shares of those of full attention."""
    head = ["layers", "cache at 16 *l*", "prefill", "decoding"]
    whole = costs(WHOLE)
    rows = [
        [
            name,
            *(
                f"{costs(name)[each] / whole[each]:.2f}"
                for each in ("cache_bytes", "prefill_seconds", "decode_seconds")
            ),
        ]
        for name in (WHOLE, BLOCKS, *HYBRIDS)
    ]
    return markdown_table(head, rows)


def books() -> str:
    """Perplexity of books by length."""
    multiples, names = (
        record("books")["multiples"],
        (BLOCKS, *HYBRIDS, *SCALED, *ROTARY, "RoPE, full", "ALiBi, full", WHOLE),
    )
    head = ["layers", *(_multiple(each) for each in multiples)]
    rows = [[name, *(cell(perplexities("books", name, each), 3) for each in multiples)] for name in names]
    return markdown_table(head, rows)


def _multiple(number: float) -> str:
    return "*l*" if number == 1 else f"{number} *l*"


TABLES: list[tuple[str, str, Callable[[], str]]] = [
    ("README.md", "short", short),
    ("docs/recall.md", "long", long),
    ("docs/recall.md", "price", price),
    ("docs/recall.md", "books", books),
]


@pytest.mark.parametrize(("page", "name", "table"), TABLES)
def test_the_tables_are_those_on_record(page: str, name: str, table: Callable[[], str]) -> None:
    begin, end = f"<!-- table: notebooks/recall, {name} -->\n", "<!-- end of table -->"
    text = (ROOT / page).read_text(encoding="utf-8")
    assert text.split(begin)[1].split(end)[0].strip() == table()


@pytest.mark.parametrize("folder", sorted(FOLDER.glob("*/")), ids=lambda path: path.name)
def test_reports_are_those_of_their_records(folder: Path) -> None:
    text = (folder / "report.md").read_text(encoding="utf-8")
    assert text == recall_report.render(record(folder.name))
    for picture in re.findall(r"!\[.*?\]\((.*?)\)", text):
        assert (folder / picture).is_file()


def test_the_records_show_what_the_pages_say() -> None:
    chance = 100 / 32  # of the values that there are
    for distance in (2, 4, 8, 16, 32):
        assert max(recalls(BLOCKS, distance)) <= 3 * chance
        assert min(value for name in SCALED[:2] for value in recalls(name, distance)) >= 95
    for name in (*HYBRIDS, YARN):
        assert fmean(recalls(name, 8)) >= 90
        curve = [fmean(perplexities("words", name, each)) for each in (1, 2, 4, 8, 16)]
        assert curve == sorted(curve, reverse=True)
    assert max(share_of_cache(name) for name in (*HYBRIDS[:2], YARN)) <= 1 / 3
    assert all(max(recalls(name, 8)) <= 50 for name in ROTARY)


def test_the_records_show_what_the_page_says_of_books() -> None:
    multiples = record("books")["multiples"]

    def curve(name: str) -> list[float]:
        return [fmean(perplexities("books", name, each)) for each in multiples]

    blocks = curve(BLOCKS)
    assert blocks == sorted(blocks, reverse=True)
    for name in (*HYBRIDS, *SCALED):
        found = curve(name)
        assert min(found) in found[1:3]
        assert found[-1] < (1.02 if name in SCALED else 1.01) * min(found)
        assert name in SCALED or 1.03 < found[-1] / blocks[-1] < 1.065
    for name in (ROTARY[0], "RoPE, full", WHOLE):
        assert curve(name)[-1] > 1.02 * min(curve(name))
    in_blocks, hybrid, scaled = map(curve, ("Llama, blockwise", LLAMA, YARN))
    assert in_blocks == sorted(in_blocks, reverse=True)
    assert min(hybrid[-1], scaled[-1]) > 1.2 * in_blocks[0]
