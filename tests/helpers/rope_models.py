"""Tiny models of transformers with rotary positions, and what they compute with a dense mask of blocks."""

from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
)

VOCABULARY, LENGTH = 61, 8  # the training length; blocks are of 4 tokens
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "head_dim": 8,
    "max_position_embeddings": LENGTH,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


def rope_model(kind: str = "llama", attention: str = "eager", seed: int = 0, **fields: Any) -> PreTrainedModel:
    """A tiny model of a kind that transformers knows by this name, e.g. `gpt_neox`."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **{**SIZES, **fields})
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    for parameter in model.parameters():  # as after training: attention of an initial model is nearly flat
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


def dense_mask(tokens: int, block: int, documents: torch.Tensor | None = None) -> torch.Tensor:
    """What is added to scores in blockwise attention, shape `(batch or 1, 1, tokens, tokens)`.

    Args:
        tokens: Number of tokens.
        block: Length of a block.
        documents: Number of the document of each token, shape `(batch, tokens)`; blocks of each begin with it.
    """
    documents = torch.zeros(1, tokens, dtype=torch.long) if documents is None else documents
    place = torch.zeros_like(documents)
    for row, column in torch.cartesian_prod(torch.arange(len(documents)), torch.arange(1, tokens)).tolist():
        if documents[row, column] == documents[row, column - 1]:
            place[row, column] = place[row, column - 1] + 1
    same = documents[:, :, None] == documents[:, None, :]
    near = place[:, None, :] // block >= place[:, :, None] // block - 1
    causal = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    seen = (same & near & causal)[:, None]
    return torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
