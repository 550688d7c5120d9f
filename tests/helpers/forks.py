"""Python with other environments, arguments and code, without importing PyTorch and transformers each time.

A start of Python that imports this package takes six to ten seconds of CPU time. Here a server imports once, and
forks: the new process has its own environment, folder, arguments, `__main__` and output, and ends like any other.
What it does not have is what only the start of an interpreter reads: options but -I, PYTHONHASHSEED, PYTHONWARNINGS.
A test of what importing does, or of the memory of a process, starts Python itself.
"""

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import IO

ENVIRONMENT = dict(os.environ)  # of all tests: before any of them changes it
# In pyarrow, a thread would free memory, which no fork has.
_SERVERS = {**ENVIRONMENT, "JE_ARROW_MALLOC_CONF": "background_thread:false"}
# Hugging Face libraries read these while they are imported.
READ_ONCE = ("HF_", "HUGGINGFACE_", "TRANSFORMERS_", "DATASETS_", "HOME", "XDG_")
TIMEOUT = 300
_LOG = tempfile.TemporaryFile()  # noqa: SIM115 # what servers say


def _text(file: IO[bytes]) -> str:
    """All that is in a file, which others write."""
    return os.pread(file.fileno(), 2**30, 0).decode(errors="backslashreplace")


def _log() -> str:
    return _text(_LOG)


class Forked:
    """A process that a server has forked, with the methods of `subprocess.Popen`.

    Attributes:
        pid: The number of the process.
        returncode: Its exit status, negative if a signal ended it; None before `wait` or `poll` has seen the end.
    """

    def __init__(self, command: tuple[str, ...], status: IO[bytes], stdout: IO[bytes], stderr: IO[bytes]) -> None:
        self.args, self._status, self._stdout, self._stderr = command, status, stdout, stderr
        self.returncode: int | None = None
        try:
            self.pid = self._number()
        except RuntimeError:
            self._close()
            raise

    def _number(self) -> int:
        line = self._status.readline()
        if not line:
            raise RuntimeError(f"There is no server for {self.args}: {_log()}")
        return int(line)

    @property
    def stdout(self) -> str:
        """What it has written so far."""
        return _text(self._stdout)

    @property
    def stderr(self) -> str:
        return _text(self._stderr)

    def wait(self, timeout: float = TIMEOUT) -> int:
        """Wait for the end.

        Raises:
            subprocess.TimeoutExpired: If it runs for longer; it is killed then.
        """
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                self.kill()
                raise subprocess.TimeoutExpired(self.args, timeout, self.stdout, self.stderr)
            self.returncode = self._number()
        return self.returncode

    def fileno(self) -> int:
        """Of a file that can be read when it ends."""
        return self._status.fileno()

    def poll(self) -> int | None:
        ended = self.returncode is not None or select.select([self._status], [], [], 0)[0]
        return self.wait() if ended else None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> "Forked":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._close()

    def _close(self) -> None:
        for file in (self._status, self._stdout, self._stderr):
            file.close()


class Server:
    """A process that has imported modules, and forks. It starts with its first command, and ends with this process.

    Args:
        modules: Modules that it imports, those that are installed.
        base: The server that it is forked from, with modules that need not be imported again.
        without: Packages that may not be among what it has imported.
    """

    def __init__(self, *modules: str, base: "Server | None" = None, without: tuple[str, ...] = ()) -> None:
        self._modules, self._base, self._without = modules, base, without

    @cached_property
    def _connection(self) -> socket.socket:
        """The socket of the running server; the first of all servers is an interpreter that has imported nothing."""
        ours, theirs = socket.socketpair()
        with theirs:
            if self._base is None:
                self._process = subprocess.Popen(
                    [sys.executable, str(Path(__file__).with_name("fork_server.py")), str(theirs.fileno())],
                    env={key: value for key, value in _SERVERS.items() if key != "PYTHONPATH"},
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=_LOG,
                    start_new_session=True,
                )
            else:
                request = {"modules": self._modules, "forbidden": self._without, "environment": _SERVERS}
                self._base._send(request, theirs.fileno())
        atexit.register(self.close)  # those that are forked from this one end before it
        return ours

    def close(self) -> None:
        """End the server, when all that it has forked has ended."""
        self._connection.close()
        if self._base is None and self._process.poll() is None:
            self._process.wait(timeout=60)

    def _send(self, request: Mapping[str, object], *files: int) -> None:
        content = json.dumps(request).encode()
        try:
            socket.send_fds(self._connection, [len(content).to_bytes(8)], files)
            self._connection.sendall(content)
        except BrokenPipeError:
            raise RuntimeError(f"The server has ended: {_log()}") from None

    def start(
        self,
        *command: object,
        env: Mapping[str, str] | None = None,
        cwd: Path | str | None = None,
        stdout: int | None = None,
    ) -> Forked:
        """Start what `python *command` would, with the standard input of a process that has none.

        Args:
            command: `-c` and code, `-m` and a module, or a script; then its arguments. The option -I may come before.
            env: The whole environment.
            cwd: Where it runs.
            stdout: A file that it writes to, instead of what this tells.

        Raises:
            ValueError: If the environment has other values of what Hugging Face libraries, which the server has
                imported, read but once.
        """
        env = dict(os.environ if env is None else env)
        if not self._without:
            ours, theirs = (
                {key: value for key, value in each.items() if key.startswith(READ_ONCE)} for each in (ENVIRONMENT, env)
            )
            if ours != theirs:
                raise ValueError(f"{dict(ours.items() ^ theirs.items())} would not be read: start it with LIBRARIES.")
        words = tuple(map(str, command))
        output, errors = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        reading, writing = os.pipe()
        request = {"command": words, "environment": env, "folder": str(cwd or Path.cwd())}
        status = os.fdopen(reading, "rb", buffering=0)
        try:
            self._send(request, output.fileno() if stdout is None else stdout, errors.fileno(), writing)
        except RuntimeError:
            for file in (status, output, errors):
                file.close()
            raise
        finally:
            os.close(writing)
        return Forked(words, status, output, errors)

    def run(
        self,
        *command: object,
        env: Mapping[str, str] | None = None,
        cwd: Path | str | None = None,
        stdout: int | None = None,
        timeout: float = TIMEOUT,
    ) -> subprocess.CompletedProcess[str]:
        """Run what `python *command` would, as `subprocess.run` does."""
        with self.start(*command, env=env, cwd=cwd, stdout=stdout) as process:
            status = process.wait(timeout)
            return subprocess.CompletedProcess(list(process.args), status, process.stdout, process.stderr)

    def run_together(
        self, processes: int, *command: object, env: Mapping[str, str] | None = None, timeout: float = TIMEOUT
    ) -> subprocess.CompletedProcess[str]:
        """Run what `torchrun --standalone --nproc-per-node PROCESSES *command` would.

        Returns:
            What all have written, those of lower rank first. If one fails, the others are killed, and this is its own.
        """
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "TORCHELASTIC_USE_AGENT_STORE": True}
        shared |= {"GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1, "ROLE_NAME": "default", "TORCHELASTIC_RUN_ID": "tests"}
        shared |= {"TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_MAX_RESTARTS": 0, "OMP_NUM_THREADS": 1}
        shared |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), processes)
        with ExitStack() as stack:
            running = []
            for rank in range(processes):
                ranked = shared | dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), rank)
                own = dict(os.environ if env is None else env) | {key: str(value) for key, value in ranked.items()}
                running.append(stack.enter_context(self.start(*command, env=own)))
            _wait_for_all(running, timeout)
            shown = [process for process in running if process.returncode] or running
            return subprocess.CompletedProcess(
                list(shown[0].args),
                shown[0].wait(),
                "".join(process.stdout for process in shown),
                "".join(process.stderr for process in shown),
            )


def _wait_for_all(running: list[Forked], timeout: float) -> None:
    """Wait until all have ended, or one has failed, for which the others might wait in vain."""
    end = time.monotonic() + timeout
    while waiting := [process for process in running if process.poll() is None]:
        if any(process.returncode for process in running):
            return
        if not select.select(waiting, [], [], max(0, end - time.monotonic()))[0]:
            raise subprocess.TimeoutExpired(waiting[0].args, timeout, waiting[0].stdout, waiting[0].stderr)


# What the package imports, and what does not look for settings of the Hub while it is imported.
LIBRARIES = Server(
    *("torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp", "torchao.quantization"),
    *("scipy.optimize", "scipy.stats", "pandas", "pyarrow.dataset", "matplotlib.pyplot", "PIL.Image"),
    *("aiohttp", "requests", "httpx2", "httpcore2", "h11", "anyio", "truststore", "multiprocess", "psutil", "jinja2"),
    *("pydantic", "yaml", "regex", "rich.console", "typer", "filelock", "tqdm.auto", "xxhash", "fsspec", "sympy"),
    "safetensors.torch",
    base=Server(),
    without=("lex_hf", "transformers", "huggingface_hub", "datasets", "evaluate", "accelerate", "tokenizers"),
)
PACKAGE = Server(
    *("lex_hf.training.trainer", "lex_hf.evaluation.perplexity", "lex_hf.reproduce.running", "lex_hf.cli.commands"),
    base=LIBRARIES,
)
