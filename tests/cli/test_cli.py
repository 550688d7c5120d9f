"""Commands as a user types them, one after the other, and with bad input."""

import inspect
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.commands import SMALL, TEXT, lex, setting
from helpers.models import tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from lex_hf import LexForCausalLM, __version__
from lex_hf.cli import experiments
from lex_hf.data.tokenizers import byte_tokenizer
from lex_hf.evaluation.perplexity import compute_perplexity
from lex_hf.reproduce import demo
from lex_hf.reproduce.tiny import STEPS


def test_help_tells_everything() -> None:
    overview = lex("--help").output
    commands = (
        "demo",
        "train",
        "evaluate",
        "compare",
        "generate",
        "generate-corpus",
        "push",
        "serve",
        "card",
        "reproduce",
    )
    for command in commands:
        assert command in overview
        assert lex(command, "--help").exit_code == 0
    assert "--attention-pattern" in lex("evaluate", "--help").output


def test_the_version_is_that_of_the_package() -> None:
    assert lex("--version").stdout == f"lex-hf {__version__}\n"


@pytest.mark.parametrize(("command", "steps"), [(experiments.demo, demo.STEPS), (experiments.extrapolation, STEPS)])
def test_defaults_of_steps_are_those_of_the_experiments(command: Callable[..., None], steps: int) -> None:
    """The default is written out, because help must not wait for the experiments."""
    assert inspect.signature(command).parameters["steps"].default == steps


def test_train_evaluate_and_generate_in_a_row(tmp_path: Path, text: Path) -> None:
    folder = tmp_path / "model"
    options = [*SMALL, *setting(position_embedding_type="rope", max_steps=3), "--json"]
    trained = lex("train", "tiny", "--data", text, "--output", folder, *options)
    assert trained.exit_code == 0, trained.output
    summary = json.loads(trained.stdout)
    assert (summary["steps"], summary["tokens"]) == (3, 3 * 2 * 16)
    lex_model = AutoModelForCausalLM.from_pretrained(folder)
    assert isinstance(lex_model, LexForCausalLM)
    config = lex_model.config
    assert (config.position_embedding_type, config.training_length, config.xpos_scale_base) == ("rope", 16, 8)
    assert (config.hidden_size, config.vocab_size, config.bos_token_id) == (16, 257, 256)
    evaluated = lex("evaluate", folder, text, "--length", 8, "--length", 64, "--json")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for result, length in zip(json.loads(evaluated.stdout), (8, 64), strict=True):
        expected = compute_perplexity(lex_model, tokenizer, [TEXT], length=length, progress=False)
        assert result == json.loads(json.dumps(expected.to_dict()))
    written = lex("generate", folder, "The quick", "--max-new-tokens", 5, "--greedy", "--json")
    prompt = tokenizer("The quick", return_tensors="pt")
    tokens = lex_model.generate(**prompt, max_new_tokens=5, do_sample=False)[0, 9:]
    assert json.loads(written.stdout)["tokens"] == tokens.tolist()


def test_generate_streams_text_and_reads_standard_input(model: Path) -> None:
    first = lex("generate", model, "-", "--max-new-tokens", 8, "--seed", 3, stdin="def f(")
    again = lex("generate", model, "def f(", "--max-new-tokens", 8, "--seed", 3)
    assert first.exit_code == 0, first.output
    assert first.stdout.startswith("def f(")
    assert len(first.stdout.encode()) > len("def f(") + 4
    assert first.stdout == again.stdout
    assert lex("generate", model, "", "--max-new-tokens", 2, "--json").exit_code == 0


def test_generate_corpus_says_what_it_did_and_continues(model: Path, tmp_path: Path, texts: list[Path]) -> None:
    call = ["generate-corpus", model, *texts, "--output", tmp_path / "run", "--max-new-tokens", 4, "--greedy"]
    first = lex(*call, "--max-prompt-tokens", 40, "--rows", 2)
    assert first.stdout.startswith("3 prompts, 1")
    assert "only the last tokens were read" in first.stdout
    assert "were finished before" not in first.stdout
    again = lex(*call, "--max-prompt-tokens", 40, "--json")
    result = json.loads(again.stdout)
    assert (result["prompts"], result["finished_before"], result["tokens"]) == (3, 3, 12)
    assert result["prompt_tokens"] == sum(min(40, path.stat().st_size) for path in texts)
    assert result["cut"] == sum(path.stat().st_size > 40 for path in texts) > 0
    other = lex(*call)
    assert (other.exit_code, other.stderr.count("max_prompt_tokens = 40, not None")) == (1, 1)

    written = lex("generate", model, texts[1].read_text()[-40:], "--max-new-tokens", 4, "--greedy", "--json")
    lines = (tmp_path / "run" / "continuations.jsonl").read_text().splitlines()
    assert json.loads(lines[1])["tokens"] == json.loads(written.stdout)["tokens"]


def test_generate_corpus_refuses_what_is_read_only_once(model: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    result = lex("generate-corpus", model, tmp_path / "pipe", "--output", tmp_path / "run")
    assert result.exit_code == 1
    assert "is a pipe, which can be read only once" in result.stderr


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("missing.txt", "missing.txt: no such file"),
        ("empty.txt", "empty.txt is empty"),
        ("latin.txt", "latin.txt is not UTF-8 text: byte 0xe9 at offset 2"),
        ("bad.jsonl", "bad.jsonl, line 2: no field 'text'"),
    ],
)
@pytest.mark.parametrize("command", ["train", "evaluate"])
def test_bad_texts(tmp_path: Path, model: Path, command: str, case: str, message: str) -> None:
    contents = {"empty.txt": b"", "latin.txt": b"n\xc3\xe9", "bad.jsonl": b'{"text": "a"}\n{"txt": "b"}\n'}
    contents["latin.txt"] = b"caf\xe9"[1:]
    path = write(tmp_path / case, contents[case]) if case in contents else tmp_path / case
    arguments = [model, path] if command == "evaluate" else ["tiny", path, "--output", tmp_path / "out"]
    result = lex(command, *arguments)
    assert result.exit_code == 1
    assert message in " ".join(result.stderr.split())
    assert "Traceback" not in result.output


def test_bad_models_and_options(tmp_path: Path, model: Path, text: Path) -> None:
    hollow = tmp_path / "hollow"
    byte_tokenizer().save_pretrained(hollow)
    tiny_model().config.save_pretrained(hollow)
    other = tmp_path / "other"
    tiny_model(vocab_size=70).save_pretrained(other)
    byte_tokenizer().save_pretrained(other)
    one = write(tmp_path / "one.txt", b"x")
    out = ["--output", tmp_path / "out"]
    new = ["tiny", text, *out]
    cases = {
        "Could not load a causal language model (config.json, model.safetensors": ["evaluate", hollow, text],
        "Could not load a tokenizer": ["evaluate", tmp_path / "nothing", text],
        "the model's vocabulary has 70 ids": ["evaluate", other, text],
        "attention_pattern = 'local': it must be one of": ["evaluate", model, text, "--attention-pattern", "local"],
        "protocol = 'best': it must be one of": ["evaluate", model, text, "--protocol", "best"],
        "at least 2 are needed": ["evaluate", model, one, "--no-start-token"],
        "training_length = 17: it must be even": ["train", *new, *setting(training_length=17)],
        "no field of a recipe is called 'depth'": ["train", *new, *setting(depth=3)],
        "model.hidden_size = 'wide' is str; it must be int": ["train", *new, *setting(hidden_size="wide")],
        "hidden_act = 'swoosh'": ["train", *new, *setting(hidden_act="swoosh")],
        "all documents (1) together have 2 tokens": ["train", "tiny", one, *out, *SMALL],
        "resume=True, but": ["train", *new, "--resume", *SMALL],
        "has a configuration of its own": ["train", *new, "--model", model, *setting(hidden_size=3)],
        "has a tokenizer of its own": ["train", *new, "--model", model, "--tokenizer", "bytes"],
        "describes no model: give one with --model": ["train", "fine-tune", text, *out],
        "names no tokenizer: give a folder or Hub id": ["train", "small", text, *out, *setting(bf16="false")],
        "no tokenizer that loads": ["train", *new, "--tokenizer", tmp_path / "nothing"],
        "A training needs texts and a folder": ["train", "tiny", *out],
        "name a recipe first: lex-hf train tiny": ["train", text, *out],
        "Did you mean 'small'?": ["train", "smal", text, *out],
        "examples_per_step = 16: it must be a multiple of": ["train", *new, *setting(per_device_train_batch_size=7)],
        "device = 'tpu9'": ["generate", model, "a", "--device", "tpu9"],
        "exists and is not an earlier demo's": ["demo", "--output", tmp_path],
    }
    for message, arguments in cases.items():
        result = lex(*arguments)
        assert result.exit_code == 1, (message, result.output)
        assert message in " ".join(result.stderr.split()), (message, result.stderr)
        assert "Traceback" not in result.output
    assert not (tmp_path / "out").exists() or not any((tmp_path / "out").iterdir())
