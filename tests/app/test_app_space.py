"""The page as a Space: a folder that is whole, and files of others that stay."""

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from helpers.commands import lex as command
from helpers.core_only import PROJECT, ROOT
from helpers.models import BYTES, tiny_model
from packaging.requirements import Requirement

import lex_hf
from lex_hf.app import space
from lex_hf.app.space import GRADIO, is_ours, write_space
from lex_hf.data.tokenizers import byte_tokenizer
from lex_hf.evaluation.loading import load_for_evaluation


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny-lex"
    tiny_model(**BYTES).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def front_matter(folder: Path) -> dict[str, Any]:
    _, front, _ = (folder / "README.md").read_text(encoding="utf-8").split("---\n", 2)
    return yaml.safe_load(front)


def test_a_space_of_a_folder(model: Path, tmp_path: Path) -> None:
    result = command("space", model, tmp_path / "new" / "space", "--title", "Long: \N{OPEN BOOK} [texts]")
    assert result.exit_code == 0, result.output
    folder = tmp_path / "new" / "space"
    assert {path.name for path in folder.iterdir()} == {"app.py", "requirements.txt", "README.md", "model"}
    assert result.stdout.split() == [
        str(folder / name) for name in ("app.py", "requirements.txt", "README.md", "model")
    ]
    card = front_matter(folder)
    assert card["title"] == "Long: \N{OPEN BOOK} [texts]"
    assert (card["sdk"], card["sdk_version"], card["app_file"]) == ("gradio", GRADIO, "app.py")
    assert len(card["short_description"]) <= 60
    assert "models" not in card
    [needed] = [line for line in (folder / "requirements.txt").read_text().splitlines() if not line.startswith("#")]
    assert needed == f"lex-hf[app]=={lex_hf.__version__}"
    network, _ = load_for_evaluation(str(folder / "model"))
    original, _ = load_for_evaluation(str(model))
    for (name, one), other in zip(network.named_parameters(), original.parameters(), strict=True):
        assert one.equal(other), name


def test_what_app_py_does(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs as a Space runs it, in its folder; the server is another one here."""
    write_space(str(model), tmp_path / "space")
    calls: list[tuple[Any, Any]] = []
    stand_in = ModuleType("lex_hf.app.server")
    stand_in.serve_page = lambda *given, **options: calls.append((given, options))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "lex_hf.app.server", stand_in)
    exec(compile((tmp_path / "space" / "app.py").read_text(), "app.py", "exec"), {})
    assert calls == [(("model",), {"name": "tiny-lex"})]


def test_a_space_of_a_model_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(space.AutoConfig, "from_pretrained", lambda name: asked.append(name))
    write_space("someone/some-model", tmp_path)
    assert asked == ["someone/some-model"]
    assert {path.name for path in tmp_path.iterdir()} == {"app.py", "requirements.txt", "README.md"}
    assert front_matter(tmp_path)["models"] == ["someone/some-model"]
    assert front_matter(tmp_path)["title"] == "someone/some-model"
    assert "serve_page('someone/some-model', name='someone/some-model')" in (tmp_path / "app.py").read_text()
    write_space("someone/other", tmp_path, title="Another")  # its own files are replaced
    assert front_matter(tmp_path)["title"] == "Another"
    assert all(is_ours(content) for content in contents(tmp_path).values())


@pytest.mark.parametrize("name", ["app.py", "requirements.txt", "README.md"])
def test_files_of_others_stay(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(space.AutoConfig, "from_pretrained", lambda name: None)
    write_space("someone/some-model", tmp_path)
    changed = (tmp_path / name).read_bytes() + b"# changed\n"
    for content in (b"precious", b"", b"\xff\xfe", changed):
        (tmp_path / name).write_bytes(content)
        before = contents(tmp_path)
        result = command("space", "someone/other", tmp_path)
        assert result.exit_code == 1
        assert f"{name} was not written by lex-hf space, or was changed since: move it away" in result.stderr
        assert contents(tmp_path) == before


def test_a_model_that_is_there_stays(model: Path, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "thesis.tex").write_text("precious")
    with pytest.raises(ValueError, match="model exists and is not empty"):
        write_space(str(model), tmp_path)
    assert contents(tmp_path) == {"model/thesis.tex": b"precious"}


def test_nothing_is_half_written(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr("transformers.PreTrainedTokenizerBase.save_pretrained", fail)
    with pytest.raises(OSError, match="the disk is full"):
        write_space(str(model), tmp_path / "space")
    assert contents(tmp_path) == {}
    assert list((tmp_path / "space").iterdir()) == []


@pytest.mark.parametrize("name", ["missing/never", "not a model", ""])
def test_models_that_are_not_there(name: str, tmp_path: Path) -> None:
    result = command("space", name, tmp_path / "space")
    assert result.exit_code == 1
    assert "Error: Could not load the configuration of a model (config.json) from" in result.stderr
    assert not (tmp_path / "space").exists()


def test_an_empty_title(model: Path, tmp_path: Path) -> None:
    result = command("space", model, tmp_path / "space", "--title", " ")
    assert (result.exit_code, "title = ' ': give the Space a name" in result.stderr) == (1, True)
    assert not (tmp_path / "space").exists()


def test_the_version_of_gradio_is_one_that_is_tested() -> None:
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    assert f"\ngradio=={GRADIO}\n" in pins
    [given] = [each for each in PROJECT["optional-dependencies"]["app"] if each.startswith("gradio")]
    assert Requirement(given).specifier.contains(GRADIO)
    assert re.fullmatch(r"\d+\.\d+\.\d+", GRADIO)
