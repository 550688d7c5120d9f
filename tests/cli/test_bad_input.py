"""Every command, with everything that can be wrong with each of its arguments: a sentence, and nothing is lost.

To add a command, add a row to `COMMANDS`: a call that works, and of what kind each of its arguments is.
"""

import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from helpers.forks import PACKAGE
from helpers.models import tiny_model
from transformers import GPT2Config, GPT2LMHeadModel
from typer.main import get_command
from typer.testing import CliRunner, Result

from lex_hf.cli.commands import app
from lex_hf.data.tokenizers import byte_tokenizer
from lex_hf.evaluation import invariance
from lex_hf.hub import card
from lex_hf.reproduce import demo, extrapolation, models
from lex_hf.training import trainer as training

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
    "text": [NEVER, "[red]:smile:.txt", "empty.txt", "binary.txt", "latin.txt", "empty", "broken.jsonl",
             "pretty.json"],
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
    "nucleus": ["nan", "inf", "-1", "1.5", "abc"],
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
MEASURING = {**LOADING, "--output": "folder", "--length": "count", "--segments": "count"}
PERPLEXITY = {"--protocol": "choice", "--batch-size": "batch size", "--records": "records"}

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
        "tiny text.txt --output new",
        {"tiny": "choice", "text.txt": "text", "--output": "folder"},
        {"--model": "model", "--tokenizer": "model"},
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
    "recall": Command(
        "model text.txt --distance 30 --samples 2 --pairs 1",
        {"model": "model", "text.txt": "text", "--distance": "count", "--samples": "count", "--pairs": "count"},
        {**LOADING, "--output": "folder", "--seed": "seed", "--batch-size": "count", "--candidates": "count",
         "--way": "choice", "--sentence": "typed", "--training-length": "count", "--blockwise": "count"},
    ),
    "ways-to-read": Command(
        "model text.txt --training-length 8 --length 32 --way unchanged",
        {"model": "model", "text.txt": "text", "--training-length": "count", "--length": "count", "--way": "choice"},
        {"--device": "device", "--dtype": "dtype", "--output": "folder", "--texts": "count"},
    ),
    "generate": Command(
        "model abc --max-new-tokens 2",
        {"model": "model", "abc": "typed"},
        {**LOADING, "--temperature": "temperature", "--top-p": "temperature", "--seed": "seed",
         "--max-new-tokens": "limited count"},
    ),
    "generate-corpus": Command(
        "model text.txt --output new --max-new-tokens 2",
        {"model": "model", "text.txt": "text", "--output": "new folder"},
        {**LOADING, "--temperature": "temperature", "--top-p": "nucleus", "--seed": "seed", "--stop": "typed",
         "--max-new-tokens": "limited count", "--max-prompt-tokens": "limited count", "--rows": "limited count",
         "--piece": "limited count"},
    ),
    "push": Command("model someone/name --dry-run", {"model": "model", "someone/name": "choice"}),
    "serve": Command("model", {"model": "model"}, {"--port": "seed"}),
    "app": Command(
        "model",
        {"model": "model"},
        {"--port": "seed", "--training-length": "count", "--max-characters": "limited count", "--device": "device",
         "--dtype": "dtype"},
    ),
    "space": Command("model new", {"model": "model", "new": "folder"}, {"--title": "typed"}),
    "card": Command(
        "trained --about about.yaml --test lines=text.txt --length 8",
        {"trained": "model", "--about": "yaml", "--test": "text", "--length": "count"},
        {"--seed": "seed", "--characters": "count"},
    ),
}  # fmt: skip

# What is odd, but not wrong.
RIGHT = {("generate", "--top-p", "0")}
# They need the Hub, or a server.
NOT_RUN = ("push", "serve", "app")


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
    sizes = {"vocab_size": 257, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
    GPT2LMHeadModel(GPT2Config(**sizes)).save_pretrained(folder / "gpt2")
    byte_tokenizer().save_pretrained(folder / "gpt2")
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
        (models, "train"),
        (training, "train"),
        (card, "_evaluate"),
    ):
        monkeypatch.setattr(module, function, start)
    library = extrapolation.standard_library
    monkeypatch.setattr(extrapolation, "standard_library", lambda: replace(library(), train=library().train[:1]))


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


def test_the_table_has_every_command_and_its_options() -> None:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    assert sorted(commands) == sorted(COMMANDS)
    for name, command in COMMANDS.items():
        options = {word for each in commands[name].params for word in each.opts}
        assert {each for each in {**command.kinds, **command.options} if each.startswith("-")} <= options


@pytest.mark.parametrize("name", sorted({*COMMANDS} - {*NOT_RUN}))
def test_without_what_is_wrong_each_call_works(
    name: str, places: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(places, tmp_path / "copy", symlinks=True)
    monkeypatch.chdir(tmp_path / "copy")
    result = lex(name, *shlex.split(COMMANDS[name].call))
    assert result.exit_code == 0 or result.stderr.endswith(f"Error: {STARTED}\n"), result.output


@pytest.mark.parametrize(("name", "argument", "kind"), list(cases()))
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


# What the table cannot say: what is printed and written


def strict(text: str) -> Any:
    """Read JSON as other languages do, without NaN and Infinity."""

    def refuse(word: str) -> None:
        raise AssertionError(word)

    return json.loads(text, parse_constant=refuse)


def test_results_are_printed_and_the_other_file_is_written_if_one_cannot_be(tmp_path: Path) -> None:
    command = ["evaluate", "model", "text.txt", "--length", "8", "--length", "16", "--csv", "/dev/full"]
    for options in ([], ["--json"]):
        plot = tmp_path / f"{len(options)}.png"
        result = lex(*command, "--plot", str(plot), *options)
        assert result.exit_code == 1
        assert "No space left on device" in result.stderr
        assert plot.read_bytes().startswith(b"\x89PNG")
        assert (len(strict(result.stdout)) == 2) if options else ("bits/byte" in result.stdout)


@pytest.mark.parametrize("command", ["resolution", "receptive-field"])
def test_measurements_are_printed_if_they_cannot_be_written(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lex_hf.evaluation.plots.save", lambda *_: (_ for _ in ()).throw(OSError("the disk is gone")))
    call = [command, "model", "text.txt", "--length", "8", "--output", str(tmp_path), "--json"]
    result = lex(*call)
    assert (result.exit_code, result.stderr.endswith("Error: the disk is gone\n")) == (1, True)
    assert strict(result.stdout) == strict((tmp_path / f"{command}.json").read_text())


def test_a_table_goes_through_links_and_into_pipes(tmp_path: Path) -> None:
    target, link, pipe = tmp_path / "target.csv", tmp_path / "link.csv", tmp_path / "pipe"
    target.write_text("old")
    link.symlink_to("target.csv")
    os.mkfifo(pipe)
    arrived: list[str] = []
    reader = threading.Thread(target=lambda: arrived.append(pipe.read_text()), daemon=True)
    reader.start()
    for path in (link, pipe):
        assert lex("evaluate", "model", "text.txt", "--length", "8", "--csv", str(path)).exit_code == 0
    reader.join(timeout=30)
    assert link.is_symlink()
    assert arrived == [target.read_text()]
    assert arrived[0].startswith("length,tokens")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.csv", "pipe", "target.csv"]


def test_names_are_printed_as_they_are(places: Path, tmp_path: Path) -> None:
    name = "[red]:smile: $x_{$"
    shutil.copytree(places / "model", tmp_path / name)
    model, output = str(tmp_path / name), str(tmp_path / f"out {name}")
    lengths = ["--length", "8", "--length", "16"]
    shown = lex("evaluate", model, "text.txt", *lengths, "--plot", str(tmp_path / f"{name}.png"))
    assert shown.exit_code == 0, shown.output
    assert "".join(name.split()) in "".join(shown.stdout.split())
    assert lex("resolution", model, "text.txt", "--length", "8", "--output", output).exit_code == 0
    made = lex("tokenizer", "text.txt", "--output", output + "2", "--vocab-size", "257")
    assert "".join(name.split()) in "".join(made.stdout.split())
    assert name in lex("evaluate", name, "text.txt").stderr


def test_names_that_are_not_utf_8(tmp_path: Path) -> None:
    name = os.fsdecode(bytes(tmp_path) + b"/caf\xe9")
    assert lex("evaluate", "model", "text.txt", "--length", "8", "--csv", name).exit_code == 0
    assert Path(name).read_text().startswith("length,tokens")
    Path(name).unlink()
    refused = lex("tokenizer", "text.txt", "--output", name, "--vocab-size", "257")
    assert (refused.exit_code, "caf\\udce9 is not UTF-8" in refused.stderr) == (1, True)


def test_json_has_no_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    found = invariance.PositionCheck(float("nan"), float("inf"), 0.0, None, 1.0, 7, 1e-4)
    monkeypatch.setattr(invariance, "check_positions", lambda *_, **__: found)
    result = strict(lex("check", "model", "--json").stdout)
    assert (result["order_variance"], result["left_padding"], result["right_padding"]) == (None, None, 0.0)


def test_prompts_must_be_utf_8() -> None:
    result = lex("generate", "model", "-", stdin=b"caf\xe9 au lait")
    assert result.exit_code == 1
    assert "The standard input is not UTF-8 text: byte 0xe9 at offset 3" in result.stderr


def test_a_tokenizer_goes_into_an_empty_folder_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = Path("text.txt").resolve()
    monkeypatch.chdir(tmp_path)
    assert lex("tokenizer", str(text), "--output", ".", "--vocab-size", "257").exit_code == 0
    assert {path.name for path in tmp_path.iterdir()} == {"tokenizer.json", "tokenizer_config.json"}


def test_an_impossible_setting_is_said_without_the_wrapping() -> None:
    result = lex("train", "tiny", "text.txt", "--output", "new", "--set", "position_embedding_type=absolute")
    assert result.stderr.startswith("Error: position_embedding_type = 'absolute': it must be one of"), result.stderr


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ModuleNotFoundError("No module named 'peft'", name="peft"), 1, "pip install peft"),
        (ImportError("needs more: pip install x"), 1, "Error: needs more: pip install x"),
        (MemoryError(), 1, "Not enough memory"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), 1, "Not enough memory"),
        (RecursionError("too deep"), 1, "nested too deeply"),
        (OverflowError("int too big"), 1, "A number is too large"),
        (KeyboardInterrupt(), 130, "Interrupted."),
        (BrokenPipeError(), 1, ""),
    ],
)  # fmt: skip
def test_errors_are_sentences(error: BaseException, code: int, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(invariance, "check_positions", fail)
    result = lex("check", "model")
    assert (result.exit_code, message in result.stderr) == (code, True)
    assert "Traceback" not in result.stderr


def test_a_fault_of_the_program_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invariance, "check_positions", lambda *_, **__: [].pop())
    assert isinstance(lex("check", "model").exception, IndexError)


INTERRUPTED = """
import os, signal, sys

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what it runs in the background

class Interrupt:
    def find_spec(self, name, *_):
        if name == interrupted:
            os.kill(os.getpid(), signal.SIGINT)

interrupted = sys.argv.pop(1)
sys.meta_path.insert(0, Interrupt())
from lex_hf.cli import main
main()
"""


def said_and_printed(process: subprocess.CompletedProcess[str]) -> tuple[list[str], str, int]:
    assert "Traceback" not in process.stderr
    errors = [line for line in process.stderr.splitlines() if line.startswith("Error")]
    return errors, process.stdout, process.returncode


@pytest.mark.processes
def test_interrupted_and_cut_off_processes_leave_no_traceback(places: Path) -> None:
    """While it imports, when nobody reads on, and when the disk is full."""
    for words in (["typer", "--help"], ["transformers", "check", "model"]):
        command = [sys.executable, "-c", INTERRUPTED, *words]
        interrupted = subprocess.run(command, capture_output=True, text=True, timeout=240)
        assert said_and_printed(interrupted) == ([], "", 130)
    reading, writing = os.pipe()
    os.close(reading)
    full = os.open("/dev/full", os.O_WRONLY)
    check = ["-m", "lex_hf", "check", "model"]
    cut_off, not_written = (said_and_printed(PACKAGE.run(*check, stdout=file)) for file in (writing, full))
    os.close(writing)
    os.close(full)
    assert cut_off == ([], "", 1)
    assert not_written == (["Error: [Errno 28] No space left on device"], "", 1)
