"""The command line `lex-hf`: its commands parse, call one function of the package, and print."""

import os

from lex_hf.lazy import MissingPackageError, exports

__getattr__, __dir__ = exports(__name__, {"app": "commands"})


def main() -> None:
    """Run the command line; Ctrl-C ends it without a traceback, also while its libraries are being imported."""
    os.environ.setdefault("TQDM_DELAY", "1")  # no progress bars, of any library, for what takes a second or less
    try:
        from lex_hf.cli.commands import app

        app()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except MissingPackageError as error:
        raise SystemExit(f"Error: {error}") from None
