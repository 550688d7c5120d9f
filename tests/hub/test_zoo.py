"""The checkpoints that come with the repository: what a user gets who loads one, and what the Hub would hold."""

import json
import os
from pathlib import Path

import pytest
import torch
from helpers.forks import LIBRARIES, PACKAGE
from helpers.hub_server import HubServer
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

from lex_hf.evaluation.perplexity import compute_perplexity
from lex_hf.hub.push import check_push, examine_folder, push_folder

ROOT = Path(__file__).parents[2]
ZOO = sorted(path.parent for path in ROOT.glob("model_cards/*/config.json"))
MIB = 2**20

pytestmark = [
    pytest.mark.parametrize("folder", ZOO, ids=lambda path: path.name),
    # huggingface_hub uploads large files with a parameter that its HTTP library no longer likes.
    pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload raw bytes:DeprecationWarning"),
]


def test_sizes(folder: Path) -> None:
    assert max(path.stat().st_size for path in folder.iterdir()) <= 15 * MIB
    assert sum(path.stat().st_size for each in ZOO for path in each.iterdir()) <= 45 * MIB
    weights = [path.name for path in folder.iterdir() if path.suffix in (".safetensors", ".bin", ".pt")]
    assert weights == ["model.safetensors"]


def test_everything_in_the_folder_goes_to_the_hub(folder: Path) -> None:
    record = json.loads((folder / "record.json").read_text())
    check_push(folder, record["about"]["repo_id"])
    assert all(file.sent for file in examine_folder(folder)), examine_folder(folder)


def test_it_holds_no_code(folder: Path) -> None:
    """The code is in the package, once; a push adds it."""
    assert [path.name for path in folder.rglob("*.py")] == []
    assert {file.what for file in examine_folder(folder) if file.path.endswith(".py")} == {"code, added from lex_hf"}


def test_its_perplexity_falls_at_every_length_on_record(folder: Path) -> None:
    record = json.loads((folder / "record.json").read_text())
    curve = {int(length): found["perplexity"] for length, found in record["evaluation"]["books"].items()}
    values = [curve[length] for length in sorted(curve)]
    assert max(curve) >= 16 * record["model"]["training_length"]
    assert values == sorted(values, reverse=True)
    assert len(set(values)) == len(values)


def test_it_reads_far_beyond_its_training_length(folder: Path) -> None:
    """On prose that is here: the project's own documents."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    texts = [(ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "LICENSE")]
    lengths = (64, 256, 1024)
    found = [
        compute_perplexity(model, tokenizer, texts, length=length, progress=False).perplexity for length in lengths
    ]
    assert found == sorted(found, reverse=True)
    assert found[1] < model.config.vocab_size / 4


def test_it_writes_words(folder: Path) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    set_seed(0)
    prompt = tokenizer("It was a dark evening in November, and the old man", return_tensors="pt")
    beyond = 2 * model.config.training_length
    tokens = model.generate(**prompt, do_sample=True, temperature=0.7, min_new_tokens=beyond, max_new_tokens=beyond)
    words = tokenizer.decode(tokens[0, -200:]).lower().split()
    common = {"the", "of", "and", "to", "a", "in", "that", "it", "was", "he", "i", "his", "had", "with", "you", "for"}
    assert sum(word.strip('.,;"') in common for word in words) > len(words) / 6


def test_it_loads_with_lex_hf_without_a_question(folder: Path) -> None:
    """Though its configuration names code that is not beside it: the package's own is used, and nobody is asked."""
    code = f"""
import lex_hf
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained({str(folder)!r})
AutoTokenizer.from_pretrained({str(folder)!r})
assert type(model) is lex_hf.LexForCausalLM
"""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = PACKAGE.run("-c", code, env=environment)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert "trust_remote_code" not in done.stderr


def test_what_goes_to_the_hub_loads_without_lex_hf(folder: Path, online: HubServer, tmp_path: Path) -> None:
    push_folder(folder, "user/model")
    for name, content in online.files("user/model").items():
        (tmp_path / "hub").mkdir(exist_ok=True)
        (tmp_path / "hub" / name).write_bytes(content)
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.arange(100, 400)[None]
    with torch.no_grad():
        torch.save(model(ids).logits[0, -1], tmp_path / "logits.pt")
    code = """
import sys
assert not {"lex_hf", "transformers", "huggingface_hub"}.intersection(sys.modules)
sys.modules["lex_hf"] = None
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained("hub", trust_remote_code=True)
AutoTokenizer.from_pretrained("hub", trust_remote_code=True)
with torch.no_grad():
    logits = model(torch.arange(100, 400)[None]).logits[0, -1]
torch.testing.assert_close(logits, torch.load("logits.pt", weights_only=True))
"""
    environment = {"PATH": "", "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    done = LIBRARIES.run("-c", code, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
