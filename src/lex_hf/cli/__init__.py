"""The command line `lex-hf`: its commands parse, call one function of the package, and print."""


def main() -> None:
    """Run the command line; Ctrl-C ends it without a traceback, also while its libraries are being imported."""
    try:
        from .app import app

        app()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
