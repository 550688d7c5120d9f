"""The process that helpers.forks starts: it imports modules once, and forks for each command that Python is to run.

It is a script that imports nothing of the tests. Each request on its socket is a JSON object, with open files.
"""

import atexit
import gc
import importlib
import importlib.util
import io
import json
import os
import runpy
import signal
import socket
import sys
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

PATH = sys.path[1:]  # without the folder of this script; helpers.forks sees to it that PYTHONPATH is not there

TASKS = Path("/proc/self/task")


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Read one request and the files that come with it.

    Raises:
        EOFError: If the process that asks has ended.
    """
    head, files, _, _ = socket.recv_fds(connection, 8, maxfds=16)
    while len(head) < 8 and (more := connection.recv(8 - len(head))):
        head += more
    if len(head) < 8:
        raise EOFError
    content, size = io.BytesIO(), int.from_bytes(head)
    while content.tell() < size:
        content.write(connection.recv(size - content.tell()))
    return json.loads(content.getvalue()), files


def load(modules: list[str], forbidden: list[str]) -> None:
    """Import the modules that are installed, for all processes that are forked later.

    Raises:
        RuntimeError: If a forbidden package came with them, or something started a thread, which a fork would lose.
    """
    gc.disable()  # nothing of this is garbage
    for name in modules:
        if importlib.util.find_spec(name.partition(".")[0]):
            importlib.import_module(name)
    gc.freeze()
    if found := sorted({name.partition(".")[0] for name in sys.modules}.intersection(forbidden)):
        raise RuntimeError(f"{modules} import {found}")
    if TASKS.is_dir() and len(list(TASKS.iterdir())) > 1:
        raise RuntimeError(f"{modules} start threads")


def set_path(first: list[str], environment: dict[str, str]) -> None:
    named = [part for part in environment.get("PYTHONPATH", "").split(os.pathsep) if part]
    sys.path[:] = [*first, *named, *PATH]
    importlib.invalidate_caches()


def run(command: list[str]) -> None:
    """Do what Python does with this command line: `-c CODE`, `-m MODULE` or a script, and arguments."""
    isolated, command = command[0] == "-I", command[command[0] == "-I" :]
    what, arguments = (command[:2], command[2:]) if command[0] in ("-c", "-m") else (command[:1], command[1:])
    sys.argv[:] = [what[0], *arguments]
    first = {"-c": "", "-m": str(Path.cwd())}.get(what[0], str(Path(what[0]).resolve().parent))
    set_path([] if isolated else [first], {} if isolated else dict(os.environ))
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__builtins__ = __builtins__  # type: ignore[attr-defined]
    if what[0] == "-m":
        runpy.run_module(what[1], run_name="__main__", alter_sys=True)
        return
    source, name = what[-1].encode(), "<string>"
    if what[0] != "-c":
        source, name = Path(what[0]).read_bytes(), str(Path(what[0]).absolute())
        main.__file__ = name
    exec(compile(source, name, "exec"), main.__dict__)


def finish(command: list[str]) -> int:
    """Run the command and end as Python ends. What is frozen is not torn down, which would take half a second.

    Returns:
        The status that the process exits with, negative for a signal.
    """
    status = 0
    try:
        run(command)
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if not isinstance(error.code, int | None):
            sys.stderr.write(f"{error.code}\n")
    except BaseException as error:
        status = -signal.SIGINT if type(error) is KeyboardInterrupt else 1  # not if derived from it
        trace = error.__traceback__.tb_next if error.__traceback__ else None  # without this function, and without run
        error = error.with_traceback(trace.tb_next if trace else None)
        sys.excepthook(type(error), error, error.__traceback__)
    threading._shutdown()  # type: ignore[attr-defined] # waits for threads that are not daemons
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            if stream is sys.stdout:
                traceback.print_exc()
                sys.stderr.flush()
                status = 120
    return status


def open_stream(number: int, name: str) -> None:
    """Open standard output or standard error again: those of the server took notice of what kind of file it was."""
    before, unbuffered = getattr(sys, name), bool(os.environ.get("PYTHONUNBUFFERED"))
    file: Any = open(number, "wb", 0 if unbuffered else -1, closefd=False)  # noqa: SIM115
    by_line = not unbuffered and (number == 2 or file.isatty())
    stream = io.TextIOWrapper(file, before.encoding, before.errors, None, by_line, unbuffered)
    setattr(sys, name, stream)
    setattr(sys, f"__{name}__", stream)


def child(request: dict[str, Any], files: list[int]) -> None:
    """Be the process that was asked for; does not return."""
    status = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        set_environment(request)
        for number, name, file in zip((1, 2), ("stdout", "stderr"), files, strict=True):
            os.dup2(file, number)
            os.close(file)
            open_stream(number, name)
        os.chdir(request["folder"])
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()  # Python's own generator does it by itself
        gc.enable()
        status = finish(request["command"])
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        if status == -signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        os._exit(status & 0xFF)


def keep(request: dict[str, Any], files: list[int]) -> None:
    """Fork the process that was asked for, say its number, wait for it, and say how it ended; does not return."""
    *streams, status = files
    process = os.fork()
    if not process:
        os.close(status)
        child(request, streams)
    for stream in streams:
        os.close(stream)
    os.write(status, b"%d\n" % process)
    os.write(status, b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
    os._exit(0)


def set_environment(request: dict[str, Any]) -> None:
    os.environ.clear()
    os.environ.update(request["environment"])


def reap(options: int = 0) -> None:
    """Take notice of what has ended, so that its time is part of the server's."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, options)[0]:
            pass


def serve(connection: socket.socket) -> None:
    """Fork for each request, until the process that asks has ended: another server, or Python with a command line."""
    while True:
        signal.signal(signal.SIGCHLD, lambda *_: reap(os.WNOHANG))
        try:
            request, files = receive(connection)
        except EOFError:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGALRM, lambda *_: os.killpg(0, signal.SIGKILL))
            signal.alarm(1)  # nobody is left to end what has not ended
            reap()
            os._exit(0)
        if os.fork():
            for file in files:
                os.close(file)
            continue
        connection.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if "command" in request:
            keep(request, files)
        connection = socket.socket(fileno=files[0])
        set_environment(request)
        set_path([], request["environment"])
        load(request["modules"], request["forbidden"])


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: whoever asks ends the processes
    serve(socket.socket(fileno=int(sys.argv[1])))
