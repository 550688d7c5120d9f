"""A server of one model: many requests at once, over real connections."""

import json
import re
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPResponse
from typing import Any

import pytest
import torch
from helpers.rope_models import rope_model
from helpers.serving import (
    CHAT,
    COMPLETIONS,
    NAME,
    Running,
    alone,
    app_of,
    chat_tokenizer,
    letter_model,
    needs_server,
    running,
    wait_for,
)
from transformers import LogitsProcessor

from lex_hf import blockwise
from lex_hf.inference.serving.limits import ServingLimits

needs_server()
LONG = 30_000  # tokens: more than any test waits for


@pytest.fixture(scope="module")
def model() -> Any:
    return letter_model()


@pytest.fixture(scope="module")
def server(model: Any) -> Iterator[Running]:
    with running(app_of(model)) as server:
        yield server


def idle(server: Running) -> bool:
    return not (server.counts["running"] or server.counts["reading"] or server.counts["waiting"])


def text_of(answer: Any) -> str:
    (choice,) = answer["choices"]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def text_of_stream(pieces: list[Any]) -> str:
    choices = [choice for piece in pieces for choice in piece["choices"]]
    return "".join(each["text"] if "text" in each else each["delta"].get("content") or "" for each in choices)


class TestAnswers:
    def test_of_requests_at_once_are_those_of_each_alone(self, server: Running, model: Any) -> None:
        """More requests than rows: plain and streamed, greedy and sampled, chat and completions, mixed."""
        asked: list[tuple[str, dict[str, Any], str]] = []
        for index in range(8):
            tokens, prompt = 20 + 7 * index, "In a hole in the ground" * (1 + index % 3)
            body: dict[str, Any] = {"max_tokens": tokens, "stream": index % 2 == 1}
            wanted: dict[str, Any] = {}
            if index % 4 >= 2:
                body |= {"temperature": 0.5 + index / 8, "top_p": 0.9, "seed": index}
                wanted = {"do_sample": True, "temperature": 0.5 + index / 8, "top_p": 0.9, "seed": index}
            if index < 4:
                asked.append((COMPLETIONS, body | {"prompt": prompt}, alone(model, prompt, tokens, **wanted)))
            else:
                body |= {"messages": [{"role": "user", "content": prompt}], "model": NAME}
                expected = alone(model, f"user: {prompt}\nassistant: ", tokens, **wanted)
                asked.append((CHAT, body, expected))

        def ask(path: str, body: dict[str, Any]) -> str:
            if body["stream"]:
                return text_of_stream(server.stream(path, body))
            status, answer = server.ask(path, body)
            assert status == 200
            return text_of(answer)

        with ThreadPoolExecutor(len(asked)) as threads:
            texts = list(threads.map(lambda each: ask(*each[:2]), asked))
        assert texts == [expected for _, _, expected in asked]
        assert len(set(texts)) == len(texts)
        wait_for(lambda: idle(server))

    @pytest.mark.parametrize("stream", [False, True])
    def test_stop_strings_are_no_part_of_it(self, server: Running, model: Any, stream: bool) -> None:
        whole = alone(model, "abc", 60)
        stop = whole[30:33]
        expected = whole[: whole.index(stop)]
        assert len(expected) > 3
        body = {"prompt": "abc", "max_tokens": 60, "stop": ["never", stop]}
        if stream:
            pieces = server.stream(COMPLETIONS, body)
            answer, text = pieces[-1], text_of_stream(pieces)
        else:
            answer = server.ask(COMPLETIONS, body)[1]
            text = text_of(answer)
        assert text == expected
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] == len(expected) + 3
        wait_for(lambda: idle(server))

    def test_ends_at_the_token_that_ends_a_text(self, server: Running, model: Any) -> None:
        whole = alone(model, "abc", 60)
        place = next(place for place in range(5, 60) if whole[place] not in whole[:place])
        for limit in (60, place + 1):  # not "length", also if it is the last token that was allowed
            config = json.dumps({"eos_token_id": [ord(whole[place])], "max_new_tokens": limit})
            _, answer = server.ask(COMPLETIONS, {"prompt": "abc", "generation_config": config})
            assert text_of(answer) == whole[: place + 1]
            assert answer["choices"][0]["finish_reason"] == "stop"
        _, answer = server.ask(COMPLETIONS, {"prompt": "abc", "max_tokens": place})
        assert answer["choices"][0]["finish_reason"] == "length"

    def test_penalties_are_those_of_openai(self, server: Running, model: Any) -> None:
        class Formula(LogitsProcessor):  # the prompt has 3 tokens
            def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
                scores = scores.clone()
                for token in set(input_ids[0, 3:].tolist()):
                    scores[0, token] -= 1.5 * input_ids[0, 3:].tolist().count(token) + 0.5
                return scores

        expected = alone(model, "abc", 50, logits_processor=[Formula()])
        assert expected != alone(model, "abc", 50)
        body = {"prompt": "abc", "max_tokens": 50, "frequency_penalty": 1.5, "presence_penalty": 0.5}
        assert text_of(server.ask(COMPLETIONS, body)[1]) == expected

    def test_logit_bias(self, server: Running) -> None:
        body = {"prompt": "abc", "max_tokens": 5, "logit_bias": {str(ord("k")): 100}}
        assert text_of(server.ask(COMPLETIONS, body)[1]) == "kkkkk"

    def test_prompts_of_token_ids(self, server: Running) -> None:
        asked = [{"prompt": prompt, "max_tokens": 9} for prompt in ("abc", ["abc"], [97, 98, 99])]
        assert len({text_of(server.ask(COMPLETIONS, body)[1]) for body in asked}) == 1

    def test_numbers_of_tokens_in_a_piece_of_their_own(self, server: Running) -> None:
        body = {"prompt": "abc", "max_tokens": 5}
        *_, last = server.stream(COMPLETIONS, body)
        assert (last["choices"][0]["finish_reason"], last["usage"]["total_tokens"]) == ("length", 8)
        *_, last, numbers = server.stream(COMPLETIONS, body | {"stream_options": {"include_usage": True}})
        assert last["choices"][0]["finish_reason"] == "length"
        assert "usage" not in last
        assert (numbers["choices"], numbers["usage"]["total_tokens"]) == ([], 8)

    def test_of_a_llama_in_blocks(self) -> None:
        special = {"vocab_size": 257, "bos_token_id": 256, "eos_token_id": 256, "pad_token_id": 256}
        llama = blockwise(rope_model(attention="sdpa", **special))
        with running(app_of(llama)) as server:
            status, answer = server.ask(COMPLETIONS, {"prompt": "abc", "max_tokens": 30})
            pieces = server.stream(COMPLETIONS, {"prompt": "abc", "max_tokens": 30})
        assert status == 200
        assert text_of(answer) == text_of_stream(pieces) == alone(llama, "abc", 30)


class TestClientsWhoGo:
    @pytest.mark.parametrize("stream", [False, True])
    def test_their_requests_leave_the_batch(self, server: Running, stream: bool) -> None:
        before = outcomes(server)["cancelled"]
        gone = [begin(server, stream) for _ in range(5)]  # two of them wait for a row
        wait_for(lambda: server.counts["running"] == 3)
        for each in gone:
            each.close()
        wait_for(lambda: idle(server))
        written = server.counts["tokens_written"]
        assert outcomes(server)["cancelled"] == before + 5
        assert server.ask(COMPLETIONS, {"prompt": "a", "max_tokens": 2})[0] == 200
        assert server.counts["tokens_written"] == written + 2

    def test_before_the_body_has_come(self, server: Running) -> None:
        connection = socket.create_connection(("127.0.0.1", server.port))
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{")
        wait_for(lambda: server.app.state.visits.open == 1)
        connection.close()
        wait_for(lambda: server.app.state.visits.count == 0)
        assert server.app.state.visits.open == 0


def begin(server: Running, stream: bool) -> Any:
    """Ask for a long answer, and leave it unread."""
    connection = socket.create_connection(("127.0.0.1", server.port))
    body = json.dumps({"prompt": "a", "max_tokens": LONG, "stream": stream}).encode()
    connection.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n" % len(body) + body
    )
    return connection


def test_too_many_requests(model: Any) -> None:
    with running(app_of(model, rows=1, limits=ServingLimits(max_waiting=1))) as server:
        first, second = begin(server, True), begin(server, False)
        wait_for(lambda: server.counts["running"] == 1 and server.counts["waiting"] == 1)
        with server.open(COMPLETIONS, {"prompt": "a"}) as response:
            assert (response.status, response.headers["retry-after"]) == (429, "1")
            assert "2 requests are being answered or waiting" in response.read().decode()
        assert server.ask("/health")[0] == server.ask("/v1/models")[0] == 200
        first.close()
        wait_for(lambda: server.app.state.visits.open == 1)
        short = {"prompt": "a", "max_tokens": 1, "stream": True}
        with server.open(COMPLETIONS, short) as response:
            assert response.status == 200
            second.close()
            assert b"[DONE]" in response.read()
        assert outcomes(server)["turned_away"] == 1


SAMPLE = r"^([a-z_]+)(?:\{(\w+)=\"([^\"]*)\"\})? ([0-9.e+-]+)$"


def samples(text: str) -> dict[tuple[str, str], float]:
    """Samples of Prometheus' text format by name and label, after a check of what it demands."""
    found, kinds, helped = {}, {}, set()
    assert text.endswith("\n")
    for line in text.splitlines():
        if line.startswith("# HELP "):
            helped.add(line.split()[2])
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split()
            assert name in helped
            assert name not in kinds
            kinds[name] = kind
        else:
            match = re.match(SAMPLE, line)
            assert match, line
            name, _, label, value = match.groups()
            family = name if name in kinds else re.sub("_(bucket|sum|count)$", "", name)
            assert family in kinds, line
            assert kinds[family] != "counter" or name.endswith("_total")
            assert (name, label or "") not in found
            found[name, label or ""] = float(value)
    for family in (name for name, kind in kinds.items() if kind == "histogram"):
        buckets = [value for (name, _), value in found.items() if name == f"{family}_bucket"]
        assert buckets == sorted(buckets)
        assert found[f"{family}_bucket", "+Inf"] == found[f"{family}_count", ""]
    return found


def outcomes(server: Running) -> dict[str, float]:
    status, text = server.ask("/metrics")
    assert status == 200
    return {label: value for (name, label), value in samples(text).items() if name == "lex_hf_requests_total"}


def test_metrics(model: Any) -> None:
    with running(app_of(model, session_bytes=10**6)) as server:
        server.ask(COMPLETIONS, {"prompt": "abc", "max_tokens": 5})
        server.ask(COMPLETIONS, {"prompt": "abcd", "max_tokens": 7, "stop": "y"})
        server.ask(COMPLETIONS, {"prompt": ""})
        wait_for(lambda: idle(server) and not server.app.state.visits.count)
        with server.open("/metrics") as response:
            assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
            found = samples(response.read().decode())
        counts = server.counts
    for outcome in ("stop", "length", "refused"):
        assert found["lex_hf_requests_total", outcome] == 1
    assert found["lex_hf_rows", ""] == 3
    assert found["lex_hf_rows_in_use", ""] == found["lex_hf_requests_waiting", ""] == 0
    # "abcd" goes on from "abc".
    assert found["lex_hf_prompt_tokens_total", ""] == 4
    # A step may have begun before the stop string was found.
    assert found["lex_hf_generated_tokens_total", ""] == counts["tokens_written"] >= 5 + len("vrry")
    assert found["lex_hf_session_bytes", ""] == counts["session_bytes"] > 0
    assert found["lex_hf_time_to_first_token_seconds_count", ""] == 2
    assert found["lex_hf_time_per_token_seconds_count", ""] == 5 - 1 + len("vrry") - 1


def test_health_when_generation_has_failed(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(**inputs: Any) -> Any:
        raise RuntimeError("out of memory")

    with running(app_of(model)) as server:
        assert server.ask("/health") == (200, {"status": "ok"})
        monkeypatch.setattr(server.app.state.engine.manager._schedule, "step", fails)
        status, answer = server.ask(COMPLETIONS, {"prompt": "abc", "max_tokens": 5})
        assert status == 503
        assert "out of memory" in answer["error"]["message"]
        wait_for(lambda: not server.app.state.engine.manager.is_running())
        status, answer = server.ask("/health")
        assert (status, answer["reason"]) == (503, "Generation has failed: out of memory")
        assert server.ask(COMPLETIONS, {"prompt": "abc"})[0] == 503
        assert server.ask("/metrics")[0] == 200


def test_a_text_that_cannot_be_decoded(model: Any) -> None:
    tokenizer = chat_tokenizer()
    with running(app_of(model, tokenizer=tokenizer)) as server:
        tokenizer.decode = None  # as broken as can be
        status, answer = server.ask(COMPLETIONS, {"prompt": "abc", "max_tokens": 5, "stop": "x"})
        assert status == 500
        assert "not callable" in answer["error"]["message"]
        with server.open(COMPLETIONS, {"prompt": "abc", "max_tokens": LONG, "stream": True}) as response:
            assert "not callable" in response.read().decode()
        wait_for(lambda: idle(server))
        assert server.ask("/health")[0] == 200


def test_pages_of_any_origin_if_that_is_asked_for(model: Any) -> None:
    page = {"Origin": "http://page.example"}
    with running(app_of(model, enable_cors=True)) as server, server.open("/v1/models", **page) as response:
        assert response.headers["access-control-allow-origin"]


class TestStop:
    def stopping(self, server: Running) -> None:
        server.server.handle_exit(signal.SIGTERM, None)
        wait_for(lambda: server.app.state.visits.is_stopping)

    def test_what_runs_is_finished(self, model: Any) -> None:
        expected = alone(model, "abc", 300)
        with running(app_of(model)) as server, ThreadPoolExecutor(1) as threads:
            answer = threads.submit(server.ask, COMPLETIONS, {"prompt": "abc", "max_tokens": 300})
            wait_for(lambda: server.counts["running"] == 1)
            self.stopping(server)
            status, refused = server.ask(COMPLETIONS, {"prompt": "abc"})
            assert (status, refused["error"]["message"]) == (503, "The server is stopping.")
            assert server.ask("/health") == (503, {"status": "unhealthy", "reason": "The server is stopping."})
            assert not answer.done()
            status, whole = answer.result()
            assert (status, text_of(whole)) == (200, expected)
            wait_for(lambda: not server.app.state.engine.manager.is_running())

    def test_the_rest_is_ended(self, model: Any) -> None:
        with running(app_of(model), grace=0.2) as server:
            body = {"prompt": "abc", "max_tokens": LONG}
            stream: HTTPResponse = server.open(COMPLETIONS, body | {"stream": True})
            with ThreadPoolExecutor(1) as threads:
                plain = threads.submit(server.ask, COMPLETIONS, body)
                wait_for(lambda: server.counts["running"] == 2)
                self.stopping(server)
                last = stream.read().decode().split("data: ")[-1]
                assert "stopped before this request ended" in json.loads(last)["error"]["message"]
                status, answer = plain.result()
                assert status == 503
                assert "stopped before this request ended" in answer["error"]["message"]

    def test_twice_is_at_once(self, model: Any) -> None:
        with running(app_of(model), grace=600) as server:
            stream = server.open(COMPLETIONS, {"prompt": "abc", "max_tokens": LONG, "stream": True})
            wait_for(lambda: server.counts["running"] == 1)
            self.stopping(server)
            assert not server.server.should_exit
            server.server.handle_exit(signal.SIGINT, None)
            assert "stopped before this request ended" in stream.read().decode()
            wait_for(lambda: server.server.should_exit)
            assert not server.server.force_exit

    def test_three_times_is_without_a_word(self, model: Any) -> None:
        with running(app_of(model), grace=600) as server:
            for _ in range(3):
                server.server.handle_exit(signal.SIGINT, None)
            assert server.server.force_exit


class TestSessions:
    def test_a_chat_goes_on_from_its_cache(self, model: Any) -> None:
        messages = [{"role": "user", "content": "In a hole in the ground there lived a test. " * 5}]
        with running(app_of(model, session_bytes=10**7)) as server:
            first = server.ask(CHAT, {"messages": messages, "max_tokens": 20})[1]
            read = server.counts["tokens_read"]
            messages += [first["choices"][0]["message"], {"role": "user", "content": "And then?"}]
            messages = [{key: each[key] for key in ("role", "content")} for each in messages]
            second = server.ask(CHAT, {"messages": messages, "max_tokens": 20})[1]
            # The last token of an answer was never read; "\nuser: And then?\nassistant: " is new.
            assert server.counts["tokens_read"] - read == 1 + len("\nuser: And then?\nassistant: ")
        prompt = "".join(f"{each['role']}: {each['content']}\n" for each in messages) + "assistant: "
        assert text_of(second) == alone(model, prompt, 20)
        assert second["usage"]["prompt_tokens"] == len(prompt)
