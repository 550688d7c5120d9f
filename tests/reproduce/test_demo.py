"""The demo, small: everything it promises is there."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from transformers import AutoModelForCausalLM

from lex_hf import LexForCausalLM
from lex_hf.reproduce import demo, tiny


def test_the_demo_never_tests_on_what_it_trained_on() -> None:
    corpus = tiny.standard_library()
    held_back = {*corpus.test, corpus.long}
    assert not held_back & set(corpus.train)
    assert len(corpus.test) >= 4
    assert corpus.long.stat().st_size >= 50_000
    assert min(path.stat().st_size for path in corpus.test) >= 16 * tiny.TRAINING_LENGTH
    assert not [path for path in corpus.train if "site-packages" in path.parts]


def test_the_demo_trains_evaluates_streams_and_generates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [tmp_path / f"{index}.py" for index in range(4)]
    for index, file in enumerate(files):
        file.write_text(f"value_{index} = {index}\n" * 100)
    corpus = tiny.Corpus(train=files[:2], test=[files[2]], long=files[3])
    monkeypatch.setattr(demo, "standard_library", lambda: corpus)
    monkeypatch.setattr(demo, "LENGTHS", (32, 256))
    monkeypatch.setattr("evaluate.config.HF_MODULES_CACHE", tmp_path / "modules")
    folder, printed = tmp_path / "output", io.StringIO()
    for _ in range(2):  # a second run replaces the first
        result = demo.run(folder, steps=2, generate=20, console=Console(file=printed, width=120))
    assert {path.name for path in folder.iterdir()} == {"xpos", "rope", "results.json", "perplexity.png"}
    assert set(result.perplexity) == {"xPos", "xPos + BCA", "RoPE", "RoPE + BCA"}
    assert all(list(curve) == [32, 256] for curve in result.perplexity.values())
    # Within the training length a pattern changes nothing; beyond it, it does.
    for system in ("xPos", "RoPE"):
        full, blockwise = result.perplexity[system], result.perplexity[f"{system} + BCA"]
        assert full[32] == pytest.approx(blockwise[32], rel=1e-5)
        assert full[256] != pytest.approx(blockwise[256], rel=1e-5)
    sizes = {*result.cache_bytes.values(), result.generation_cache_bytes}
    assert sizes == {2 * 4 * 128 * 96 * 4}
    assert json.loads((folder / "results.json").read_text())["stream_tokens"] == result.stream_tokens == 1200
    assert (folder / "perplexity.png").read_bytes().startswith(b"\x89PNG")
    assert isinstance(AutoModelForCausalLM.from_pretrained(folder / "rope"), LexForCausalLM)
    assert "it did not grow" in printed.getvalue()


def test_models_of_other_trainings_are_left_alone(tmp_path: Path) -> None:
    for name in ("xpos", "rope"):  # as lex-hf train --output runs/xpos leaves them
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text("hours of work")
    for content in (None, "[1, 2]", '{"accuracy": 1}', "no JSON"):
        if content is not None:
            (tmp_path / "results.json").write_text(content)
        with pytest.raises(ValueError, match="is not an earlier demo's"):
            demo.run(tmp_path)
    assert (tmp_path / "rope" / "model.safetensors").read_text() == "hours of work"


def test_a_demo_that_was_stopped_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(folder: Path, *_: object) -> None:
        (folder / "xpos").mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "_train_all", stop)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            demo.run(tmp_path / "output")


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"steps": 10**20}, {"generate": 0}, {"generate": 10**20}])
def test_numbers_out_of_range_fail_before_anything_is_removed(wrong: dict[str, int], tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text("{}")
    with pytest.raises(ValueError, match="it must be from 1 to 1000000000"):
        demo.run(tmp_path, **wrong)
    assert (tmp_path / "results.json").is_file()


def test_a_folder_with_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(ValueError, match="is not an earlier demo's"):
        demo.run(tmp_path)
    assert (tmp_path / "thesis.tex").read_text() == "precious"
