"""Broken and silent connections in the middle of a push, and servers that are no Hub."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.files import contents
from helpers.hub_folders import REPO, save_model
from helpers.hub_server import HubServer
from huggingface_hub import HfApi
from huggingface_hub.errors import HTTPError
from huggingface_hub.utils import set_client_factory
from huggingface_hub.utils._http import default_client_factory
from typer.testing import CliRunner

from lex_hf.cli.commands import app
from lex_hf.hub.push import TIMEOUT, plain_errors, push_folder

# huggingface_hub uploads large files with a parameter that its HTTP library no longer likes.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload raw bytes:DeprecationWarning")

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
