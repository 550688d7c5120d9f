"""What a server refuses, and how it says so: never as an error of its own."""

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from helpers.serving import (
    CHAT,
    COMPLETIONS,
    NAME,
    Running,
    app_of,
    chat_tokenizer,
    letter_model,
    needs_server,
    running,
)
from hypothesis import example, given
from hypothesis import strategies as st

from lex_hf.data.tokenizers import byte_tokenizer
from lex_hf.inference.serving.fields import KNOWN, NUMBERS
from lex_hf.inference.serving.limits import ServingLimits

needs_server()


@pytest.fixture(scope="module")
def model() -> Any:
    return letter_model()


@pytest.fixture(scope="module")
def server(model: Any) -> Iterator[Running]:
    limits = ServingLimits(max_body_bytes=50_000, max_prompt_tokens=2_000, hosts=["localhost"], body_seconds=0.5)
    with running(app_of(model, limits=limits)) as server:
        yield server


# What is sent, and words of the sentence that answers it.
BAD: dict[str, tuple[Any, str]] = {
    "nothing": (b"", "must be a JSON object"),
    "no JSON": (b"{", "must be a JSON object"),
    "no object": ([1], "must be a JSON object"),
    "a lone surrogate alone": (b'"\\ud800"', "must be a JSON object"),
    "deep": (b'{"prompt": ' + b"[" * 20_000 + b"]" * 20_000 + b"}", "must be a JSON object"),
    "a number of many digits": (b'{"seed": ' + b"9" * 10_000 + b"}", "must be a JSON object"),
    "other bytes": (b'{"prompt": "\xff\xfe"}', "must be a JSON object"),
    "a lone surrogate": (b'{"prompt": "\\ud800"}', "lone surrogate"),
    "a lone surrogate as a name": (b'{"prompt": "a", "\\udfff": 1}', "lone surrogate"),
    "NaN": (b'{"prompt": "a", "temperature": NaN}', "NaN or an infinite number"),
    "no prompt": ({}, "prompt = None: it must be a text"),
    "an empty prompt": ({"prompt": ""}, "The prompt is empty"),
    "an empty list": ({"prompt": []}, "prompt = []: it must be a text"),
    "two prompts": ({"prompt": ["a", "b"]}, "send several prompts as several requests"),
    "an id of no token": ({"prompt": [1, 257]}, "must be a flat list of ids from 0 to 256"),
    "an odd id": ({"prompt": [1, True]}, "ids of tokens"),
    "a long prompt": ({"prompt": "a" * 2_001}, "The prompt has 2,001 tokens, and 2,000 are allowed"),
    "no tokens": ({"prompt": "a", "max_tokens": 0}, "max_tokens = 0: it must be a whole number from 1 to 32768"),
    "fewer": ({"prompt": "a", "max_tokens": -1}, "max_tokens = -1: it must be"),
    "half a token": ({"prompt": "a", "max_tokens": 1.5}, "max_tokens = 1.5: it must be"),
    "many tokens": ({"prompt": "a", "max_tokens": 10**30}, "it must be a whole number from 1 to 32768"),
    "a cold temperature": ({"prompt": "a", "temperature": -1}, "temperature = -1: it must be a number from 0 to 2"),
    "hardly a temperature": ({"prompt": "a", "temperature": 1e-300}, "temperature = 1e-300: it must be 0, which"),
    "a text as temperature": ({"prompt": "a", "temperature": "hot"}, "temperature = 'hot': it must be a number"),
    "top_p": ({"prompt": "a", "top_p": 2}, "top_p = 2: it must be a number from 0 to 1"),
    "a huge seed": ({"prompt": "a", "seed": 2**63}, "seed = 9223372036854775808: it must be a whole number from 0"),
    "many stops": ({"prompt": "a", "stop": ["x"] * 5_000}, "stop = ['x', 'x', 'x', 'x', 'x', 'x', ...]: it must be"),
    "an empty stop": ({"prompt": "a", "stop": ""}, "stop = '': it must be at most 4 texts of 1 to 256 characters"),
    "a stop that is no text": ({"prompt": "a", "stop": [1]}, "stop = [1]: it must be"),
    "two answers": ({"prompt": "a", "n": 2}, "n = 2: this server does not do that"),
    "n = true": ({"prompt": "a", "n": True}, "n = True: this server does not do that"),
    "log-probabilities": ({"prompt": "a", "logprobs": 0}, "logprobs = 0: this server does not do that"),
    "the prompt again": ({"prompt": "a", "echo": True}, "echo = True: this server does not do that"),
    "a suffix": ({"prompt": "a", "suffix": "b"}, "suffix = 'b': this server does not do that"),
    "an unknown field": ({"prompt": "a", "flavour": 1}, "There is no field 'flavour'. Fields are: "),
    "a field of chat": ({"prompt": "a", "messages": []}, "There is no field 'messages'"),
    "a model that is no text": ({"prompt": "a", "model": 3}, "model must be the name"),
    "a stream that is no truth": ({"prompt": "a", "stream": "yes"}, "stream = 'yes': it must be true or false"),
    "a bias of no token": ({"prompt": "a", "logit_bias": {"x": 1}}, "whose names are ids of tokens"),
    "a bias of another vocabulary": ({"prompt": "a", "logit_bias": {"257": 1}}, "they go from 0 to 256"),
    "a large bias": ({"prompt": "a", "logit_bias": {"1": 101}}, "1 = 101: it must be a number from -100 to 100"),
    "beams": ({"prompt": "a", "generation_config": '{"num_beams": 4}'}, "'num_beams' is not used here"),
    "long by another way": (
        {"prompt": "a", "generation_config": '{"max_new_tokens": 99999}'},
        "max_new_tokens = 99999",
    ),
    "no configuration": ({"prompt": "a", "generation_config": "[]"}, "it must be an object of JSON as a text"),
}
HI = {"role": "user", "content": "hi"}
BAD_CHATS: dict[str, tuple[Any, str]] = {
    "no messages": ({}, "messages = None: it must be a list of messages"),
    "none": ({"messages": []}, "messages = []: it must be a list"),
    "a message that is a text": ({"messages": ["hi"]}, "messages[0] = 'hi': it must be an object"),
    "no content": ({"messages": [{"role": "user"}]}, "messages[0].content = None: it must be a text"),
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "this model reads no other",
    ),
    "tools": ({"messages": [HI], "tools": [{"type": "function"}]}, "the chat template of this model has no tools"),
    "calls": (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}]},
        "the chat template of this model has no tools",
    ),
    "malformed calls": ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "tool_calls = [{}]: it must be"),
    "a format": ({"messages": [HI], "response_format": {"type": "json_object"}}, "this server does not do that"),
    "another template": (
        {"messages": [HI], "chat_template_kwargs": {"chat_template": "{{ 1 }}"}},
        "chat_template is no variable of the template",
    ),
    "an unknown part of a message": ({"messages": [{**HI, "colour": 1}]}, "does not use 'colour'"),
}


class TestRefusals:
    @pytest.mark.parametrize("case", BAD)
    def test_completions(self, server: Running, case: str) -> None:
        body, words = BAD[case]
        status, answer = server.ask(COMPLETIONS, body)
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
        assert words in answer["error"]["message"]

    @pytest.mark.parametrize("case", BAD_CHATS)
    def test_chat(self, server: Running, case: str) -> None:
        body, words = BAD_CHATS[case]
        status, answer = server.ask(CHAT, body)
        assert status == 400
        assert words in answer["error"]["message"]

    def test_what_a_page_of_another_origin_could_send(self, server: Running) -> None:
        """Browsers ask for permission, which is not given, before they send JSON as what it is."""
        for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
            status, answer = server.ask(COMPLETIONS, {"prompt": "a", "max_tokens": 1}, Content_Type=kind)
            assert status == 400
            assert "sent with Content-Type: application/json" in answer["error"]["message"]
        with server.open(COMPLETIONS, method="OPTIONS", Origin="http://evil.example") as response:
            assert response.status == 405
            assert "access-control-allow-origin" not in response.headers

    def test_what_asks_for_nothing_is_taken(self, server: Running) -> None:
        body = {"n": 1, "logprobs": None, "best_of": 1, "echo": False, "user": "me", "stop": None, "suffix": None}
        assert server.ask(COMPLETIONS, body | {"prompt": "a", "max_tokens": 1})[0] == 200
        body = {"n": 1, "logprobs": False, "tools": [], "response_format": {"type": "text"}, "metadata": {"a": "b"}}
        history = [HI, {**HI, "role": "assistant", "refusal": None, "annotations": []}, HI]
        assert server.ask(CHAT, body | {"messages": history, "max_tokens": 1})[0] == 200

    def test_another_model(self, server: Running) -> None:
        for path, body in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": [HI]}), ("/load_model", {})):
            status, answer = server.ask(path, body | {"model": "gpt-9"})
            assert (status, answer["error"]["code"]) == (404, "model_not_found")
            assert server.ask(path, body | {"model": 3})[0] == 400
            assert "There is no model 'gpt-9' here: this server has letters." in answer["error"]["message"]
        assert server.ask("/v1/models/gpt-9")[0] == 404
        assert server.ask(f"/v1/models/{NAME}")[1]["id"] == NAME
        assert [each["id"] for each in server.ask("/v1/models")[1]["data"]] == [NAME]

    @pytest.mark.parametrize("path", ["/reset", "/v1/responses", "/v1/audio/transcriptions", "/v1/systemone", "/docs"])
    def test_routes_that_are_not_there(self, server: Running, path: str) -> None:
        for method in ("POST", "GET"):
            status, answer = server.ask(path, {}, method)
            assert status == 404
            assert f"There is no {method} {path} here. There are: " in answer["error"]["message"]
        assert server.ask(COMPLETIONS, method="GET")[0] == 405

    def test_bodies(self, server: Running) -> None:
        status, answer = server.ask(COMPLETIONS, {"prompt": "a" * 50_000})
        assert (status, answer["error"]["message"]) == (413, "The body is too long: 50000 bytes are allowed.")
        with self.begun(server, b"Transfer-Encoding: chunked") as connection:
            connection.sendall((b"2000\r\n" + b"a" * 0x2000 + b"\r\n") * 8)
            assert b" 413 " in connection.recv(1000)
        with self.begun(server, b"Content-Length: 10") as connection:  # which never comes
            assert b" 408 " in connection.recv(1000)

    def begun(self, server: Running, header: bytes) -> socket.socket:
        """A request whose body is still to come."""
        connection = socket.create_connection(("127.0.0.1", server.port), timeout=20)
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n" + header + b"\r\n\r\n")
        return connection

    @pytest.mark.parametrize(
        ("host", "status"),
        [
            ("localhost", 200),
            ("LOCALHOST:8000", 200),
            ("127.0.0.1:80", 200),
            ("[::1]:8000", 200),
            ("evil.example", 400),
            ("localhost.evil.example:80", 400),
            ("127.0.0.1.evil.example", 400),
            ("", 400),
        ],
    )
    def test_names_of_the_server(self, server: Running, host: str, status: int) -> None:
        for path, body in (("/v1/models", None), (COMPLETIONS, {"prompt": "a", "max_tokens": 1}), ("/health", None)):
            assert server.ask(path, body, Host=host)[0] == status

    def test_chat_without_a_template(self, model: Any) -> None:
        with running(app_of(model, tokenizer=byte_tokenizer())) as server:
            status, answer = server.ask(CHAT, {"messages": [HI]})
        assert status == 400
        assert "has no chat template" in answer["error"]["message"]

    def test_what_a_template_refuses(self, model: Any) -> None:
        tokenizer = chat_tokenizer()
        tokenizer.chat_template = "{{ raise_exception('Roles must alternate') if messages | length > 1 }}hi"
        with running(app_of(model, tokenizer=tokenizer)) as server:
            status, answer = server.ask(CHAT, {"messages": [HI, HI]})
            assert status == 400
            assert "does not take this: Roles must alternate" in answer["error"]["message"]
            assert server.ask(CHAT, {"messages": [HI], "max_tokens": 1})[0] == 200


EXTREMES = NUMBERS | {"top_k": (0, 2**31), "min_new_tokens": (0, 32768)}


@given(settings=st.fixed_dictionaries({}, optional={name: st.sampled_from(ends) for name, ends in EXTREMES.items()}))
@example(settings={name: ends[0] for name, ends in EXTREMES.items()})
@example(settings={name: ends[1] for name, ends in EXTREMES.items()})
def test_whatever_is_allowed_can_be_done(server: Running, settings: dict[str, float]) -> None:
    config = json.dumps({**settings, "do_sample": True, "max_new_tokens": 3, "eos_token_id": list(range(97, 113))})
    bias = {str(token): 100 * (-1) ** token for token in range(256)}
    body = {"frequency_penalty": -2, "presence_penalty": 2, "logit_bias": bias, "generation_config": config}
    status, answer = server.ask(COMPLETIONS, {"prompt": "a", **body})
    assert status == 200, answer
    assert server.ask("/health")[0] == 200


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
FIELDS = st.sampled_from(sorted(KNOWN))
ODD = ["", "{}", [], {}, 0, 1, -1, 1e308, 2**64, NAME, '{"top_k": 0}', '{"min_p": 1}', {"1": 5}]
VALUES = JSON | st.sampled_from(ODD)
PARTS = st.sampled_from(["role", "content", "name", "tool_calls"])
PROMPTS = JSON | st.lists(st.dictionaries(PARTS, JSON), max_size=3) | st.just("a") | st.just([HI])


@given(is_chat=st.booleans(), prompt=PROMPTS, fields=st.dictionaries(FIELDS, VALUES))
@example(is_chat=True, prompt=[{"role": "\x00", "content": "\U0010ffff"}], fields={})
def test_no_body_is_an_error_of_the_server(
    server: Running, is_chat: bool, prompt: Any, fields: dict[str, Any]
) -> None:
    body = {"max_tokens": 2, "messages" if is_chat else "prompt": prompt, **fields}
    status, answer = server.ask(CHAT if is_chat else COMPLETIONS, body)
    assert status in (200, 400, 404), answer
    if status != 200:
        assert answer["error"]["message"]
