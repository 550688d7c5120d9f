"""Folders of saved models that are pushed to the stand-in for the Hub, and processes that push and load."""

import os
import subprocess
import textwrap
from pathlib import Path
from typing import Any

import lex_hf
from helpers.forks import LIBRARIES
from helpers.hub_server import HubServer
from helpers.models import tiny_model
from lex_hf.data.tokenizers import byte_tokenizer

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


def environment(hub: HubServer, home: Path, token: str | None = None) -> dict[str, str]:
    """The environment of a user with an empty cache, for whom the server is the Hub."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    own |= {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HOME": str(home)}
    own["NO_PROXY"] = "127.0.0.1"
    return own | ({} if token is None else {"HF_TOKEN": token})


def python(code: str, env: dict[str, str], *options: str) -> subprocess.CompletedProcess[str]:
    return LIBRARIES.run(*options, "-c", textwrap.dedent(code), env=env)


def push_command(env: dict[str, str], *arguments: object) -> subprocess.CompletedProcess[str]:
    return LIBRARIES.run("-m", "lex_hf", "push", *arguments, env=env)


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


def shard(folder: Path) -> None:
    byte_model().save_pretrained(folder, max_shard_size="20KB")
    (folder / "model.safetensors").unlink()


def link_out(folder: Path, name: str) -> Path:
    """Move a file out of the folder, and put a link in its place."""
    target = folder.parent / f"outside-{name}"
    (folder / name).rename(target)
    (folder / name).symlink_to(target)
    return target
