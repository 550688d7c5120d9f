"""The comparison of schemes, small: what is trained, reused, measured and written."""

import functools
import io
import itertools
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from helpers.models import tiny_model
from huggingface_hub.errors import StrictDataclassError
from rich.console import Console

from lex_hf import LexForCausalLM
from lex_hf.data.tokenizers import byte_tokenizer
from lex_hf.evaluation.perplexity import compute_perplexity
from lex_hf.reproduce import extrapolation, tiny


def test_schemes_are_trained_once_and_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [tmp_path / f"{index}.py" for index in range(3)]
    for index, file in enumerate(files):
        file.write_text(f"value_{index} = {index}\n" * 100)
    corpus = tiny.Corpus(train=files[:2], test=[files[2]], long=files[2])
    monkeypatch.setattr(extrapolation, "standard_library", lambda: corpus)
    monkeypatch.setattr(extrapolation, "LENGTHS", (64, 256))
    folder, console = tmp_path / "output", Console(file=io.StringIO())
    settings = {"schemes": ("alibi", "learned"), "seeds": (0, 1), "steps": 2, "console": console}
    result = extrapolation.run(folder, **settings)
    assert list(result.perplexity) == ["alibi", "alibi + BCA", "learned", "learned + BCA"]
    assert {system: list(curve) for system, curve in result.perplexity.items()} == {
        "alibi": [64, 256],
        "alibi + BCA": [64, 256],
        "learned": [64],
        "learned + BCA": [64],
    }
    first, second = result.perplexity["alibi"][64]
    assert first != second
    row = result.markdown().splitlines()[4]
    assert row.startswith("| learned |")
    assert row.endswith("| error |")
    written = json.loads((folder / "extrapolation.json").read_text())
    assert written["perplexity"]["alibi"]["64"] == [first, second]
    assert [(each["seed"], each["steps"], each["systems"]) for each in written["models"]] == [
        (seed, 2, [scheme, f"{scheme} + BCA"]) for scheme in ("alibi", "learned") for seed in (0, 1)
    ]
    assert {"command", "created", "versions", "hardware"} <= written.keys()
    (weights,) = folder.glob("alibi-l128-seed1-*/model.safetensors")
    before = weights.stat().st_mtime_ns
    shutil.rmtree(weights.parent / "measurements")
    assert extrapolation.run(folder, **settings) == result
    assert weights.stat().st_mtime_ns == before
    assert (folder / "extrapolation.png").read_bytes().startswith(b"\x89PNG")
    kept = (folder / "extrapolation.json").read_bytes()
    for other, lost in (
        ({"steps": 1}, "steps=2"),
        ({"seeds": (1, 2)}, "seed 0"),
        ({"schemes": ("alibi",)}, "the system learned, the system learned \\+ BCA"),
    ):
        with pytest.raises(ValueError, match=f"has {lost}, which .* --overwrite"):
            extrapolation.run(folder, **{**settings, **other})
    assert (folder / "extrapolation.json").read_bytes() == kept
    extrapolation.run(folder, **{**settings, "schemes": ("alibi",)}, overwrite=True)
    assert list(json.loads((folder / "extrapolation.json").read_text())["perplexity"]) == ["alibi", "alibi + BCA"]


def test_unknown_schemes_fail_before_anything_is_trained(tmp_path: Path) -> None:
    with pytest.raises(StrictDataclassError, match="position_embedding_type = 'absolute'"):
        extrapolation.run(tmp_path / "output", schemes=("alibi", "absolute"))
    assert not (tmp_path / "output").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"seeds": (0, 0)}, "seeds = 0, 0: they must be different"),
        ({"seeds": (2**32,)}, "from 0 to 4294967295"),
        ({"seeds": ()}, "seeds = none"),
        ({"steps": 0}, "steps = 0: it must be from 1"),
        ({"schemes": ("rope", "rope")}, "one is given twice"),
    ],
)
def test_impossible_settings_fail_before_anything_is_trained(
    settings: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        extrapolation.run(tmp_path / "output", **{"schemes": ("alibi",), **settings})
    (tmp_path / "file").write_text("precious")
    with pytest.raises(ValueError, match="is a file, not a folder"):
        extrapolation.run(tmp_path / "file", schemes=("alibi",))
    assert not (tmp_path / "output").exists()


def test_a_single_step(tmp_path: Path) -> None:
    examples = Dataset.from_dict({"input_ids": [[1] * 128] * 16})
    result = tiny.train_tiny(tiny.tiny_config("rope"), tmp_path, examples, steps=1)
    assert (result.steps, [step for step, _ in result.losses]) == (1, [1])


def test_a_training_that_was_stopped_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    examples = Dataset.from_dict({"input_ids": [[token] * 128 for token in range(32)]})
    forward, calls = LexForCausalLM.forward, itertools.count(1)

    @functools.wraps(forward)
    def interrupted(self: LexForCausalLM, *args: Any, **options: Any) -> Any:
        if next(calls) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return forward(self, *args, **options)

    monkeypatch.setattr(LexForCausalLM, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt, match="stopped after 2 of 4 steps"):
        tiny.train_tiny(tiny.tiny_config("rope"), tmp_path, examples, steps=4)
    assert tiny.train_tiny(tiny.tiny_config("rope"), tmp_path, examples, steps=4).steps == 4
    assert next(calls) == 5  # two steps before, and two after


def test_a_curve_is_the_chunked_perplexity_at_each_length() -> None:
    model = tiny_model(vocab_size=257, position_embedding_type="learned", bos_token_id=256, pad_token_id=256)
    texts, tokenizer = ["some text to read, long enough for two lengths"] * 3, byte_tokenizer()
    curve = tiny.perplexity_by_length(model, tokenizer, texts, (7, 14, 15))
    expected = {n: compute_perplexity(model, tokenizer, texts, length=n, progress=False).perplexity for n in (7, 14)}
    assert curve == pytest.approx(expected, rel=1e-6)
