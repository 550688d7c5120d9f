"""What commands print, and where: results on standard output, all else on standard error, or nowhere."""

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.commands import SMALL, TEXT, lex, setting
from helpers.models import tiny_model
from rich.console import Console
from typer.main import get_command

from lex_hf.cli import commands
from lex_hf.cli.printing import new_table, notices, number, quietly, session
from lex_hf.data.tokenizers import byte_tokenizer


def printed(*arguments: object, **environment: str) -> tuple[str, str]:
    """Standard output and standard error of a command, in a Python that has imported nothing."""
    command = [sys.executable, "-m", "lex_hf", *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout, result.stderr


def training(folder: Path) -> list[object]:
    """A training of two steps, without its folder."""
    (folder / "text.txt").write_text(TEXT)
    return ["train", "tiny", folder / "text.txt", "--tokenizer", "bytes", *SMALL, *setting(max_steps=2)]


def shown(table: object) -> list[str]:
    file = io.StringIO()
    Console(file=file, width=80).print(table)
    return [line.rstrip() for line in file.getvalue().splitlines()]


@pytest.mark.processes
def test_quiet_prints_the_result_alone(tmp_path: Path) -> None:
    train = training(tmp_path)
    out, err = printed(*train, "--output", tmp_path / "loud")
    assert re.fullmatch(r"2 steps, \d+ tokens, mean loss .* nats per token; the model is in\s+\S+loud\n", out)
    assert "train_loss" in err  # what Trainer prints is progress
    quiet, nothing = printed(*train, "--output", tmp_path / "quiet", "--quiet")
    assert quiet.split() == out.replace("loud", "quiet").split()
    assert nothing == ""


@pytest.mark.processes
def test_what_takes_less_than_the_delay_shows_no_progress(tmp_path: Path) -> None:
    tiny_model(vocab_size=257).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT)
    evaluate = ["evaluate", tmp_path, tmp_path / "text.txt"]
    (_, slow), (_, quick) = (printed(*evaluate, TQDM_DELAY=delay) for delay in ("1000", "0"))
    assert "%|" in quick
    assert "%|" not in slow


def test_the_delay_is_that_of_the_user_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from lex_hf.cli import main

    for given, expected in ((None, "1"), ("7", "7")):
        monkeypatch.delenv("TQDM_DELAY", raising=False)
        if given is not None:
            monkeypatch.setenv("TQDM_DELAY", given)
        monkeypatch.setattr(sys, "argv", ["lex-hf", "--version"])
        with pytest.raises(SystemExit):
            main()
        assert os.environ["TQDM_DELAY"] == expected


def test_libraries_print_beside_results(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for is_quiet in (False, True):
        monkeypatch.setattr(os, "environ", dict(os.environ))
        with quietly(is_quiet), session() as console:
            sys.stdout.write("of a library\n")
            notices().print("on the way")
            console.print("result")
        out, err = capsys.readouterr()
        assert out == "result\n"
        assert err == ("" if is_quiet else "of a library\non the way\n")
    with session(as_json=True) as console:
        sys.stdout.write("of a library\n")
        console.print("in words")
    assert capsys.readouterr() == ("", "of a library\nin words\n")
    with session(prints=True):
        sys.stdout.write("a text\n")
    assert capsys.readouterr() == ("a text\n", "")


def test_tables_have_no_empty_columns() -> None:
    table = new_table(
        "a title that is longer than the table", ["name", number("low"), number("high")], [["x", "", "3"]]
    )
    title, head, _, row = shown(table)
    assert title == "a title that is longer than the table"
    assert head.split() == ["name", "high"]
    assert row.split() == ["x", "3"]
    assert shown(new_table("nothing", ["name", "low"], []))[1].split() == ["name", "low"]
    assert shown(new_table("t", ["a"], [["1"]], "a caption"))[-1] == "a caption"


def test_a_single_text_has_no_interval(tmp_path: Path) -> None:
    assert lex(*training(tmp_path), "--output", tmp_path / "model").exit_code == 0
    (tmp_path / "other.txt").write_text("In a hole in the ground there lived a test. " * 9)
    evaluate = ["evaluate", tmp_path / "model", "--length", 32, tmp_path / "text.txt"]
    one, two = (" ".join(lex(*each).stdout.split()) for each in (evaluate, [*evaluate, tmp_path / "other.txt"]))
    assert "1 text, chunked" in one
    assert "2 texts, chunked" in two
    assert "interval" not in one
    assert "95 % interval" in two
    assert " low " in two
    assert " low " not in one


def summary(overview: str, name: str) -> list[str]:
    """Words beside the name of a command, in the help text of all."""
    return re.split(r"\n  (?=\S)|\n\n", overview.split(f"\n  {name} ")[1])[0].split()


def test_commands_and_options_stand_in_sections() -> None:
    overview = lex("--help").output
    assert re.findall(r"^(\S.*):$", overview, re.MULTILINE) == ["Options", *commands._COMMANDS]
    for name in ("resolution", "extrapolation"):  # the whole of their first sentences, which are long
        assert lex(name, "--help").output.split("\n\n")[1].split() == summary(overview, name)
    text = lex("evaluate", "--help").output
    sections = re.findall(r"^(\S.*):$", text, re.MULTILINE)
    assert sections == ["Arguments", "Options", "How the model is loaded and reads", "Output"]
    assert text.index("Output:") < text.index("--quiet")


@pytest.mark.parametrize("name", [name for section in commands._COMMANDS.values() for name in section])
def test_help_tells_every_option(name: str) -> None:
    command = get_command(commands.app).commands[name]  # type: ignore[attr-defined]
    text = " ".join(lex(name, "--help").output.split())
    for parameter in (each for each in command.params if not getattr(each, "hidden", False)):
        for option in parameter.opts:
            assert option in text
    assert "--quiet" in text
