"""The server of transformers."""

import importlib
from types import ModuleType

import pytest


def model_manager() -> ModuleType:
    """Import what loads the models of transformers' server, or skip the test."""
    try:
        return importlib.import_module("transformers.cli.serving.model_manager")
    except NameError:
        pytest.skip("older versions of transformers import their server only where all of its packages are installed")
