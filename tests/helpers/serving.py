"""A server in this process: a tiny model of bytes that writes small letters, behind a real socket."""

import contextlib
import importlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.client import HTTPConnection, HTTPResponse
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from helpers.models import tiny_model
from lex_hf import LexForCausalLM
from lex_hf.data.tokenizers import byte_tokenizer
from lex_hf.inference.batching import BlockBatchingManager
from lex_hf.inference.serving.limits import ServingLimits

TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
NAME = "letters"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def needs_server() -> None:
    """Skip a file of tests where the packages of a server are not installed."""
    for package in ("fastapi", "uvicorn", "openai"):
        pytest.importorskip(package)


def answering() -> ModuleType:
    """Import what answers are made of, or skip the test."""
    try:
        return importlib.import_module("lex_hf.inference.serving.answers")
    except (ImportError, NameError):
        pytest.skip("older versions of transformers have no server, or only where all of its packages are installed")


def letter_model(**fields: Any) -> LexForCausalLM:
    """A model of bytes that writes small letters only, which no terminal changes."""
    model = tiny_model(**{"vocab_size": 257, "bos_token_id": 256, "pad_token_id": 256} | fields)
    with torch.no_grad():
        model.model.norm.weight[0], model.model.norm.bias[0] = 0, 1
        model.lm_head.weight[:, 0] = -1000
        model.lm_head.weight[ord("a") : ord("z") + 1, 0] = 0
    return model


def chat_tokenizer() -> Any:
    """A tokenizer of bytes with a chat template."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def alone(model: Any, prompt: str, tokens: int, seed: int | None = None, **settings: Any) -> str:
    """What `generate` writes for a prompt alone."""
    words = byte_tokenizer()
    inputs = words(prompt, return_tensors="pt")
    if seed is not None:
        torch.manual_seed(seed)
    options = {"do_sample": False, "max_new_tokens": tokens} | settings
    output = model.generate(**inputs, **options)
    return words.decode(output[0, inputs["input_ids"].shape[1] :])


def app_of(
    model: Any,
    rows: int = 3,
    tokenizer: Any = None,
    limits: ServingLimits | None = None,
    enable_cors: bool = False,
    **options: Any,
) -> Any:
    """Make an app, which serves a model in so many rows."""
    from lex_hf.inference.serving import build_app

    config = ContinuousBatchingConfig(max_requests_per_batch=rows, max_batch_tokens=16)
    manager = BlockBatchingManager(model, None, config, **options)
    words = chat_tokenizer() if tokenizer is None else tokenizer
    return build_app(NAME, model, words, manager, limits, enable_cors=enable_cors)


class Running:
    """A server that runs in a thread.

    Attributes:
        app: Its app.
        server: What uvicorn runs.
        port: Where it listens, at 127.0.0.1.
    """

    def __init__(self, app: Any, server: Any, port: int) -> None:
        self.app, self.server, self.port = app, server, port

    @property
    def counts(self) -> Any:
        """Counts of the batch."""
        return self.app.state.engine.manager.counts()

    def open(self, path: str, body: Any = None, method: str | None = None, **headers: str) -> HTTPResponse:
        """Send a request, and return the answer before it was read; a body that is no bytes is sent as JSON."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        # The connection is then closed with the response.
        given = {"Content-Type": "application/json", "Connection": "close"}
        given |= {name.replace("_", "-"): text for name, text in headers.items()}
        connection.request(method or ("GET" if body is None else "POST"), path, data, given)
        return connection.getresponse()

    def ask(self, path: str, body: Any = None, method: str | None = None, **headers: str) -> tuple[int, Any]:
        """Send a request, and return status and answer."""
        with self.open(path, body, method, **headers) as response:
            text = response.read().decode()
        return response.status, json.loads(text) if response.headers["content-type"] == "application/json" else text

    def stream(self, path: str, body: Any) -> list[Any]:
        """Send a request for a stream, and return its pieces."""
        status, text = self.ask(path, {**body, "stream": True})
        assert status == 200, text
        pieces = [piece.removeprefix("data: ") for piece in text.split("\n\n") if piece]
        assert pieces.pop() == "[DONE]"
        return [json.loads(piece) for piece in pieces]


def wait_for(condition: Callable[[], bool], seconds: float = 20) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it does not come true"
        time.sleep(0.005)


@contextlib.contextmanager
def running(app: Any, grace: float = 30) -> Iterator[Running]:
    """Serve an app of `build_app` on a free port."""
    from lex_hf.inference.serving.server import Server

    server = Server(app, "127.0.0.1", 0, grace, "warning")
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            wait_for(lambda: server.started)
            yield Running(app, server, listening.getsockname()[1])
        finally:
            server.should_exit = True
            thread.join()
            app.state.engine.close()
