"""Shared by all tests: a tiny model whose sizes all differ, and no network."""

import os

# Before any Hugging Face import: nothing may reach for the network.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("lex", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("lex")


@pytest.fixture(scope="session")
def golden() -> Path:
    """The folder with outputs of the official code; tests that need it are skipped where it is absent."""
    folder = Path(__file__).parents[2] / "shared" / "golden"
    if not folder.is_dir():
        pytest.skip("the golden vectors are not here")
    return folder
