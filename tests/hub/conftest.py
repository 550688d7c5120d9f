"""The folder of a saved model, which tests of pushing send."""

from pathlib import Path

import pytest
from helpers.hub_folders import save_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_model(tmp_path / "model")
