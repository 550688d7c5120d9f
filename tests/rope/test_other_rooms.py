"""Models that read in blocks, in what LEX models do: measurements, commands, cache files, processes, training."""

import json
import math
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from helpers.forks import PACKAGE
from helpers.rope_models import LENGTH, dense_mask, rope_model
from safetensors.torch import load_file
from transformers import PreTrainedModel
from typer.testing import CliRunner

from lex_hf import blockwise, load_cache, measure_resolution, receptive_field, restore, save_cache
from lex_hf.cli.commands import app
from lex_hf.data.tokenizers import byte_tokenizer
from lex_hf.evaluation.perplexity import compute_perplexity
from lex_hf.inference.generation import continue_text, encode_prompt
from lex_hf.training.arguments import training_arguments
from lex_hf.training.trainer import train

BLOCK = LENGTH // 2
TEXTS = ["What a block does not see, the block before it has seen.", "né" * 17]


def byte_model(seed: int = 0, **fields: Any) -> PreTrainedModel:
    special = {"bos_token_id": 256, "eos_token_id": 256, "pad_token_id": 256}
    return rope_model(attention="sdpa", seed=seed, vocab_size=257, **special, **fields)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny Llama with its tokenizer, and a text."""
    byte_model().save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text(" ".join(TEXTS))
    return tmp_path


def command(*arguments: object) -> Any:
    result = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def dense_nll(model: PreTrainedModel, text: str) -> float:
    """Mean loss of a whole text, by a dense mask of blocks."""
    ids = torch.tensor([[256, *text.encode()]])
    with torch.no_grad():
        logits = model(ids[:, :-1], attention_mask=dense_mask(ids.shape[1] - 1, BLOCK), use_cache=False).logits
    return float(torch.nn.functional.cross_entropy(logits[0], ids[0, 1:]))


def test_perplexity_by_every_protocol() -> None:
    model, tokenizer = byte_model(), byte_tokenizer()
    expected = [dense_nll(model, text) for text in TEXTS]
    blockwise(model)
    for options in ({"protocol": "streaming", "length": 7}, {"protocol": "chunked", "length": 500}):
        result = compute_perplexity(model, tokenizer, TEXTS, progress=False, **options)
        assert [each.nll / each.tokens for each in result.documents] == pytest.approx(expected, rel=1e-5)
    windows = {"protocol": "sliding", "length": 500, "stride": 100}
    assert compute_perplexity(model, tokenizer, TEXTS, progress=False, **windows).perplexities == pytest.approx(
        [math.exp(each) for each in expected], rel=1e-5
    )
    last = compute_perplexity(model, tokenizer, TEXTS, protocol="last_token", length=30, progress=False)
    assert [each.start for each in last.loss_by_position] == [1, 2, 4, 8, 16, 29]


def test_records_tell_blocks_and_sinks_apart(tmp_path: Path) -> None:
    """A text that was read otherwise is read again."""
    options = {"records": tmp_path / "records.jsonl", "protocol": "streaming", "length": 7, "progress": False}
    found = []
    for way in ({}, {"training_length": LENGTH}, {"training_length": 6}, {"sinks": 1}):
        model = byte_model() if not way else blockwise(byte_model(), **way)
        found += [compute_perplexity(model, byte_tokenizer(), TEXTS, **options).perplexity for _ in range(2)]
    assert found[::2] == found[1::2]
    assert len(set(found)) == 4
    assert len((tmp_path / "records.jsonl").read_text().splitlines()) == 4 * len(TEXTS)


def test_commands_take_sinks(folder: Path) -> None:
    arguments = ("evaluate", folder / "model", folder / "text.txt", "--protocol", "streaming", "--length", 9)
    found = command(*arguments, "--blockwise", "auto", "--sinks", 1)[0]["perplexity"]
    model = blockwise(byte_model(), sinks=1)
    expected = compute_perplexity(
        model, byte_tokenizer(), [" ".join(TEXTS)], protocol="streaming", length=9, progress=False
    )
    assert found == pytest.approx(expected.perplexity, rel=1e-5)
    prompt = ("generate", folder / "model", "What a block", "--greedy", "--max-new-tokens", 30)
    written = command(*prompt, "--blockwise", LENGTH, "--sinks", 1)["tokens"]
    inputs = encode_prompt("What a block", model, byte_tokenizer())
    assert written == continue_text(model, inputs, max_new_tokens=30, do_sample=False).tolist()
    assert written != continue_text(restore(model), inputs, max_new_tokens=30, do_sample=False).tolist()
    for wrong in (("--sinks", 1), ("--blockwise", LENGTH, "--sinks", 3)):
        result = CliRunner().invoke(app, [*map(str, arguments), *map(str, wrong)])
        assert result.exit_code == 1
        assert "sinks" in result.stderr
    (folder / "more.txt").write_text(TEXTS[0])
    both = ("compare", folder / "model", folder / "model", folder / "text.txt", folder / "more.txt")
    paired = command(*both, "--protocol", "streaming", "--blockwise", "auto", "--sinks", 0, "--sinks", 1)
    assert paired["b"]["perplexities"][0] == pytest.approx(expected.perplexity, rel=1e-5)
    assert paired["a"]["perplexity"] != paired["b"]["perplexity"]


def test_resolution_counts_the_keys_that_are_seen() -> None:
    model, ids = rope_model(), torch.randint(1, 61, (2, 30), generator=torch.Generator().manual_seed(0))
    blockwise(model)
    before = model(ids).logits
    result = measure_resolution(model, ids, progress=False)
    assert {len(curve) for curve in result.curves} == {2 * BLOCK}
    assert torch.equal(model(ids).logits, before)
    (pairs, *_) = result.pairs
    assert pairs[0] == 2 * 30
    # At distance 5, of each block after the first the tokens with a place of at least 1.
    seen = dense_mask(30, BLOCK)[0, 0] == 0
    assert pairs.tolist() == [2 * int(seen.diagonal(-distance).sum()) for distance in range(2 * BLOCK)]


def test_receptive_field_is_that_of_blocks() -> None:
    model, ids = blockwise(rope_model()), torch.randint(1, 61, (1, 40), generator=torch.Generator().manual_seed(0))
    field = receptive_field(model, ids, progress=False)
    assert field.theoretical == 40 - (36 - 3 * BLOCK)
    assert field.training_length == LENGTH
    gradients = field.cumulative.diff(prepend=torch.zeros(1, dtype=torch.float64))
    assert not gradients[field.theoretical :].any()
    assert gradients[field.theoretical - 1] > 0


def test_a_cache_goes_on_in_another_process(tmp_path: Path) -> None:
    model = rope_model()
    model.save_pretrained(tmp_path / "model")
    blockwise(model)
    ids = torch.randint(1, 61, (2, 30), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        cache = model(ids).past_key_values
        save_cache(cache, model, tmp_path / "cache.safetensors")
        torch.save(model(ids[:, :9], past_key_values=cache).logits, tmp_path / "expected.pt")
    code = f"""
    import torch
    from transformers import AutoModelForCausalLM
    from lex_hf import blockwise, load_cache
    model = blockwise(AutoModelForCausalLM.from_pretrained({str(tmp_path / "model")!r}, attn_implementation="eager"))
    cache = load_cache({str(tmp_path / "cache.safetensors")!r}, model)
    ids = torch.randint(1, 61, (2, 30), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        found = model(ids[:, :9], past_key_values=cache).logits
    assert torch.equal(found, torch.load({str(tmp_path / "expected.pt")!r}, weights_only=True))
    """
    process = PACKAGE.run("-c", textwrap.dedent(code))
    assert process.returncode == 0, process.stderr
    for other, length in ((rope_model(), 4), (rope_model(seed=1), LENGTH)):
        with pytest.raises(ValueError, match="was written by another model"):
            load_cache(tmp_path / "cache.safetensors", blockwise(other, length))
    some = blockwise(rope_model(), layers=[1])
    with pytest.raises(ValueError, match="not all of its layers are two blocks"):
        save_cache(some(ids).past_key_values, some, tmp_path / "other.safetensors")


WORKER = """
import sys
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from lex_hf import blockwise
from lex_hf.inference.context_parallel import read_part

dist.init_process_group("gloo")
model = blockwise(AutoModelForCausalLM.from_pretrained(f"{sys.argv[1]}/model", dtype=torch.float64))
text, more = torch.load(f"{sys.argv[1]}/text.pt", weights_only=True)
output, (start, stop) = read_part(model, text)
logits = [output.logits]
if stop == text.shape[1]:
    with torch.no_grad():
        logits.append(model(more, past_key_values=output.past_key_values).logits)
torch.save(torch.cat(logits, dim=1), f"{sys.argv[1]}/{dist.get_rank()}.pt")
dist.destroy_process_group()
"""


@pytest.mark.processes
def test_processes_read_together(tmp_path: Path) -> None:
    model = rope_model()
    model.save_pretrained(tmp_path / "model")
    ids = torch.randint(1, 61, (2, 60), generator=torch.Generator().manual_seed(5))
    torch.save(list(ids.split([51, 9], dim=1)), tmp_path / "text.pt")
    (tmp_path / "worker.py").write_text(WORKER)
    result = PACKAGE.run_together(3, tmp_path / "worker.py", tmp_path)
    assert result.returncode == 0, result.stderr
    together = torch.cat([torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(3)], dim=1)
    with torch.no_grad():
        expected = blockwise(model.double())(ids).logits
    torch.testing.assert_close(together, expected, atol=1e-5, rtol=0)


def test_commands(folder: Path) -> None:
    model, text = folder / "model", folder / "text.txt"
    content = text.read_text()
    expected = dense_nll(byte_model(), content)
    measured = command("evaluate", model, text, "--blockwise", "auto", "--length", 500)
    assert measured[0]["nll"] == pytest.approx(expected, rel=1e-5)
    (folder / "other.txt").write_text(TEXTS[0])
    both = [model, model, text, folder / "other.txt"]
    paired = command("compare", *both, "--blockwise", "none", "--blockwise", LENGTH, "--length", 500)
    assert paired["b"]["documents"][0]["nll"] / paired["b"]["documents"][0]["tokens"] == pytest.approx(
        expected, rel=1e-5
    )
    assert paired["a"]["nll"] != pytest.approx(paired["b"]["nll"], rel=1e-3)
    written = command("generate", model, "a", "--greedy", "--max-new-tokens", 50, "--blockwise", LENGTH)
    prompt = torch.tensor([list(b"a")])
    tokens = blockwise(byte_model()).generate(prompt, max_new_tokens=50, do_sample=False)[0, 1:].tolist()
    assert written["tokens"] == tokens
    assert command("check", model, "--blockwise", "auto")["shifted_positions"] < 1e-4
    sizes = ("--length", 30, "--segments", 1, "--blockwise", "auto")
    assert len(command("resolution", model, text, *sizes)["llama"]["curves"][0]) == 2 * BLOCK
    assert command("receptive-field", model, text, *sizes)["llama"]["theoretical"] == 30 - (28 - 3 * BLOCK)


@pytest.mark.parametrize("value", ["none", "-2", "l"])
def test_a_length_that_is_none_is_refused_before_anything_is_loaded(folder: Path, value: str) -> None:
    arguments = ["evaluate", "no-such-model", str(folder / "text.txt"), f"--blockwise={value}"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert f"--blockwise {value}: it must be 'auto' or a number of tokens" in result.output


def test_training_with_blocks_leaves_a_model_of_transformers(tmp_path: Path) -> None:
    """What is learned is what a dense mask would have taught, and the files are the base model's."""
    model, tokenizer = byte_model(), byte_tokenizer()
    examples = Dataset.from_dict({"input_ids": torch.randint(0, 256, (8, 30)).tolist()})
    settings = {
        "max_steps": 2,
        "warmup_steps": 0,
        "per_device_train_batch_size": 4,
        "use_cpu": True,
        "report_to": "none",
    }
    plain = {name: value.clone() for name, value in model.state_dict().items()}
    blockwise(model)
    result = train(model, tokenizer, examples, training_arguments(tmp_path / "model", **settings))
    assert result.steps == 2
    config = json.loads((tmp_path / "model/config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert "lex" not in json.dumps(config)
    saved = load_file(tmp_path / "model/model.safetensors")
    assert set(saved) <= set(plain)
    assert any(not torch.equal(saved[name], plain[name]) for name in saved)
    restore(model)
