"""Several processes of one model over one folder of sessions: one is killed, and another goes on from what it kept."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import psutil
import pytest
from helpers.forks import PACKAGE, Forked
from helpers.models import needs_rows, tiny_model
from helpers.serving import alone, chat_tokenizer, letter_model, wait_for
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from lex_hf.data.tokenizers import byte_tokenizer
from lex_hf.inference.batching import BlockBatchingManager
from lex_hf.inference.batching.sessions import FileSessions
from lex_hf.inference.caches import new_cache

pytestmark = needs_rows

LOST = (HTTPError, URLError, HTTPException, ConnectionError)  # what becomes of a request whose replica is gone
FIRST, SECOND = "In a hole in the ground", " there lived a hobbit. Not a nasty, dirty, wet hole"

# A process that answers one prompt after the other, and tells what it does.
ANSWERS = """
import json, sys
from transformers import AutoModelForCausalLM
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from lex_hf.inference import cache_files
from lex_hf.inference.batching import BlockBatchingManager

def half(tensors, place, **options):
    place.write_bytes(whole(tensors, **options)[:1000])
    print("half-written", flush=True)
    import time; time.sleep(1000)

folder, prompts, tokens, is_cut = json.loads(sys.argv[1])
if is_cut:
    from safetensors.torch import save as whole
    cache_files.save_file = half
model = AutoModelForCausalLM.from_pretrained(f"{folder}/model")
config = ContinuousBatchingConfig(max_requests_per_batch=2, max_batch_tokens=16)
manager = BlockBatchingManager(model, None, config, session_bytes=10**8, session_folder=f"{folder}/sessions")
manager.start()
for index, (prompt, count) in enumerate(zip(prompts, tokens)):
    name = manager.add_request(prompt, max_new_tokens=count, streaming=True, do_sample=False)
    while manager.counts()["tokens_read"] < 100 and index:
        pass
    print("reads", index, flush=True)
    for result in manager.request_id_iter(name):
        print("wrote", index, json.dumps(result.generated_tokens), flush=True)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replicas")
    letter_model().save_pretrained(folder / "model")
    chat_tokenizer().save_pretrained(folder / "model")
    return folder


@pytest.fixture
def place(folder: Path, tmp_path: Path) -> Path:
    """A folder of its own with the model."""
    (tmp_path / "model").symlink_to(folder / "model")
    return tmp_path


def ids_of(text: str) -> list[int]:
    return list(byte_tokenizer()(text)["input_ids"])


def start(place: Path, prompts: list[list[int]], tokens: list[int], is_cut: bool = False) -> Forked:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    return PACKAGE.start("-c", ANSWERS, json.dumps([str(place), prompts, tokens, is_cut]), env=env)


def kill_when(process: Forked, condition: Callable[[], bool]) -> None:
    def comes() -> bool:
        assert process.poll() is None, process.stderr
        return condition()

    wait_for(comes, 120)
    process.kill()
    assert process.wait() == -signal.SIGKILL


def sessions(place: Path) -> list[int]:
    """Lengths of the texts that are kept."""
    return sorted(int(path.name.partition("-")[0]) for path in (place / "sessions").glob("*.safetensors"))


def goes_on(place: Path, prompt: list[int], tokens: int = 20) -> tuple[int, list[int]]:
    """Let this process answer a prompt; return how many tokens it read, and what it wrote."""
    model = AutoModelForCausalLM.from_pretrained(place / "model")
    config = ContinuousBatchingConfig(max_requests_per_batch=2, max_batch_tokens=16)
    options: dict[str, Any] = {"session_bytes": 10**8, "session_folder": place / "sessions"}
    manager = BlockBatchingManager(model, None, config, **options)
    manager.start()
    try:
        name = manager.add_request(prompt, max_new_tokens=tokens, do_sample=False)
        result = manager.get_result(name)
        assert result is not None
        assert result.error is None
        return manager.counts()["tokens_read"], result.generated_tokens
    finally:
        manager.destroy()


def written_alone(place: Path, prompt: list[int], tokens: int = 20) -> list[int]:
    text = alone(AutoModelForCausalLM.from_pretrained(place / "model"), bytes(prompt).decode(), tokens)
    return ids_of(text)


@pytest.mark.processes
class TestKilled:
    def test_in_mid_answer(self, place: Path) -> None:
        prompt = ids_of(FIRST * 9)
        with start(place, [prompt], [100_000]) as process:
            kill_when(process, lambda: process.stdout.count("wrote") > 3 and bool(sessions(place)))
            assert json.loads(process.stdout.splitlines()[3].split(" ", 2)[2])[:3] == written_alone(place, prompt, 3)
        assert sessions(place) == [len(prompt) - 1]
        assert goes_on(place, prompt) == (1, written_alone(place, prompt))

    def test_while_it_reads_a_later_turn(self, place: Path) -> None:
        first = ids_of(FIRST)
        history = first + written_alone(place, first, 30)
        endless = history + ids_of(SECOND * 20_000)
        with start(place, [first, endless], [30, 5]) as process:
            kill_when(process, lambda: "reads 1" in process.stdout and len(first) + 29 in sessions(place))
            assert "wrote 1" not in process.stdout
        later = history + ids_of(SECOND)
        # The last token of an answer is read with the next prompt.
        assert goes_on(place, later) == (1 + len(SECOND), written_alone(place, later))

    def test_while_it_keeps_a_session(self, place: Path) -> None:
        prompt = ids_of(FIRST)
        with start(place, [prompt], [100_000], is_cut=True) as process:
            kill_when(process, lambda: "half-written" in process.stdout)
        assert sessions(place) == []
        (left,) = (place / "sessions").iterdir()
        assert left.stat().st_size == 1000
        assert goes_on(place, prompt) == (len(prompt), written_alone(place, prompt))
        assert left.exists()  # it might have been another process that still writes
        os.utime(left, (0, 0))
        assert goes_on(place, prompt, tokens=5)[0] == 1
        assert not left.exists()
        assert sessions(place) == [len(prompt) - 1, len(prompt) + 4, len(prompt) + 19]


def test_files_of_sessions_have_a_constant_size(place: Path) -> None:
    for times in (10, 30):
        goes_on(place, ids_of(FIRST * times), tokens=1)
    one, other = (place / "sessions").iterdir()
    assert one.stat().st_size == other.stat().st_size
    assert load_file(one).keys() == load_file(other).keys()


def test_a_slow_disk_does_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    kept = FileSessions(10**8, tmp_path, model)
    written: list[Any] = []
    is_slow = True

    def write(*arguments: Any, **options: Any) -> None:
        wait_for(lambda: not is_slow)
        written.append(arguments)

    monkeypatch.setattr("lex_hf.inference.batching.sessions.save_cache", write)
    taken = [kept.keep([1, 2, index], new_cache(model), model) for index in range(40)]
    assert taken == [True] * 16 + [False] * 24
    is_slow = False
    wait_for(lambda: len(written) == 16)
    wait_for(lambda: kept.keep([1], new_cache(model), model))
    kept.close()
    assert len(written) == 17


class Replicas:
    """Replicas on the loopback.

    Attributes:
        url: Where they listen.
        process: The number of the process that started them.
    """

    def __init__(self, port: int, process: int) -> None:
        self.url, self.process = f"http://127.0.0.1:{port}", process

    def open(self, path: str, body: Any = None) -> Any:
        """Send a request, and return the answer before it was read."""
        data = None if body is None else json.dumps(body).encode()
        return urlopen(Request(self.url + path, data, {"Content-Type": "application/json"}), timeout=60)

    def figures(self) -> tuple[int, dict[str, float]]:
        """Number of the process of some replica, and its figures."""
        with self.open("/metrics") as response:
            text = response.read().decode()
        found = re.findall(r'^(\w+)\{replica="[^"]*:(\d+)"\} (\S+)$', text, re.MULTILINE)
        return int(found[0][1]), {name: float(value) for name, _, value in found}

    def by_process(self, count: int = 2) -> dict[int, dict[str, float]]:
        """Figures of so many replicas."""
        found: dict[int, dict[str, float]] = {}

        def all_there() -> bool:
            with suppress(*LOST):
                process, figures = self.figures()
                found[process] = figures
            return len(found) == count

        wait_for(all_there, 120)
        return found


@pytest.fixture(scope="module")
def replicas(folder: Path) -> Iterator[Replicas]:
    """Two replicas over one folder, as the command line starts them."""
    for package in ("ray.serve", "openai"):
        pytest.importorskip(package, reason="Ray Serve is not installed: make ray-tests installs it")
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
    command = [*("serve", folder / "model", "--host", "127.0.0.1", "--port", port, "--rows", 2, "--replicas", 2)]
    command += ["--session-bytes", "100MB", "--session-folder", folder / "sessions", "--replica-cpus", 0.5]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    log = folder / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "lex_hf", *map(str, command)], env=env, stdout=file, stderr=file
        )
    found = Replicas(port, process.pid)
    try:

        def answers() -> bool:
            assert process.poll() is None, log.read_text()
            with suppress(*LOST), found.open("/health") as response:
                return bool(response.status == 200)
            return False

        wait_for(answers, 300)
        yield found
    finally:
        process.terminate()
        assert process.wait(timeout=120) == 0, log.read_text()


def test_one_of_two_replicas_is_killed_in_mid_answer(replicas: Replicas, folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    prompt = FIRST * 9
    body = {"prompt": prompt, "max_tokens": 20, "temperature": 0}
    before = replicas.by_process()
    assert all(figures["lex_hf_prompt_tokens_total"] == 0 for figures in before.values())
    with replicas.open("/v1/completions", {**body, "max_tokens": 30_000, "stream": True}) as stream:
        assert stream.readline().startswith(b"data: ")
        wait_for(lambda: len(prompt) - 1 in sessions(folder))
        now = replicas.by_process()
        (writing,) = (process for process, figures in now.items() if figures["lex_hf_rows_in_use"])
        (other,) = now.keys() - {writing}
        os.kill(writing, signal.SIGKILL)
        rest = b""
        with suppress(HTTPException, ConnectionError):
            rest = stream.read()
        assert b"[DONE]" not in rest

    # The client asks again, and may first meet the one that is no more.
    answers = []

    def answered() -> bool:
        with (
            suppress(HTTPError, URLError, HTTPException, ConnectionError),
            replicas.open("/v1/completions", body) as found,
        ):
            answers.append(json.load(found))
        return bool(answers)

    wait_for(answered, 60)
    assert answers[0]["choices"][0]["text"] == alone(model, prompt, 20)
    assert answers[0]["usage"]["prompt_tokens"] == len(prompt)
    after = replicas.by_process()  # Ray has started another one
    assert writing not in after
    read = {process: figures["lex_hf_prompt_tokens_total"] for process, figures in after.items()}
    assert sorted(read.values()) == [0, 1]
    assert read[other] == 1


def test_a_request_leaves_with_its_client(replicas: Replicas) -> None:
    body = {"prompt": FIRST, "max_tokens": 30_000, "stream": True}
    with replicas.open("/v1/completions", body) as stream:
        assert stream.readline().startswith(b"data: ")
        assert sum(each["lex_hf_rows_in_use"] for each in replicas.by_process().values()) == 1
    wait_for(lambda: not any(each["lex_hf_rows_in_use"] for each in replicas.by_process().values()), 60)


def test_a_name_that_is_not_the_servers(replicas: Replicas) -> None:
    request = Request(f"{replicas.url}/v1/models", headers={"Host": "evil.example"})
    with pytest.raises(HTTPError) as refused:
        urlopen(request, timeout=60)
    assert refused.value.code == 400
    assert "--allowed-host" in refused.value.read().decode()


def test_other_machines_reach_nothing_without_a_token(replicas: Replicas) -> None:
    """All is on the loopback, but for a port that each replica has in any case, for other parts of an application."""
    import grpc

    started = psutil.Process(replicas.process)
    inside, outside = set(), []
    for process in (started, *started.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            for each in process.net_connections("tcp"):
                if each.status == "LISTEN" and each.laddr.ip.removeprefix("::ffff:") == "127.0.0.1":
                    inside.add(each.laddr.port)
                elif each.status == "LISTEN":
                    assert process.cmdline()[0].startswith("ray::ServeReplica")
                    outside.append(each.laddr.port)
    assert int(replicas.url.rpartition(":")[2]) in inside
    assert len(outside) == 2
    for port in outside:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.unary_unary("/ray.serve.ASGIService/HandleRequest")
            with pytest.raises(grpc.RpcError) as refused:
                call(b"", timeout=30)
            assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED


def test_requests_are_spread(replicas: Replicas) -> None:
    before = replicas.by_process()
    for index in range(30):
        with replicas.open("/v1/completions", {"prompt": f"{index} {FIRST}", "max_tokens": 2}) as found:
            assert found.status == 200
    after = replicas.by_process()
    steps = [after[each]["lex_hf_prompt_tokens_total"] - before[each]["lex_hf_prompt_tokens_total"] for each in after]
    assert len(steps) == 2
    assert min(steps) > 0


class TestRefused:
    """Before anything starts."""

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"replicas": 0}, "replicas = 0"),
            ({"replicas": True}, "replicas = True"),
            ({"cpus": 0}, "cpus = 0"),
            ({"gpus": -1}, "gpus = -1"),
            ({"grace": -1}, "grace = -1"),
            ({"device": "cuda"}, "gpus = 0: say how many GPUs"),
            ({"session_bytes": 10**6}, "needs session_folder"),
            ({"max_waiting": -1}, "max_waiting = -1"),
        ],
    )
    def test_what_cannot_work(self, options: dict[str, Any], message: str) -> None:
        from lex_hf.inference.replicas import deployment

        with pytest.raises(ValueError, match=message):
            deployment("a-model", **options)

    def test_too_many(self) -> None:
        from lex_hf.inference.replicas import _check_room

        _check_room({"CPU": 2.0}, replicas=2)
        with pytest.raises(ValueError, match=r"3 replicas with cpus = 1 need 3, and there are 2"):
            _check_room({"CPU": 2.0}, replicas=3)
        with pytest.raises(ValueError, match=r"2 replicas with gpus = 0.5 need 1, and there are 0"):
            _check_room({"CPU": 2.0}, gpus=0.5)

    def test_a_port_that_nobody_would_know(self) -> None:
        from lex_hf.inference.replicas import run

        with pytest.raises(ValueError, match="port = 0"):
            run("a-model", port=0)

    def test_options_of_replicas_alone(self) -> None:
        from typer.testing import CliRunner

        from lex_hf.cli.commands import app

        done = CliRunner().invoke(app, ["serve", "a-model", "--replica-gpus", "1"])
        assert done.exit_code == 1
        assert "belong to --replicas" in done.output

    def test_unknown_options(self) -> None:
        from lex_hf.inference.replicas import deployment

        with pytest.raises(TypeError, match="Unknown options of replicas: labels, row"):
            deployment("a-model", row=3, labels={})

    def test_without_ray(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from lex_hf.inference import replicas

        monkeypatch.setitem(sys.modules, "ray", None)
        monkeypatch.setattr(replicas, "check_serving", lambda *_: None)
        with pytest.raises(ImportError, match=r"The extra 'ray' brings it: pip install 'lex-hf\[ray\]'"):
            replicas.deployment("a-model")
