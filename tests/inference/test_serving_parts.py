"""What a server is made of, without one: texts that come token by token, limits, figures, and the command."""

import asyncio
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.models import tiny_model
from helpers.rope_models import rope_model
from helpers.serving import answering, letter_model
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import AutoModelForSequenceClassification
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus
from typer.testing import CliRunner

from lex_hf.cli.commands import app
from lex_hf.data.tokenizers import byte_tokenizer
from lex_hf.inference import serve as entry
from lex_hf.inference.serving.limits import ServingLimits
from lex_hf.inference.serving.metrics import _COUNTS, Histogram, Metrics

ResponseParser = pytest.importorskip(
    "transformers.utils.chat_parsing", reason="serving needs a newer transformers"
).ResponseParser

TOKENIZER = byte_tokenizer()


def cut(text: str, stops: list[str]) -> str:
    """A text up to the stop string that is complete first."""
    for end in range(len(text) + 1):
        places = [place for stop in stops if (place := text[:end].find(stop)) >= 0]
        if places:
            return text[: min(places)]
    return text


@pytest.fixture(scope="module")
def text_class() -> Any:
    return answering().Text


class TestText:
    @given(
        text=st.text(st.sampled_from("abcé€🙂 "), max_size=30),
        stops=st.lists(st.text(st.sampled_from("abcé€🙂 "), min_size=1, max_size=3), max_size=3),
        pieces=st.lists(st.integers(1, 7)),
    )
    @example(text="aab", stops=["ab"], pieces=[])
    @example(text="ab", stops=["abc"], pieces=[])
    @example(text="€", stops=["€"], pieces=[1, 1])
    def test_is_that_of_all_tokens_up_to_a_stop_string(
        self, text_class: Any, text: str, stops: list[str], pieces: list[int]
    ) -> None:
        ids = TOKENIZER(text)["input_ids"]
        decoded, start, read = text_class(TOKENIZER, stops), 0, ""
        for size in [*pieces, len(ids)]:
            read += decoded.feed(ids[start : start + size])
            assert not any(stop in read for stop in stops)
            start += size
        read += decoded.finish()
        assert read == cut(text, stops)
        assert decoded.is_stopped == (read != text)
        if decoded.is_stopped:
            assert any(TOKENIZER.decode(ids[: decoded.tokens]).endswith(stop) for stop in stops)
        else:
            assert decoded.tokens == len(ids)

    @given(ids=st.lists(st.integers(0, 256), max_size=40), size=st.integers(1, 5))
    def test_of_bytes_that_are_no_text(self, text_class: Any, ids: list[int], size: int) -> None:
        decoded = text_class(TOKENIZER)
        text = "".join(decoded.feed(ids[start : start + size]) for start in range(0, len(ids), size))
        assert text + decoded.finish() == TOKENIZER.decode(ids, skip_special_tokens=True)

    def test_each_token_is_read_once(self, text_class: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """Long answers cost no more per token than short ones."""
        decoded, sizes = text_class(TOKENIZER), []

        def decode(ids: list[int], **settings: Any) -> str:
            sizes.append(len(ids))
            return TOKENIZER.decode(ids, **settings)

        monkeypatch.setattr(decoded, "_tokenizer", SimpleNamespace(decode=decode))
        for _ in range(300):
            decoded.feed([ord("a")])
        assert max(sizes) <= 2


THINKS = {
    "start_anchor": "assistant: ",
    "defaults": {"role": "assistant"},
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open": "<call>",
            "close": "</call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close": "<end>", "content": "text"},
    },
}


class TestAnswer:
    """Thoughts, text and calls of tools, as a response template tells them apart."""

    def written(self, text: str, step: int, **settings: Any) -> Any:
        """An answer to which the tokens of a text came, so many at once."""
        parser = ResponseParser(THINKS, prefix="assistant: ")
        ids, cancelled = TOKENIZER(text)["input_ids"], []
        decoded = answering().Text(TOKENIZER, settings.get("stops", ()), skip_special_tokens=False)
        answer = answering().Answer("name", decoded, [], parser, 3, lambda: cancelled.append(True))
        for end in [*range(step, len(ids), step), len(ids)]:
            status = RequestStatus.FINISHED if end == len(ids) else RequestStatus.DECODING
            answer.take(GenerationOutput("name", generated_tokens=ids[:end], status=status))
        return answer

    def items(self, answer: Any) -> list[Any]:
        async def collect() -> list[Any]:
            return [item async for items in answer.pieces() for item in items]

        return asyncio.run(collect())

    @pytest.mark.parametrize("step", [1, 3, 1000])
    def test_is_told_apart(self, step: int) -> None:
        call = '<call>{"name": "add", "arguments": {"a": 1}}</call>'
        answer = self.written(f"<think>Well.</think>Let me see.{call}", step)
        thought, text, tool = self.items(answer)
        assert (thought, text) == ("Well.", "Let me see.")
        assert (type(thought).__name__, type(text)) == ("ReasoningText", str)
        assert (tool.name, json.loads(tool.arguments)) == ("add", {"a": 1})
        assert answer.finish_reason == "tool_calls"

    def test_ends_within_a_call(self) -> None:
        answer = self.written('<call>{"name": "add"', 2)
        assert self.items(answer) == []
        assert answer.finish_reason == "length"


class TestHistogram:
    def test_counts_in_buckets_that_hold_smaller_ones(self) -> None:
        histogram = Histogram("seconds", "Some.", [0.1, 1])
        for seconds in (0.05, 0.1, 0.5, 7):
            histogram.observe(seconds)
        *_, first, second, infinite, total, count = histogram.lines()
        assert (first, second, infinite) == (
            'seconds_bucket{le="0.1"} 2',
            'seconds_bucket{le="1"} 3',
            'seconds_bucket{le="+Inf"} 4',
        )
        assert (total, count) == ("seconds_sum 7.65", "seconds_count 4")


def test_limits_that_are_impossible() -> None:
    for value in (-1, 1.5, True):
        with pytest.raises(ValueError, match=r"max_waiting = .*: it must be a whole number, at least 0"):
            ServingLimits(max_waiting=value)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_body_bytes = 0: it must be a whole number, at least 1"):
        ServingLimits(max_body_bytes=0)


class TestCommand:
    """What `lex-hf serve` starts, and says when it cannot."""

    @pytest.fixture(autouse=True)
    def packages(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(entry, "is_serve_available", lambda: True)

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        letter_model().save_pretrained(tmp_path)
        byte_tokenizer().save_pretrained(tmp_path)
        return tmp_path

    def said(self, *arguments: object) -> str:
        result = CliRunner().invoke(app, ["serve", *map(str, arguments)])
        assert result.exit_code == 1, result.output
        assert "Traceback" not in result.output
        return " ".join(result.output.split())

    def test_hands_everything_on(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        answering()
        started: list[Any] = []
        server = pytest.importorskip("lex_hf.inference.serving.server")
        monkeypatch.setattr(server, "run", lambda *arguments: started.append(arguments))
        command = ["serve", str(folder), "--device", "cpu", "--port", "8001", "--rows", "2", "--piece", "5"]
        command += [
            "--max-waiting",
            "3",
            "--max-body-bytes",
            "1kB",
            "--max-prompt-tokens",
            "7",
            "--max-new-tokens",
            "9",
        ]
        command += [
            "--session-bytes",
            "2MB",
            "--session-folder",
            str(folder / "kept"),
            "--allowed-host",
            "Here.Example",
        ]
        command += [
            "--grace",
            "4",
            "--log-level",
            "warning",
            "--chat-template-kwargs",
            '{"a": 1}',
            "--continuous-batching",
        ]
        for template in (False, True):
            caplog.clear()
            result = CliRunner().invoke(app, command)
            assert result.exit_code == 0, result.output
            assert ("has no chat template: completions work, chat does not" in caplog.text) is not template
            (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
        made, *where = started[-1]
        assert where == ["localhost", 8001, 4.0, "warning"]
        engine = made.state.engine
        hosts = {"localhost", "127.0.0.1", "::1", "here.example"}
        assert engine.limits == ServingLimits(3, 1000, 7, 9, hosts)
        manager = engine.manager
        assert (manager.counts()["rows"], manager.limits.piece) == (2, 5)
        assert manager._schedule.sessions.max_bytes == 2_000_000
        assert (folder / "kept").is_dir()
        assert made.state.visits.most == 2 + 3
        for each, *_ in started:
            each.state.engine.close()

    def test_without_its_packages(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(entry, "is_serve_available", lambda: False)
        assert self.said(folder) == "Error: Serving needs more packages: pip install 'lex-hf[serve]'"

    def test_with_a_transformers_that_is_too_old(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "transformers.cli.serving.server", None)
        assert "Serving needs a newer transformers than this: pip install -U" in self.said(folder)

    def test_what_cannot_be_served(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        answering()
        monkeypatch.setattr(entry, "check_serving", lambda *_: None)
        assert "Could not load a tokenizer" in self.said(folder / "absent")
        assert "--sinks 4: only a model that reads in blocks has sinks" in self.said(folder, "--sinks", "4")
        assert "--max-body-bytes none: it must be a number and its unit" in self.said(
            folder, "--max-body-bytes", "none"
        )
        assert "--chat-template-kwargs []: it must be an object" in self.said(folder, "--chat-template-kwargs", "[]")
        assert "needs session_bytes" in self.said(folder, "--session-folder", folder / "kept")
        AutoModelForSequenceClassification.from_config(tiny_model().config).save_pretrained(folder)
        assert "lacks 1 of the weights of LexForCausalLM" in self.said(folder)
        rope_model(vocab_size=257).save_pretrained(folder)
        said = self.said(folder)
        assert "LlamaForCausalLM, which does not read in blocks: give --blockwise auto" in said
        tiny_model(attention_pattern="full", vocab_size=257).save_pretrained(folder)
        assert "how long texts become, with --max-prompt-tokens and --max-new-tokens" in self.said(folder)

    def test_an_option_as_a_model(self, folder: Path) -> None:
        with pytest.raises(ValueError, match="--device is an option, not a MODEL"):
            entry.serve("--device")
        with pytest.raises(ValueError, match="grace = -1: it must be a number of seconds, at least 0"):
            entry.serve(str(folder), grace=-1)

    def test_names_of_the_machine(self) -> None:
        assert entry._hosts("localhost", ["*"]) is None
        assert entry._hosts("box.example", []) == {"box.example"}
        assert {"localhost", "127.0.0.1"} < (entry._hosts("0.0.0.0", []) or set())


def test_labels_tell_the_figures_of_servers_apart() -> None:
    counts = dict.fromkeys(_COUNTS, 7)
    plain, labelled = Metrics().render(counts), Metrics({"replica": 'a"b', "zone": "1"}).render(counts)
    own = 'replica="a\\"b",zone="1"'
    assert f"lex_hf_rows{{{own}}} 7\n" in labelled
    assert f'lex_hf_requests_total{{{own},outcome="stop"}} 0\n' in labelled
    assert f'_bucket{{{own},le="+Inf"}} 0\n' in labelled
    assert labelled.replace(f"{{{own}}}", "").replace(f"{own},", "") == plain
