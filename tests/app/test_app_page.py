"""The page itself, with Gradio but without a browser; `test_app_browser.py` has one."""

import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from helpers.commands import lex as command
from helpers.models import BYTES, tiny_model
from transformers import PreTrainedModel

from lex_hf.app.desk import Desk
from lex_hf.app.turns import Turns
from lex_hf.data.tokenizers import byte_tokenizer

gradio = pytest.importorskip("gradio", exc_type=ModuleNotFoundError)
# What Gradio and its libraries warn of while they are imported and started is none of ours.
pytestmark = pytest.mark.filterwarnings("default")

TEXT = "A text of some tokens, which is longer than three blocks of this model. "


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny-lex"
    tiny_model(**BYTES).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def page(lex: PreTrainedModel) -> Any:
    from lex_hf.app.page import Page

    return Page(Desk(lex, byte_tokenizer(), most_characters=1000), "tiny <lex>")


class Counted(Turns):
    """Turns that are counted."""

    taken = 0

    def __enter__(self) -> None:
        super().__enter__()
        self.taken += 1


@pytest.fixture(scope="module")
def turns() -> Counted:
    return Counted()


@pytest.fixture(scope="module")
def address(turns: Counted) -> Iterator[str]:
    from lex_hf.app.page import build
    from lex_hf.app.server import launch

    desk = Desk(tiny_model(**BYTES), byte_tokenizer())
    desk.turns = turns
    blocks = build(desk, "tiny-lex")
    yield launch(blocks, host="127.0.0.1")
    blocks.close(verbose=False)


def test_what_a_reader_sees(page: Any) -> None:
    chart, cards = list(page.read(TEXT, "blockwise", "full"))[-1]
    assert re.findall(r'<polyline class="(\w+)"', chart) == ["first", "second"]
    assert "training length" in chart
    assert cards.count("<section") == 2
    assert re.findall(r"<dt>tokens read</dt><dd>([^<]*)</dd>", cards) == [str(len(TEXT) - 1)] * 2
    assert "<dt>cache</dt><dd>6.56 KiB</dd>" in cards  # 14 tokens · 2 layers · 30 numbers · 2 · 4 bytes
    assert "tiny &lt;lex&gt;" in page.header()
    assert "trained on texts of 14 tokens" in page.header()


def test_what_a_writer_sees(page: Any) -> None:
    *_, (text, card, memory) = islice(page.write(TEXT, "blockwise", 0.8, 0.95), 3)
    assert text.startswith("<pre>")
    assert len(text) > len("<pre></pre>")
    assert "<dt>cache</dt><dd>6.56 KiB</dd>" in card
    assert "Keys and values in the cache" in memory


def test_what_patterns_show(page: Any) -> None:
    from lex_hf.app.page import Page

    shown = page.patterns("blockwise", "full", 1)
    assert "Blockwise: blocks of 7 tokens" in shown
    assert shown.count("<path") == 2
    hybrid = Page(Desk(tiny_model(**BYTES, attention_pattern=["blockwise", "full"]), byte_tokenizer()), "hybrid")
    for layer, description in ((1, "blocks of 7 tokens"), (2, "all tokens before")):
        assert f"Its own layers: {description}" in hybrid.patterns("own", "full", layer)
    refused = page.patterns("blockwise-sinks", "full", 1)
    assert "a LEX model has blocks of its own" in refused
    assert refused.count("<path") == 1


def test_what_is_wrong_is_said(page: Any, tmp_path: Path) -> None:
    (tmp_path / "image.png").write_bytes(b"\x89PNG")
    for call, message in (
        (lambda: next(page.read("", "full", "full")), "There is no text"),
        (lambda: next(page.read(TEXT * 20, "full", "full")), "this page takes 1,000"),
        (lambda: next(page.read(TEXT, "full", "blockwise-sinks")), "a LEX model has blocks of its own"),
        (lambda: next(page.write(" ", "full", 1, 1)), "There is no text"),
        (lambda: next(page.write(TEXT, "full", -1, 1)), "temperature = -1"),
        (lambda: page.open_file(str(tmp_path / "image.png")), "image.png is not UTF-8 text"),
    ):
        with pytest.raises(gradio.Error) as error:
            call()
        assert message in error.value.message
        assert (error.value.print_exception, error.value.duration) == (False, None)


def get(url: str) -> Any:
    return urllib.request.urlopen(url, timeout=60)


def test_nothing_comes_from_elsewhere(address: str) -> None:
    with get(address) as response:
        policy, body = response.headers["Content-Security-Policy"], response.read().decode()
    assert "default-src 'self'" in policy
    assert "http" not in policy
    loaded = re.findall(r"<(?:script|link|img|iframe)[^>]+(?:src|href)=\"([^\"]+)\"", body)
    assert loaded
    assert [each for each in loaded if each.startswith(("http", "//"))] == []
    with get(f"{address}config") as response:
        config = json.load(response)
    assert config["analytics_enabled"] is False
    assert config["footer_links"] == []
    with get(f"{address}theme.css") as response:
        assert set(re.findall(r"https?://[^/'\" )]+", response.read().decode())) <= {"http://www.w3.org"}  # of SVG


@pytest.mark.parametrize("path", [Path(__file__), "/etc/passwd", "pyproject.toml"])
def test_files_of_the_machine_stay_there(path: object, address: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as error:
        get(f"{address}gradio_api/file={path}")
    assert error.value.code in (403, 404)
    error.value.close()


def ask(address: str, function: str, data: list[Any], session: str) -> Iterator[dict[str, Any]]:
    """Call a function of the page as a browser does, and yield what it is told."""
    with get(f"{address}config") as response:
        functions = {each["api_name"]: each["id"] for each in json.load(response)["dependencies"]}
    body = json.dumps({"data": data, "fn_index": functions[function], "session_hash": session}).encode()
    request = urllib.request.Request(
        f"{address}gradio_api/queue/join", data=body, headers={"Content-Type": "application/json"}
    )
    get(request).close()  # type: ignore[arg-type]
    with get(f"{address}gradio_api/queue/data?session_hash={session}") as response:
        for line in response:
            if line.startswith(b"data: "):
                message = json.loads(line.removeprefix(b"data: "))
                yield message
                if message["msg"] == "process_completed":
                    return


def test_people_read_and_write_at_once(address: str, turns: Counted) -> None:
    """One writes without an end, and goes; meanwhile another one reads."""
    writing = ask(address, "write", [TEXT, "blockwise", 0.8, 0.95], "writer")  # "full" has an end, by xPos
    seen = [message["msg"] for message in islice(writing, 6)]
    assert "process_generating" in seen
    reading = list(ask(address, "read", [TEXT, "blockwise", "sliding"], "reader"))
    assert reading[-1]["msg"] == "process_completed"
    assert reading[-1]["success"]
    assert next(writing)["msg"] in ("process_generating", "heartbeat")
    writing.close()  # as when a browser is closed
    assert ends(turns)
    failed = list(ask(address, "read", ["", "blockwise", "full"], "other"))[-1]
    assert not failed["success"]
    assert "There is no text" in failed["output"]["error"]


def ends(turns: Counted) -> bool:
    """Whether nobody takes turns any more, after a while."""
    for _ in range(40):
        before = turns.taken
        time.sleep(0.5)
        if turns.taken == before:
            return True
    return False


def test_a_model_that_is_not_there_is_said_before_a_server_starts(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    def launched(*_: Any, **__: Any) -> None:
        raise AssertionError("a server was started")

    monkeypatch.setattr("lex_hf.app.server.launch", launched)
    for arguments, message in (
        (["missing/never"], "Could not load a tokenizer"),
        ([folder, "--training-length", "8"], "a LEX model has one of its own, 14 tokens"),
        ([folder, "--dtype", "nonsense"], "it must be a dtype of torch"),
    ):
        result = command("app", *arguments)
        assert result.exit_code == 1, result.output
        assert message in result.stderr


def test_the_command_serves_until_it_is_stopped(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    pages: list[str] = []

    def block_thread(blocks: Any) -> None:
        pages.append(get(address_of(blocks)).read().decode())
        blocks.close(verbose=False)

    def address_of(blocks: Any) -> str:
        return str(blocks.local_url)

    monkeypatch.setattr(gradio.Blocks, "block_thread", block_thread)
    result = command("app", folder)
    assert result.exit_code == 0, result.output
    assert re.fullmatch(r"The page is at http://127.0.0.1:\d+/ and Ctrl-C ends it.", result.stdout.strip())
    assert "tiny-lex" in pages[0]


def test_a_port_that_is_taken_is_said(folder: Path, address: str) -> None:
    port = address.rstrip("/").rpartition(":")[2]
    result = command("app", folder, "--port", port)
    assert result.exit_code == 1
    assert f"empty port in range: {port}-{port}" in result.stderr
