"""Drawings of the documentation. `python docs/_build/drawings.py` writes them into docs/drawings.

They are SVG of a few rectangles and lines, in colours that can be read on white and on black, and on a phone.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from xml.sax.saxutils import escape

FOLDER = Path(__file__).parents[1] / "drawings"
READ = Path(__file__).parents[2] / "notebooks/ways-to-read/ways-to-read-llama-260k.json"
LENGTH, TOKENS = 8, 24  # training length and text of the drawings
_BLUE, _LIGHT, _ORANGE, _GREY, _PALE = "#3b76c4", "#6f9fdd", "#d97706", "#8a8a8a", "#8a8a8a33"
Sees = Callable[[int, int], bool]


def reading() -> str:
    """Perplexity by position of a Llama that reads beyond its training length, unchanged and in blocks."""
    record = json.loads(READ.read_text(encoding="utf-8"))
    ways = {way["way"]: way for way in record["ways"]}
    last = [*(bucket[1] + 1 for bucket in record["buckets"][:-1]), record["longest"]]
    left, top, wide, high = 52, 34, 300, 190

    def x(tokens: float) -> float:
        return left + wide * math.log(tokens / last[0]) / math.log(last[-1] / last[0])

    def y(perplexity: float) -> float:
        return top + high * (1 - math.log(perplexity / 4) / math.log(100 / 4))

    length = record["training_length"]
    parts = [_text(left - 42, 16, "Perplexity"), _text(left + wide / 2, top + high + 40, "tokens read", "middle")]
    for tick in (5, 10, 20, 50, 100):
        parts += [_line([(left, y(tick)), (left + wide, y(tick))], _PALE, 1)]
        parts += [_text(left - 8, y(tick) + 5, f"{tick}", "end")]
    parts += [_text(x(tokens), top + high + 20, f"{tokens}", "middle") for tokens in last]
    parts.append(_line([(x(length), top - 6), (x(length), top + high)], _GREY, 1))
    parts.append(_text(x(length) + 6, top + 8, "longest text in training"))
    for way, label, colour in (("unchanged", "unchanged", _ORANGE), ("blockwise", "in blocks", _BLUE)):
        values = ways[way]["perplexity"]
        parts.append(_line([(x(a), y(b)) for a, b in zip(last, values, strict=True)], colour, 3))
        place, kept = y(values[-1]), ways[way]["bytes_kept"] / 2**20
        parts.append(_text(left + wide + 8, place - 3, f"{label}: {values[-1]:.1f}", colour=colour))
        parts.append(_text(left + wide + 8, place + 15, f"keeps {kept:.3g} MiB", colour=colour))
    return _svg(left + wide + 130, top + high + 50, parts, size=15)


def full(query: int, key: int) -> bool:
    """Whether a query sees a key, with full attention."""
    return key <= query


def sliding(query: int, key: int) -> bool:
    """Whether a query sees a key in a window of the training length."""
    return query - LENGTH < key <= query


def blockwise(query: int, key: int) -> bool:
    """Whether a query sees a key in blocks of half the training length."""
    block = LENGTH // 2
    return key <= query and query // block - key // block <= 1


def patterns() -> str:
    """Queries and keys of the three patterns."""
    cell, gap, top = 9, 36, 40
    side = cell * TOKENS
    panels = [
        ("full: distances it never saw", full),
        (f"sliding window of l = {LENGTH}", sliding),
        (f"blockwise: blocks of l/2 = {LENGTH // 2}", blockwise),
    ]
    parts: list[str] = []
    for index, (title, sees) in enumerate(panels):
        left = 30 + index * (side + gap)
        parts.append(_text(left + side / 2, 22, title, anchor="middle"))
        parts.extend(_matrix(left, top, cell, sees))
    low = top + side + 20
    parts.append(_text(30 + side / 2, low, "keys →", anchor="middle"))
    parts.append(_text(18, top + side / 2, "queries →", anchor="middle", turned=True))
    for place, colour, label in ((30 + side + gap, _BLUE, "seen"), (110 + side + gap, _ORANGE, "seen, from beyond l")):
        parts.append(_box(place, low - 10, 11, 11, colour))
        parts.append(_text(place + 17, low, label))
    return _svg(30 + 3 * side + 2 * gap + 10, low + 14, parts)


def folding() -> str:
    """How a text of five blocks becomes rows of a batch, of a pair of blocks each."""
    wide, high, count = 76, 26, 5
    parts = [_text(10, 24, "A text of five blocks")]
    for block in range(count):
        parts.extend(_labelled(10 + block * wide, 34, wide, high, f"block {block}", _PALE))
    parts.append(_text(10, 92, "is read as five rows at once: queries of a block, keys of it and of the one before"))
    for block in range(count):
        top = 104 + block * (high + 8)
        parts.extend(_labelled(10, top, wide, high, f"queries {block}", _PALE))
        parts.append(_text(10 + wide + 12, top + 17, "×"))
        for place, key in enumerate(range(max(0, block - 1), block + 1)):
            colour = _BLUE if key == block else _LIGHT
            parts.extend(_labelled(10 + wide + 32 + place * wide, top, wide, high, f"keys {key}", colour))
    return _svg(560, 104 + count * (high + 8) + 4, parts)


def caches() -> str:
    """Slots of a layer's cache after a text, with full attention and in blocks."""
    cell, top = 12, 50
    parts = [_text(10, 22, f"Keys that a layer keeps after n tokens, l = {LENGTH}")]
    for row, read in enumerate((4, 8, 11, 12, 20, 24)):
        y = top + row * (cell + 8)
        parts.append(_text(10, y + 10, f"n = {read}"))
        for token in range(read):
            colour = _BLUE if token >= read - kept(read) else _PALE
            parts.append(_box(70 + token * cell, y, cell - 2, cell - 2, colour))
    low = top + 6 * (cell + 8) + 12
    parts += [_box(70, low - 10, 10, 10, _BLUE), _text(86, low, "kept by blocks: never more than l")]
    parts += [_box(330, low - 10, 10, 10, _PALE), _text(346, low, "kept by full attention too")]
    return _svg(540, low + 14, parts)


def kept(read: int) -> int:
    """Tokens whose keys a layer keeps after a text, in blocks: a pair that begins with a block, full or not."""
    block = LENGTH // 2
    return read if read <= LENGTH else LENGTH - -read % block


def hybrid() -> str:
    """Layers of a hybrid, and what each keeps."""
    parts = [_text(10, 22, "1 layer in 4 has full attention; the others short blocks")]
    for layer in range(8):
        y = 226 - layer * 26
        is_full = layer % 4 == 2
        label = "full attention, no positions" if is_full else "blocks of l/8, xPos"
        parts.append(_text(10, y + 15, f"layer {layer}"))
        parts.extend(_labelled(70, y, 210, 22, label, _ORANGE if is_full else _BLUE))
        parts.append(_box(300, y + 5, 200 if is_full else 16, 12, _ORANGE if is_full else _BLUE))
    parts.append(_text(300, 272, "keys that it keeps of a long text"))
    return _svg(520, 286, parts)


DRAWINGS = {"reading": reading, "patterns": patterns, "folding": folding, "caches": caches, "hybrid": hybrid}


def _matrix(left: float, top: float, cell: int, sees: Sees) -> Iterator[str]:
    """A square of queries and keys, and the borders of blocks where there are any."""
    for query in range(TOKENS):
        for key in range(query + 1):
            colour = _PALE
            if sees(query, key):
                colour = _BLUE if query - key < LENGTH else _ORANGE
            yield _box(left + key * cell, top + query * cell, cell - 1, cell - 1, colour)


def _labelled(x: float, y: float, width: float, height: float, label: str, colour: str) -> Iterator[str]:
    yield _box(x, y, width - 4, height, colour)
    on_colour = _GREY if colour == _PALE else "#ffffff"
    yield _text(x + (width - 4) / 2, y + height / 2 + 4.5, label, anchor="middle", colour=on_colour)


def _box(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="1.5" fill="{colour}"/>'


def _line(points: Iterable[tuple[float, float]], colour: str, width: float) -> str:
    places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="{width:g}"/>'


def _text(
    x: float, y: float, words: str, anchor: str = "start", *, colour: str = _GREY, turned: bool = False
) -> str:
    turn = f' transform="rotate(-90 {x:g} {y:g})"' if turned else ""
    return f'<text x="{x:g}" y="{y:g}" fill="{colour}" text-anchor="{anchor}"{turn}>{escape(words)}</text>'


def _svg(width: float, height: float, parts: Iterable[str], *, size: int = 13) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}"'
    return "\n".join([f'{head} font-family="sans-serif" font-size="{size}">', *parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    for name, draw in DRAWINGS.items():
        (FOLDER / f"{name}.svg").write_text(draw(), encoding="utf-8")
