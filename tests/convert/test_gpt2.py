"""Models that begin with GPT-2's weights, from checkpoints made here."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.models import random_ids
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel
from typer.testing import CliRunner

from lex_hf import LexForCausalLM
from lex_hf.cli.commands import app
from lex_hf.convert.gpt2 import from_gpt2

IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def gpt2(seed: int = 0, **fields: Any) -> GPT2LMHeadModel:
    """A random GPT-2 whose sizes all differ, with weights that are large enough for mistakes to show."""
    torch.manual_seed(seed)
    sizes = {"vocab_size": 97, "n_positions": 22, "n_embd": 30, "n_layer": 2, "n_head": 3, "n_inner": 44}
    model = GPT2LMHeadModel(GPT2Config(**{**sizes, **IDS, **fields}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(
                mean=float(".ln_" in name and "weight" in name), std=0.1 if parameter.dim() == 1 else 0.3
            )
    return model.eval()


SAME: dict[str, Any] = {"position_embedding_type": "learned", "attention_pattern": "full"}


@pytest.mark.parametrize(
    "fields", [{}, {"n_inner": None}, {"tie_word_embeddings": False}, {"activation_function": "relu"}]
)
@pytest.mark.parametrize("length", [1, 13, 22])
def test_with_its_own_positions_it_is_gpt2(fields: dict[str, Any], length: int) -> None:
    model, ids = gpt2(**fields), random_ids(2, length)
    with torch.no_grad():
        expected = model(ids).logits
        torch.testing.assert_close(from_gpt2(model, **SAME)(ids).logits, expected, atol=1e-5, rtol=0)
    assert expected.std() > 1


def test_a_folder_and_its_config(tmp_path: Path) -> None:
    model = gpt2(layer_norm_epsilon=1e-3, resid_pdrop=0.2, attn_pdrop=0.3)
    model.save_pretrained(tmp_path)
    ids = random_ids(2, 22)
    lex = from_gpt2(tmp_path, **SAME)
    with torch.no_grad():
        torch.testing.assert_close(lex(ids).logits, model(ids).logits, atol=1e-5, rtol=0)
    config = lex.config
    assert (config.layer_norm_eps, config.hidden_dropout, config.attention_dropout) == (1e-3, 0.2, 0.3)
    assert (config.hidden_act, config.training_length, config.eos_token_id) == ("gelu_new", 22, 2)


def test_a_shorter_table_of_positions_is_its_beginning() -> None:
    model, ids = gpt2(), random_ids(2, 12)
    lex = from_gpt2(model, training_length=12, **SAME)
    with torch.no_grad():
        torch.testing.assert_close(lex(ids).logits, model(ids).logits, atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match="training_length = 24: learned positions end at GPT-2's 22"):
        from_gpt2(model, training_length=24, **SAME)


def test_with_xpos_it_trains_and_is_saved(tmp_path: Path) -> None:
    source = gpt2()
    lex = from_gpt2(source, training_length=20).train()
    assert (lex.config.position_embedding_type, lex.config.xpos_scale_base) == ("xpos", 10)
    ids = random_ids(2, 50)
    losses = []
    optimizer = torch.optim.SGD(lex.parameters(), lr=0.05)
    for _ in range(2):
        loss = lex(ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[1] < losses[0]
    lex.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(loaded, LexForCausalLM)
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, lex.eval()(ids).logits)
    # The weights are its own: training it left GPT-2 as it was.
    fresh = gpt2()
    assert all(torch.equal(one, other) for one, other in zip(source.parameters(), fresh.parameters(), strict=True))


def test_dtype_is_kept() -> None:
    assert from_gpt2(gpt2().to(torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("model", "fields", "message"),
    [
        ({"scale_attn_by_inverse_layer_idx": True}, {}, "scale_attn_by_inverse_layer_idx = True"),
        ({"scale_attn_weights": False}, {}, "scale_attn_weights = False"),
        ({}, {"hidden_size": 33}, "hidden_size = 33, GPT-2 has 30"),
    ],
)
def test_what_does_not_fit_is_named(model: dict[str, Any], fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_gpt2(gpt2(**model), **fields)


def test_another_model(tmp_path: Path) -> None:
    lex = from_gpt2(gpt2())
    with pytest.raises(ValueError, match="The model is a LexForCausalLM; a warm start needs a GPT2LMHeadModel"):
        from_gpt2(lex)
    lex.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is a model of type 'lex'; a warm start needs 'gpt2'"):
        from_gpt2(tmp_path)


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"transformer.ln_f.weight": Path()}, protocol=2))


def without_a_weight(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["transformer.h.1.ln_2.bias"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), r"Could not load a GPT-2 \(config\.json, model\.safeten"),
        (lambda folder: (folder / "config.json").write_text("[]"), "Could not load a GPT-2 "),
        (lambda folder: (folder / "model.safetensors").unlink(), "Could not load .*no file named"),
        (cut, "Could not load a causal language model"),
        (pickled, "Other pickles are not loaded, because they can run code"),
        (without_a_weight, r"lacks 1 of the weights of GPT2LMHeadModel.*: transformer\.h\.1\.ln_2\.bias"),
    ],
)
def test_folders_that_hold_no_whole_model(tmp_path: Path, spoil: Callable[[Path], object], message: str) -> None:
    source = tmp_path / "source"
    gpt2().save_pretrained(source)
    spoil(source)
    with pytest.raises(ValueError, match=message) as caught:
        from_gpt2(source)
    assert "\n" not in str(caught.value)
    assert "weights_only" not in str(caught.value)
    result = CliRunner().invoke(app, ["warm-start", str(source), str(tmp_path / "out")])
    assert result.exit_code == 1
    assert not (tmp_path / "out").exists()
