"""The command line, in the process of the test."""

from typer.testing import CliRunner, Result

from lex_hf.cli.commands import app


def setting(**fields: object) -> list[str]:
    """Fields of a recipe, as the command line has them."""
    return [argument for name, value in fields.items() for argument in ("--set", f"{name}={value}")]


SIZES = setting(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)

SMALL = [*SIZES, *setting(training_length=16, per_device_train_batch_size=2, examples_per_step=2)]

TEXT = "The quick brown fox jumps over the lazy dog. " * 40


def lex(*arguments: object, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)
