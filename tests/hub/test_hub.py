"""To the Hub and back over HTTP: pushing, loading with and without lex_hf, broken connections, refusals.

The Hub is the server in hub_server.py.
"""

import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.hub_server import HubServer
from helpers.models import random_ids, tiny_model
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HTTPError
from huggingface_hub.utils import set_client_factory
from huggingface_hub.utils._http import default_client_factory
from safetensors.torch import load, save_file
from typer.testing import CliRunner

import lex_hf
from lex_hf.cli.app import app
from lex_hf.data.tokenizers import byte_tokenizer
from lex_hf.hub.push import TIMEOUT, FolderFile, examine_folder, files_to_push, plain_errors, push_folder
from lex_hf.model.modeling_lex import AUTO_MAP

# huggingface_hub uploads large files with a parameter that its HTTP library no longer likes.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload raw bytes:DeprecationWarning")

REPO = "user/tiny-lex"
CARD = "---\nlicense: apache-2.0\nlibrary_name: transformers\n---\n# A tiny LEX\n\n![Lengths](pictures/lengths.png)\n"
CODE = {path.name for path in (Path(lex_hf.__file__).parent / "model").glob("*_lex.py")}
TEXT = "def né(x):"
LATER = ("checkpoint-20/model.safetensors", "checkpoint-20/optimizer.pt", "runs/a/events.out.tfevents.1")


def byte_model(**fields: Any) -> lex_hf.LexForCausalLM:
    return tiny_model(**{"vocab_size": 257, "bos_token_id": 256, "eos_token_id": 256, "pad_token_id": 256} | fields)


def save_model(folder: Path, **fields: Any) -> Path:
    """A model with tokenizer, card and picture."""
    byte_model(**fields).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    (folder / "README.md").write_text(CARD)
    write(folder / "pictures/lengths.png", b"\x89PNG lengths")
    return folder


def write(path: Path, content: bytes = b"x") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_model(tmp_path / "model")


def environment(hub: HubServer, home: Path, token: str | None = None) -> dict[str, str]:
    """The environment of a user with an empty cache, for whom the server is the Hub."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    own |= {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HOME": str(home)}
    own["NO_PROXY"] = "127.0.0.1"
    return own | ({} if token is None else {"HF_TOKEN": token})


def python(code: str, env: dict[str, str], *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *options, "-c", textwrap.dedent(code)]
    return subprocess.run(command, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL)


def push_command(env: dict[str, str], *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lex_hf", "push", *map(str, arguments)]
    return subprocess.run(command, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[HubServer, Path]]:
    """What push_to_hub of a model, its tokenizer and its card leaves; and a file with what the model says."""
    work = tmp_path_factory.mktemp("published")
    model, ids = byte_model(), random_ids(2, 40, vocab_size=257)
    model.save_pretrained(work / "model")
    with torch.no_grad():
        expected = {"ids": ids, "logits": model(ids).logits}
    expected["tokens"] = model.generate(ids[:, :9], max_new_tokens=30, do_sample=False)
    save_file(expected, work / "expected.safetensors")
    code = f"""
    from huggingface_hub import ModelCard
    from lex_hf import LexForCausalLM
    from lex_hf.data.tokenizers import byte_tokenizer
    LexForCausalLM.from_pretrained({str(work / "model")!r}).push_to_hub({REPO!r})
    byte_tokenizer().push_to_hub({REPO!r})
    ModelCard({CARD!r}).push_to_hub({REPO!r})
    """
    with HubServer() as server:
        result = python(code, environment(server, work / "home", server.token))
        assert result.returncode == 0, result.stderr
        yield server, work / "expected.safetensors"


def test_push_to_hub_sends_all_that_loading_needs(published: tuple[HubServer, Path]) -> None:
    server, _ = published
    files = server.files(REPO)
    assert {name for name in files if name.endswith(".py")} == CODE
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= files.keys()
    assert json.loads(files["config.json"])["auto_map"] == AUTO_MAP
    assert "LexForCausalLM" in json.loads(files["config.json"])["architectures"]
    assert files["README.md"].decode() == CARD
    assert server.count("POST", "/info/lfs/objects/batch") == server.count("PUT", "/objects/") == 1
    assert list(server.objects.values()) == [files["model.safetensors"]]
    messages = [commit.message for commit in server.repositories[REPO].commits]
    assert messages[:3] == ["initial commit", "Upload LexForCausalLM", "Upload tokenizer"]
    assert len(messages) == 4


LOAD = """
import os
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
assert not os.path.exists(os.environ["HF_HOME"]), "the cache is not empty"
model = AutoModelForCausalLM.from_pretrained({repo!r}, **{options})
tokenizer = AutoTokenizer.from_pretrained({repo!r}, **{options})
expected = load_file({expected!r})
with torch.no_grad():
    assert torch.equal(model(expected["ids"]).logits, expected["logits"])
assert torch.equal(model.generate(expected["ids"][:, :9], max_new_tokens=30, do_sample=False), expected["tokens"])
assert tokenizer({text!r})["input_ids"] == list({text!r}.encode()), tokenizer({text!r})
print(type(model).__module__)
"""


WITHOUT_LEX_HF = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "lex_hf":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
"""


def downloads(server: HubServer, before: int) -> set[str]:
    """Names of the files that were fetched since a number of requests."""
    return {path.rsplit("/", 1)[1] for verb, path in server.requests[before:] if verb == "GET" and "/resolve/" in path}


def test_loading_by_name_where_lex_hf_is_installed(published: tuple[HubServer, Path], tmp_path: Path) -> None:
    server, expected = published
    before = len(server.requests)
    code = LOAD.format(repo=REPO, options={}, expected=str(expected), text=TEXT)
    result = python(f"import lex_hf\n{code}", environment(server, tmp_path / "home"))
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "lex_hf.model.modeling_lex"
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= downloads(server, before)
    assert not downloads(server, before) & CODE  # the package's own code runs


def test_loading_by_name_where_lex_hf_is_not_installed(published: tuple[HubServer, Path], tmp_path: Path) -> None:
    server, expected = published
    before = len(server.requests)
    code = LOAD.format(repo=REPO, options={"trust_remote_code": True}, expected=str(expected), text=TEXT)
    # A tokenizer needs no code, and no trust.
    code += f"assert AutoTokenizer.from_pretrained({REPO!r}, trust_remote_code=False)('a')['input_ids'] == [97]\n"
    result = python(WITHOUT_LEX_HF + code, environment(server, tmp_path / "home"), "-I")
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip().startswith("transformers_modules.")
    assert downloads(server, before) >= {"config.json", "model.safetensors", "tokenizer.json"} | CODE


def test_the_command_pushes_a_folder_in_one_commit(hub: HubServer, folder: Path, tmp_path: Path) -> None:
    expected = contents(folder)
    for name in LATER:
        write(folder / name)
    arguments = [folder, REPO, "--private", "--message", "First words", "--json"]
    result = push_command(environment(hub, tmp_path / "home", hub.token), *arguments)
    assert result.returncode == 0, result.stderr
    assert hub.files(REPO) == expected
    repository = hub.repositories[REPO]
    assert repository.private
    assert [commit.message for commit in repository.commits] == ["initial commit", "First words"]
    sha = repository.commits[-1].sha
    assert json.loads(result.stdout) == {"commit": sha, "url": f"{hub.url}/{REPO}/commit/{sha}"}


def test_code_is_added_where_the_folder_has_none(online: HubServer, folder: Path, tmp_path: Path) -> None:
    code = {path.name: path.read_bytes() for path in folder.glob("*.py")}
    ids = random_ids(2, 40, vocab_size=257)
    expected = {"ids": ids, "tokens": byte_model().generate(ids[:, :9], max_new_tokens=30, do_sample=False)}
    with torch.no_grad():
        save_file(expected | {"logits": byte_model()(ids).logits}, tmp_path / "expected.safetensors")
    for name in code:
        (folder / name).unlink()
    write(folder / "other_lex.py")  # the user's own
    before = contents(folder)
    sizes = {file.path: file.size for file in files_to_push(folder) if file.what == "code, added from lex_hf"}
    assert sizes == {name: len(content) for name, content in code.items()}
    push_folder(folder, REPO)
    assert contents(folder) == before
    files = online.files(REPO)
    del before["other_lex.py"]
    assert files == before | code
    assert json.loads(files["config.json"])["auto_map"] == AUTO_MAP
    options = {"repo": REPO, "options": {"trust_remote_code": True}, "text": TEXT}
    script = WITHOUT_LEX_HF + LOAD.format(expected=str(tmp_path / "expected.safetensors"), **options)
    result = python(script, environment(online, tmp_path / "home"), "-I")
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip().startswith("transformers_modules.")


def test_code_of_another_version_is_sent_as_it_is(online: HubServer, folder: Path) -> None:
    path = folder / "modeling_lex.py"
    path.write_text(path.read_text().replace("from .loss_lex ", "from .older_lex "))
    (folder / "loss_lex.py").rename(folder / "older_lex.py")
    expected = contents(folder)
    push_folder(folder, REPO)
    assert online.files(REPO) == contents(folder) == expected


def test_the_command_names_a_wrong_token(hub: HubServer, folder: Path, tmp_path: Path) -> None:
    result = push_command(environment(hub, tmp_path / "home", "hf_wrong"), folder, REPO)
    assert result.returncode == 1
    assert " ".join(result.stderr.split()).endswith(
        "Error: The Hub does not accept the token, or there is none (401: Invalid credentials in Authorization "
        "header): log in with `hf auth login`, or set HF_TOKEN to a token with write access."
    )
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    assert hub.count("POST", "/api/repos/create") == 1
    assert not hub.repositories


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


def shard(folder: Path) -> None:
    byte_model().save_pretrained(folder, max_shard_size="20KB")
    (folder / "model.safetensors").unlink()


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


def link_out(folder: Path, name: str) -> Path:
    """Move a file out of the folder, and put a link in its place."""
    target = folder.parent / f"outside-{name}"
    (folder / name).rename(target)
    (folder / name).symlink_to(target)
    return target


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
    (lambda folder: (folder / "folding_lex.py").unlink(), "has no folding_lex.py, which loading without"),
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


CREATE, COMMIT = "/api/repos/create", f"/api/models/{REPO}/commit/main"
ASKED = [CREATE, f"/api/models/{REPO}/tree/main", f"/api/models/{REPO}/preupload/main", COMMIT]


@pytest.mark.parametrize("path", [*ASKED, f"/{REPO}.git/info/lfs/objects/batch"])
def test_a_hub_that_never_answers(online: HubServer, folder: Path, path: str) -> None:
    online.silent = {path}
    message = rf"The push to {REPO} broke off \(ReadTimeout: .*run the same command again"
    with pytest.raises(ValueError, match=message), plain_errors(REPO):
        push_folder(folder, REPO, timeout=0.2)
    online.silent = set()
    push_folder(folder, REPO)  # with the usual patience
    assert online.files(REPO) == contents(folder)


def test_patience_is_for_the_push_alone(online: HubServer, folder: Path) -> None:
    limits = []

    def note(request: Any) -> None:
        limits.append(request.extensions["timeout"]["read"])

    def own() -> Any:
        client = default_client_factory()
        client._transport = Noting(client._transport, note)
        return client

    set_client_factory(own)
    try:
        push_folder(folder, REPO)
        assert set(limits) == {TIMEOUT}
        assert len(limits) > 5
        HfApi().repo_info(REPO)
        assert limits[-1] is None
    finally:
        set_client_factory(default_client_factory)


class Noting:
    """A transport that looks at its requests."""

    def __init__(self, transport: Any, note: Callable[[Any], None]) -> None:
        self.transport, self.note = transport, note

    def handle_request(self, request: Any) -> Any:
        self.note(request)
        return self.transport.handle_request(request)

    def close(self) -> None:
        self.transport.close()


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize(
    "answer", [b"<!DOCTYPE html><h1>Log in", b"{}", b"[]", b'"\xff', b"[" * 100_000, b'"ok"', b"7"]
)
def test_what_answers_is_no_hub(online: HubServer, folder: Path, path: str, answer: bytes) -> None:
    if path.endswith("/tree/main") and answer in (b"{}", b"[]"):
        return  # an empty folder
    online.answers = {path: answer}
    result = CliRunner().invoke(app, ["push", str(folder), REPO])
    assert result.exit_code == 1, result.output
    message = (
        rf"Error: The push to {REPO} broke off: {online.url} gave an answer that a Hub does not give \(\w+: .*\)\."
    )
    assert re.search(message + " Check HF_ENDPOINT, and whether a proxy", " ".join(result.stderr.split()))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere", REPO], "nowhere is not a folder: give the folder that model.save_pretrained wrote"),
        (["tests", REPO, "--dry-run"], "tests has no config.json, so it is not the folder of a saved model"),
        (["model", "a/b/c"], "must be in the form"),
        (["model", "a/b/c", "--dry-run"], "must be in the form"),
        (["model", REPO, "--message", " "], "message = ' ': the commit needs a message"),
        (
            ["model", REPO, "--create-pr", "--branch", "x"],
            "A pull request is opened against main: leave out create_pr",
        ),
    ],
)
def test_the_command_refuses_in_a_sentence(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tests").mkdir()
    result = CliRunner().invoke(app, ["push", *arguments])
    assert result.exit_code == 1
    assert message in " ".join(result.stderr.split())
    assert "Traceback" not in result.output


def test_an_upload_that_breaks_leaves_nothing(online: HubServer, tmp_path: Path) -> None:
    # Weights that no buffer of a socket takes as a whole.
    folder = save_model(tmp_path / "model", vocab_size=80_000)
    (folder / "pictures/lengths.png").unlink()
    assert (folder / "model.safetensors").stat().st_size > 15_000_000
    online.cuts["lfs"] = 1000
    with pytest.raises(RuntimeError, match=r"Error while uploading 'model\.safetensors'") as caught:
        push_folder(folder, REPO)
    assert isinstance(caught.value.__cause__, HTTPError)
    repository = online.repositories[REPO]
    assert online.count("PUT", "/objects/") > 1  # it was tried again
    assert online.count("POST", "/commit/") == 0
    assert [commit.message for commit in repository.commits] == ["initial commit"]
    assert not online.files(REPO)
    assert not online.objects
    online.cuts["lfs"] = 0
    push_folder(folder, REPO)
    assert online.files(REPO) == contents(folder)
    assert len(repository.commits) == 2


def test_an_upload_that_breaks_once_is_tried_again(online: HubServer, folder: Path) -> None:
    online.cuts["lfs"] = 1
    push_folder(folder, REPO)
    assert online.count("PUT", "/objects/") == 3  # the weights twice, the picture once
    assert online.files(REPO) == contents(folder)


def test_a_commit_that_breaks_leaves_nothing(online: HubServer, folder: Path) -> None:
    online.cuts["commit"] = 1
    with pytest.raises(HTTPError):
        push_folder(folder, REPO)
    repository = online.repositories[REPO]
    assert [commit.message for commit in repository.commits] == ["initial commit"]
    assert not online.files(REPO)
    assert online.objects  # what was uploaded belongs to no repository, and is not uploaded again
    push_folder(folder, REPO)
    assert online.files(REPO) == contents(folder)
    assert online.count("PUT", "/objects/") == 2


@pytest.mark.parametrize("kind", ["lfs", "commit"])
def test_the_command_tells_of_a_broken_connection(online: HubServer, folder: Path, kind: str) -> None:
    online.cuts[kind] = 1000
    result = CliRunner().invoke(app, ["push", str(folder), REPO])
    assert result.exit_code == 1
    message = " ".join(result.stderr.split())
    assert re.search(rf"Error: The push to {REPO} broke off \((RemoteProtocol|Read|Write)Error: .+\)\. ", message)
    assert "The Hub takes a push whole or not at all: run the same command again." in message
    assert "Traceback" not in result.output


def test_a_wrong_token_is_the_error_of_huggingface_hub(online: HubServer, folder: Path) -> None:
    with pytest.raises(HfHubHTTPError, match="Invalid credentials in Authorization header") as caught:
        push_folder(folder, REPO, token="hf_wrong")
    assert caught.value.response.status_code == 401
    assert not online.repositories
    push_folder(folder, REPO, token=online.token)
    assert online.files(REPO) == contents(folder)


def test_the_command_tells_what_the_hub_refused(
    online: HubServer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    online.refusals["/api/repos/create"] = 403
    result = CliRunner().invoke(app, ["push", str(folder), REPO])
    assert result.exit_code == 1
    assert f"The token may not write to {REPO} (403: refused)" in " ".join(result.stderr.split())
    online.refusals = {f"/api/models/{REPO}/commit/main": 413}
    result = CliRunner().invoke(app, ["push", str(folder), REPO])
    assert result.exit_code == 1
    message = f"The Hub refused the push to {REPO} (413: refused); nothing was published."
    assert message in " ".join(result.stderr.split())


def test_a_push_that_changes_nothing_makes_no_commit(online: HubServer, folder: Path) -> None:
    first = push_folder(folder, REPO)
    again = push_folder(folder, REPO)
    assert again.oid == first.oid
    assert len(online.repositories[REPO].commits) == 2


def test_new_weights_replace_those_that_would_be_loaded_in_their_place(online: HubServer, folder: Path) -> None:
    push_folder(folder, REPO)
    whole = online.files(REPO)["model.safetensors"]
    shard(folder)
    push_folder(folder, REPO, message="Shards")
    files = online.files(REPO)
    assert files == contents(folder)
    assert "model.safetensors" not in files
    shards = [load(files[name]) for name in files if name.endswith(".safetensors")]
    assert len(shards) > 2
    assert {name for tensors in shards for name in tensors} == load(whole).keys()
    save_model(folder)
    push_folder(folder, REPO)
    assert [name for name in online.files(REPO) if "safetensors" in name] == ["model.safetensors"]
    assert len(online.repositories[REPO].commits) == 4


def test_other_files_of_a_repository_stay(online: HubServer, folder: Path) -> None:
    push_folder(folder, REPO)
    repository = online.repositories[REPO]
    others = {"adapter_model.safetensors": b"1", "extra/model.safetensors": b"2", "notes.txt": b"3"}
    repository.commit("main", "By hand", repository.revision("main").files | others)
    write(folder / "LICENSE", b"Apache-2.0")
    push_folder(folder, REPO)
    assert online.files(REPO) == contents(folder) | others


def test_branches_and_pull_requests(online: HubServer, folder: Path) -> None:
    push_folder(folder, REPO, revision="longer/texts")
    assert online.files(REPO, "longer/texts") == contents(folder)
    assert not online.files(REPO)
    write(folder / "README.md", f"{CARD}More.\n".encode())
    proposed = push_folder(folder, REPO, create_pr=True)
    assert proposed.pr_url == f"{online.url}/{REPO}/discussions/1"
    assert online.files(REPO, "refs/pr/1") == contents(folder)
    assert not online.files(REPO)
    write(folder / "README.md", f"{CARD}Still more.\n".encode())
    push_folder(folder, REPO, revision="refs/pr/1")
    assert online.files(REPO, "refs/pr/1") == contents(folder)


def test_private_is_never_ignored(online: HubServer, folder: Path) -> None:
    push_folder(folder, "user/secret", private=True)
    assert online.repositories["user/secret"].private
    push_folder(folder, REPO)
    assert not online.repositories[REPO].private
    write(folder / "LICENSE", b"Apache-2.0")
    with pytest.raises(ValueError, match=f"{REPO} is there already, and public: make it private"):
        push_folder(folder, REPO, private=True)
    assert "LICENSE" not in online.files(REPO)
    push_folder(folder, "user/secret", private=True)
    assert "LICENSE" in online.files("user/secret")
