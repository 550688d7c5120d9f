"""Shared by all tests: a tiny model whose sizes all differ, and no network."""

import os

# Before any Hugging Face import: nothing may reach for the network.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hub_server import HubServer
from huggingface_hub import constants
from huggingface_hub.utils import close_session
from hypothesis import settings

from lex_hf import LexConfig, LexForCausalLM

settings.register_profile("lex", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("lex")

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
    """The folder with outputs of the official code; its README tells where each comes from."""
    return Path(__file__).with_name("golden")


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        yield server


@pytest.fixture
def online(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """The server, which huggingface_hub in this very process then takes for the Hub."""
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", hub.token)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    # It tries a broken upload again, and would wait 23 seconds in between.
    monkeypatch.setattr("huggingface_hub.utils._http.time", SimpleNamespace(sleep=lambda seconds: None))
    close_session()
    yield hub
    close_session()
