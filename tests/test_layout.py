"""The layout of the package: names that moved, and rooms."""

import importlib
import subprocess
import sys

import pytest

import lex_hf


@pytest.mark.parametrize("name", ["perplexity", "comparison", "tokenization", "context_parallel", "modeling_lex"])
def test_modules_that_moved_are_found_under_their_old_names(name: str) -> None:
    with pytest.warns(DeprecationWarning, match=rf"lex_hf.{name} is now lex_hf"):
        old = importlib.import_module(f"lex_hf.{name}")
    try:
        assert old is sys.modules[old.__name__]
        assert old.__name__ != f"lex_hf.{name}"
        assert old.__spec__ is not None
        assert old.__spec__.name == old.__name__
    finally:
        del sys.modules[f"lex_hf.{name}"]
        delattr(lex_hf, name)


def test_a_moved_module_warns_where_it_is_imported() -> None:
    code = "import lex_hf\nfrom lex_hf.perplexity import compute_perplexity"
    result = subprocess.run([sys.executable, "-W", "always", "-c", code], capture_output=True, text=True, check=True)
    assert "<string>:2: DeprecationWarning: lex_hf.perplexity is now lex_hf.evaluation.perplexity" in result.stderr


def test_unknown_modules_and_names_are_errors() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"lex_hf\.nothing"):
        importlib.import_module("lex_hf.nothing")
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        importlib.import_module("lex_hf.data").nothing  # noqa: B018
