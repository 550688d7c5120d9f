"""The commands train, tokenizer and warm-start."""

import json
import signal
import time
from pathlib import Path

import pytest
import torch
import yaml
from helpers.commands import SMALL, lex, setting
from helpers.forks import PACKAGE
from helpers.official import official_state
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from lex_hf import LexForCausalLM
from lex_hf.data.tokenizers import byte_tokenizer
from lex_hf.training.recipes import load_recipe


def test_fine_tuning_starts_from_the_model_given(tmp_path: Path, text: Path, model: Path) -> None:
    options = setting(length=16, max_steps=1, learning_rate=1e-9, warmup_steps=0)
    result = lex("train", "fine-tune", text, "--output", tmp_path / "out", "--model", model, *options)
    assert result.exit_code == 0, result.output
    assert "1 steps, 128 tokens" in result.output
    assert load_recipe(tmp_path / "out" / "recipe.yaml").model == {}
    before, after = (AutoModelForCausalLM.from_pretrained(path) for path in (model, tmp_path / "out"))
    for name, parameter in before.state_dict().items():
        torch.testing.assert_close(parameter, after.state_dict()[name], atol=1e-8, rtol=0, msg=name)


@pytest.mark.processes
def test_an_interrupted_training_can_be_loaded_and_resumed(tmp_path: Path, text: Path) -> None:
    folder, sizes = tmp_path / "out", [*SMALL, *setting(save_steps=5)]
    endless = ["train", "tiny", text, "--output", folder, *sizes, *setting(max_steps=100_000)]
    with PACKAGE.start("-m", "lex_hf", *endless) as process:
        while not list(folder.glob("checkpoint-*/trainer_state.json")) and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert process.wait() == 130, process.stderr
        errors = process.stderr
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


def test_lists_for_the_layers_are_given_as_yaml() -> None:
    lists = ["--set", "attention_pattern=[blockwise, full]", "--set", "position_embedding_type=[xpos, none]"]
    arguments = ["train", "hybrid", "--dry-run", "--processes", 1, *setting(num_hidden_layers=2), "--json"]
    told = json.loads(lex(*arguments, *lists).stdout)
    written = yaml.safe_load(told["recipe"])["model"]
    assert written["attention_pattern"] == ["blockwise", "full"]
    assert written["position_embedding_type"] == ["xpos", "none"]
    short = lex(*arguments, "--set", "position_embedding_type=[none]")
    assert short.exit_code == 1
    assert "a list with one for each of the 2 layers" in " ".join(short.stderr.split())


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
