"""Import of official checkpoints, from state dicts made here."""

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.models import random_ids, tiny_model
from helpers.official import official_state
from safetensors.torch import save_file
from typer.testing import CliRunner

from lex_hf import from_torchscale
from lex_hf.cli.commands import app

FIELDS: dict[str, Any] = {
    "training_length": 14,
    "xpos_scale_base": 7,
    "bos_token_id": None,
    "eos_token_id": None,
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("prefix", ["", "decoder."])
@pytest.mark.parametrize("form", ["dict", "safetensors", "pt", "fairseq"])
def test_every_form_of_a_checkpoint_gives_the_same_logits(tmp_path: Path, tied: bool, prefix: str, form: str) -> None:
    model, ids = tiny_model(tie_word_embeddings=tied), random_ids(2, 40)
    state: Any = {prefix + name: tensor for name, tensor in official_state(model, tied=tied).items()}
    if form != "dict":
        path = tmp_path / ("model.safetensors" if form == "safetensors" else "model.pt")
        if form == "safetensors":
            save_file({name: tensor.clone() for name, tensor in state.items()}, path)
        else:
            torch.save({"model": state} if form == "fairseq" else state, path)
        state = path
    imported = from_torchscale(state, **FIELDS)
    assert imported.config.num_attention_heads == 3
    assert imported.config.tie_word_embeddings == tied
    with torch.no_grad():
        torch.testing.assert_close(imported(ids).logits, model(ids).logits, atol=0, rtol=0)


def test_one_scale_for_each_layer_and_what_fairseq_leaves() -> None:
    state = official_state(tiny_model())
    scale = state.pop("self_attn_xpos.scale")
    state |= {f"layers.{i}.self_attn.xpos.scale": scale for i in range(2)}
    state["version"] = torch.tensor([3.0])
    assert from_torchscale(state, **FIELDS).config.num_hidden_layers == 2


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (
            "layers.0.self_attn.inner_attn_ln.weight",
            r"sub-LayerNorm .*: layers.0.self_attn.inner_attn_ln.weight",
        ),
        ("layers.1.moe_layer.gate.wg.weight", "mixture of experts"),
        ("embed_positions.weight", "learned positions: embed_positions.weight"),
        ("self_attn_relative_position.relative_attention_bias.weight", "T5 relative positions"),
        ("layernorm_embedding.weight", "LayerNorm on embeddings"),
        ("layers.0.encoder_attn.q_proj.weight", "cross-attention"),
        ("layers.0.self_attn.q_proj.A.weight", "multiway"),
        ("pooler.weight", "does not belong to a LEX model: pooler.weight"),
    ],
)
def test_what_does_not_fit_is_named(extra: str, message: str) -> None:
    state = official_state(tiny_model()) | {extra: torch.zeros(3)}
    with pytest.raises(ValueError, match=message):
        from_torchscale(state, **FIELDS)


def test_contradictions_and_gaps_are_named(tmp_path: Path) -> None:
    state = official_state(tiny_model())
    with pytest.raises(ValueError, match="num_attention_heads = 5, the checkpoint has 3"):
        from_torchscale(state, num_attention_heads=5, **FIELDS)
    with pytest.raises(ValueError, match=r"begins with 0\.2857, xpos_gamma = 0\.6 gives 0\.3750"):
        from_torchscale(state, xpos_gamma=0.6, **FIELDS)
    with pytest.raises(ValueError, match=r"lacks 1 tensors .*layers.1.mlp.down_proj.bias"):
        from_torchscale({k: v for k, v in state.items() if k != "layers.1.ffn.fc2.bias"}, **FIELDS)
    with pytest.raises(ValueError, match="not a whole decoder"):
        from_torchscale({"layer_norm.weight": torch.ones(3)}, **FIELDS)
    with pytest.raises(ValueError, match=r"ffn|up_proj.bias: \(3,\), expected \(44,\)"):
        from_torchscale(state | {"layers.0.ffn.fc1.bias": torch.ones(3)}, **FIELDS)
    with pytest.raises(FileNotFoundError, match=r"absent\.pt is not a file"):
        from_torchscale(tmp_path / "absent.pt")
    for content in ([torch.ones(2)], {1: torch.ones(2)}):
        torch.save(content, tmp_path / "list.pt")
        with pytest.raises(ValueError, match="holds no state dict"):
            from_torchscale(tmp_path / "list.pt")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"embed_tokens.weight": torch.tensor(1.0)}, "not a whole decoder"),
        ({"layers.0.ffn.fc1.weight": torch.ones(3)}, "not a whole decoder"),
        ({"layers.99999999.ffn.fc1.bias": torch.ones(44)}, "has weights of layer 99999999, but of 3 layers in all"),
        ({"self_attn_xpos.scale": torch.tensor(1.0)}, r"xPos scales have the shapes \[\(\)\]"),
        ({"self_attn_xpos.scale": torch.ones(0)}, r"xPos scales have the shapes \[\(0,\)\]"),
        ({"layers.0.self_attn.xpos.scale": torch.ones(4)}, "xPos scale has 4 values, half a head has 5"),
        (
            {"layer_norm.bias": torch.ones(30, dtype=torch.int8)},
            r"floating-point numbers: model\.norm\.bias: torch.int8",
        ),
    ],
)
def test_strange_tensors_are_named(changes: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_torchscale(official_state(tiny_model()) | changes, **FIELDS)


class Code:
    """What a pickle may hold: a call of any function."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch /nowhere/at/all",)


DAMAGED = {
    "notes.txt": b"Some text.\n",
    "empty.pt": b"",
    "page.bin": b"<!DOCTYPE html><title>Log in</title>",
    "code.pt": pickle.dumps({"model": Code()}),
    "state.pkl": pickle.dumps({"model": {"layer_norm.weight": [1.0]}, "args": Path()}),
    "cut.safetensors": b"\x40\0\0\0\0\0\0\0{",
    "cut.pt": b"PK\x03\x04" + bytes(500),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_files_that_are_no_checkpoint(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(DAMAGED[name])
    result = CliRunner().invoke(app, ["warm-start", str(tmp_path / name), str(tmp_path / "out")])
    assert result.exit_code == 1
    message = " ".join(result.stderr.split())
    assert "Could not load the weights of a torchscale decoder (a safetensors or PyTorch file) from " in message
    assert f"{name}': " in message
    assert "weights_only" not in result.output
    assert "Traceback" not in result.output
    assert ("they can run code" in message) == (name in ("notes.txt", "page.bin", "code.pt", "state.pkl"))
    assert [path.name for path in tmp_path.iterdir()] == [name]
