"""Files of a folder that a push sends, leaves or refuses."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.files import contents
from helpers.hub_folders import CODE, LATER, REPO, environment, link_out, push_command, shard, write
from helpers.hub_server import HubServer
from safetensors.torch import load, save_file
from typer.testing import CliRunner

from lex_hf.cli.commands import app
from lex_hf.hub.push import FolderFile, examine_folder, files_to_push, push_folder
from lex_hf.model.modeling_lex import AUTO_MAP

# huggingface_hub uploads large files with a parameter that its HTTP library no longer likes.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload raw bytes:DeprecationWarning")


def test_a_dry_run_sends_nothing(hub: HubServer, folder: Path, tmp_path: Path) -> None:
    expected = contents(folder)
    for name in LATER:
        write(folder / name, bytes(1500))
    env = environment(hub, tmp_path / "home") | {"COLUMNS": "120"}
    result = push_command(env, folder, REPO, "--dry-run")
    assert result.returncode == 0, result.stderr
    rows = [line.split() for line in result.stdout.splitlines()]
    assert [row[0] for row in rows if "yes" in row] == sorted(expected)
    assert ["pictures/lengths.png", "12", "bytes", "yes", "picture"] in rows
    assert ["checkpoint-20/", "3.0", "kB", "no", "checkpoint", "of", "a", "training", "run"] in rows
    assert ["runs/", "1.5", "kB", "no", "log", "of", "a", "training", "run"] in rows
    total = sum(map(len, expected.values()))
    assert f"{len(expected)} files, {total / 1000:.1f} kB, would be sent" in result.stdout
    assert hub.requests == []


def test_a_dry_run_prints_json(folder: Path) -> None:
    write(folder / "training_args.bin", bytes(7))
    result = CliRunner().invoke(app, ["push", str(folder), REPO, "--dry-run", "--json"])
    assert result.exit_code == 0, result.output
    files = [FolderFile(**each) for each in json.loads(result.stdout)["files"]]
    assert files == examine_folder(folder)
    assert files[-1] == FolderFile("training_args.bin", 7, sent=False, what="state of a training run")


def test_a_dry_run_tells_that_the_card_is_missing_after_the_list(folder: Path) -> None:
    (folder / "README.md").unlink()
    result = CliRunner().invoke(app, ["push", str(folder), REPO, "--dry-run"])
    assert result.exit_code == 1
    assert "model.safetensors" in result.stdout
    assert "has no model card: `lex-hf card` makes one" in " ".join(result.stderr.split())


def test_what_stays_and_why(folder: Path) -> None:
    write(folder / "additional_chat_templates/tools.jinja")
    saved = contents(folder)
    stays = {
        "checkpoint-20/": "checkpoint of a training run",
        "runs/": "log of a training run",
        "trainer_state.json": "log of a training run",
        "optimizer.pt": "state of a training run",
        "rng_state.pth": "state of a training run",
        "training_args.bin": "state of a training run",
        "pytorch_model.bin": "pickle, which can run code when it is loaded",
        "words.pkl": "pickle, which can run code when it is loaded",
        "model.safetensors.partial": "half-written",
        ".saving/": "hidden",
        ".env": "hidden",
        ".hidden.png": "hidden",
        "model-00001-of-00002.safetensors": "weights that the model does not load",
        "model.safetensors.index.json": "weights that the model does not load",
        "train.py": "code that the model does not need",
        "__pycache__/": "code that the model does not need",
        "notes.txt": "no part of a saved model",
        "books/": "no part of a saved model",
        "dangling.png": "no part of a saved model",
        "loop/": "no part of a saved model",
    }
    for name in stays:
        if name not in ("dangling.png", "loop/"):
            write(folder / name / "inside/model.safetensors" if name.endswith("/") else folder / name)
    write(folder / "checkpoint-20/config.json")
    write(folder / ".saving/README.md")
    write(folder / "runs/curve.png")
    write(folder / "books/words.model")
    (folder / "dangling.png").symlink_to(folder / "nowhere.png")
    (folder / "loop").symlink_to(folder, target_is_directory=True)
    files = examine_folder(folder)
    assert {file.path: file.what for file in files if not file.sent} == stays
    assert {file.path: file.size for file in files if file.sent} == {name: len(saved[name]) for name in saved}
    assert files_to_push(folder) == [file for file in files if file.sent]
    what = {file.path: file.what for file in files_to_push(folder)}
    assert {name for name, kind in what.items() if kind == "code"} == CODE
    assert what["model.safetensors"] == "weights"
    assert what["additional_chat_templates/tools.jinja"] == "tokenizer"
    assert what["tokenizer_config.json"] == "tokenizer"
    assert what["generation_config.json"] == "configuration"
    assert what["README.md"] == "card"


def change_config(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps(config))


def without_a_shard(folder: Path) -> None:
    shard(folder)
    sorted(folder.glob("model-*.safetensors"))[1].unlink()


def with_a_foreign_shard(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder.parent / "secret.safetensors")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../secret.safetensors"}}')


def with_a_strange_index(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text('{"weight_map": ["model.safetensors"]}')


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = folder / "model.safetensors"
    tensors = load(path.read_bytes())
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def rename(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.ln_f.weight"] = tensors.pop("model.norm.weight")


def cut_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def pickle_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


REFUSED: list[tuple[Callable[[Path], object], str]] = [
    (lambda folder: (folder / "config.json").unlink(), "has no config.json, so it is not the folder of a saved model"),
    (lambda folder: write(folder / "config.json"), "config.json is not JSON"),
    (lambda folder: write(folder / "config.json", b"[]"), "config.json holds no JSON object"),
    (lambda folder: change_config(folder, model_type="gpt2"), r"model_type = 'gpt2': only LEX models \('lex'\)"),
    (lambda folder: change_config(folder, auto_map=None), "lacks AutoConfig, AutoModel, AutoModelForCausalLM"),
    (
        lambda folder: change_config(folder, auto_map=AUTO_MAP | {"AutoModel": "a/b--modeling_lex.LexModel"}),
        "lacks AutoModel, which loading without lex_hf needs: load .* with model.save_pretrained",
    ),
    (lambda folder: (folder / "modeling_lex.py").unlink(), "has no modeling_lex.py, which loading without"),
    (lambda folder: (folder / "batch_lex.py").unlink(), "has no batch_lex.py, which loading without"),
    (lambda folder: (folder / "model.safetensors").unlink(), "has no weights as safetensors: load"),
    (pickle_weights, "has no weights as safetensors: load"),
    (cut_weights, "model.safetensors is damaged .*: save the model again"),
    (without_a_shard, "index.json names model-00002-of-.*safetensors, which is no safetensors file in the folder"),
    (
        lambda folder: change_weights(folder, rename),
        r"lacks 1 of the weights of LexForCausalLM, .*: model\.norm\.weight\. Were they renamed\? .*: model\.ln_f\.w",
    ),
    (
        lambda folder: change_weights(folder, lambda tensors: tensors.update({"model.norm.bias": torch.ones(3)})),
        r"has weights of other shapes .*: model\.norm\.bias \(3,\) instead of \(30,\)",
    ),
    (lambda folder: change_config(folder, num_hidden_layers=1), r"holds 16 weights .* model\.layers\.1"),
    (lambda folder: change_config(folder, hidden_size="wide"), "Could not load .*hidden_size"),
    (lambda folder: change_config(folder, architectures=["GPT2LMHeadModel"]), "it must name one of LexModel, LexFor"),
    (lambda folder: change_config(folder, auto_map=["AutoModel"]), "lacks AutoConfig, AutoModel"),
    (lambda folder: write(folder / "config.json", b"[" * 100_000), "config.json is not JSON"),
    (with_a_strange_index, "has no weights as safetensors"),
    (lambda folder: link_out(folder, "model.safetensors"), r"model\.safetensors is a link .*: put the file itself in"),
    (lambda folder: link_out(folder, "config.json"), r"config\.json is a link .*outside-config\.json: put the file"),
    (lambda folder: link_out(folder, "cache_lex.py"), r"cache_lex\.py is a link that leads out of the folder"),
    (lambda folder: link_out(folder, "README.md"), r"README\.md is a link that leads out of the folder"),
    (with_a_foreign_shard, "index.json names secret.safetensors, which is no safetensors file in the folder"),
    (lambda folder: (folder / "README.md").unlink(), "or write a README.md yourself; begin it with"),
    (lambda folder: write(folder / "README.md", b"# Tiny"), "README.md has no front matter: begin it with"),
    (lambda folder: write(folder / "README.md", b"---\na: [\n---\n"), "front matter of .*README.md cannot be read"),
    (lambda folder: write(folder / "README.md", b"---\n- a\n---\n"), "front matter of .*README.md cannot be read"),
]


@pytest.mark.parametrize(("spoil", "message"), REFUSED)
def test_what_is_no_whole_model_is_refused(
    online: HubServer, folder: Path, spoil: Callable[[Path], object], message: str
) -> None:
    spoil(folder)
    with pytest.raises(ValueError, match=message):
        push_folder(folder, REPO)
    assert online.requests == []


def test_links_that_lead_out_stay(online: HubServer, folder: Path) -> None:
    write(folder / "LICENSE")
    expected = contents(folder)
    write(folder.parent / "secret.png", b"secret")
    write(folder / ".env", b"secret")
    stay = {
        "LICENSE": link_out(folder, "LICENSE"),
        "tokenizer.json": link_out(folder, "tokenizer.json"),
        "pictures/secret.png": folder.parent / "secret.png",
        "hidden.png": folder / ".env",
        "passwd.svg": Path("/etc/passwd"),
    }
    for name in ("pictures/secret.png", "hidden.png", "passwd.svg"):
        (folder / name).symlink_to(stay[name])
    (folder / "again.png").symlink_to("pictures/lengths.png")
    whats = {file.path: file.what for file in examine_folder(folder) if not file.sent}
    reason = "link that leads out of the folder or to a hidden file"
    assert whats == {name: f"{reason}, {target}" for name, target in stay.items()} | {".env": "hidden"}
    push_folder(folder, REPO)
    sent = {name: content for name, content in expected.items() if name not in stay}
    assert online.files(REPO) == sent | {"again.png": b"\x89PNG lengths"}


def test_a_snapshot_in_the_cache_is_pushed(online: HubServer, folder: Path, tmp_path: Path) -> None:
    expected = contents(folder)
    snapshot, blobs = tmp_path / "cache/snapshots/0123abc", tmp_path / "cache/blobs"
    blobs.mkdir(parents=True)
    for number, name in enumerate(expected):
        (folder / name).rename(blobs / str(number))
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / name).symlink_to(blobs / str(number))
    (snapshot / "secret.png").symlink_to(tmp_path / "cache/refs")
    write(tmp_path / "cache/refs", b"secret")
    push_folder(snapshot, REPO)
    assert online.files(REPO) == expected


def test_names_that_are_not_utf_8_stay(online: HubServer, folder: Path) -> None:
    expected = contents(folder)
    write(Path(os.fsdecode(bytes(folder) + b"/caf\xe9.png")))
    assert examine_folder(folder)[-1] == FolderFile(r"caf\xe9.png", 1, sent=False, what="its name is not UTF-8")
    push_folder(folder, REPO)
    assert online.files(REPO) == expected
