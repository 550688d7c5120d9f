"""The page in a real browser, of which `make app-test` installs what drives it: Chromium, without a window.

Pictures of the page are left in `build/app`, to be looked at.
"""

import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gradio", exc_type=ModuleNotFoundError)
api = pytest.importorskip("playwright.sync_api", exc_type=ModuleNotFoundError)
pytestmark = pytest.mark.filterwarnings("default")

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "build" / "app"
MODEL = ROOT / "model_cards" / "lex-books-3m"
TEXT = "It was a dark evening in November, and the old man " * 20
PHONE = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}
DESKTOP = {"viewport": {"width": 1280, "height": 900}}
READ = "[...document.querySelectorAll('#readers dd')].every(x => !x.innerText.includes(' of '))"
OUTSIDE = """
[...document.querySelectorAll('button, input, textarea, .area svg, .pattern svg, .card, h1, h4')].filter(x => {
    const place = x.getBoundingClientRect();
    return place.width && (place.right > innerWidth + 1 || place.left < -1);
}).length
"""
Open = Callable[..., Any]


@pytest.fixture(scope="module")
def desk() -> Any:
    from lex_hf.app.desk import Desk
    from lex_hf.evaluation.loading import load_for_evaluation

    return Desk(*load_for_evaluation(str(MODEL)), most_characters=100_000)


@pytest.fixture(scope="module")
def address(desk: Any) -> Iterator[str]:
    from lex_hf.app.page import build
    from lex_hf.app.server import launch

    blocks = build(desk, MODEL.name)
    yield launch(blocks, host="127.0.0.1")
    blocks.close(verbose=False)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next(filter(None, map(shutil.which, names)), None)  # else the one that Playwright installs
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def visit(browser: Any, address: str) -> Iterator[Open]:
    """Opens the page for one more person, and sees that nothing is loaded from elsewhere, and nothing fails."""
    faults: list[str] = []
    contexts: list[Any] = []

    def watch(page: Any) -> None:
        page.on("request", lambda each: None if each.url.startswith((address, "data:", "blob:")) else fault(each.url))
        page.on("console", lambda each: fault(each.text) if each.type == "error" else None)
        page.on("pageerror", lambda each: fault(str(each)))

    def fault(text: str) -> None:
        faults.append(text)

    def opened(**options: Any) -> Any:
        contexts.append(browser.new_context(**{**DESKTOP, **options}))
        page = contexts[-1].new_page()
        watch(page)
        page.goto(address)
        page.wait_for_selector("#patterns svg")
        return page

    yield opened
    for each in contexts:
        each.close()
    assert faults == []


def read(page: Any, text: str) -> None:
    page.fill("#text textarea", text)
    page.click("#read")


def figures(page: Any, where: str) -> dict[str, list[str]]:
    names, values = (page.locator(f"{where} {tag}").all_inner_texts() for tag in ("dt", "dd"))
    found: dict[str, list[str]] = {}
    for name, value in zip(names, values, strict=True):
        found.setdefault(name, []).append(value)
    return found


def choose(page: Any, where: str, title: str) -> None:
    page.click(f"{where} input")
    page.get_by_role("option", name=title, exact=True).click()


def said(page: Any) -> str:
    toast = page.locator(".toast-body").last
    toast.wait_for()
    return str(toast.inner_text())


def grows(value: Callable[[], str], seconds: float = 1.0) -> bool:
    before = value()
    time.sleep(seconds)
    return value() != before


def test_two_settings_read_what_is_typed(visit: Open, desk: Any) -> None:
    page = visit()
    page.locator("#text textarea").press_sequentially("Once upon a time, ")
    assert page.input_value("#text textarea") == "Once upon a time, "
    choose(page, "#second", "Sliding window")
    read(page, TEXT)
    page.wait_for_function("document.querySelectorAll('#losses polyline').length == 2")
    *_, expected = desk.read(TEXT, ["blockwise", "sliding"])
    page.wait_for_function(READ)
    found = figures(page, "#readers")
    assert found["tokens read"] == [f"{each.total:,}" for each in expected]
    assert found["mean loss"] == [f"{each.loss:.3f}" for each in expected]
    assert found["cache"] == ["1.75 MiB", "3.50 MiB"]
    assert page.locator("#patterns h4").all_inner_texts() == [
        "Blockwise: blocks of 128 tokens",
        "Sliding window: window of 256 tokens",
    ]


def test_the_pattern_of_a_layer_is_drawn(visit: Open, desk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, pattern = [], desk.pattern
    monkeypatch.setattr(desk, "pattern", lambda *given: (asked.append(given), pattern(*given))[1])
    page = visit()
    assert asked == [("blockwise", 0), ("full", 0)]
    layer = page.locator("#layer input[type=number]")
    assert layer.get_attribute("max") == "4"
    layer.fill("3")
    layer.press("Tab")
    page.wait_for_timeout(1500)
    assert asked[-2:] == [("blockwise", 2), ("full", 2)]
    before = page.inner_html("#patterns")
    choose(page, "#second", "Sliding window")
    page.wait_for_function("document.querySelector('#patterns').innerText.includes('window of 256 tokens')")
    assert page.inner_html("#patterns") != before


def test_what_cannot_be_done_is_said(visit: Open, tmp_path: Path) -> None:
    page = visit()
    page.click("#read")
    assert "There is no text" in said(page)
    page = visit()
    read(page, "a" * 100_001)
    assert "The text has 100,001 characters, and this page takes 100,000" in said(page)
    page = visit()
    (tmp_path / "picture.txt").write_bytes(b"\x89PNG\r\n\x1a\n" * 20)
    page.set_input_files("#open input, input#open, input[type=file]", tmp_path / "picture.txt")
    assert "picture.txt is not UTF-8 text: byte 0x89 at offset 0" in said(page)
    assert page.input_value("#text textarea") == ""
    page = visit()
    choose(page, "#first", "Blockwise with sinks")
    page.wait_for_selector("#patterns .problem")
    assert "a LEX model has blocks of its own" in page.inner_text("#patterns .problem")
    read(page, TEXT)
    assert "a LEX model has blocks of its own" in said(page)
    time.sleep(0.5)  # it moves in
    page.screenshot(path=PICTURES / "refused.png")


def test_a_file_is_opened(visit: Open, tmp_path: Path) -> None:
    page = visit()
    (tmp_path / "letter.txt").write_text("Dear \N{GREEK SMALL LETTER ALPHA},\nyours.", encoding="utf-8")
    page.set_input_files("#open input, input#open, input[type=file]", tmp_path / "letter.txt")
    page.wait_for_function("document.querySelector('#text textarea').value.length > 0")
    assert page.input_value("#text textarea") == "Dear \N{GREEK SMALL LETTER ALPHA},\nyours."


def test_writing_goes_on_until_it_is_stopped(visit: Open) -> None:
    page = visit()
    page.fill("#text textarea", "It was a dark evening")
    page.get_by_role("tab", name="Write").click()
    page.click("#write")
    page.wait_for_selector("#memory polyline", state="attached")
    text = page.locator("#written").inner_text
    assert all(grows(text) for _ in range(3))
    assert set(figures(page, "#writer")["cache"]) == {"1.75 MiB"}
    page.wait_for_function("document.querySelector('#written').scrollHeight > 600")
    end = page.locator("#written pre").bounding_box()
    shown = page.locator("#written").bounding_box()
    assert end["height"] > shown["height"]
    assert abs(end["y"] + end["height"] - shown["y"] - shown["height"]) < 30  # its end is in sight, and a margin
    page.click("#stop-writing")
    time.sleep(1)
    assert not grows(text, 2.0)
    assert len(text()) > 20
    page.click("#write")  # and once more
    assert grows(text)


def test_reading_is_stopped(visit: Open) -> None:
    page = visit()
    read(page, TEXT * 80)
    page.wait_for_selector("#losses polyline")
    page.click("#stop-reading")
    time.sleep(1)
    assert not grows(lambda: page.inner_html("#readers"), 2.0)
    assert " of " in page.inner_text("#readers")


def test_two_people_at_once(visit: Open, desk: Any) -> None:
    one, other = visit(), visit(**PHONE)
    one.fill("#text textarea", "It was a dark evening")
    one.get_by_role("tab", name="Write").click()
    choose(one, "#setting", "Full")
    one.click("#write")
    one.wait_for_selector("#memory polyline", state="attached")
    read(other, TEXT)
    *_, expected = desk.read(TEXT, ["blockwise", "full"])
    other.wait_for_function("[...document.querySelectorAll('#readers dd')].length > 0")
    other.wait_for_function(READ)
    assert figures(other, "#readers")["mean loss"] == [f"{each.loss:.3f}" for each in expected]
    assert grows(one.locator("#written").inner_text)
    assert other.locator("#writer dd").count() == 0
    assert one.locator("#readers dd").count() == 0


def test_a_person_who_goes_leaves_nothing_running(visit: Open, desk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    enter = type(desk.turns).__enter__
    monkeypatch.setattr(type(desk.turns), "__enter__", lambda turns: (taken.append(1), enter(turns))[1])
    page = visit()
    page.fill("#text textarea", "It was a dark evening")
    page.get_by_role("tab", name="Write").click()
    page.click("#write")
    page.wait_for_selector("#memory polyline", state="attached")
    assert grows(lambda: str(len(taken)))
    page.close()
    for _ in range(30):
        if not grows(lambda: str(len(taken))):
            return
    raise AssertionError("the model still writes")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("device", ["desktop", "phone"])
def test_it_fits(device: str, scheme: str, visit: Open) -> None:
    page = visit(color_scheme=scheme, **(PHONE if device == "phone" else DESKTOP))
    page.click("#example")
    page.wait_for_function("document.querySelector('#text textarea').value.length > 1000")
    page.click("#read")
    page.wait_for_function("document.querySelectorAll('#losses polyline').length == 2")
    page.wait_for_function(READ)
    for tab in ("Read", "Write"):
        page.get_by_role("tab", name=tab).click()
        if tab == "Write":
            page.click("#write")
            page.wait_for_selector("#memory polyline", state="attached")
            time.sleep(2)
            page.click("#stop-writing")
            time.sleep(0.5)
        page.screenshot(path=PICTURES / f"{device}-{scheme}-{tab.lower()}.png", full_page=True)
        needed, there = page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
        assert needed <= there
        assert page.evaluate(OUTSIDE) == 0
        assert page.locator("#text").bounding_box()["width"] > (360 if device == "phone" else 900)
    colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
    brightness = sum(map(int, re.findall(r"\d+", colour)[:3])) / 3
    assert (brightness < 80) == (scheme == "dark")
