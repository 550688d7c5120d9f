"""Tiny models, texts, and the patterns and schemes that tests go through."""

from typing import Any

import pytest
import torch
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from packaging.version import Version
from transformers import PreTrainedModel
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from helpers import reference
from lex_hf import LexCache, LexConfig, LexForCausalLM

# Largest difference that is rounding, for logits of a model with weights of a usual size.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 4e-2, torch.bfloat16: 3e-1}

SIZES = {
    "vocab_size": 97,
    "hidden_size": 30,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 44,
    "training_length": 14,
    "xpos_scale_base": 7,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}

# Those of a model whose tokens are bytes, for `byte_tokenizer`.
BYTES = {"vocab_size": 257, "bos_token_id": 256, "eos_token_id": 256, "pad_token_id": 256}


def tiny_model(*, dtype: torch.dtype = torch.float32, seed: int = 0, **fields: Any) -> LexForCausalLM:
    """A random model in evaluation mode, whose weights are large enough for mistakes to show and texts to vary."""
    torch.manual_seed(seed)
    model = LexForCausalLM(LexConfig(**{**SIZES, **fields}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(mean=float("norm.weight" in name), std=0.1 if parameter.dim() == 1 else 0.4)
    return model.to(dtype).eval()


# An id that no model here writes: guessing with transformers 5.9 needs one that ends a text.
NEVER = SIZES["vocab_size"]


# With 2.6, graphs fail after they are compiled; with 2.9 most do not, but some shapes are compiled more than once.
needs_whole_graphs = pytest.mark.skipif(
    Version(torch.__version__).release < (2, 13),
    reason="older PyTorch does not compile the whole graphs of these models",
)


needs_rows = pytest.mark.skipif(
    not hasattr(ContinuousBatchingConfig(), "max_requests_per_batch"),
    reason="older transformers has no number of rows among its settings of continuous batching",
)


def enable_checkpointing(model: PreTrainedModel, **options: Any) -> None:
    """Compute layers again for gradients, under the name that this version of transformers has for it."""
    name = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    getattr(model, f"{name}_checkpointing_enable")(options or None)


def settings_of(model: LexForCausalLM) -> dict[str, Any]:
    """What `reference.forward` needs to know of a model."""
    config = model.config
    patterns = [(pattern, config.attention_span(pattern)) for pattern in config.layer_patterns]
    return {**config.to_dict(), "patterns": patterns}


def random_ids(*shape: int, seed: int = 0, vocab_size: int = 97) -> torch.Tensor:
    """Random token ids that avoid 0, the padding."""
    return torch.randint(1, vocab_size, shape, generator=torch.Generator().manual_seed(seed))


PATTERNS = (
    {"attention_pattern": "blockwise"},
    {"attention_pattern": "blockwise", "block_length": 3},
    {"attention_pattern": "sliding"},
    {"attention_pattern": "sliding", "sliding_window": 5},
    {"attention_pattern": "full"},
    {"attention_pattern": ["blockwise", "full"], "full_attention_log_scaling": True},
)

ABLATIONS = (
    {"position_embedding_type": "rope"},
    {"xpos_rotation": False},
    {"xpos_scale": "scalar"},
    {"xpos_scale": "none"},
    {"rope_theta": 100.0, "xpos_gamma": 0.7, "xpos_scale_base": 5},
)

SCHEMES: tuple[dict[str, Any], ...] = (
    {"position_embedding_type": "alibi"},
    {"position_embedding_type": "alibi", "alibi_slopes": "geometric", "alibi_slope_shift": 2},
    {"position_embedding_type": "alibi", "alibi_shared_slope": 3},
    {"position_embedding_type": "t5", "t5_num_buckets": 8, "t5_max_distance": 20},
    {"position_embedding_type": "t5", "t5_num_buckets": 6, "t5_max_distance": 9, "t5_scaled": True},
    {"position_embedding_type": "shaw", "shaw_max_distance": 1},
    {"position_embedding_type": "shaw", "shaw_max_distance": 9},
    {"position_embedding_type": "kerple"},
    {"position_embedding_type": "kerple", "kerple_variant": "power"},
    {"position_embedding_type": "sandwich", "sandwich_dim": 16},
    {"position_embedding_type": "sandwich", "sandwich_dim": 10, "sandwich_first_index": 0},
    {"position_embedding_type": "smoothed_sandwich"},
    {"position_embedding_type": "smoothed_sandwich", "smoothed_sandwich_fit": "points"},
    {"position_embedding_type": "sinusoidal"},
    {"position_embedding_type": "learned", "training_length": 100, "block_length": 7, "sliding_window": 14},
    {"position_embedding_type": "none"},
)

MIXED: tuple[dict[str, Any], ...] = (
    {"position_embedding_type": ["xpos", "none"]},
    {"position_embedding_type": ["rope", "xpos"]},
    {"position_embedding_type": ["kerple", "t5"], "t5_num_buckets": 8, "t5_max_distance": 20},
    {"position_embedding_type": ["sandwich", "alibi"], "sandwich_dim": 16},
    {"position_embedding_type": ["shaw", "xpos"], "shaw_max_distance": 5},
)
HYBRID = {
    "attention_pattern": ["blockwise", "full"],
    "position_embedding_type": ["xpos", "none"],
    "full_attention_log_scaling": True,
}

scheme_fields = st.sampled_from((*SCHEMES, *MIXED))

pattern_fields = st.sampled_from(PATTERNS)

quick = hypothesis_settings(max_examples=20)


def dense_logits(model: LexForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return reference.forward(model.state_dict(), ids, settings_of(model))


def left_padded(prompts: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    width = max(len(prompt) for prompt in prompts)
    ids, mask = torch.zeros(2, len(prompts), width, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :], mask[row, width - len(prompt) :] = prompt, 1
    return {"input_ids": ids, "attention_mask": mask}


cuts = st.lists(st.sampled_from([1, 1, 1, 2, 3, 5, 6, 7, 8, 13, 14, 15, 28, 30]), min_size=40, max_size=60)


def read_in_pieces(
    model: LexForCausalLM, ids: torch.Tensor, pieces: list[int], mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Logits of `ids`, read in pieces with one cache."""
    cache, logits, start = LexCache(model.config), [], 0
    with torch.no_grad():
        for piece in pieces:
            stop = min(start + piece, ids.shape[1])
            known = None if mask is None else mask[:, :stop]
            logits.append(model(ids[:, start:stop], attention_mask=known, past_key_values=cache).logits)
            start = stop
            if start == ids.shape[1]:
                break
    assert start == ids.shape[1] == cache.get_seq_length()
    return torch.cat(logits, dim=1)


def logits_of(model: torch.nn.Module, length: int = 40) -> torch.Tensor:
    with torch.no_grad():
        return model(random_ids(2, length)).logits
