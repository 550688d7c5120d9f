"""Ctrl-C while the command line still imports its libraries, which takes seconds, ends it without a traceback.

Importing this module is what does it; `raise_again` ends it.
"""

import os
import signal
import sys
from pathlib import Path


def raise_again() -> None:
    """Let Ctrl-C raise KeyboardInterrupt, as Python does."""
    if signal.getsignal(signal.SIGINT) is _exit:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _is_command_line() -> bool:
    program = sys.argv[0] if sys.argv else ""
    # `python -m lex_hf` imports the package while the name of the program is not known yet.
    is_module = program == "-m" and not {"lex_hf", "-mlex_hf"}.isdisjoint(sys.orig_argv)
    return is_module or Path(program).stem == "lex-hf"


def _exit(*_: object) -> None:
    os._exit(130)


def _end_at_once() -> None:
    """Let Ctrl-C end the process, if it is the command line; there is nothing to finish or to clean up yet."""
    if _is_command_line() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit)


_end_at_once()
