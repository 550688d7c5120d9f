"""Every command, as a user types it; bad input gives a sentence, never a traceback."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import tiny_model
from test_torchscale import official_state
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel
from typer.testing import CliRunner, Result

from lex_hf import LexForCausalLM, measure_resolution, receptive_field
from lex_hf.cli import app
from lex_hf.perplexity import compute_perplexity
from lex_hf.recipes import load_recipe
from lex_hf.tokenization import byte_tokenizer


def setting(**fields: object) -> list[str]:
    """Fields of a recipe, as the command line has them."""
    return [argument for name, value in fields.items() for argument in ("--set", f"{name}={value}")]


SIZES = setting(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
SMALL = [*SIZES, *setting(training_length=16, per_device_train_batch_size=2, examples_per_step=2)]
TEXT = "The quick brown fox jumps over the lazy dog. " * 40


def lex(*arguments: object, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model(vocab_size=257, bos_token_id=256, eos_token_id=256, pad_token_id=256).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def test_help_tells_everything() -> None:
    overview = lex("--help").output
    for command in ("demo", "train", "evaluate", "compare", "generate", "push", "serve", "card", "reproduce"):
        assert command in overview
        assert lex(command, "--help").exit_code == 0
    assert "--attention-pattern" in lex("evaluate", "--help").output


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


def test_fine_tuning_starts_from_the_model_given(tmp_path: Path, text: Path, model: Path) -> None:
    options = setting(length=16, max_steps=1, learning_rate=1e-9, warmup_steps=0)
    result = lex("train", "fine-tune", text, "--output", tmp_path / "out", "--model", model, *options)
    assert result.exit_code == 0, result.output
    assert "1 steps, 128 tokens" in result.output
    assert load_recipe(tmp_path / "out" / "recipe.yaml").model == {}
    before, after = (AutoModelForCausalLM.from_pretrained(path) for path in (model, tmp_path / "out"))
    for name, parameter in before.state_dict().items():
        torch.testing.assert_close(parameter, after.state_dict()[name], atol=1e-8, rtol=0, msg=name)


def test_evaluate_prints_a_table(model: Path, text: Path) -> None:
    result = lex("evaluate", model, text, "--protocol", "streaming", "--attention-pattern", "sliding")
    assert result.exit_code == 0, result.output
    assert "bits/byte" in result.output
    assert str(len(TEXT)) in result.output


def test_generate_streams_text_and_reads_standard_input(model: Path) -> None:
    first = lex("generate", model, "-", "--max-new-tokens", 8, "--seed", 3, stdin="def f(")
    again = lex("generate", model, "def f(", "--max-new-tokens", 8, "--seed", 3)
    assert first.exit_code == 0, first.output
    assert first.stdout.startswith("def f(")
    assert len(first.stdout.encode()) > len("def f(") + 4
    assert first.stdout == again.stdout
    assert lex("generate", model, "", "--max-new-tokens", 2, "--json").exit_code == 0


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
        "searched for a causal language model (config.json, model.safetensors": ["evaluate", hollow, text],
        "searched for a tokenizer": ["evaluate", tmp_path / "nothing", text],
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
        "put a recipe in front: lex-hf train tiny": ["train", text, *out],
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


@pytest.mark.processes
def test_an_interrupted_training_can_be_loaded_and_resumed(tmp_path: Path, text: Path) -> None:
    folder, sizes = tmp_path / "out", [*SMALL, *setting(save_steps=5)]
    command = [sys.executable, "-m", "lex_hf", "train", "tiny", str(text), "--output", str(folder), *sizes]
    endless = [*command, *setting(max_steps=100_000)]
    process = subprocess.Popen(endless, stderr=subprocess.PIPE, text=True, env=os.environ)
    deadline = time.monotonic() + 120
    while not list(folder.glob("checkpoint-*/trainer_state.json")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert "resume=True" in errors
    assert "Traceback" not in errors
    last = max(folder.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    done = int(last.name.split("-")[1])
    assert isinstance(AutoModelForCausalLM.from_pretrained(last), LexForCausalLM)
    again = setting(max_steps=done + 2)
    command = ["train", "tiny", text, "--output", folder, *sizes, *again, "--resume", "--json"]
    refused = " ".join(lex(*command).stderr.split())
    assert f"max_steps: was 100000, now {done + 2}" in refused
    result = lex(*command, "--allow-change", "max_steps")
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    assert summary["steps"] == done + 2
    assert summary["changes"] == [{"step": done, "name": "max_steps", "was": 100_000, "now": done + 2}]


def test_a_plan_is_told_before_anything_starts(tmp_path: Path, model: Path) -> None:
    # GPT-2's tokenizer is not here, and not needed.
    arguments = ["train", "gpt-medium", "--dry-run", "--processes", 8, *setting(max_steps=30_000)]
    told = json.loads(lex(*arguments, "--json").stdout)
    assert (told["tokens_per_step"], told["accumulation"], told["tokens"]) == (2**19, 8, 30_000 * 2**19)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(told["recipe"])
    written = load_recipe(recipe)
    assert (written.model["hidden_size"], written.training["max_steps"]) == (1024, 30_000)
    printed = " ".join(lex(*arguments).output.split())
    for expected in (
        "353,774,592",
        "302,311,424",
        "524,288",
        "15,728,640,000",
        "GiB",
        "warmup_steps: 20000",
        "Not counted",
    ):
        assert expected in printed, printed
    tuned = json.loads(lex("train", "fine-tune", "--model", model, "--dry-run", "--json").stdout)
    assert tuned["tokens_per_step"] == 8 * 14
    uneven = lex("train", "gpt-medium", "--dry-run", "--processes", 3)
    assert "must be a multiple of per_device_train_batch_size x devices = 8 x 3" in " ".join(uneven.stderr.split())


def test_a_recipe_of_ones_own(tmp_path: Path, text: Path) -> None:
    recipe, folder = tmp_path / "mine.yaml", tmp_path / "out"
    recipe.write_text(
        "model: {hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2, intermediate_size: 16,"
        " training_length: 16}\n"
        "training: {max_steps: 2, per_device_train_batch_size: 2, learning_rate: 1e-3}\n"
        "data: {tokenizer: bytes, streaming: true, separate_documents: true, examples_per_step: 4, text_field: body}\n"
    )
    lines = tmp_path / "lines.jsonl"
    lines.write_text("".join(json.dumps({"body": f"document {number} " * 3}) + "\n" for number in range(40)))
    trained = lex("train", recipe, "--data", lines, lines, "--output", folder, "--json")
    assert trained.exit_code == 0, trained.output
    assert json.loads(trained.stdout)["tokens"] == 2 * 4 * 16
    kept = load_recipe(folder / "recipe.yaml")
    assert kept.model["xpos_scale_base"] == 8
    assert kept.data.streaming
    again = lex("train", folder / "recipe.yaml", lines, lines, "--output", tmp_path / "again", "--json")
    assert again.exit_code == 0, again.output
    weights = (path / "model.safetensors" for path in (folder, tmp_path / "again"))
    assert len({path.read_bytes() for path in weights}) == 1


def test_evaluation_data(tmp_path: Path, text: Path) -> None:
    arguments = ["train", "tiny", text, "--output", tmp_path / "out", *SMALL, "--eval-data", text, "--json"]
    options = setting(max_steps=4, eval_strategy="steps", eval_steps=2)
    result = lex(*arguments, *options)
    assert result.exit_code == 0, result.output
    assert [step for step, _ in json.loads(result.stdout)["eval_losses"]] == [2, 4]


def test_tokenizer_is_trained_and_used(tmp_path: Path, text: Path) -> None:
    folder, output = tmp_path / "words", tmp_path / "out"
    result = lex("tokenizer", text, "--vocab-size", 280, "--output", folder)
    assert result.exit_code == 0, result.output
    assert "280 tokens" in result.output
    words = AutoTokenizer.from_pretrained(folder)
    assert words.decode(words("The quick né")["input_ids"]) == "The quick né"
    assert len(words("The quick brown fox")["input_ids"]) < 12
    refused = lex("tokenizer", text, "--output", folder)
    assert "exists and is not empty" in " ".join(refused.stderr.split())
    options = [*SMALL, *setting(max_steps=2), "--tokenizer", folder]
    assert lex("train", "tiny", text, "--output", output, *options).exit_code == 0
    config = AutoModelForCausalLM.from_pretrained(output).config
    assert (config.vocab_size, config.eos_token_id) == (280, 279)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpt2")
    sizes = {"vocab_size": 257, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
    GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=256, eos_token_id=256)).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def test_a_warm_start_can_be_fine_tuned(tmp_path: Path, text: Path, gpt2: Path) -> None:
    begun, tuned = tmp_path / "begun", tmp_path / "tuned"
    result = lex("warm-start", gpt2, begun, *setting(position_embedding_type="rope"))
    assert result.exit_code == 0, result.output
    loaded = AutoModelForCausalLM.from_pretrained(begun)
    assert isinstance(loaded, LexForCausalLM)
    assert (loaded.config.position_embedding_type, loaded.config.training_length) == ("rope", 16)
    options = setting(max_steps=2, per_device_train_batch_size=2)
    result = lex("train", "fine-tune", text, "--model", begun, "--output", tuned, *options, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["tokens"] == 2 * 2 * 16
    AutoTokenizer.from_pretrained(tuned)


def test_a_warm_start_from_an_official_checkpoint(tmp_path: Path, model: Path) -> None:
    lex_model = AutoModelForCausalLM.from_pretrained(model)
    source, folder = tmp_path / "official.pt", tmp_path / "begun"
    torch.save(official_state(lex_model), source)
    fields = setting(training_length=14, xpos_scale_base=7, eos_token_id=256, bos_token_id=256)
    result = lex("warm-start", source, folder, "--tokenizer", "bytes", *fields, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["tokenizer"] == "bytes"
    ids = torch.tensor([list(b"some bytes that are longer than a block")])
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(loaded(ids).logits, lex_model(ids).logits)
    assert len(AutoTokenizer.from_pretrained(folder)) == 257


def test_bad_warm_starts(tmp_path: Path, model: Path, gpt2: Path, text: Path) -> None:
    bare = tmp_path / "bare"
    GPT2LMHeadModel.from_pretrained(gpt2).save_pretrained(bare)
    cases = {
        "is a model of type 'lex'; a warm start needs 'gpt2'": [model],
        "num_hidden_layers = 3, GPT-2 has 1": [gpt2, *setting(num_hidden_layers=3)],
        "--set takes the fields of LexConfig here": [gpt2, *setting(max_steps=3)],
        "no tokenizer that loads": [bare],
    }
    for message, (source, *options) in cases.items():
        result = lex("warm-start", source, tmp_path / "out", *options)
        assert result.exit_code == 1, (message, result.output)
        assert message in " ".join(result.stderr.split()), (message, result.stderr)
    assert "exists and is not empty" in " ".join(lex("warm-start", gpt2, model).stderr.split())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bare", "text.txt"]


def test_check_reports_what_holds(model: Path) -> None:
    result = lex("check", model, "--text", "some words, and some more of them")
    assert result.exit_code == 0, result.output
    assert "knows order" in result.output
    assert "not: positions are relative" not in result.output
    numbers = json.loads(lex("check", model, "--json", "--shift", 3).stdout)
    assert numbers["left_padding"] <= numbers["tolerance"] < numbers["order_variance"]


@pytest.fixture
def texts(tmp_path: Path) -> list[Path]:
    """Three short texts, as files."""
    words = TEXT.split()
    return [write(tmp_path / f"{start}.txt", " ".join(words[start : start + 12]).encode()) for start in range(3)]


def numbers_of(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_evaluate_sliding_with_csv_and_plot(model: Path, texts: list[Path], tmp_path: Path) -> None:
    table, plot = tmp_path / "table.csv", tmp_path / "plot.png"
    options = ["--protocol", "sliding", "--length", 9, "--length", 4, "--stride", 3, "--batch-size", "auto"]
    result = lex("evaluate", model, *texts, *options, "--csv", table, "--plot", plot, "--json")
    assert result.exit_code == 0, result.output
    measured = json.loads(result.stdout)
    words, network = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    contents = [path.read_text() for path in texts]
    for got, row, length in zip(measured, numbers_of(table), (9, 4), strict=True):
        options = {"protocol": "sliding", "length": length, "stride": 3, "progress": False}
        expected = compute_perplexity(network, words, contents, **options)
        assert got["perplexity"] == pytest.approx(expected.perplexity, rel=1e-5)
        assert (got["options"], len(got["documents"])) == ({"stride": 3}, 3)
        low, high = got["confidence_interval"]
        written = (length, got["tokens"], got["nll"], got["perplexity"], low, high, got["bits_per_byte"])
        assert [float(value) for value in row.values()] == list(written)
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.txt", "1.txt", "2.txt", "plot.png", "table.csv"]


def test_plot_of_a_single_text(model: Path, texts: list[Path], tmp_path: Path) -> None:
    plot = tmp_path / "plot.png"
    result = lex("evaluate", model, texts[0], "--length", 9, "--length", 4, "--plot", plot)
    assert result.exit_code == 0, result.output
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_evaluate_last_token_shows_every_context(model: Path, texts: list[Path], tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    options = ["--protocol", "last_token", "--length", 20, "--contexts", 7, "--contexts", 19, "--csv", table]
    result = lex("evaluate", model, *texts, *options)
    assert result.exit_code == 0, result.output
    words, network = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    contents = [path.read_text() for path in texts]
    expected = compute_perplexity(
        network, words, contents, protocol="last_token", length=20, contexts=[7, 19], progress=False
    )
    for row, bucket in zip(numbers_of(table), expected.loss_by_position, strict=True):
        assert (row["context"], row["tokens"]) == (str(bucket.start), str(bucket.tokens))
        assert float(row["perplexity"]) == pytest.approx(bucket.perplexity)
        assert f"{bucket.perplexity:#.5g}" in result.output
        assert (row["low"] == "") == (bucket.start == 7)
    assert "context" in result.output


def test_evaluate_goes_on_from_records(model: Path, texts: list[Path], tmp_path: Path) -> None:
    records = tmp_path / "records.jsonl"
    options = ["--length", 9, "--records", records, "--json"]
    first = lex("evaluate", model, *texts, *options)
    lines = records.read_text().splitlines(keepends=True)
    assert len(lines) == 3
    records.write_text("".join(lines[:2]))
    again = lex("evaluate", model, *texts, *options)
    assert again.stdout == first.stdout
    assert records.read_text().splitlines(keepends=True) == lines


def test_compare_models(model: Path, texts: list[Path], tmp_path: Path) -> None:
    other = tmp_path / "other"
    tiny_model(vocab_size=257, bos_token_id=256, seed=1).save_pretrained(other)
    byte_tokenizer().save_pretrained(other)
    options = [*texts, "--length", 9, "--protocol", "chunked"]
    result = lex("compare", model, other, *options, "--json")
    assert result.exit_code == 0, result.output
    paired = json.loads(result.stdout)
    a, b = (json.loads(lex("evaluate", each, *options, "--json").stdout)[0] for each in (model, other))
    assert (paired["a"], paired["b"]) == (a, b)
    assert paired["perplexity_ratio"] == pytest.approx(a["perplexity"] / b["perplexity"])
    means = [[each["nll"] / each["tokens"] for each in result["documents"]] for result in (a, b)]
    differences = [one - other for one, other in zip(*means, strict=True)]
    assert paired["difference"] == pytest.approx(sum(differences) / 3)
    assert paired["n"] == 3
    shown = lex("compare", model, other, *options)
    assert shown.exit_code == 0, shown.output
    assert paired["verdict"] in " ".join(shown.output.split())
    assert f"{paired['difference']:+.4f}" in shown.output


def test_compare_two_patterns_of_one_model(model: Path, texts: list[Path]) -> None:
    patterns = ["--attention-pattern", "blockwise", "--attention-pattern", "full"]
    short, long = (
        json.loads(lex("compare", model, model, *texts, "--length", length, *patterns, "--json").stdout)
        for length in (14, 50)  # the model's training length is 14: up to there the patterns are one
    )
    assert short["difference"] == pytest.approx(0, abs=1e-5)
    assert abs(long["difference"]) > 1e-3


def test_bad_options_of_evaluate_and_compare(model: Path, text: Path, texts: list[Path], tmp_path: Path) -> None:
    three = [argument for _ in range(3) for argument in ("--attention-pattern", "full")]
    cases = {
        "--plot draws perplexity against length": ["evaluate", model, text, "--plot", tmp_path / "plot.png"],
        "batch_size = 'many': it must be": ["evaluate", model, text, "--batch-size", "many"],
        "stride = 3: the protocol 'chunked' has no such option": ["evaluate", model, text, "--stride", 3],
        "Text 0 (counted from 0): it has": ["evaluate", model, *texts, "--protocol", "last_token", "--length", 999],
        "line 1 of": ["evaluate", model, *texts, "--records", text],
        "is the same file as --csv": ["evaluate", model, text, "--csv", tmp_path / "a", "--records", tmp_path / "a"],
        "text.txt is the same file as": ["evaluate", model, text, "--csv", text],
        "there is no folder": ["evaluate", model, *texts, "--records", tmp_path / "none" / "records.jsonl"],
        "too few pairs, 1": ["compare", model, model, text],
        "--attention-pattern is given 3 times": ["compare", model, model, *texts, *three],
    }
    text.write_text(TEXT + "\n")
    for message, arguments in cases.items():
        result = lex(*arguments)
        assert result.exit_code == 1, (message, result.output)
        assert message in " ".join(result.stderr.split()), (message, result.stderr)
        assert "Traceback" not in result.output
    assert text.read_text() == TEXT + "\n"


def test_resolution_compares_patterns_and_writes_what_it_found(model: Path, text: Path, tmp_path: Path) -> None:
    output = tmp_path / "measured"
    patterns = ["--attention-pattern", "full", "--attention-pattern", "blockwise"]
    arguments = ["resolution", model, text, "--length", 40, "--segments", 2, *patterns]
    result = lex(*arguments, "--output", output)
    assert result.exit_code == 0, result.output
    numbers = json.loads((output / "resolution.json").read_text())
    loaded = AutoModelForCausalLM.from_pretrained(model, attention_pattern="full")
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = torch.tensor(tokenizer(TEXT)["input_ids"])
    expected = measure_resolution(loaded, torch.stack((ids[:40], ids[40:80])), progress=False)
    assert numbers["full"]["by_layer"] == pytest.approx(expected.by_layer, rel=1e-6)
    assert len(numbers["blockwise"]["curves"][0]) == 14
    assert f"{expected.mean:.4f}" in result.output
    assert {path.name for path in output.iterdir()} == {
        "resolution.json",
        "resolution.png",
        "curves-full.png",
        "curves-blockwise.png",
    }
    assert json.loads(lex(*arguments, "--json").stdout) == numbers


def test_receptive_field_prints_and_writes(model: Path, text: Path, tmp_path: Path) -> None:
    arguments = ["receptive-field", model, text, "--length", 40, "--segments", 3]
    result = lex(*arguments, "--output", tmp_path)
    assert result.exit_code == 0, result.output
    loaded, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    ids = torch.tensor(tokenizer(TEXT)["input_ids"][:120]).view(3, 40)
    expected = receptive_field(loaded, ids, progress=False)
    assert json.loads((tmp_path / "receptive-field.json").read_text())["blockwise"]["erf"] == expected.erf
    assert str(expected.theoretical) in result.output
    assert (tmp_path / "receptive-field.png").is_file()
    too_short = lex(*arguments[:-1], 1000)
    assert too_short.exit_code == 1
    assert "hold 45 segments of 40 tokens, 1000 are asked for" in " ".join(too_short.stderr.split())
