"""Pages show what the record of `lex-hf reproduce ways-to-read` says."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
RECORD = "notebooks/ways-to-read"
KINDS = {"llama": "Llama", "gpt_neox": "GPT-NeoX"}
WAYS = {
    "unchanged": "unchanged",
    "linear": "linear",
    "dynamic": "dynamic NTK",
    "yarn": "YaRN",
    "self-extend": "Self-Extend",
    "dual-chunk": "Dual Chunk",
    "sliding": "sliding",
    "streaming": "StreamingLLM",
    "blockwise": "blockwise",
    "blockwise-sinks": "blockwise + sinks",
}


def record(kind: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / RECORD / f"ways-to-read-{kind}.json").read_text(encoding="utf-8"))
    return found


def markdown(names: int, *rows: list[str]) -> str:
    """A table whose first columns are names."""
    rule = ["---"] * names + ["---:"] * (len(rows[0]) - names)
    return "\n".join(f"| {' | '.join(row)} |" for row in (rows[0], rule, *rows[1:]))


def cell(perplexity: float) -> str:
    return f"{perplexity:#.3g}".removesuffix(".")


def by_model() -> str:
    """Perplexity of the last half of each text, a row for each model."""
    found = {title: record(kind)["ways"] for kind, title in KINDS.items()}
    header = [WAYS[way["way"]] for way in found["Llama"]]
    rows = [[title, *(cell(way["perplexity"][-1]) for way in ways)] for title, ways in found.items()]
    return markdown(1, ["model", *header], *rows)


def by_position(kind: str, memory: set[str]) -> str:
    """Perplexity by position, a row for each way."""
    found = record(kind)
    header = [f"{first}-{last}" for first, last in found["buckets"]]
    rows = [[way["name"], *map(cell, way["perplexity"])] for way in found["ways"] if way["memory"] in memory]
    return markdown(1, ["way of reading", *header], *rows)


def by_position_with_memory() -> str:
    """Perplexity by position, a row for each way, and the keys and values that it keeps."""
    found = record("llama-260k")
    header = [f"{first}-{last}" for first, last in found["buckets"]]
    rows = [
        [way["name"], *map(cell, way["perplexity"]), f"{way['bytes_kept'] / 1024:,.0f} KiB"] for way in found["ways"]
    ]
    return markdown(1, ["way of reading", *header, "kept"], *rows)


def by_layer() -> str:
    """Share of attention that the first token draws."""
    found = {title: record(kind)["attention_to_first_token"] for kind, title in KINDS.items()}
    layers = [f"layer {number}" for number in range(1, len(found["Llama"]) + 1)]
    rows = [
        [title, *(f"{sum(heads) / len(heads):.1%} ({max(heads):.0%})" for heads in shares)]
        for title, shares in found.items()
    ]
    return markdown(1, ["model", *layers], *rows)


@pytest.mark.parametrize(
    ("page", "name", "table"),
    [
        ("blockwise.md", "somebody else's Llama", by_position_with_memory),
        ("blockwise.md", "by model", by_model),
        ("sinks.md", "by position", lambda: by_position("llama", {"bounded"})),
        ("sinks.md", "books", lambda: by_position("books", {"keeps everything", "bounded"})),
        ("sinks.md", "by layer", by_layer),
    ],
)
def test_the_tables_are_those_on_record(page: str, name: str, table: Any) -> None:
    begin, end = f"<!-- table: {RECORD}, {name} -->\n", "<!-- end of table -->"
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert text.split(begin)[1].split(end)[0].strip() == table()


def test_pictures_are_there() -> None:
    for page in (ROOT / "docs").glob("*.md"):
        for picture in re.findall(r"!\[.*?\]\((.*?)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / picture).is_file()


def test_the_record_shows_what_the_page_says() -> None:
    for kind in ("llama", "books"):
        ways = {way["way"]: way["perplexity"][-1] for way in record(kind)["ways"]}
        assert max(ways["streaming"], ways["blockwise-sinks"]) < 0.98 * min(ways["sliding"], ways["blockwise"])
    shares = [sum(heads) / len(heads) for heads in record("llama")["attention_to_first_token"]]
    assert max(shares) > 10 * 0.0143  # of attention that is spread evenly
