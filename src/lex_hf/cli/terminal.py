"""Output on a terminal: any text can be printed, and errors are sentences."""

import contextlib
import os
import sys
from collections.abc import Iterator
from io import TextIOWrapper
from typing import NoReturn

import typer

from lex_hf.lazy import MissingPackageError
from lex_hf.reproduce.console import plain_console

_ERRORS = (ValueError, OSError, ImportError)
_NO_MEMORY = ("not enough memory", "can't allocate memory")  # of torch on the CPU, which has no class for it


def write_any_text() -> None:
    """Print characters that an encoding lacks, e.g. in file names, as escapes instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


@contextlib.contextmanager
def errors_as_sentences() -> Iterator[None]:
    """Print errors that a user can act on as a sentence and end the command; all others are tracebacks."""
    try:
        yield
        if sys.stdout is not None:
            sys.stdout.flush()  # now, while an error can still be explained
    except (typer.Exit, typer.Abort):
        raise
    except KeyboardInterrupt as interruption:  # of a training that was stopped: it says how to resume
        fail(str(interruption) or "Interrupted.", 130)
    except BrokenPipeError as error:  # the reader has closed, as after `| head`
        _write_no_more()
        raise typer.Exit(1) from error
    except Exception as error:
        sentence = _sentence(error)
        if sentence is None:
            raise
        fail(f"Error: {sentence}", 1)


def fail(message: str, code: int) -> NoReturn:
    """End the command with a message."""
    console = plain_console(stderr=True)
    console.print(message, soft_wrap=not console.is_terminal)
    try:  # Python would report, when it ends, that what was printed does not fit on the disk
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        _write_no_more()
    raise typer.Exit(code)


def _sentence(error: Exception) -> str | None:
    """Return what to say of an error; `None` if it is a fault of the program."""
    if isinstance(error, RecursionError):
        return f"Something in the input is nested too deeply ({error})."
    if isinstance(error, OverflowError):
        return f"A number is too large ({error})."
    if isinstance(error, ModuleNotFoundError) and error.name and not isinstance(error, MissingPackageError):
        return f"{error}. Install the package it belongs to: pip install {error.name.partition('.')[0]}"
    if isinstance(error, _ERRORS):
        return str(error) or type(error).__name__
    if _is_of_memory(error):
        return f"Not enough memory ({error}). Choose smaller batches, shorter texts or a smaller model."
    from huggingface_hub.errors import StrictDataclassError  # only now, because libraries are slow to import
    from safetensors import SafetensorError

    if isinstance(error, StrictDataclassError):
        return str(error.__cause__ or error)
    return str(error) if isinstance(error, SafetensorError) else None


def _is_of_memory(error: Exception) -> bool:
    if isinstance(error, RuntimeError):
        from torch import OutOfMemoryError

        return isinstance(error, OutOfMemoryError) or any(words in str(error) for words in _NO_MEMORY)
    return isinstance(error, MemoryError)


def _write_no_more() -> None:
    with contextlib.suppress(OSError, ValueError):  # a stream that is no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
