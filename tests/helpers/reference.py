"""A slow, dense float64 LEX Transformer: loops and N × N masks, nothing from lex_hf.

It reads a state dict by lex_hf's parameter names and the settings from a plain mapping, and evaluates one unpadded
text at a time. LEX paper (arXiv 2212.10554), Eq. 8, 11, 12, 14, 17 and §3.3; Sandwich paper (arXiv 2212.10356), Eq. 6.
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


def bias(weights: Mapping[str, torch.Tensor], settings: Mapping[str, Any], head: int, r: int) -> torch.Tensor | float:
    """What is added to the score of a key r tokens before its query, in head 1 … H."""
    scheme, heads = settings.get("position_embedding_type", "xpos"), settings["num_attention_heads"]
    ratio = 8 * head / heads
    if scheme == "alibi":
        exponent = ratio
        if settings["alibi_slopes"] == "official":
            power = max(2**n for n in range(10) if 2**n <= heads)
            exponent = 8 * head / power if head <= power else 4 * (2 * (head - power) - 1) / power
        if settings["alibi_shared_slope"] is not None:
            exponent = settings["alibi_shared_slope"]
        return -r / 2 ** (exponent + settings["alibi_slope_shift"])
    if scheme == "t5":
        table, exact = weights["model.positions.relative_attention_bias.weight"], settings["t5_num_buckets"] // 2
        bucket = r
        if r >= exact:
            position = math.log(r / exact) / math.log(settings["t5_max_distance"] / exact)
            bucket = min(exact + math.floor(position * exact), 2 * exact - 1)
        scale = math.sqrt(settings["hidden_size"] / heads) if settings["t5_scaled"] else 1
        return scale * table[bucket, head - 1]
    if scheme == "kerple":
        r1 = weights["model.positions.r1"][head - 1].clamp(min=0.01)
        r2 = weights["model.positions.r2"][head - 1].clamp(min=0.01)
        if settings["kerple_variant"] == "log":
            return -r1 * torch.log(1 + r2 * r)
        return -r1 * r ** r2.clamp(max=2) if r else 0.0
    if scheme in ("sandwich", "smoothed_sandwich"):
        width, first = settings["sandwich_dim"], settings["sandwich_first_index"]

        def cosines(distance: int) -> float:
            indices = range(first, first + width // 2)
            return sum(math.cos(distance / 10000 ** (2 * i / width)) for i in indices) - width / 2

        if scheme == "sandwich":
            return cosines(r) / ratio
        if settings["smoothed_sandwich_fit"] == "printed":
            return 8 / ratio * (-0.825 * math.log(1 + r) - 0.8)
        x, y = [math.log(1 + n) for n in range(50)], [cosines(n) / 8 for n in range(50)]
        mean_x, mean_y = sum(x) / 50, sum(y) / 50
        covariance = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
        slope = covariance / sum((a - mean_x) ** 2 for a in x)
        return 8 / ratio * (slope * (math.log(1 + r) - mean_x) + mean_y)
    return 0.0


def biases(weights: Mapping[str, torch.Tensor], settings: Mapping[str, Any], head: int, length: int) -> torch.Tensor:
    """The bias of every query and key, shape (length, length); 0 for keys after their query."""
    by_distance = [torch.as_tensor(bias(weights, settings, head, r), dtype=torch.float64) for r in range(length)]
    zero = torch.zeros((), dtype=torch.float64)
    rows = [torch.stack([by_distance[p - n] if n <= p else zero for n in range(length)]) for p in range(length)]
    return torch.stack(rows)


def embeddings(weights: Mapping[str, torch.Tensor], settings: Mapping[str, Any], length: int) -> torch.Tensor | float:
    """What is added to the token embeddings, shape (length, hidden_size)."""
    scheme, width = settings.get("position_embedding_type", "xpos"), settings["hidden_size"]
    if scheme == "learned":
        return weights["model.positions.embedding.weight"][:length]
    if scheme != "sinusoidal":
        return 0.0
    table = torch.zeros(length, width, dtype=torch.float64)
    for p in range(length):
        for i in range(width // 2):
            angle = p / 10000 ** (2 * i / width)
            table[p, 2 * i], table[p, 2 * i + 1] = math.sin(angle), math.cos(angle)
    return table


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
        if settings.get("position_embedding_type", "xpos") not in ("xpos", "rope"):
            theta, zeta = 0.0, 1.0
        q = torch.complex(query[:, 2 * i], query[:, 2 * i + 1])
        k = torch.complex(key[:, 2 * i], key[:, 2 * i + 1])
        turned = (q[:, None] * k.conj()[None, :] * torch.exp(1j * theta * distance)).real
        scores += turned * zeta ** (distance / settings.get("xpos_scale_base", 512))
    return scores / math.sqrt(width)


def scores(
    query: torch.Tensor,
    key: torch.Tensor,
    weights: Mapping[str, torch.Tensor],
    settings: Mapping[str, Any],
    layer: int,
    head: int,
) -> torch.Tensor:
    """Scores of a head, 1 … H, of a layer, 0, 1, …, for states of shape (length, d), before the mask."""
    schemes, length = settings.get("position_embedding_type", "xpos"), len(query)
    if isinstance(schemes, list):  # each has its parameters under its own name
        settings = {**settings, "position_embedding_type": schemes[layer]}
        own = f"positions.{schemes[layer]}."
        weights = {name.replace(own, "positions."): tensor for name, tensor in weights.items()}
    found = xpos_scores(query, key, settings)
    if settings.get("position_embedding_type") == "shaw":
        vectors, longest = weights[f"model.layers.{layer}.self_attn.relative.weight"], settings["shaw_max_distance"]
        for p in range(length):
            for other in range(p + 1):
                vector = vectors[min(p - other, longest)]
                found[p, other] = query[p] @ (key[other] + vector) / math.sqrt(query.shape[1])
    if settings["patterns"][layer][0] == "full" and settings.get("full_attention_log_scaling"):
        seen = torch.arange(1, length + 1, dtype=torch.float64)
        found = found * (seen.log() / math.log(settings["training_length"])).clamp(min=1)[:, None]
    return found + biases(weights, settings, head, length)


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
    x = w["model.embed_tokens.weight"][ids] + embeddings(w, settings, len(ids))
    for layer, (pattern, block) in enumerate(patterns):
        prefix = f"model.layers.{layer}"
        h = norm(f"{prefix}.input_layernorm", x)
        states = [linear(f"{prefix}.self_attn.{n}_proj", h).unflatten(-1, (heads, -1)).transpose(0, 1) for n in "qkv"]
        mask, outputs = visible(pattern, len(ids), block), []
        for head, (q, k, v) in enumerate(zip(*states, strict=True), start=1):
            outputs.append(scores(q, k, w, settings, layer, head).masked_fill(~mask, -torch.inf).softmax(-1) @ v)
        x = x + linear(f"{prefix}.self_attn.o_proj", torch.cat(outputs, dim=-1))
        h = linear(f"{prefix}.mlp.up_proj", norm(f"{prefix}.post_attention_layernorm", x))
        h = h * 0.5 * (1 + torch.erf(h / math.sqrt(2)))
        x = x + linear(f"{prefix}.mlp.down_proj", h)
    return norm("model.norm", x) @ w["lm_head.weight"].T
