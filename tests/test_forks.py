"""The processes that tests fork are like those that Python starts."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from helpers.forks import ENVIRONMENT, PACKAGE, Server

BARE = Server()

ENDS = (
    "",
    "raise SystemExit",
    "raise SystemExit(3)",
    "raise SystemExit(256 + 7)",
    "raise SystemExit('in words')",
    "def fail():\n    1 / 0\nfail()",
    "1 +",
    "raise KeyboardInterrupt",
    "class Own(KeyboardInterrupt):\n    pass\nraise Own",
    "import sys; sys.stdout.reconfigure(errors='replace'); print('\\ud800', sys.__stdout__ is sys.stdout)",
    "import sys; print([(f.encoding, f.errors, f.line_buffering, f.fileno()) for f in (sys.stdout, sys.stderr)])",
    "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "print('unflushed'); import os; os._exit(5)",
    "import os; os.write(2, b'an error'); os.write(1, b'of bytes'); print('more')",
    "import atexit; atexit.register(print, 'at exit'); raise ValueError('no')",
    "import threading; threading.Timer(0.1, lambda: print('a thread')).start(); print('first')",
    "import sys; print(sys.argv, __name__, sys.modules['__main__'].__dict__ is globals(), sys.stdin.read())",
    "import os; os.close(1); print('nowhere')",
)


@pytest.mark.parametrize("code", ENDS)
def test_processes_end_like_those_of_python(code: str) -> None:
    started = subprocess.run(
        [sys.executable, "-c", code, "an", "argument"], capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    forked = BARE.run("-c", code, "an", "argument")
    assert forked.returncode == started.returncode
    assert forked.stdout == started.stdout
    assert forked.stderr.splitlines()[-1:] == started.stderr.splitlines()[-1:]


def test_output_goes_to_a_pipe() -> None:
    reading, writing = os.pipe()
    done = BARE.run("-c", "import sys; sys.stdout.reconfigure(errors='replace'); print('piped')", stdout=writing)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        assert (done.returncode, done.stdout, pipe.read()) == (0, "", "piped\n")


@pytest.mark.parametrize("command", ["-c", "-m", "script", "-I"])
def test_modules_are_found_where_python_looks_for_them(command: str, tmp_path: Path) -> None:
    code = "import sys, os; print(__name__, sys.argv, [each for each in sys.path if 'places' in each], os.getcwd())"
    for folder in ("here", "other"):
        (tmp_path / "places" / folder).mkdir(parents=True)
        (tmp_path / "places" / folder / "script.py").write_text(code)
    words = {"-c": ["-c", code], "-m": ["-m", "script"], "script": ["../other/script.py"], "-I": ["-I", "-c", code]}
    env, cwd = {**os.environ, "PYTHONPATH": "/places:/more/places"}, tmp_path / "places" / "here"
    whole = [sys.executable, *words[command], "argument"]
    started = subprocess.run(whole, cwd=cwd, env=env, capture_output=True, text=True)
    assert started.returncode == 0, started.stderr
    assert BARE.run(*words[command], "argument", env=env, cwd=cwd).stdout == started.stdout


def test_a_process_knows_nothing_of_those_before(tmp_path: Path) -> None:
    code = """
import os, random, sys
import numpy
sys.modules["left"] = left = sys.modules.get("left", 0)
value, os.environ["VALUE"] = os.environ.get("VALUE"), "changed"
print(value, left, random.random(), numpy.random.rand(), sorted(os.environ))
sys.modules["left"] += 1
os.chdir("/")
"""
    with closing(Server("numpy", base=BARE, without=("torch",))) as server:
        results = [server.run("-c", code, env={"VALUE": value}, cwd=tmp_path) for value in ("one", "two")]
    first, second = (result.stdout.split() for result in results)
    assert [first[:2], second[:2]] == [["one", "0"], ["two", "0"]]
    assert first[2] != second[2]
    assert first[3] != second[3]
    assert first[4:] == second[4:] == ["['VALUE']"]
    assert "VALUE" not in os.environ


def test_what_is_imported_cannot_have_read_another_environment(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'HF_HOME'.* would not be read: start it with LIBRARIES"):
        PACKAGE.run("-c", "", env={**ENVIRONMENT, "HF_HOME": str(tmp_path)})
    server = Server("json", base=BARE, without=("json",))
    with closing(server):
        for _ in range(2):  # the server ends while it is asked for the first time, and has ended at the second
            with pytest.raises(RuntimeError, match=r"\['json'\] import \['json'\]"):
                server.run("-c", "")


def test_processes_are_signalled_and_killed() -> None:
    ready = "import time; print('ready', flush=True); time.sleep(99)"
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        with BARE.start("-c", ready) as process:
            assert process.poll() is None
            while "ready" not in process.stdout:
                time.sleep(0.01)
            process.send_signal(number)
            assert process.wait() == process.poll() == -number
            assert ("KeyboardInterrupt" in process.stderr) == (number == signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired, match=r"timed out after 0.2 seconds"):
        BARE.run("-c", ready, timeout=0.2)


def test_nothing_outlives_the_tests(tmp_path: Path) -> None:
    code = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from helpers.forks import Server
process = Server(base=Server()).start("-c", "import time; time.sleep(99)")
print(process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    command = [sys.executable, "-c", code, str(Path(__file__).parent)]
    number = int(subprocess.run(command, capture_output=True, text=True).stdout)
    end = time.monotonic() + 20
    while psutil.pid_exists(number) and time.monotonic() < end:
        time.sleep(0.05)
    assert not psutil.pid_exists(number)


def test_processes_of_one_group_are_told_what_torchrun_tells_them(tmp_path: Path) -> None:
    """But for the names of its own files and signals, which are none of theirs."""
    script = tmp_path / "script.py"
    code = "import json, os, sys; json.dump(dict(os.environ), open(f'{sys.argv[1]}-{os.environ[\"RANK\"]}', 'w'))"
    script.write_text(code)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, str(script), str(tmp_path / "launched")]
    subprocess.run(command, env=dict(os.environ), capture_output=True, check=True)
    assert BARE.run_together(2, script, tmp_path / "forked").returncode == 0
    theirs, ours = (
        [json.loads((tmp_path / f"{name}-{rank}").read_text()) for rank in (0, 1)] for name in ("launched", "forked")
    )
    chosen = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"}
    its_own = {"TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE", "TORCH_NCCL_ASYNC_ERROR_HANDLING"}
    for told, expected in zip(ours, theirs, strict=True):
        assert chosen <= told.keys()
        assert told.keys() == expected.keys() - its_own
        assert {name for name in told if told[name] != expected[name]} <= chosen


def test_processes_that_fail_end_those_that_wait_for_them() -> None:
    code = "import os, time; print(os.environ['RANK'], os.environ['WORLD_SIZE']); {}"
    done = BARE.run_together(3, "-c", code.format(""))
    assert (done.returncode, done.stdout) == (0, "0 3\n1 3\n2 3\n")
    one_fails = code.format("os.environ['RANK'] == '1' and 1 / 0; time.sleep(99)")
    done = BARE.run_together(3, "-c", one_fails, timeout=20)
    assert (done.returncode, done.stdout) == (1, "1 3\n")
    assert "ZeroDivisionError" in done.stderr
    with pytest.raises(subprocess.TimeoutExpired):
        BARE.run_together(2, "-c", "import time; time.sleep(99)", timeout=0.2)
