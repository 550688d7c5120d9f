"""Shared by all tests: a tiny model whose sizes all differ, and no network."""

import os

# Before any Hugging Face import: nothing may reach for the network.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Before torch: models so small gain nothing from threads, and processes that test in parallel would share the cores.
os.environ["OMP_NUM_THREADS"] = "1"

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from lex_hf import LexConfig, LexForCausalLM

settings.register_profile("lex", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("lex")


def pytest_collection() -> None:
    """While tests import, each collection of garbage would go through ever more that is none."""
    gc.disable()


def pytest_collection_finish() -> None:
    """What all imports have left lives as long as the process: a collection of garbage need not look at it again."""
    gc.collect()
    gc.freeze()
    gc.enable()


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


def tiny_model(*, dtype: torch.dtype = torch.float32, seed: int = 0, **fields: Any) -> LexForCausalLM:
    """A random model in evaluation mode, whose weights are large enough for mistakes to show and texts to vary."""
    torch.manual_seed(seed)
    model = LexForCausalLM(LexConfig(**{**SIZES, **fields}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(mean=float("norm.weight" in name), std=0.1 if parameter.dim() == 1 else 0.4)
    return model.to(dtype).eval()


def settings_of(model: LexForCausalLM) -> dict[str, Any]:
    """What tests/reference.py needs to know of a model."""
    config = model.config
    patterns = [(pattern, config.attention_span(pattern)) for pattern in config.layer_patterns]
    return {**config.to_dict(), "patterns": patterns}


def random_ids(*shape: int, seed: int = 0, vocab_size: int = 97) -> torch.Tensor:
    """Random token ids that avoid 0, the padding."""
    return torch.randint(1, vocab_size, shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="session")
def golden() -> Path:
    """The folder with outputs of the official code; tests that need it are skipped where it is absent."""
    folder = Path(__file__).parents[2] / "shared" / "golden"
    if not folder.is_dir():
        pytest.skip("the golden vectors are not here")
    return folder
