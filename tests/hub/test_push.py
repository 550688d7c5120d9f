"""Pushes: one commit each, what they replace, branches and pull requests, and the command."""

import json
from pathlib import Path

import pytest
from helpers.files import contents
from helpers.hub_folders import CARD, LATER, REPO, environment, push_command, save_model, shard, write
from helpers.hub_server import HubServer
from huggingface_hub.errors import HfHubHTTPError
from safetensors.torch import load
from typer.testing import CliRunner

from lex_hf.cli.commands import app
from lex_hf.hub.push import push_folder

# huggingface_hub uploads large files with a parameter that its HTTP library no longer likes.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload raw bytes:DeprecationWarning")


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
