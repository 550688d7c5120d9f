"""Models of the official code."""

from pathlib import Path
from typing import Any

import torch

from lex_hf import LexForCausalLM, from_torchscale

OURS_TO_THEIRS = (
    ("model.", ""),
    ("self_attn.o_proj", "self_attn.out_proj"),
    ("input_layernorm", "self_attn_layer_norm"),
    ("post_attention_layernorm", "final_layer_norm"),
    ("mlp.up_proj", "ffn.fc1"),
    ("mlp.down_proj", "ffn.fc2"),
    ("lm_head", "output_projection"),
)


def official_state(model: LexForCausalLM, *, tied: bool = False) -> dict[str, torch.Tensor]:
    """The state dict that torchscale would have for this model, with its xPos buffer."""
    state = {}
    for name, tensor in model.state_dict().items():
        for ours, theirs in OURS_TO_THEIRS:
            name = name.replace(ours, theirs)
        state["layer_norm" + name.removeprefix("norm") if name.startswith("norm.") else name] = tensor
    if tied:
        del state["output_projection.weight"]
    state["self_attn_xpos.scale"] = (torch.arange(5) / 5 + 0.4) / 1.4
    return state


def official(golden: Path, **fields: Any) -> LexForCausalLM:
    defaults = {"training_length": 32, "num_attention_heads": 4, "bos_token_id": None, "eos_token_id": None}
    return from_torchscale(golden / "lex_torchscale_weights.safetensors", **{**defaults, **fields})
