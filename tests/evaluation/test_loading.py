"""Loading for evaluation: its options, weights that are missing, renamed or of another shape, damaged files."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import evaluate
import pytest
import torch
from helpers.models import tiny_model
from helpers.perplexity import TOKENIZER, lex
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel
from typer.testing import CliRunner

import lex_hf
import lex_hf.evaluation.loading
from lex_hf import LexForSequenceClassification
from lex_hf.cli.commands import app
from lex_hf.data.tokenizers import byte_tokenizer
from lex_hf.evaluation.lm_eval import documents
from lex_hf.evaluation.loading import check_checkpoint, load_for_evaluation

TEXT = "A block sees itself and the one before. " * 4
IDS = {"vocab_size": 257, "bos_token_id": 256, "eos_token_id": 256, "pad_token_id": 256}
UP = "model.layers.0.mlp.up_proj.weight"


def save_model(folder: Path, **fields: Any) -> Path:
    tiny_model(**IDS, **fields).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def change_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def rename(tensors: dict[str, torch.Tensor]) -> None:
    tensors[UP.replace("up_proj", "fc1")] = tensors.pop(UP)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_model(tmp_path / "model")


@pytest.fixture
def renamed(folder: Path) -> Path:
    change_weights(folder, rename)
    return folder


def drop_mlps(tensors: dict[str, torch.Tensor]) -> None:
    for name in [name for name in tensors if ".mlp." in name]:
        del tensors[name]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda folder: change_weights(folder, rename),
            r"lacks 1 of the weights of LexForCausalLM, which would be filled with random numbers: model\.layers\.0\."
            r"mlp\.up_proj\.weight\. Were they renamed\? Besides, the checkpoint holds 1 weights that LexForCausalLM "
            r"does not have: model\.layers\.0\.mlp\.fc1\.weight\. Save the whole model again",
        ),
        (
            lambda folder: change_weights(folder, drop_mlps),
            r"lacks 8 of the weights .*: model\.layers\.0\.mlp\.down_proj\.bias, [^,]*, [^,]*, …\. Save",
        ),
        (
            lambda folder: change_weights(folder, lambda tensors: tensors.pop("lm_head.weight")),
            r"lacks 1 of the weights .*: lm_head\.weight\. Save",
        ),
        (
            lambda folder: change_weights(folder, lambda tensors: tensors.update({UP: torch.ones(3, 30)})),
            r"has weights of other shapes .*: model\.layers\.0\.mlp\.up_proj\.weight \(3, 30\) instead of \(44, 30\)",
        ),
        (
            lambda folder: change_config(folder, intermediate_size=45),
            r"has weights of other shapes .* \(30, 44\) instead of \(30, 45\), .* \(44,\) instead .*, …\. ",
        ),
        (
            lambda folder: change_config(folder, num_hidden_layers=1),
            r"does not agree with its config\.json: the checkpoint holds 16 weights .* model\.layers\.1\.input_lay",
        ),
        (
            lambda folder: change_config(folder, num_hidden_layers=3),
            r"lacks 16 of the weights .*: model\.layers\.2\.input_lay",
        ),
    ],
)
@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16", "attention_pattern": "full"}])
def test_weights_that_are_not_those_of_the_model(
    folder: Path, spoil: Callable[[Path], object], message: str, options: dict[str, Any]
) -> None:
    spoil(folder)
    with pytest.raises(ValueError, match=message) as caught:
        load_for_evaluation(str(folder), device="cpu", **options)
    assert "\n" not in str(caught.value)
    assert repr(str(folder)) in str(caught.value)


def test_tied_weights_are_not_missing(tmp_path: Path) -> None:
    folder = save_model(tmp_path, tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    assert load_for_evaluation(str(folder), device="cpu")[0].config.tie_word_embeddings
    change_weights(folder, lambda tensors: tensors.pop("model.embed_tokens.weight"))
    with pytest.raises(ValueError, match=r"lacks .*model\.embed_tokens\.weight"):
        load_for_evaluation(str(folder), device="cpu")


def test_a_classifier_is_no_language_model(tmp_path: Path) -> None:
    folder = save_model(tmp_path, tie_word_embeddings=True)
    LexForSequenceClassification.from_pretrained(folder).save_pretrained(folder)
    with pytest.raises(ValueError, match=r"holds 1 weights that LexForCausalLM does not have: score\.weight"):
        load_for_evaluation(str(folder), device="cpu")


def test_other_models_may_hold_more(tmp_path: Path) -> None:
    sizes = {"vocab_size": 257, "n_positions": 22, "n_embd": 30, "n_layer": 1, "n_head": 3}
    GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=256, eos_token_id=256)).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    change_weights(tmp_path, lambda tensors: tensors.update(extra=torch.ones(1)))
    assert isinstance(load_for_evaluation(str(tmp_path), device="cpu")[0], GPT2LMHeadModel)
    change_weights(tmp_path, lambda tensors: tensors.pop("transformer.ln_f.weight"))
    with pytest.raises(ValueError, match=r"lacks 1 of the weights of GPT2LMHeadModel.*: transformer\.ln_f\.weight"):
        load_for_evaluation(str(tmp_path), device="cpu")


def test_names_and_shapes_alone_take_no_memory(
    renamed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    save_model(tmp_path / "whole")
    devices = set()
    check_names = lex_hf.evaluation.loading._check_names

    def note(model: torch.nn.Module, *rest: Any) -> None:
        devices.update(parameter.device.type for parameter in model.parameters())
        check_names(model, *rest)

    monkeypatch.setattr("lex_hf.evaluation.loading._check_names", note)
    capfd.readouterr()
    check_checkpoint(lex_hf.LexForCausalLM, str(tmp_path / "whole"))
    assert capfd.readouterr().err == ""  # no bar: nothing is loaded
    with pytest.raises(ValueError, match="lacks 1 of the weights"):
        check_checkpoint(lex_hf.LexForCausalLM, str(renamed))
    assert devices == {"meta"}


@pytest.mark.parametrize(
    "command",
    [
        "evaluate MODEL TEXT --length 8",
        "compare MODEL WHOLE TEXT --length 8",
        "compare WHOLE MODEL TEXT --length 8",
        "resolution MODEL TEXT --length 8 --segments 1",
        "receptive-field MODEL TEXT --length 8 --segments 1",
        "check MODEL",
        "generate MODEL abc --max-new-tokens 2",
        "train fine-tune TEXT --output OUTPUT --model MODEL",
    ],
)
def test_every_command_refuses(renamed: Path, tmp_path: Path, command: str) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    places = {"MODEL": renamed, "WHOLE": save_model(tmp_path / "whole"), "TEXT": text, "OUTPUT": tmp_path / "output"}
    result = CliRunner().invoke(app, [str(places.get(word, word)) for word in command.split()])
    assert result.exit_code == 1
    assert "lacks 1 of the weights of LexForCausalLM" in " ".join(result.stderr.split())
    assert "LOAD REPORT" not in result.output
    assert result.stdout == ""


def test_the_metric_refuses(renamed: Path, tmp_path: Path) -> None:
    metric = evaluate.load(lex_hf.metric_path(), cache_dir=str(tmp_path / "cache"))
    with pytest.raises(ValueError, match="lacks 1 of the weights of LexForCausalLM"):
        metric.compute(predictions=[TEXT], model_id=str(renamed), device="cpu")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", b"[]"),
        ("config.json", b"{"),
        ("config.json", b"{}"),
        ("config.json", b'{"model_type": "no-such"}'),
        ("config.json", b'{"model_type": "lex", "hidden_size": "wide"}'),
        ("config.json", b"[" * 100_000),
        ("tokenizer.json", b"{}"),
        ("tokenizer.json", b"\xff"),
        ("tokenizer_config.json", b"[]"),
        ("tokenizer_config.json", b"[" * 100_000),
        ("generation_config.json", b"[]"),
        ("model.safetensors", b""),
        ("model.safetensors", b"\xff" * 100),
        ("model.safetensors", b"<!DOCTYPE html>" * 10),
        ("model.safetensors", b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 1\n"),
    ],
)
def test_damaged_files(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)
    with pytest.raises(ValueError, match=r"Could not load .* from .*: ") as caught:
        load_for_evaluation(str(folder), device="cpu")
    assert "\n" not in str(caught.value)


def test_pickles_are_not_recommended(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({UP: Path()}, protocol=2))
    with pytest.raises(ValueError, match="Other pickles are not loaded, because they can run code") as caught:
        load_for_evaluation(str(folder), device="cpu")
    assert "weights_only" not in str(caught.value)


def test_the_task_for_the_harness_refuses(renamed: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    with pytest.raises(ValueError, match="lacks 1 of the weights of LexForCausalLM"):
        documents.load(str(text), pretrained=str(renamed))
    whole = save_model(tmp_path / "whole")
    assert documents.load(str(text), pretrained=str(whole))["test"]["text"] == [TEXT]
    (whole / "config.json").write_text('{"model_type": "of another package"}')
    assert documents.load(str(text), pretrained=str(whole))["test"]["text"] == [TEXT]


def test_a_tokenizer_of_another_model(tmp_path: Path) -> None:
    tiny_model(vocab_size=97).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    result = CliRunner().invoke(app, ["generate", str(tmp_path), "né", "--max-new-tokens", "1"])
    assert result.exit_code == 1
    assert "token id 195, but the vocabulary of" in " ".join(result.stderr.split())


def test_load_for_evaluation(lex_folder: str) -> None:
    model, tokenizer = load_for_evaluation(lex_folder, dtype="bfloat16", attention_pattern="full")
    assert (model.dtype, model.device.type, model.training) == (torch.bfloat16, "cpu", False)
    assert model.config.attention_pattern == "full"
    assert tokenizer("né")["input_ids"] == [110, 195, 169]
    assert load_for_evaluation(lex_folder, device="cpu")[0].dtype == torch.float32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "gpux"}, "device = 'gpux': it must be a device of torch"),
        ({"dtype": "float99"}, "dtype = 'float99': it must be a dtype of torch"),
        ({"dtype": "nn"}, "dtype = 'nn': it must be a dtype of torch"),
    ],
)
def test_bad_loading_options(lex_folder: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_for_evaluation(lex_folder, **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize("device", ["gpu", "cuda"])
def test_no_gpu_here(lex_folder: str, device: str) -> None:
    with pytest.raises(ValueError, match=f"device = '{device}': torch finds no CUDA device"):
        load_for_evaluation(lex_folder, device=device)


def test_folder_that_lacks_something(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"Could not load a tokenizer \(tokenizer.json"):
        load_for_evaluation(str(tmp_path))
    TOKENIZER.save_pretrained(tmp_path)
    lex("blockwise").config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"Could not load a causal language model .*no file named"):
        load_for_evaluation(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"cut off")
    with pytest.raises(ValueError, match="Could not load a causal language model"):
        load_for_evaluation(str(tmp_path))
