"""To the Hub and back over HTTP: pushing, and loading with and without lex_hf.

The Hub is the server in hub_server.py.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers.files import contents
from helpers.hub_folders import CARD, CODE, LOAD, REPO, TEXT, byte_model, environment, python, write
from helpers.hub_server import HubServer
from helpers.models import random_ids
from helpers.processes import WITHOUT_LEX_HF
from safetensors.torch import save_file

from lex_hf.hub.push import files_to_push, push_folder
from lex_hf.model.modeling_lex import AUTO_MAP

# huggingface_hub uploads large files with a parameter that its HTTP library no longer likes.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload raw bytes:DeprecationWarning")


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
