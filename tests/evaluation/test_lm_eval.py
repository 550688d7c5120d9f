"""The task for lm-evaluation-harness: its files fit together, and its numbers are those of lex_hf."""

import importlib
import inspect
import json
import math
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml
from helpers.models import tiny_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import lex_hf
from lex_hf.data.tokenizers import byte_tokenizer
from lex_hf.evaluation.lm_eval.documents import load
from lex_hf.evaluation.perplexity import compute_perplexity

FOLDER = Path(lex_hf.__file__).parent / "evaluation" / "lm_eval"
FOLDER_OF_0_1_0 = Path(lex_hf.__file__).parent / "lm_eval_tasks"
README = (FOLDER / "README.md").read_text(encoding="utf-8")
METRICS = ("word_perplexity", "byte_perplexity", "bits_per_byte")
BOS = 256
# 60, 30 and 90 bytes; the second looks like a list to a template, and its é is two bytes.
TEXTS = [
    "In a hole in the ground there lived a test that failed once.",
    "[1, 2, 3, 4, 5, 6, 7, 8, 'é']",
    "na na " * 15,
]


def task() -> dict[str, Any]:
    """The task file, with `!function` read as plain text."""
    loader = type("Loader", (yaml.SafeLoader,), {})
    loader.add_constructor("!function", lambda reader, node: reader.construct_scalar(node))
    return yaml.load((FOLDER / "long_documents.yaml").read_text(encoding="utf-8"), Loader=loader)


def commands() -> list[str]:
    """The commands of README, each in one line."""
    (block,) = re.findall(r"```console\n(.*?)```", README, re.DOTALL)
    return [" ".join(command.replace("\\\n", "").split()) for command in re.split(r"^\$ ", block, flags=re.M)[1:]]


def options() -> dict[str, str]:
    """The options of README's lm_eval command."""
    program, *words = shlex.split(commands()[1])
    assert program == "lm_eval"
    return dict(zip(words[::2], words[1::2], strict=True))


def write_documents(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def byte_model() -> lex_hf.LexForCausalLM:
    return tiny_model(vocab_size=257, bos_token_id=BOS, eos_token_id=BOS, pad_token_id=BOS)


def bits_per_byte(texts: list[str], protocol: str, length: int) -> float:
    result = compute_perplexity(
        byte_model(), byte_tokenizer(), texts, protocol=protocol, length=length, progress=False
    )
    return result.bits_per_byte


def rolling_nll(text: str, max_length: int) -> float:
    """NLL in nats, token by token: windows of `max_length` targets, the last with `max_length` tokens of context."""
    tokens, model, total = [BOS, *text.encode()], byte_model(), 0.0
    for target in range(1, len(tokens)):
        start = (target - 1) // max_length * max_length
        if len(tokens) - 1 - start < max_length:
            start = max(0, len(tokens) - 1 - max_length)
        with torch.no_grad():
            logits = model(torch.tensor([tokens[start:target]])).logits[0, -1].double()
        total -= logits.log_softmax(-1)[tokens[target]].item()
    return total


def test_the_task_file_names_what_exists(tmp_path: Path) -> None:
    config = task()
    module, _, function = config["custom_dataset"].rpartition(".")
    assert getattr(importlib.import_module(f"lex_hf.evaluation.lm_eval.{module}"), function) is load
    documents = load(str(write_documents(tmp_path / "a.jsonl", TEXTS)))[config["test_split"]]
    # A template would be parsed: the second text would become a list.
    assert documents[config["doc_to_target"]] == TEXTS
    assert [metric["metric"] for metric in config["metric_list"]] == list(METRICS)


def test_the_folder_of_version_0_1_0_includes_the_task() -> None:
    (file,) = FOLDER_OF_0_1_0.iterdir()
    (included,) = yaml.safe_load(file.read_text(encoding="utf-8")).items()
    assert included[0] == "include"
    assert (FOLDER_OF_0_1_0 / included[1]).resolve() == FOLDER / "long_documents.yaml"


def test_documents_come_from_one_source_or_several(tmp_path: Path) -> None:
    first = write_documents(tmp_path / "first.jsonl", TEXTS[:2])
    second = tmp_path / "second.txt"
    second.write_text(TEXTS[2])
    # lm_eval passes the arguments of the model as well.
    (split,) = load([str(first), str(second)], pretrained="x", max_length=3, version=1.0).values()
    assert split["text"] == TEXTS


@pytest.mark.parametrize("nothing", [{}, {"documents": ""}, {"documents": []}])
def test_no_documents(nothing: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"--metadata '\{\"documents\": \"FILE.jsonl\"\}'"):
        load(**nothing)


def test_documents_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=re.escape("nowhere.jsonl")):
        load(str(tmp_path / "nowhere.jsonl"))


def test_the_commands_name_what_exists(capsys: pytest.CaptureFixture[str]) -> None:
    code = re.fullmatch(r"TASKS=\$\(python -c '(.*)'\)", commands()[0])
    assert code is not None
    exec(code[1], {})
    assert Path(capsys.readouterr().out.strip()) == FOLDER
    options_given = options()
    assert options_given["--include_path"] == "$TASKS"
    assert options_given["--tasks"] == task()["task"]
    ((parameter, written),) = json.loads(options_given["--metadata"]).items()
    assert parameter in inspect.signature(load).parameters
    assert f'Path("{written}").write_text' in README


def test_the_table_shows_what_readme_says() -> None:
    cells = re.findall(r"^\| (\d+) \| (.*) \| (.*) \| (.*) \|$", README, re.MULTILINE)
    rows = [[float(cell) for cell in row] for row in cells]
    assert len(rows) == 4
    for length, harness, chunked, streaming in rows:
        assert streaming == rows[-1][1]
        assert (harness == chunked) == (16384 % length == 0)
        assert harness <= chunked
    assert [row[1] for row in rows] == sorted((row[1] for row in rows), reverse=True)


@pytest.fixture(scope="module")
def lm_eval() -> ModuleType:
    return pytest.importorskip("lm_eval", reason="lm_eval is not installed")


def evaluate(model: Any, documents: Path, folder: Path = FOLDER) -> dict[str, float]:
    """Metrics of the task for a model of lm_eval."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(folder), include_defaults=False, metadata={"documents": str(documents)})
    results = lm_eval.simple_evaluate(model, tasks=["long_documents"], task_manager=manager, bootstrap_iters=0)
    return {metric: results["results"]["long_documents"][f"{metric},none"] for metric in METRICS}


@settings(max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(max_length=st.integers(8, 100), batch_size=st.integers(1, 3))
def test_the_harness_agrees_with_a_sum_by_hand(
    lm_eval: ModuleType, tmp_path: Path, max_length: int, batch_size: int
) -> None:
    from lm_eval.models.huggingface import HFLM

    model = HFLM(byte_model(), tokenizer=byte_tokenizer(), max_length=max_length, batch_size=batch_size, device="cpu")
    metrics = evaluate(model, write_documents(tmp_path / "a.jsonl", TEXTS))
    nll = sum(rolling_nll(text, max_length) for text in TEXTS)
    size, words = sum(len(text.encode()) for text in TEXTS), sum(len(re.split(r"\s+", text)) for text in TEXTS)
    assert metrics["bits_per_byte"] == pytest.approx(nll / math.log(2) / size, rel=1e-5)
    assert metrics["byte_perplexity"] == pytest.approx(math.exp(nll / size), rel=1e-5)
    assert metrics["word_perplexity"] == pytest.approx(math.exp(nll / words), rel=1e-4)


@pytest.mark.parametrize(("max_length", "is_whole"), [(None, True), (90, True), (30, False)])
def test_the_harness_agrees_with_the_protocols(
    lm_eval: ModuleType, tmp_path: Path, max_length: int | None, is_whole: bool
) -> None:
    from lm_eval.models.huggingface import HFLM

    texts = [TEXTS[0], TEXTS[2]]  # 60 and 90 tokens: 30 divides both
    model = HFLM(byte_model(), tokenizer=byte_tokenizer(), max_length=max_length, batch_size=1, device="cpu")
    metrics = evaluate(model, write_documents(tmp_path / "a.jsonl", texts))
    assert evaluate(model, tmp_path / "a.jsonl", FOLDER_OF_0_1_0) == metrics
    measured = metrics["bits_per_byte"]
    assert measured == pytest.approx(bits_per_byte(texts, "chunked", max_length or 90), rel=1e-5)
    streamed = bits_per_byte(texts, "streaming", 7)
    assert (measured == pytest.approx(streamed, rel=1e-5)) == is_whole
    assert is_whole or abs(measured - streamed) > 1e-3


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_HOME": str(folder / "home")}
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    """A folder as README expects it: a model and documents."""
    byte_model().save_pretrained(tmp_path / "demo_output/xpos")
    byte_tokenizer().save_pretrained(tmp_path / "demo_output/xpos")
    write_documents(tmp_path / "held_back.jsonl", TEXTS)
    return tmp_path


def test_the_command_of_readme_runs(lm_eval: ModuleType, workplace: Path) -> None:
    filled = {**options(), "--include_path": str(FOLDER), "--output_path": "out"}
    run([sys.executable, "-m", "lm_eval", *(word for pair in filled.items() for word in pair)], workplace)
    (path,) = (workplace / "out").rglob("results_*.json")
    measured = json.loads(path.read_text())["results"]["long_documents"]["bits_per_byte,none"]
    assert measured == pytest.approx(bits_per_byte(TEXTS, "streaming", 14), rel=1e-5)


def test_the_code_of_readme_runs(lm_eval: ModuleType, workplace: Path) -> None:
    _, code = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    printed = run([sys.executable, "-c", code], workplace).stdout.split()[-1]
    assert float(printed) == pytest.approx(bits_per_byte(TEXTS, "streaming", 14), rel=1e-5)
