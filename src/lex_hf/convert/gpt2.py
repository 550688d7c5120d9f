"""Warm start from GPT-2: a LEX model with its weights."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, GPT2LMHeadModel, PreTrainedModel

from lex_hf.errors import explained
from lex_hf.evaluation.loading import load_whole
from lex_hf.model.configuration_lex import LexConfig
from lex_hf.model.modeling_lex import LexForCausalLM

# Fields of GPT-2's configuration that change what a layer computes, and the only value that LEX computes.
_REQUIRED = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}
_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")  # the weights decide them
_TAKEN_OVER = ("initializer_range", "bos_token_id", "eos_token_id", "pad_token_id")
# Names inside a layer of GPT-2, and ours.
_NAMES = {
    "ln_1": "input_layernorm",
    "ln_2": "post_attention_layernorm",
    "attn.c_proj": "self_attn.o_proj",
    "mlp.c_fc": "mlp.up_proj",
    "mlp.c_proj": "mlp.down_proj",
}


def from_gpt2(model: PreTrainedModel | str | Path, **config_fields: Any) -> LexForCausalLM:
    """Build a LEX model from GPT-2 weights: the same architecture but for the positions.

    GPT-2's learned positions have no place in a model with other positions and are dropped, so the new model must be
    trained before it is useful. With `position_embedding_type="learned", attention_pattern="full"` they are kept, and
    the model computes what GPT-2 does.

    Args:
        model: A `GPT2LMHeadModel`, or the folder or Hub id of one.
        config_fields: Fields of [`LexConfig`]; sizes, activation, epsilon, dropout and token ids are GPT-2's. By
            default `training_length` is GPT-2's number of positions, and `xpos_scale_base` half of that.

    Returns:
        The model in evaluation mode, with weights of its own in the dtype of GPT-2's.

    Raises:
        ValueError: If there is no such model, it cannot be read, lacks weights, is not a GPT-2, computes something
            that LEX does not, or contradicts `config_fields`; the message says which.

    Example:
        >>> model = from_gpt2("openai-community/gpt2", position_embedding_type="rope")  # doctest: +SKIP
    """
    gpt2 = _load(model) if isinstance(model, str | Path) else model
    if not isinstance(gpt2, GPT2LMHeadModel):
        raise ValueError(f"The model is a {type(gpt2).__name__}; a warm start needs a GPT2LMHeadModel.")
    config = _config(gpt2, config_fields)
    lex = LexForCausalLM(config).to(gpt2.dtype)
    lex.load_state_dict(_weights(gpt2.state_dict(), config), strict=True)
    return lex.eval()


def _load(path: str | Path) -> PreTrainedModel:
    with explained(str(path), "a GPT-2 (config.json, model.safetensors or its shards)"):
        kind = AutoConfig.from_pretrained(path).model_type
    if kind != "gpt2":
        raise ValueError(f"{path} is a model of type {kind!r}; a warm start needs 'gpt2'.")
    return load_whole(GPT2LMHeadModel, str(path))


def _config(gpt2: PreTrainedModel, fields: Mapping[str, Any]) -> LexConfig:
    """Make the configuration: GPT-2's, with these fields; refuse what LEX does not compute, and contradictions."""
    theirs = gpt2.config
    wrong = [
        f"{name} = {getattr(theirs, name)}" for name, value in _REQUIRED.items() if getattr(theirs, name) != value
    ]
    if wrong:
        raise ValueError(f"LEX does not compute what this GPT-2 does: {', '.join(wrong)}.")
    sizes = {name: getattr(theirs, name) for name in _SIZES}
    sizes["intermediate_size"] = theirs.n_inner or 4 * theirs.n_embd
    sizes["tie_word_embeddings"] = theirs.tie_word_embeddings
    wrong = [
        f"{name} = {fields[name]!r}, GPT-2 has {sizes[name]!r}"
        for name in sizes
        if fields.get(name, sizes[name]) != sizes[name]
    ]
    if wrong:
        raise ValueError("The fields contradict the weights: " + "; ".join(wrong) + ".")
    length = fields.get("training_length", theirs.n_positions)
    if "learned" in fields.get("position_embedding_type", ()) and length > theirs.n_positions:
        raise ValueError(f"training_length = {length}: learned positions end at GPT-2's {theirs.n_positions}.")
    computation = {
        "hidden_act": theirs.activation_function,
        "layer_norm_eps": theirs.layer_norm_epsilon,
        "hidden_dropout": theirs.resid_pdrop,
        "attention_dropout": theirs.attn_pdrop,
    }
    computation |= {name: getattr(theirs, name) for name in _TAKEN_OVER}
    lengths = {"training_length": length, "xpos_scale_base": length / 2}
    return LexConfig(**{**sizes, **computation, **lengths, **fields})


def _weights(theirs: Mapping[str, torch.Tensor], config: LexConfig) -> dict[str, torch.Tensor]:
    """Rename, transpose and split: GPT-2 stores its matrices as `(inputs, outputs)`, and q, k, v in one."""
    ours = {
        "model.embed_tokens.weight": theirs["transformer.wte.weight"],
        "lm_head.weight": theirs["lm_head.weight"],
        "model.norm.weight": theirs["transformer.ln_f.weight"],
        "model.norm.bias": theirs["transformer.ln_f.bias"],
    }
    for index in range(config.num_hidden_layers):
        gpt2, lex = f"transformer.h.{index}.", f"model.layers.{index}."
        for kind in ("weight", "bias"):  # t() leaves vectors as they are
            ours |= {f"{lex}{name}.{kind}": theirs[f"{gpt2}{old}.{kind}"].t() for old, name in _NAMES.items()}
            parts = theirs[f"{gpt2}attn.c_attn.{kind}"].t().chunk(3)
            ours |= {f"{lex}self_attn.{name}_proj.{kind}": part for name, part in zip("qkv", parts, strict=True)}
    if "learned" in config.layer_schemes:
        ours["model.positions.embedding.weight"] = theirs["transformer.wpe.weight"][: config.training_length]
    return ours
