"""A slow, dense float64 LEX Transformer: loops and N × N masks, nothing from lex_hf.

It reads a state dict by lex_hf's parameter names and the settings from a plain mapping, and evaluates one unpadded
text at a time. LEX paper (arXiv 2212.10554), Eq. 8, 11, 12 and §3.3.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch


def visible(pattern: str, length: int, block: int | None) -> torch.Tensor:
    """Whether query p sees key p', by the definitions, shape (length, length)."""
    mask = torch.zeros(length, length, dtype=torch.bool)
    for p in range(length):
        for other in range(p + 1):
            near = {
                "full": True,
                "blockwise": block is not None and p // block - other // block in (0, 1),
                "sliding": block is not None and p - other < block,
            }
            mask[p, other] = near[pattern]
    return mask


def xpos_scores(query: torch.Tensor, key: torch.Tensor, settings: Mapping[str, Any]) -> torch.Tensor:
    """Σ_i Re(q_i k_i* e^{iθ_i(p-p')}) ζ_i^{(p-p')/B} / √d for states of shape (length, d)."""
    length, width = query.shape
    distance = torch.arange(length, dtype=torch.float64)[:, None] - torch.arange(length, dtype=torch.float64)
    scores = torch.zeros(length, length, dtype=torch.float64)
    for i in range(width // 2):
        theta = settings.get("rope_theta", 10000.0) ** (-2 * i / width)
        gamma = settings.get("xpos_gamma", 0.4)
        zeta = (2 * i / width + gamma) / (1 + gamma)
        if settings.get("xpos_scale", "vector") == "scalar":
            zeta = gamma / (1 + gamma)
        if settings.get("position_embedding_type", "xpos") == "rope" or settings.get("xpos_scale") == "none":
            zeta = 1.0
        if not settings.get("xpos_rotation", True):
            theta = 0.0
        q = torch.complex(query[:, 2 * i], query[:, 2 * i + 1])
        k = torch.complex(key[:, 2 * i], key[:, 2 * i + 1])
        turned = (q[:, None] * k.conj()[None, :] * torch.exp(1j * theta * distance)).real
        scores += turned * zeta ** (distance / settings.get("xpos_scale_base", 512))
    return scores / math.sqrt(width)


def forward(weights: Mapping[str, torch.Tensor], ids: torch.Tensor, settings: Mapping[str, Any]) -> torch.Tensor:
    """Logits of one text, shape (length, vocab_size), in float64."""
    w = {name: tensor.double() for name, tensor in weights.items()}

    def linear(name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        centred = x - x.mean(-1, keepdim=True)
        scale = (centred.square().mean(-1, keepdim=True) + settings.get("layer_norm_eps", 1e-5)).sqrt()
        return centred / scale * w[f"{name}.weight"] + w[f"{name}.bias"]

    heads, patterns = settings["num_attention_heads"], settings["patterns"]
    x = w["model.embed_tokens.weight"][ids]
    for layer, (pattern, block) in enumerate(patterns):
        prefix = f"model.layers.{layer}"
        h = norm(f"{prefix}.input_layernorm", x)
        states = [linear(f"{prefix}.self_attn.{n}_proj", h).unflatten(-1, (heads, -1)).transpose(0, 1) for n in "qkv"]
        mask, outputs = visible(pattern, len(ids), block), []
        for q, k, v in zip(*states, strict=True):
            scores = xpos_scores(q, k, settings).masked_fill(~mask, -torch.inf)
            outputs.append(scores.softmax(-1) @ v)
        x = x + linear(f"{prefix}.self_attn.o_proj", torch.cat(outputs, dim=-1))
        h = linear(f"{prefix}.mlp.up_proj", norm(f"{prefix}.post_attention_layernorm", x))
        h = h * 0.5 * (1 + torch.erf(h / math.sqrt(2)))
        x = x + linear(f"{prefix}.mlp.down_proj", h)
    return norm("model.norm", x) @ w["lm_head.weight"].T
