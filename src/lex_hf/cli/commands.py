"""The command line: all commands, in the order of the help text."""

from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from lex_hf.cli import browser, evaluating, experiments, generating, hub, measuring, recall, training, ways
from lex_hf.cli.terminal import errors_as_sentences, write_any_text
from lex_hf.records import versions

_COMMANDS: dict[str, Callable[..., None]] = {
    "demo": experiments.demo,
    "extrapolation": experiments.extrapolation,
    "reproduce": experiments.reproduce,
    "check": measuring.check,
    "train": training.train,
    "tokenizer": training.tokenizer,
    "warm-start": training.warm_start,
    "evaluate": evaluating.evaluate,
    "compare": evaluating.compare,
    "resolution": measuring.resolution,
    "receptive-field": measuring.receptive_field,
    "recall": recall.recall,
    "ways-to-read": ways.ways_to_read,
    "generate": generating.generate,
    "generate-corpus": generating.generate_corpus,
    "push": hub.push,
    "serve": generating.serve,
    "app": browser.app,
    "space": browser.space,
    "card": hub.card,
}


class _Group(TyperGroup):
    """Group of all commands; errors in one are printed as a sentence."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        write_any_text()
        with errors_as_sentences():
            return super().invoke(ctx)


app = typer.Typer(
    cls=_Group,
    help="Length-Extrapolatable Transformers: train on short texts, read and write long ones.",
    no_args_is_help=True,
    rich_markup_mode=None,  # its columns cut option names short in a narrow terminal
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"lex-hf {versions('lex-hf')['lex-hf']}")  # noqa: T201
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Take the options that stand before a command."""


for _name, _command in _COMMANDS.items():
    app.command(_name)(_command)
