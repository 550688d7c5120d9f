"""Forward passes of tiny Llama and GPT-NeoX models by loops over pairs and tokens, to compare ways to read with.

Nothing of transformers' forward passes is used but projections, norms and feed-forward layers. Scores are those of a
distance: the query is rotated by it, the key is not.
"""

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel


class SlowModel:
    """A tiny Llama or GPT-NeoX.

    Args:
        model: The model, in float32.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.config = model, model.config
        self.is_llama = model.config.model_type == "llama"
        decoder: Any = model.get_decoder()
        self.layers, self.norm = decoder.layers, decoder.norm if self.is_llama else decoder.final_layer_norm
        parameters = self.config.rope_parameters
        width = self.config.head_dim if self.is_llama else self.config.hidden_size // self.config.num_attention_heads
        rotated = int(width * parameters.get("partial_rotary_factor", 1.0))
        places = torch.arange(0, rotated, 2, dtype=torch.float64) / rotated
        self.frequencies = parameters["rope_theta"] ** -places

    def projected(self, layer: Any, states: torch.Tensor) -> list[torch.Tensor]:
        """Queries, keys and values that are not rotated, each of the shape `(tokens, heads, head_dim)`."""
        heads = self.config.num_attention_heads
        normed = layer.input_layernorm(states)
        if not self.is_llama:
            return list(layer.attention.query_key_value(normed).unflatten(-1, (heads, -1)).chunk(3, dim=-1))
        parts = (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj)
        found = [part(normed).unflatten(-1, (-1, self.config.head_dim)) for part in parts]
        return [each.repeat_interleave(heads // each.shape[1], dim=1) for each in found]

    def finished(self, layer: Any, states: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """States after a layer, from the outputs of its heads."""
        if self.is_llama:
            states = states + layer.self_attn.o_proj(attended.flatten(-2))
            return states + layer.mlp(layer.post_attention_layernorm(states))
        output = layer.attention.dense(attended.flatten(-2))
        return states + output + layer.mlp(layer.post_attention_layernorm(states))

    def rotated(self, states: torch.Tensor, position: int) -> torch.Tensor:
        """Rotate states of the shape `(heads, head_dim)` as complex numbers."""
        half = len(self.frequencies)
        whole = torch.complex(states[:, :half].double(), states[:, half : 2 * half].double())
        whole = whole * torch.polar(torch.ones_like(self.frequencies), position * self.frequencies)
        return torch.cat((whole.real, whole.imag, states[:, 2 * half :].double()), dim=-1)

    def attended(self, query: torch.Tensor, distances: dict[int, int], keys: Any, values: Any) -> torch.Tensor:
        """Output of all heads for one query, whose keys are at these distances, by their index."""
        scores = [(self.rotated(query, distance) * keys[index]).sum(-1) for index, distance in distances.items()]
        weights = (torch.stack(scores) * query.shape[-1] ** -0.5).softmax(dim=0)
        seen = torch.stack([values[index] for index in distances]).double()
        return (weights[..., None] * seen).sum(dim=0).float()

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Logits of the last layer's states."""
        head: Any = self.model.get_output_embeddings()
        return head(self.norm(states))

    @torch.no_grad()
    def by_pairs(self, ids: torch.Tensor, distance: Callable[[int, int], int | None]) -> torch.Tensor:
        """Logits of a text, shape `(tokens, vocabulary)`, when keys are at some distance, or not seen (`None`)."""
        states = self.model.get_input_embeddings()(ids)
        for layer in self.layers:
            query, key, value = self.projected(layer, states)
            rows = []
            for i in range(len(ids)):
                found = {j: distance(i, j) for j in range(i + 1)}
                seen = {j: each for j, each in found.items() if each is not None}
                rows.append(self.attended(query[i], seen, key, value))
            states = self.finished(layer, states, torch.stack(rows))
        return self.logits(states)

    @torch.no_grad()
    def by_tokens(self, ids: torch.Tensor, sinks: int, room: int) -> torch.Tensor:
        """Logits of StreamingLLM: from a cache of keys that are not rotated, the oldest but the sinks is evicted.

        Args:
            ids: Shape `(tokens,)`.
            sinks: Number of first tokens that stay.
            room: Tokens in the cache.
        """
        caches: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in self.layers]
        logits = []
        for token in ids:
            states = self.model.get_input_embeddings()(token[None])
            for layer, cache in zip(self.layers, caches, strict=True):
                query, key, value = self.projected(layer, states)
                cache.append((key[0], value[0]))
                if len(cache) > room:
                    del cache[sinks]
                last = len(cache) - 1  # the position of the query in the cache
                distances = {place: last - place for place in range(len(cache))}
                output = self.attended(query[0], distances, *zip(*cache, strict=True))
                states = self.finished(layer, states, output[None])
            logits.append(self.logits(states)[0])
        return torch.stack(logits)
