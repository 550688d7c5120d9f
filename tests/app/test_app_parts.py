"""Parts of the page: turns, pace, texts and drawings."""

import re
import threading
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

from lex_hf.app import drawing, pace
from lex_hf.app.drawing import Card, Curve, Picture
from lex_hf.app.pace import Pace, now_and_then
from lex_hf.app.patterns import Seen
from lex_hf.app.texts import check_text, example, text_of_file
from lex_hf.app.turns import Turns


def test_turns_come_in_the_order_in_which_they_were_asked_for() -> None:
    turns, order = Turns(), []
    started = threading.Event()

    def greedy() -> None:
        for _ in range(3):
            with turns:
                started.set()
                time.sleep(0.05)
                order.append("greedy")

    def patient(name: str) -> None:
        with turns:
            order.append(name)

    threads = [threading.Thread(target=greedy)]
    threads[0].start()
    started.wait()
    for name in ("one", "two"):
        threads.append(threading.Thread(target=patient, args=[name]))
        threads[-1].start()
        time.sleep(0.01)
    for thread in threads:
        thread.join()
    assert order == ["greedy", "one", "two", "greedy", "greedy"]


def test_an_error_ends_a_turn() -> None:
    turns = Turns()
    with pytest.raises(ValueError, match="wrong"), turns:
        raise ValueError("wrong")
    with turns:
        pass


def test_pieces_take_a_few_tenths_of_a_second() -> None:
    found = Pace()
    sizes = []
    for tokens_per_second in (100_000,) * 12 + (1000,) * 5:
        sizes.append(found.tokens)
        found.note(found.tokens / tokens_per_second)
    assert sizes[:3] == [16, 32, 64]
    assert max(sizes) == pace.LARGEST
    assert sizes[-1] == 256
    assert found.seconds > 0
    for _ in range(12):
        found.note(60)
    assert found.tokens == pace.SMALLEST


def test_pages_are_told_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(pace.time, "monotonic", lambda: clock[0])

    def values() -> object:
        for each in range(8):
            yield each
            clock[0] += 0.1

    assert list(now_and_then(values(), 0.25)) == [0, 3, 6, 7]  # type: ignore[arg-type]
    assert list(now_and_then(iter([1]), 9)) == [1]
    assert list(now_and_then(iter([]), 9)) == []


def test_texts(tmp_path: Path) -> None:
    (tmp_path / "some.txt").write_bytes("naïve\r\n".encode())
    assert text_of_file(tmp_path / "some.txt") == "naïve\r\n"
    for name, content, message in (
        ("image.png", b"\x89PNG\r\n", r"^image.png is not UTF-8 text: byte 0x89 at offset 0. Convert it.$"),
        ("empty.txt", b"", r"^empty.txt is empty.$"),
        ("blank.txt", b" \n", r"^There is no text"),
        ("long.txt", b"a" * 30, r"^The text has 30 characters, and this page takes 20"),
        ("longer.txt", b"\xff" * 100, r"^longer.txt has 100 bytes, and this page takes 20 characters"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=message):
            text_of_file(tmp_path / name, 20)
    check_text(example())
    assert len(example()) == 12_000


class Tags(HTMLParser):
    """Open tags, and whether each is closed in its place."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self.seen.append((tag, dict(attributes)))

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_charts_hold_their_points_between_round_values() -> None:
    curves = [Curve([(0, 2.3), (50, 3.1), (100, 2.7)], "first"), Curve([(10, float("inf")), (20, 2.5)], "second")]
    text = drawing.chart(curves, 100, title="a < b", xlabel="tokens", mark=(25, "here"))
    lines = [attributes for tag, attributes in Tags(text).seen if tag == "polyline"]
    assert [each["class"] for each in lines] == ["first", "second"]
    # From 2.2 to 3.2 in steps of 0.2.
    assert lines[0]["points"] == "0.00,90.00 50.00,10.00 100.00,50.00"
    assert lines[1]["points"] == "20.00,70.00 20.00,70.00"
    assert re.findall(r'bottom:[\d.]+%">([\d.]+)<', text) == ["2.2", "2.4", "2.6", "2.8", "3", "3.2"]
    assert re.findall(r'left:[\d.]+%">(\d+)<', text) == ["0", "20", "40", "60", "80", "100"]
    assert "a &lt; b" in text
    assert 'left:25.00%"><span>here</span>' in text
    assert "here" not in drawing.chart(curves, 20, title="", xlabel="", mark=(25, "here"))


@pytest.mark.parametrize("values", [[], [0.0], [5.0, 5.0], [1e-9, 2e-9], [1e9, 3.0], [7 * 2.0**20]])
def test_axes_of_any_values(values: list[float]) -> None:
    for is_bytes in (False, True):
        curve = Curve(list(enumerate(values)), "first")
        text = drawing.chart([curve], max(1, len(values)), title="", xlabel="", is_bytes=is_bytes)
        for points in (attributes["points"] or "" for tag, attributes in Tags(text).seen if tag == "polyline"):
            assert all(-0.01 <= float(each.split(",")[1]) <= 100.01 for each in points.split())
        assert 2 <= len(re.findall("bottom:", text)) <= 8


def test_numbers() -> None:
    assert [drawing.size(each) for each in (0, 1023, 1024, 1835008, 2**30, 150 * 2**20)] == [
        "0 B", "1023 B", "1.00 KiB", "1.75 MiB", "1.00 GiB", "150 MiB"
    ]  # fmt: skip
    assert [drawing.rate(each) for each in (None, 1.234, 1234.5)] == ["\N{EN DASH}", "1.2", "1,234"]


def test_what_people_write_is_no_html() -> None:
    card = Card("<b>", "<i>", [("<u>", "<s>")], 0.5, "<script>", "first")
    pictures = [Picture("<b>", None, "<script>"), Picture("<i>", Seen(8, torch.eye(3, dtype=torch.bool)))]
    assert drawing.text("a <b>\n  & c") == "<pre>a &lt;b&gt;\n  &amp; c</pre>"
    for text in (drawing.cards([card]), drawing.patterns(pictures)):
        assert {"b", "i", "u", "s", "script"} & {tag for tag, _ in Tags(text).seen} <= {"i"}
        assert "&lt;script&gt;" in text
    assert "width:50.0%" in drawing.cards([card])
    assert "M0 0h1v1h-1zM1 1h1v1h-1zM2 2h1v1h-1z" in drawing.patterns(pictures)
    assert "one token in 8 of 24" in drawing.patterns(pictures)
