"""A long, mixed load on a server over the loopback: answers, clients who go, bad requests, slow readers.

    python benchmarks/soak.py --minutes 10 --clients 16

Needs pip install 'lex-hf[serve]'. A server of a small model runs in a process of its own; every text is compared with
what `generate` writes alone. It ends by itself, prints what happened as JSON, and exits with 1 if a text is wrong, an
answer is an error of the server, requests remain in the batch, or rows, threads or memory grow.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPException, HTTPResponse
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lex_hf import LexConfig, LexForCausalLM
from lex_hf.data.tokenizers import byte_tokenizer

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
WORDS = ["in", "a", "hole", "the", "ground", "there", "lived", "test", "once", "upon", "time", "né", "猫"]
PROMPTS, LONGEST = 24, 120  # prompts, and new tokens that are compared
GROWTH = 0.10  # of memory, from the warm-up to the end
WARM_UP = 0.25  # share of the time after which memory must not grow
BAD = (
    b"{",
    b"[]",
    b'{"prompt": ""}',
    b'{"prompt": "\\ud800"}',
    b'{"prompt": "a", "temperature": NaN}',
    b'{"prompt": "a", "max_tokens": -5}',
    b'{"prompt": "a", "n": 3}',
    b'{"prompt": "a", "stop": [1]}',
    b'{"prompt": "a", "model": "another"}',
    b'{"prompt": "' + b"a" * 300_000 + b'"}',
)


def make_model(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Make a small model whose answers are varied, and save it."""
    torch.manual_seed(0)
    config = LexConfig(
        vocab_size=257,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=128,
        training_length=64,
        bos_token_id=256,
        eos_token_id=256,
        pad_token_id=256,
        dtype="float32",
    )
    model = LexForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.2)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, tokenizer


def make_cases(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[tuple[dict[str, Any], str]]:
    """Return requests, and the text of each: what `generate` writes alone."""
    choose, cases = random.Random(0), []
    for index in range(PROMPTS):
        prompt = " ".join(choose.choices(WORDS, k=choose.choice([1, 10, 100, 400])))
        tokens = choose.randint(1, LONGEST)
        body: dict[str, Any] = {"max_tokens": tokens}
        settings: dict[str, Any] = {"do_sample": False}
        if index % 2:
            settings = {"do_sample": True, "temperature": 0.7, "top_p": 0.9}
            body |= {"temperature": 0.7, "top_p": 0.9, "seed": index}
        is_chat = index % 3 == 0
        text = f"user: {prompt}\nassistant: " if is_chat else prompt
        body |= {"messages": [{"role": "user", "content": prompt}]} if is_chat else {"prompt": prompt}
        inputs = tokenizer(text, return_tensors="pt")
        torch.manual_seed(index)
        output = model.generate(**inputs, max_new_tokens=tokens, **settings)[0, inputs["input_ids"].shape[1] :]
        answer = tokenizer.decode(output, skip_special_tokens=True)
        if index % 4 == 3 and len(answer) > 20:  # stop strings
            stop = answer[12:14]
            body, answer = body | {"stop": [stop]}, answer[: answer.index(stop)]
        cases.append((body, answer))
    return cases


class Load:
    """Clients that send requests until the time is over.

    Args:
        port: Of the server.
        cases: Requests and their texts.
        until: When they end, in seconds (`time.monotonic`).
    """

    def __init__(self, port: int, cases: list[tuple[dict[str, Any], str]], until: float) -> None:
        self.port, self.cases, self.until = port, cases, until
        self.done: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._lock = threading.Lock()

    def run(self, seed: int) -> None:
        """Be a client."""
        choose = random.Random(seed)
        kinds = [self.whole, self.streamed, self.slow, self.leaves, self.leaves_early, self.bad]
        while time.monotonic() < self.until:
            kind = choose.choices(kinds, [6, 6, 1, 3, 2, 2])[0]
            try:
                kind(choose)
            except (OSError, HTTPException, KeyError, ValueError) as error:
                self._fail(f"{kind.__name__}: {type(error).__name__}: {error}")
            with self._lock:
                self.done[kind.__name__] += 1

    def _fail(self, what: str) -> None:
        with self._lock:
            self.wrong.append(what[:500])

    @contextlib.contextmanager
    def _asked(self, body: Any) -> Iterator[tuple[HTTPConnection, HTTPResponse]]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        path = "/v1/chat/completions" if isinstance(body, dict) and "messages" in body else "/v1/completions"
        connection = HTTPConnection("127.0.0.1", self.port, timeout=120)
        with contextlib.closing(connection):
            connection.request("POST", path, data, {"Content-Type": "application/json"})
            yield connection, connection.getresponse()

    def _check(self, body: dict[str, Any], expected: str, text: str) -> None:
        if text != expected:
            self._fail(f"{body} was answered {text!r}, and generate writes {expected!r}")

    def whole(self, choose: random.Random) -> None:
        """Read an answer at once."""
        body, expected = choose.choice(self.cases)
        with self._asked(body) as (_, response):
            answer = json.loads(response.read())
            if self._is_taken(response):
                choice = answer["choices"][0]
                self._check(body, expected, choice["text"] if "text" in choice else choice["message"]["content"])

    def streamed(self, choose: random.Random, pause: float = 0) -> None:
        """Read an answer while it is written."""
        body, expected = choose.choice(self.cases)
        with self._asked({**body, "stream": True}) as (_, response):
            if not self._is_taken(response):
                response.read()
                return
            text, ended = "", False
            for line in response:
                if pause:
                    time.sleep(pause * choose.random())
                piece = line.removeprefix(b"data: ").strip()
                if not piece:
                    continue
                if piece == b"[DONE]":
                    ended = True
                    continue
                choice = json.loads(piece)["choices"][0]
                text += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            self._check(body, expected, text if ended else f"{text}, without an end")

    def slow(self, choose: random.Random) -> None:
        """Read an answer slowly."""
        self.streamed(choose, pause=0.05)

    def leaves(self, choose: random.Random) -> None:
        """Go while a long answer is written."""
        body = {"prompt": "a", "max_tokens": 20_000, "stream": True}
        with self._asked(body) as (_, response):
            if self._is_taken(response):
                for _ in range(choose.randint(1, 20)):
                    response.readline()

    def leaves_early(self, choose: random.Random) -> None:
        """Go without having read anything, perhaps in the middle of the request."""
        body = json.dumps({"prompt": "a " * choose.choice([1, 3000]), "max_tokens": 20_000}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        whole = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
        with socket.create_connection(("127.0.0.1", self.port)) as connection:
            connection.sendall(whole[: choose.choice([len(whole), len(whole) // 2])])
            time.sleep(0.3 * choose.random())

    def bad(self, choose: random.Random) -> None:
        """Send what is refused."""
        with self._asked(choose.choice(BAD)) as (_, response):
            response.read()
            if response.status not in (400, 404, 413, 429):
                self._fail(f"a bad request was answered {response.status}")

    def _is_taken(self, response: HTTPResponse) -> bool:
        """Return whether a request was answered; there may be too many at once."""
        with self._lock:
            self.done[f"status {response.status}"] += 1
        if response.status not in (200, 429):
            self._fail(f"a good request was answered {response.status}")
        if response.status == 429:
            time.sleep(0.25)
        return response.status == 200


def metrics(port: int) -> dict[str, float]:
    """Return the figures of the server."""
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    with contextlib.closing(connection):
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


def process(pid: int) -> tuple[float, int]:
    """Return the resident memory of a process in MiB, and its threads."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(status["VmRSS"].split()[0]) / 1024, int(status["Threads"])


@contextlib.contextmanager
def serving(folder: Path, rows: int, log: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Serve the model; yield the process and its port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "lex_hf", "serve", str(folder), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--device", "cpu", "--rows", str(rows), "--max-waiting", "8", "--session-bytes", "20MB"]
    command += ["--max-body-bytes", "200kB", "--log-level", "warning"]
    with log.open("w") as output:
        server = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        while True:
            with contextlib.suppress(OSError):
                metrics(port)
                break
            if server.poll() is not None:
                raise SystemExit(log.read_text())
            time.sleep(0.2)
        yield server, port
    finally:
        server.kill()
        server.wait()


def soak(minutes: float, clients: int, rows: int, folder: Path) -> dict[str, Any]:
    """Load a server, and return what happened."""
    model, tokenizer = make_model(folder / "model")
    cases = make_cases(model, tokenizer)
    log = folder / "log"
    with serving(folder / "model", rows, log) as (server, port):
        start = time.monotonic()
        load = Load(port, cases, start + 60 * minutes)
        threads = [threading.Thread(target=load.run, args=(seed,)) for seed in range(clients)]
        for each in threads:
            each.start()
        watched = []
        while time.monotonic() < load.until:
            time.sleep(min(5, 6 * minutes))
            watched.append((time.monotonic() - start, *process(server.pid)))
        for each in threads:
            each.join()
        for _ in range(100):
            last = metrics(port)
            if not (last["lex_hf_rows_in_use"] or last["lex_hf_requests_reading"] or last["lex_hf_requests_waiting"]):
                break
            time.sleep(0.1)
        server.send_signal(signal.SIGTERM)
        code = server.wait(60)
    warm = [each for each in watched if each[0] >= 60 * minutes * WARM_UP] or watched
    third = max(1, len(warm) // 3)
    memory = [each[1] for each in warm]
    before, after = max(memory[:third]), max(memory[-third:])
    result = {
        "minutes": minutes,
        "clients": clients,
        "rows": rows,
        "requests": dict(sorted(load.done.items())),
        "outcomes": {name[31:-2]: count for name, count in last.items() if name.startswith("lex_hf_requests_total")},
        "tokens_read": last["lex_hf_prompt_tokens_total"],
        "tokens_written": last["lex_hf_generated_tokens_total"],
        "rows_left_in_use": last["lex_hf_rows_in_use"],
        "requests_left_waiting": last["lex_hf_requests_waiting"],
        "session_bytes": last["lex_hf_session_bytes"],
        "memory_mib": {"after_warm_up": round(before, 1), "at_the_end": round(after, 1)},
        "threads": {"after_warm_up": warm[0][2], "most": max(each[2] for each in warm), "at_the_end": warm[-1][2]},
        "exit_code": code,
        "tracebacks": log.read_text().count("Traceback"),
        "wrong": len(load.wrong),
        "first_wrong": load.wrong[:5],
    }
    result["failed"] = [
        what
        for what, is_so in {
            "wrong answers": load.wrong,
            "requests left in the batch": result["rows_left_in_use"] or result["requests_left_waiting"],
            "requests that failed": result["outcomes"]["failed"],
            "memory grows": after > before * (1 + GROWTH),
            "threads grow": result["threads"]["at_the_end"] > result["threads"]["after_warm_up"] + 2,
            "errors in the log": result["tracebacks"],
            "no clean exit": code,
        }.items()
        if is_so
    ]
    return result


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=2, help="how long clients send requests")
    parser.add_argument("--clients", type=int, default=16, help="clients at once")
    parser.add_argument("--rows", type=int, default=6, help="rows of the server")
    arguments = parser.parse_args()
    if not (arguments.minutes > 0 and arguments.clients > 0 and arguments.rows > 0):
        parser.error("--minutes, --clients and --rows must be more than 0")
    os.environ["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        result = soak(arguments.minutes, arguments.clients, arguments.rows, Path(folder))
    print(json.dumps(result, indent=1, ensure_ascii=False))
    raise SystemExit(bool(result["failed"]))


if __name__ == "__main__":
    main()
