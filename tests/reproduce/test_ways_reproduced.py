"""Ways to read on tiny models that are trained for it: `lex-hf reproduce ways-to-read`."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.commands import lex

from lex_hf.data.tokenizers import byte_tokenizer
from lex_hf.evaluation import ways as measuring
from lex_hf.reproduce import ways


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder, where few and short texts are read."""
    library = ways.standard_library()
    few = replace(library, train=library.train[:3], test=library.test[:1])
    monkeypatch.setattr(ways, "standard_library", lambda: few)
    monkeypatch.setattr(ways, "LONGEST", 150)
    monkeypatch.setattr(measuring, "ROUNDS", 1)
    return tmp_path


def test_two_models_are_trained_once_and_measured(folder: Path) -> None:
    arguments = ["reproduce", "ways-to-read", "--output", folder, "--steps", 2, "--json"]
    first = lex(*arguments)
    assert first.exit_code == 0, first.output
    results = json.loads(first.stdout)
    assert list(results) == ["llama", "gpt_neox"]
    for kind, result in results.items():
        assert all(way["problem"] is None for way in result["ways"])
        assert json.loads((folder / f"ways-to-read-{kind}.json").read_text()) == result
        for what in ("", "-beyond", "-first-tokens"):
            assert (folder / f"ways-to-read-{kind}{what}.png").is_file()
        shares = torch.tensor(result["attention_to_first_token"])
        assert shares.shape == (4, 4)
        assert ((shares > 0) & (shares < 1)).all()
    weights = {kind: (folder / kind / "model.safetensors").stat().st_mtime_ns for kind in results}
    again = lex(*arguments[:-1])
    assert again.exit_code == 0, again.output
    assert "blockwise, blocks of 64" in again.output
    assert {kind: (folder / kind / "model.safetensors").stat().st_mtime_ns for kind in results} == weights
    other = lex(*arguments, "--steps", 3)
    assert (other.exit_code, other.stderr.endswith("choose another folder.\n")) == (1, True)


def test_examples_begin_with_the_start_token() -> None:
    library = ways.standard_library()
    few = replace(library, train=library.train[:3])
    rows = torch.tensor(ways.examples_with_start(few.documents())["input_ids"][:])
    assert rows.shape[1] == ways.TRAINING_LENGTH
    assert (rows[:, 0] == byte_tokenizer().bos_token_id).all()
    joined = torch.tensor(few.examples()["input_ids"][:]).flatten()  # the same bytes, cut elsewhere
    torch.testing.assert_close(rows[:, 1:].flatten()[: len(joined)], joined[: rows[:, 1:].numel()])


@pytest.mark.parametrize("options", [["--preset", "small"], ["--length", 64], ["--dry-run"]])
def test_options_of_other_tables_are_refused(options: list[object], folder: Path) -> None:
    done = lex("reproduce", "ways-to-read", "--output", folder, *options)
    assert done.exit_code == 1
    assert "ways-to-read has the preset tiny alone" in done.stderr
    assert not list(folder.iterdir())
