"""Every command, with everything that can be wrong with each of its arguments: a sentence, and nothing is lost.

To add a command, add a row to `COMMANDS`: a call that works, and of what kind each of its arguments is.
"""

import hashlib
import json
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from conftest import tiny_model
from typer.main import get_command
from typer.testing import CliRunner, Result

from lex_hf import card, demo, extrapolation, training
from lex_hf.cli import app
from lex_hf.reproduce import running
from lex_hf.tokenization import byte_tokenizer

TEXT = "The quick brown fox jumps over the lazy dog. " * 4
STARTED = "the work has begun"

ABOUT = """name: lex-test
repo_id: someone/lex-test
summary: A model of a test.
license: apache-2.0
language: [en]
data: [lines]
test_data: {lines: lines}
limits: [anything]
hardware: a machine
command: lex-hf train
"""

# By kind of argument: what is wrong, relative to the folder of `places`.
NEVER = "missing/never"
WRONG: dict[str, list[str]] = {
    "model": [NEVER, "[red]:smile:", "text.txt", "empty", "broken", "listed", "", "$x_{$"],
    "text": [NEVER, "[red]:smile:.txt", "empty.txt", "binary.txt", "latin.txt", "empty", "broken.jsonl", "pretty.json"],
    "file": [NEVER, "full", "text.txt/below", "a" * 300],
    "records": [NEVER, "full", "text.txt/below", "text.txt", "/dev/full", "pretty.json", "binary.txt"],
    "folder": ["text.txt", "text.txt/below", "/dev/full", "/proc/nowhere", "dangling"],
    "new folder": ["text.txt", "text.txt/below", "full", ".", "/dev/full", "/proc/nowhere", "dangling"],
    "yaml": [NEVER, "full", "binary.txt", "empty.txt", "list.yaml", "scalar.yaml", "unknown.yaml", "types.yaml",
             "broken.yaml", "latin.txt", "keys.yaml"],
    "count": ["0", "-1", "1.5", "abc", "", "nan"],
    "limited count": ["0", "-1", "1.5", "abc", "", "nan", str(10**20)],
    "batch size": ["0", "-1", "1.5", "abc", "", "nan"],
    "seed": ["-1", "abc", "", str(2**32), str(10**20)],
    "seeds": ["-1", "abc", "", ",", "0,0", str(2**32), str(10**20), "9" * 5000],
    "share": ["nan", "inf", "-1", "1", "abc"],
    "temperature": ["nan", "inf", "0", "-1"],
    "device": ["mps", "xpu", "meta", "cuda:9", "cpu:5", "nonsense", "", "cuda:x"],
    "dtype": ["int8", "nonsense", "", "nn", "complex64"],
    "choice": ["nonsense", "", "[red]", ":smile:"],
    "typed": ["\udce9 is not UTF-8", "\ud83d"],
}  # fmt: skip


class Command(NamedTuple):
    """A call that works, as it is typed, and the kind of what its arguments are.

    Attributes:
        call: Places in the sandbox are written as they are.
        kinds: By option, or by what stands in the call, the kind of the argument.
        options: Options that are not in the call, with their kinds.
    """

    call: str
    kinds: dict[str, str]
    options: dict[str, str] = {}  # noqa: RUF012


LOADING = {"--device": "device", "--dtype": "dtype", "--attention-pattern": "choice"}
MEASURING = {**LOADING, "--output": "folder", "--length": "count", "--segments": "count", "--text-field": "choice"}
PERPLEXITY = {"--protocol": "choice", "--batch-size": "batch size", "--records": "records", "--text-field": "choice"}

COMMANDS = {
    "demo": Command("", {}, {"--output": "new folder", "--steps": "limited count", "--generate": "limited count"}),
    "extrapolation": Command(
        "--output new",
        {"--output": "folder"},
        {"--steps": "limited count", "--seed": "seed", "--scheme": "choice"},
    ),
    "reproduce": Command(
        "lex-figure1 --output new --data text.txt --test text.txt",
        {"lex-figure1": "choice", "--output": "folder", "--data": "text", "--test": "text"},
        {"--device": "device", "--seeds": "seeds", "--steps": "limited count", "--length": "limited count",
         "--preset": "choice", "--tokenizer": "model", "--also": "choice", "--segments": "count"},
    ),
    "check": Command("model", {"model": "model"}, {**LOADING, "--shift": "count", "--text": "typed"}),
    "train": Command(
        "tiny text.txt --output new", {"tiny": "choice", "text.txt": "text"}, {"--model": "model", "--tokenizer": "model"}
    ),
    "tokenizer": Command(
        "text.txt --output new", {"text.txt": "text", "--output": "new folder"}, {"--vocab-size": "count"}
    ),
    "warm-start": Command("gpt2 new", {"gpt2": "model", "new": "new folder"}, {"--tokenizer": "model"}),
    "evaluate": Command(
        "model text.txt --length 8 --length 16",
        {"model": "model", "text.txt": "text"},
        {**LOADING, **PERPLEXITY, "--csv": "file", "--plot": "file", "--length": "count", "--stride": "count",
         "--contexts": "count"},
    ),
    "compare": Command(
        "model model text.txt other.txt --length 8",
        {"model": "model", "text.txt": "text"},
        {**LOADING, **PERPLEXITY, "--length": "count", "--stride": "count"},
    ),
    "resolution": Command(
        "model text.txt --length 8", {"model": "model", "text.txt": "text"}, {**MEASURING, "--reading": "choice"}
    ),
    "receptive-field": Command(
        "model text.txt --length 8",
        {"model": "model", "text.txt": "text"},
        {**MEASURING, "--threshold": "share", "--batch-size": "count"},
    ),
    "generate": Command(
        "model abc --max-new-tokens 2",
        {"model": "model", "abc": "typed"},
        {**LOADING, "--temperature": "temperature", "--top-p": "temperature", "--seed": "seed",
         "--max-new-tokens": "limited count"},
    ),
    "push": Command("model someone/name --dry-run", {"model": "model", "someone/name": "choice"}),
    "serve": Command("model", {"model": "model"}, {"--port": "seed"}),
    "card": Command(
        "trained --about about.yaml --test lines=text.txt --length 8",
        {"trained": "model", "--about": "yaml", "--test": "text", "--length": "count"},
        {"--seed": "seed", "--characters": "count"},
    ),
}  # fmt: skip

# What is odd, but not wrong.
RIGHT = {
    ("warm-start", "--tokenizer", ""),
    ("generate", "--top-p", "0"),
    ("generate", "--top-p", "-1"),
}


def cases() -> Iterator[Any]:
    for name, command in COMMANDS.items():
        for argument, kind in {**command.kinds, **command.options}.items():
            yield pytest.param(name, argument, kind, id=f"{name} {argument}")


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("places")
    model = tiny_model(vocab_size=257, bos_token_id=256, eos_token_id=256, pad_token_id=256)
    for name in ("model", "trained"):
        model.save_pretrained(folder / name)
        byte_tokenizer().save_pretrained(folder / name)
    state = {"global_step": 1, "log_history": [{"step": 1, "loss": 1.0, "num_input_tokens_seen": 8}]}
    contents: dict[str, bytes] = {
        "trained/trainer_state.json": json.dumps(state).encode(),
        "text.txt": TEXT.encode(),
        "other.txt": TEXT[1:].encode(),
        "empty.txt": b"",
        "binary.txt": bytes(range(256)),
        "latin.txt": b"caf\xe9",
        "broken.jsonl": b'{"text": "a"}\n{"text": \n',
        "pretty.json": b'[\n  {\n    "text": "a"\n  }\n]\n',
        "broken/config.json": b'{"model_type": "lex",',
        "listed/config.json": b"[1, 2]",
        "full/thesis.tex": b"precious",
        "about.yaml": ABOUT.encode(),
        "list.yaml": b"- a\n- b\n",
        "scalar.yaml": b"just words\n",
        "broken.yaml": b"a: [1, 2\nb: {\n",
        "unknown.yaml": ABOUT.encode() + b"nmae: x\n",
        "keys.yaml": ABOUT.encode() + b"1: x\n2020-01-01: y\n",
        "types.yaml": ABOUT.replace("[en]", "en").encode(),
    }
    for name, content in contents.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    (folder / "empty").mkdir()
    (folder / "dangling").symlink_to("nowhere")
    return folder


@pytest.fixture(autouse=True)
def sandbox(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Be in the sandbox; work that takes long is not done."""

    def start(*_: object, **__: object) -> None:
        raise ValueError(STARTED)

    monkeypatch.chdir(places)
    for module, function in (
        (demo, "_train_all"),
        (extrapolation, "train_tiny"),
        (running, "_train"),
        (training, "train"),
        (card, "_evaluate"),
    ):
        monkeypatch.setattr(module, function, start)


def lex(*arguments: str, stdin: str | bytes | None = None) -> Result:
    return CliRunner().invoke(app, list(arguments), input=stdin)


def contents(folder: Path) -> dict[str, str]:
    """What is in a folder, at any depth."""
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else str(path.is_symlink())
        for path in sorted(folder.rglob("*"))
    }


def call(name: str, argument: str, value: str) -> list[str]:
    """The call of a command with another value for one of its arguments."""
    words = shlex.split(COMMANDS[name].call)
    if argument == "--test":
        value = f"lines={value}"
    if not argument.startswith("-"):
        words[words.index(argument)] = value
        return [name, *(["--"] if value.startswith("-") else []), *words]
    if argument in words:
        words[words.index(argument) + 1] = value
        return [name, *words]
    return [name, *words, argument, value]


def test_the_table_has_every_command_and_its_calls_work(places: Path) -> None:
    assert sorted(get_command(app).commands) == sorted(COMMANDS)  # type: ignore[attr-defined]
    for name, command in COMMANDS.items():
        options = {word for each in get_command(app).commands[name].params for word in each.opts}  # type: ignore[attr-defined]
        assert {each for each in {**command.kinds, **command.options} if each.startswith("-")} <= options


@pytest.mark.parametrize(("name", "argument", "kind"), cases())
def test_wrong_arguments_give_a_sentence_and_lose_nothing(
    name: str, argument: str, kind: str, places: Path, recwarn: pytest.WarningsRecorder
) -> None:
    before = contents(places)
    for value in WRONG[kind]:
        result = lex(*call(name, argument, value))
        where = (value, result.output, result.exception)
        assert result.exception is None or isinstance(result.exception, SystemExit), where
        assert "Traceback" not in result.output, where
        assert STARTED not in result.output, where
        assert result.exit_code in (1, 2) or (name, argument, value) in RIGHT, where
        assert contents(places) == before, where
