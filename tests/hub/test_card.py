"""Model cards: measured once, rendered from the record, and never typed."""

import json
import math
import shutil
from pathlib import Path

import pytest
import yaml
from datasets import Dataset
from helpers.models import tiny_model
from huggingface_hub import ModelCard
from typer.testing import CliRunner

from lex_hf.cli.commands import app
from lex_hf.data.tokenizers import byte_tokenizer
from lex_hf.evaluation.perplexity import compute_perplexity, load_for_evaluation
from lex_hf.hub import card
from lex_hf.training.arguments import training_arguments
from lex_hf.training.trainer import train

ROOT = Path(__file__).parents[2]
ABOUT = {
    "name": "lex-test",
    "repo_id": "someone/lex-test",
    "summary": "A model of a test.",
    "license": "apache-2.0",
    "language": ["en"],
    "data": ["Lines that count (Apache-2.0)"],
    "test_data": {"lines": "lines that count further (Apache-2.0)"},
    "limits": ["anything"],
    "hardware": "a test machine",
    "command": "lex-hf train ...",
    "prompts": ["line 1"],
    "datasets": ["someone/lines"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("card") / "model"
    rows = [list(f"line {index:03d} of the text\n".encode()) * 7 for index in range(32)]
    examples = Dataset.from_dict({"input_ids": [row[:128] for row in rows]})
    arguments = training_arguments(folder, max_steps=4, per_device_train_batch_size=8, save_steps=2, logging_steps=1)
    train(
        tiny_model(vocab_size=257, training_length=128, bos_token_id=256, eos_token_id=256, pad_token_id=256),
        byte_tokenizer(),
        examples,
        arguments,
    )
    for index in range(3):
        (folder.parent / f"{index}.txt").write_text("".join(f"line {n:03d} of the text\n" for n in range(50 + index)))
    (folder.parent / "about.yaml").write_text(yaml.safe_dump(ABOUT))
    return folder


def test_the_command_measures_and_renders(folder: Path) -> None:
    about = folder.parent / "about.yaml"
    texts = [str(folder.parent / f"{index}.txt") for index in range(3)]
    command = ["card", str(folder), "--about", str(about), "--length", "64", "--length", "256"]
    result = CliRunner().invoke(app, [*command, *(part for text in texts for part in ("--test", f"lines={text}"))])
    assert result.exit_code == 0, result.output
    record = json.loads((folder / "record.json").read_text())
    model, tokenizer = load_for_evaluation(str(folder), device="cpu")
    expected = compute_perplexity(model, tokenizer, [Path(text).read_text() for text in texts], length=256)
    assert record["evaluation"]["lines"]["256"]["perplexity"] == pytest.approx(expected.perplexity, rel=1e-6)
    assert record["training"]["steps"] == 4
    assert record["training"]["tokens"] == 4 * 8 * 128
    assert len(record["training"]["losses"]) == 4
    text = (folder / "README.md").read_text()
    for figure in (f"{expected.perplexity:.2f} (", f"{expected.bits_per_byte:.3f}", "| 4 | ", "> **line 1**"):
        assert figure in text
    assert (folder / "perplexity.png").read_bytes().startswith(b"\x89PNG")

    data = ModelCard.load(folder / "README.md").data
    assert data.library_name == "transformers"
    assert data.license == "apache-2.0"
    assert data.datasets == ["someone/lines"]
    assert {result.metric_name for result in data.eval_results} == {
        "Perplexity at 64 tokens",
        "Perplexity at 256 tokens",
    }

    assert CliRunner().invoke(app, ["card", str(folder)]).exit_code == 0  # its own card may be replaced
    assert (folder / "README.md").read_text() == text


def test_layers_that_differ_are_counted(folder: Path) -> None:
    patterns = ["blockwise", "blockwise", "full"]
    model = tiny_model(
        num_hidden_layers=3, attention_pattern=patterns, position_embedding_type=["xpos", "xpos", "none"]
    )
    record = json.loads((folder / "record.json").read_text())
    text = card.render(record | {"model": card._describe(model)})
    assert "positions by `xpos (2 layers) and none (1 layer)`" in " ".join(text.split())
    assert "`blockwise (2 layers) and full (1 layer)` attention" in " ".join(text.split())
    assert "in 1 of its 3 layers the cache grows with the text" in text
    assert "never holds more than" not in text
    assert "never holds more than" in card.render(record)


def copy_of_the_card(tmp_path: Path) -> Path:
    """The card in the repository, as 0.1.0 wrote it."""
    source = ROOT / "model_cards" / "lex-books-3m"
    for name in ("README.md", "record.json"):
        shutil.copy(source / name, tmp_path / name)
    return tmp_path / "README.md"


def test_a_card_of_a_record_may_be_rendered_again(tmp_path: Path) -> None:
    readme = copy_of_the_card(tmp_path)
    text = readme.read_text()
    # Another version of a library lays out the same front matter in another way.
    _, data, body = text.split("---\n", 2)
    readme.write_text(f"---\n{yaml.safe_dump(yaml.safe_load(data), default_flow_style=True)}---\n{body}")
    assert readme.read_text() != text
    assert card.write_card(tmp_path).read_text() == text


@pytest.mark.parametrize("measured", [False, True])
def test_what_was_written_by_hand_is_kept(measured: bool, folder: Path, tmp_path: Path) -> None:
    readme = copy_of_the_card(tmp_path)
    edited = readme.read_text().replace("Licence of the weights", "My own words. Licence of the weights")
    texts = [
        "--about",
        str(folder.parent / "about.yaml"),
        "--test",
        f"lines={folder.parent / '0.txt'}",
        "--length",
        "8",
    ]
    record = (tmp_path / "record.json").read_bytes()
    for content in (edited, "typed by hand", ""):
        readme.write_text(content)
        result = CliRunner().invoke(app, ["card", str(tmp_path), *(texts if measured else [])])
        assert (result.exit_code, "was written or changed by hand" in result.stderr) == (1, True)
        assert readme.read_text() == content
        assert (tmp_path / "record.json").read_bytes() == record
    assert CliRunner().invoke(app, ["card", str(tmp_path), "--overwrite"]).exit_code == 0
    assert readme.read_text() == card.render(json.loads(record))


def test_perplexities_that_are_not_finite_are_said_and_rendered_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = shutil.copytree(folder, tmp_path / "model")
    infinite = {"perplexity": math.inf, "low": 1.0, "high": math.inf, "bits_per_byte": 9.5, "tokens": 3, "texts": 2}
    monkeypatch.setattr(card, "_evaluate", lambda *_: {"64": {**infinite, "perplexity": 2.0}, "128": infinite})
    about = card.About(**{**ABOUT, "prompts": []})
    card.measure(copied, about, {"lines": [str(folder.parent / "0.txt")]}, [64, 128], overwrite=True)
    text = (copied / "README.md").read_text()
    assert "| 2.00 (1.0 to not finite) | not finite (1.0 to not finite) | 9.500 |" in text
    assert "does not fall from 64 to 128" in text
    assert card.write_card(copied).read_text() == text


@pytest.mark.parametrize("content", ["[]", "{}", '{"about": 1}', '{"about":', "null", '"text"'])
def test_records_that_are_none_give_a_sentence(content: str, tmp_path: Path) -> None:
    (tmp_path / "record.json").write_text(content)
    with pytest.raises(ValueError, match=r"record.json is (not a record|not JSON)"):
        card.write_card(tmp_path)


def test_what_the_card_says_of_a_curve_is_what_the_curve_does() -> None:
    def record(values: list[float]) -> dict[str, object]:
        curve = {str(64 * 2**i): {"perplexity": value} for i, value in enumerate(values)}
        return {"model": {"training_length": 64}, "evaluation": {"books": curve}}

    assert card._verdicts(record([9, 8, 7])) == [
        "- books: the perplexity falls at every step, up to 4 times the training length."
    ]
    assert card._verdicts(record([9, 9.5, 7])) == [
        "- books: up to 4 times the training length, the perplexity does not fall from 64 to 128 tokens."
    ]


def test_bad_input_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no record.json: measure the model first"):
        card.write_card(tmp_path)
    about = card.About(**ABOUT)
    with pytest.raises(ValueError, match=r"test_data describes \['lines'\]; the corpora are \['books'\]"):
        card.measure(folder, about, {"books": ["x"]}, [64])
    with pytest.raises(ValueError, match=r"holds no trainer_state.json"):
        card.measure(tmp_path, about, {"lines": ["x"]}, [64])
    (tmp_path / "about.yaml").write_text(yaml.safe_dump({**ABOUT, "nmae": "x"}))
    with pytest.raises(ValueError, match="nmae"):
        card.About.read(tmp_path / "about.yaml")


@pytest.mark.parametrize("record", sorted(ROOT.glob("model_cards/*/record.json")), ids=lambda path: path.parent.name)
def test_cards_in_the_repository_are_those_of_their_records(record: Path) -> None:
    assert (record.parent / "README.md").read_text() == card.render(json.loads(record.read_text()))


def test_what_was_measured_is_shown_where_the_disk_is_full(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(card, "write_text", full)
    about = card.About.read(folder.parent / "about.yaml")
    with pytest.raises(OSError, match="No space left"):
        card.measure(folder, about, {"lines": [str(folder.parent / "0.txt")]}, [64], overwrite=True)
    assert "This was measured, and could not be written:" in caplog.text
    assert "| lines | 1 |" in caplog.text
