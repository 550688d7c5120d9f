"""Records: JSON that is read back, fingerprints that stay as they were, versions."""

import math
import platform
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

import lex_hf
from lex_hf.records import content_hash, fingerprint, hardware, read_json, versions, whole_file, write_json


def test_json_is_read_back_with_all_numbers(tmp_path: Path) -> None:
    value = {"é": [1, 0.1 + 0.2, math.inf, -math.inf], "none": None}
    write_json(tmp_path / "new" / "folder" / "value.json", value)
    assert read_json(tmp_path / "new" / "folder" / "value.json") == value
    write_json(tmp_path / "nan.json", math.nan)
    assert math.isnan(read_json(tmp_path / "nan.json"))


def test_fingerprints_are_those_of_earlier_versions() -> None:
    # Folders of models are named after them: printf '{"a": 1, "b": [2, null]}' | sha256sum
    expected = "c8caf5ad035ad1d6a15b14c79b2f86a75c47cb4eb04c32a063e979eb1849b3bb"
    assert fingerprint({"b": [2, None], "a": 1}) == fingerprint({"a": 1, "b": [2, None]}) == expected
    assert fingerprint({"a": 1}) != fingerprint({"a": 2})


def test_content_hashes_do_not_depend_on_the_parts() -> None:
    # printf 'abc' | b2sum -l 64; checkpoints hold such hashes
    assert content_hash([b"abc"]) == content_hash([b"a", b"", b"bc"]) == "d8bb14d833d59559"
    assert content_hash([b"abd"]) != content_hash([b"abc"])


def test_versions_and_hardware() -> None:
    assert versions() == {"python": platform.python_version()}
    found = versions("torch", "transformers", "no-such-library")
    assert (found["torch"], found["transformers"]) == (torch.__version__, version("transformers"))
    assert found["no-such-library"] == "not installed"
    assert hardware()["processes"] == 1
    assert set(hardware()) == {"machine", "system", "threads", "accelerators", "processes"}


def test_the_version_is_that_of_the_code_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sources may be newer than what pip knows of them: those that are installed as editable, or only on a path."""
    assert versions("lex-hf")["lex-hf"] == lex_hf.__version__
    monkeypatch.setattr(lex_hf, "__version__", "9.8.7")
    assert versions("lex-hf")["lex-hf"] == "9.8.7"


def test_two_that_write_a_file_at_once_leave_a_whole_one(tmp_path: Path) -> None:
    """On a file system that machines share, two processes may even have the same number."""
    with whole_file(tmp_path / "file") as slow:
        slow.write_text("of the slow o")
        with whole_file(tmp_path / "file") as quick:
            assert quick != slow
            quick.write_text("of the quick one")
        assert (tmp_path / "file").read_text() == "of the quick one"
        slow.write_text("of the slow one")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "of the slow one"
