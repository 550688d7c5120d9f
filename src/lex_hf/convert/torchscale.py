"""Import of the official checkpoints: state dicts of torchscale's decoder."""

import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from lex_hf.errors import explained
from lex_hf.model.configuration_lex import LexConfig
from lex_hf.model.modeling_lex import LexForCausalLM

# Names inside a torchscale decoder, as patterns, and ours.
_NAMES = {
    r"embed_tokens\.weight": "model.embed_tokens.weight",
    r"output_projection\.weight": "lm_head.weight",
    r"layer_norm\.(weight|bias)": r"model.norm.\1",
    r"layers\.(\d+)\.self_attn\.([qkv])_proj\.(weight|bias)": r"model.layers.\1.self_attn.\2_proj.\3",
    r"layers\.(\d+)\.self_attn\.out_proj\.(weight|bias)": r"model.layers.\1.self_attn.o_proj.\2",
    r"layers\.(\d+)\.self_attn_layer_norm\.(weight|bias)": r"model.layers.\1.input_layernorm.\2",
    r"layers\.(\d+)\.final_layer_norm\.(weight|bias)": r"model.layers.\1.post_attention_layernorm.\2",
    r"layers\.(\d+)\.ffn\.fc1\.(weight|bias)": r"model.layers.\1.mlp.up_proj.\2",
    r"layers\.(\d+)\.ffn\.fc2\.(weight|bias)": r"model.layers.\1.mlp.down_proj.\2",
}
# The xPos buffer, one for the decoder or one for each layer: it holds ζ, which the config defines.
_SCALE = r"(self_attn_xpos|layers\.\d+\.self_attn\.xpos)\.scale"
_NO_WEIGHT = rf"{_SCALE}|version|.*\._float_tensor"  # the latter two are left by fairseq in its checkpoints
# Parts that a torchscale decoder may have and LEX does not.
_FOREIGN = {
    r"\.inner_attn_ln\.|\.ffn_layernorm\.": "sub-LayerNorm (subln=True)",
    r"\.moe_layer\.": "mixture of experts (moe_freq > 0)",
    r"embed_positions\.": "learned positions",
    r"relative_position\.": "T5 relative positions",
    r"layernorm_embedding\.": "LayerNorm on embeddings (layernorm_embedding=True)",
    r"encoder_attn": "cross-attention (it is an encoder-decoder)",
    r"\.(A|B)\.": "multiway layers",
}


def from_torchscale(state_dict: Mapping[str, torch.Tensor] | str | Path, **config_fields: Any) -> LexForCausalLM:
    """Build a LEX model from an official checkpoint.

    Sizes are read from the tensors; all else (`num_attention_heads`, unless the xPos buffer does,
    `training_length`, which torchscale calls block_size, `hidden_act`, token ids) is a field of `LexConfig`.

    Args:
        state_dict: A torchscale decoder's state dict, with or without the prefix `decoder.`; or the path of a file
            that holds one: safetensors, or a PyTorch file, also with the state dict under `"model"`.
        config_fields: Fields of [`LexConfig`].

    Returns:
        The model in evaluation mode, in float32 unless `dtype` is given.

    Raises:
        FileNotFoundError: If the path does not exist.
        ValueError: If the file cannot be read or is a pickle of more than tensors, or the checkpoint has parts that
            LEX does not have, lacks parts that it needs, or contradicts `config_fields`; the message names them.

    Example:
        >>> model = from_torchscale("checkpoint_best.pt", training_length=1024)  # doctest: +SKIP
    """
    tensors = _load(Path(state_dict)) if isinstance(state_dict, str | Path) else dict(state_dict)
    tensors = {name.removeprefix("decoder."): tensor for name, tensor in tensors.items()}
    _refuse_foreign_parts(tensors)
    scales = [tensor for name, tensor in tensors.items() if re.fullmatch(_SCALE, name)]
    weights = {_renamed(name): tensor for name, tensor in tensors.items() if not re.fullmatch(_NO_WEIGHT, name)}
    config = _config(weights, scales, config_fields)
    model = LexForCausalLM(config).to(config.dtype or torch.float32)
    _load_weights(model, weights)
    return model.eval()


def _load(path: Path) -> dict[str, torch.Tensor]:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file; give a safetensors or PyTorch file of a torchscale decoder.")
    with explained(str(path), "the weights of a torchscale decoder (a safetensors or PyTorch file)"):
        if path.suffix == ".safetensors":
            return load_file(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about pickles that it then refuses
            content = torch.load(path, map_location="cpu", weights_only=True)
    content = content.get("model", content) if isinstance(content, dict) else content
    if not isinstance(content, dict) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in content.items()
    ):
        raise ValueError(f"{path} holds no state dict: expected names and tensors, at the top or under 'model'.")
    return content


def _refuse_foreign_parts(tensors: Mapping[str, torch.Tensor]) -> None:
    named = {part: [name for name in tensors if re.search(pattern, name)] for pattern, part in _FOREIGN.items()}
    found = [f"{part}: {names[0]}" for part, names in named.items() if names]
    if found:
        raise ValueError("The checkpoint has parts that a LEX model does not have: " + "; ".join(found) + ".")


def _renamed(name: str) -> str:
    for pattern, ours in _NAMES.items():
        if re.fullmatch(pattern, name):
            return re.sub(pattern, ours, name)
    raise ValueError(f"The checkpoint has a tensor that does not belong to a LEX model: {name}.")


def _config(weights: Mapping[str, torch.Tensor], scales: list[torch.Tensor], fields: Mapping[str, Any]) -> LexConfig:
    """Read the sizes from the tensors, and check that the fields given agree with them."""
    embedding = weights.get("model.embed_tokens.weight")
    up = weights.get("model.layers.0.mlp.up_proj.weight")
    if embedding is None or up is None or embedding.dim() != 2 or up.dim() != 2:
        raise ValueError("The checkpoint lacks embed_tokens.weight or layers.0.ffn.fc1.weight: not a whole decoder.")
    head = weights.get("lm_head.weight")
    layers = {int(found[1]) for name in weights if (found := re.match(r"model\.layers\.(\d+)\.", name))}
    if max(layers) >= len(layers):
        raise ValueError(f"The checkpoint has weights of layer {max(layers)}, but of {len(layers)} layers in all.")
    read: dict[str, Any] = {
        "vocab_size": embedding.shape[0],
        "hidden_size": embedding.shape[1],
        "intermediate_size": up.shape[0],
        "num_hidden_layers": max(layers) + 1,
        "tie_word_embeddings": head is None or torch.equal(head, embedding),
    }
    if any(scale.dim() != 1 or len(scale) == 0 for scale in scales):
        raise ValueError(f"The checkpoint's xPos scales have the shapes {[tuple(scale.shape) for scale in scales]}.")
    if scales:
        read["num_attention_heads"] = embedding.shape[1] // (2 * scales[0].shape[0])
    wrong = [
        f"{name} = {fields[name]!r}, the checkpoint has {value!r}"
        for name, value in read.items()
        if fields.get(name, value) != value
    ]
    if wrong:
        raise ValueError("The checkpoint contradicts the fields given: " + "; ".join(wrong) + ".")
    config = LexConfig(**{**read, **fields})
    _check_scale(config, scales)
    return config


def _check_scale(config: LexConfig, scales: list[torch.Tensor]) -> None:
    """Refuse a config that would give another ζ than the buffer, which depends on γ."""
    pairs = torch.arange(config.head_dim // 2) * 2 / config.head_dim
    zeta = (pairs + config.xpos_gamma) / (1 + config.xpos_gamma)
    for scale in scales:
        if len(scale) != len(zeta):
            raise ValueError(f"The checkpoint's xPos scale has {len(scale)} values, half a head has {len(zeta)}.")
        if not torch.allclose(scale.float(), zeta, atol=1e-3):
            raise ValueError(
                f"The checkpoint's xPos scale begins with {scale[0].item():.4f}, xpos_gamma = {config.xpos_gamma} "
                f"gives {zeta[0].item():.4f}: pass the xpos_gamma it was trained with."
            )


def _load_weights(model: LexForCausalLM, weights: dict[str, torch.Tensor]) -> None:
    """Load all weights; every parameter must be given, with its shape."""
    expected = model.state_dict()
    if model.config.tie_word_embeddings:
        weights = {**weights, "lm_head.weight": weights["model.embed_tokens.weight"]}
    missing = sorted(expected.keys() - weights.keys())
    if missing:
        raise ValueError(f"The checkpoint lacks {len(missing)} tensors of the model, among them {missing[:3]}.")
    shapes = [
        f"{name}: {tuple(tensor.shape)}, expected {tuple(expected[name].shape)}"
        for name, tensor in weights.items()
        if tensor.shape != expected[name].shape
    ]
    if shapes:
        raise ValueError("Tensors of the checkpoint have the wrong shape: " + "; ".join(shapes[:3]) + ".")
    strange = [f"{name}: {tensor.dtype}" for name, tensor in weights.items() if not tensor.is_floating_point()]
    if strange:
        raise ValueError("Tensors of the checkpoint are not floating-point numbers: " + "; ".join(strange[:3]) + ".")
    model.load_state_dict(weights)
