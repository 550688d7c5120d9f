"""The layers of the decoder: attention, feed-forward layer, and the two with their norms."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from .attention_lex import Fold, Step
from .functions_lex import AttentionFunction
from .linear_lex import LexLinear, suits_parts
from .positions_lex import SCHEMES

_MLP_TOKENS = 512  # that a feed-forward layer takes at once, where it takes them in parts


class LexMLP(nn.Module):
    """The feed-forward layer."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.up_proj = LexLinear(config.hidden_size, config.intermediate_size)
        self.down_proj = LexLinear(config.intermediate_size, config.hidden_size)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Map `(batch, sequence, hidden_size)` to the same shape."""
        if not suits_parts(hidden_states, _MLP_TOKENS, self):
            return self.down_proj(self.act_fn(self.up_proj(hidden_states)))
        # The widest states of all: of a long text they would be new memory in every layer, which takes time to map.
        output = torch.empty_like(hidden_states, memory_format=torch.contiguous_format)
        parts, places = (states.flatten(0, 1).split(_MLP_TOKENS) for states in (hidden_states, output))
        for part, place in zip(parts, places, strict=True):
            place.copy_(self.down_proj(self.act_fn(self.up_proj(part))))
        return output


class LexAttention(nn.Module):
    """Multi-head attention along the plan of its pattern."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.scaling = self.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        self.is_causal = True
        self.q_proj = LexLinear(config.hidden_size, config.hidden_size)
        self.k_proj = LexLinear(config.hidden_size, config.hidden_size)
        self.v_proj = LexLinear(config.hidden_size, config.hidden_size)
        self.o_proj = LexLinear(config.hidden_size, config.hidden_size)
        vectors = SCHEMES[config.layer_schemes[layer_idx]].count_vectors(config)
        self.relative = None if vectors is None else nn.Linear(self.head_dim, vectors, bias=False)

    def forward(
        self,
        hidden_states: torch.Tensor,
        plan: Fold | Step,
        function: AttentionFunction,
        past_key_values: Cache | None = None,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Apply attention.

        Args:
            hidden_states: Shape `(batch, sequence, hidden_size)`.
            plan: The plan of this forward pass for the pattern of this layer.
            function: The attention function of this forward pass.
            past_key_values: The cache, or `None`.
            output_attentions: Whether to return weights (with eager attention only).
            kwargs: Passed on to the attention function.

        Returns:
            Shape `(batch, sequence, hidden_size)`, and weights, shape `(batch, num_heads, sequence, slots)` or `None`.
        """
        batch, length, _ = hidden_states.shape
        shape, rows = (batch, length, -1, self.head_dim), plan.batch
        projections = (self.q_proj, self.k_proj, self.v_proj)
        query, key, value = (rows.align(project(hidden_states).view(shape).transpose(1, 2)) for project in projections)
        query, key = plan.rotation.rotate(query, key)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx, rows, plan.rotation.decay)
        output, weights = plan.attend(
            partial(function, self, **kwargs),
            query,
            key,
            value,
            scaling=self.scaling,
            dropout=self.attention_dropout if self.training else 0.0,
            dense=output_attentions,
            of_queries=None if self.relative is None else self._of_queries,
        )
        output = rows.restore(output)
        if output_attentions and weights is not None:
            # The output is made of the very weights that are returned, so that gradients reach them.
            weights, value = by_column(rows.restore(weights), value, plan.key_order(value.shape[2]))
            output = weights @ value
        return self.o_proj(output.transpose(1, 2).reshape(batch, length, -1)), weights

    def _of_queries(self, query: torch.Tensor) -> torch.Tensor:
        """Products of queries and vectors of distances, as added to scores; see [`PositionScheme.count_vectors`]."""
        assert self.relative is not None
        return self.relative(query) * self.scaling


def by_column(
    weights: torch.Tensor, value: torch.Tensor, order: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Bring weights, `(batch, num_heads, query, slots)`, and values of slots into the order of keys that users see."""
    if order is None:
        return weights, value
    index = order.to(value.device)[:, None]
    return weights.take_along_dim(index[:, :, None], dim=3), value.take_along_dim(index[..., None], dim=2)


class LexDecoderLayer(GradientCheckpointingLayer):
    """A pre-LayerNorm decoder layer."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = LexAttention(config, layer_idx)
        self.mlp = LexMLP(config)
        self.input_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.post_attention_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(
        self, hidden_states: torch.Tensor, *masks: torch.Tensor | None, plan: Fold | Step, **kwargs: Any
    ) -> torch.Tensor:
        """Map `(batch, sequence, hidden_size)` to the same shape.

        Args:
            hidden_states: Shape `(batch, sequence, hidden_size)`.
            masks: If given, those of the plan.
            plan: The plan for the pattern of this layer.
            kwargs: See [`LexAttention.forward`].
        """
        plan = replace(plan, masks=masks) if masks else plan
        attended, _ = self.self_attn(self.input_layernorm(hidden_states), plan, **kwargs)
        drop = self.dropout if self.dropout.training else _unchanged  # a module that does nothing takes time, too
        hidden_states = hidden_states + drop(attended)
        del attended  # the feed-forward layer needs the most memory
        return hidden_states + drop(self.mlp(self.post_attention_layernorm(hidden_states)))


def _unchanged(states: torch.Tensor) -> torch.Tensor:
    return states
