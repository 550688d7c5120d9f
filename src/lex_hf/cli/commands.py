"""The command line: all commands, in the order of the help text."""

import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from lex_hf.cli import browser, evaluating, experiments, generating, hub, measuring, recall, training, ways
from lex_hf.cli.options import OUTPUT, READING, Quiet
from lex_hf.cli.printing import quietly
from lex_hf.cli.terminal import errors_as_sentences, write_any_text
from lex_hf.records import versions

# In the order of a project: what each section of the help text has.
_COMMANDS: dict[str, dict[str, Callable[..., None]]] = {
    "See it work": {"demo": experiments.demo},
    "Train": {"train": training.train, "tokenizer": training.tokenizer, "warm-start": training.warm_start},
    "Write": {
        "generate": generating.generate,
        "generate-corpus": generating.generate_corpus,
        "serve": generating.serve,
        "app": browser.app,
    },
    "Measure": {
        "evaluate": evaluating.evaluate,
        "compare": evaluating.compare,
        "recall": recall.recall,
        "ways-to-read": ways.ways_to_read,
        "resolution": measuring.resolution,
        "receptive-field": measuring.receptive_field,
        "check": measuring.check,
    },
    "Share": {"card": hub.card, "push": hub.push, "space": browser.space},
    "The papers": {"reproduce": experiments.reproduce, "extrapolation": experiments.extrapolation},
}
_SUMMARY = 200  # characters of a command's summary: all of it


class _Command(TyperCommand):
    """Command whose options stand in sections."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments and options, each under the section that it names."""
        _write_sections(formatter, ((_section(each), each.get_help_record(ctx)) for each in self.get_params(ctx)))


class _Group(TyperGroup):
    """Group of all commands; errors in one are printed as a sentence."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        write_any_text()
        with errors_as_sentences():
            return super().invoke(ctx)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands with their whole summaries, in sections."""
        _write_sections(
            formatter,
            (
                (section, (name, self.commands[name].get_short_help_str(_SUMMARY)))
                for section, commands in _COMMANDS.items()
                for name in commands
            ),
        )


def _section(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return "Arguments"
    return getattr(parameter, "rich_help_panel", None) or "Options"


def _write_sections(formatter: Any, records: Iterable[tuple[str, tuple[str, str] | None]]) -> None:
    """Write definition lists under their headings."""
    sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": [], READING: [], OUTPUT: []}
    for section, record in records:
        if record is not None:
            sections.setdefault(section, []).append(record)
    for section, rows in sections.items():
        if rows:
            with formatter.section(section):
                formatter.write_dl(rows)


def _with_quiet(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the option `--quiet`."""

    @wraps(command)
    def run(*, quiet: bool, **options: Any) -> None:
        with quietly(quiet):
            command(**options)

    signature = inspect.signature(command)
    last = inspect.Parameter("quiet", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Quiet)
    run.__signature__ = signature.replace(parameters=[*signature.parameters.values(), last])  # type: ignore[attr-defined]
    run.__annotations__ = {**command.__annotations__, "quiet": Quiet}
    return run


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


for _commands in _COMMANDS.values():
    for _name, _command in _commands.items():
        app.command(_name, cls=_Command)(_with_quiet(_command))
