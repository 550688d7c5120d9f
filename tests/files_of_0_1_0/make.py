"""Write the files of this folder with lex-hf 0.1.0; see README.md for the command."""

import json
import os
import shutil
import tempfile
from pathlib import Path

import torch
from lex_hf.cache_files import FORMAT
from safetensors.torch import save_file
from typer.testing import CliRunner

from lex_hf import LexConfig, LexForCausalLM, save_cache
from lex_hf.cli import app

HERE = Path(__file__).parent
SIZES = {
    "vocab_size": 97,
    "hidden_size": 30,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 44,
    "training_length": 14,
    "xpos_scale_base": 7,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
RECIPE = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "training_length": 16,
    "per_device_train_batch_size": 2,
    "examples_per_step": 2,
    "max_steps": 4,
    "save_steps": 2,
    "logging_steps": 1,
    "warmup_steps": 0,
}
ABOUT = {
    "name": "lex-of-0-1-0",
    "repo_id": "someone/lex-of-0-1-0",
    "summary": "A model of a test.",
    "license": "apache-2.0",
    "language": ["en"],
    "data": ["A sentence, many times (Apache-2.0)"],
    "test_data": {"lines": "the same sentence (Apache-2.0)"},
    "limits": ["anything"],
    "hardware": "a test machine",
    "command": "lex-hf train tiny",
    "prompts": ["The quick"],
    "datasets": ["someone/lines"],
}


def lex(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def without_code(folder: Path) -> None:
    """Remove what save_pretrained adds for those who do not have lex_hf: 150 kB of 0.1.0's own code."""
    for path in folder.rglob("*_lex.py"):
        path.unlink()


def model_and_cache(folder: Path) -> None:
    torch.manual_seed(0)
    model = LexForCausalLM(LexConfig(**SIZES)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(mean=float("norm.weight" in name), std=0.1 if parameter.dim() == 1 else 0.4)
        ids = torch.randint(1, 97, (2, 40))
        outputs = model(ids, use_cache=True)
    model.save_pretrained(folder / "model")
    without_code(folder / "model")
    save_file({"input_ids": ids, "logits": outputs.logits}, folder / "logits.safetensors")
    save_cache(outputs.past_key_values, model, folder / "cache.safetensors")


def training_and_records(folder: Path) -> None:
    """A training that was stopped after 2 of 4 steps, what it would have come to, and measurements."""
    texts = [folder / f"text-{number}.txt" for number in range(3)]
    for number, path in enumerate(texts):
        path.write_text(f"The quick brown fox number {number} jumps over the lazy dog. " * 40)
    settings = [argument for name, value in RECIPE.items() for argument in ("--set", f"{name}={value}")]
    lex("train", "tiny", texts[0], "--output", "training", *settings)
    without_code(Path("training"))
    about = folder / "about.yaml"
    about.write_text(json.dumps(ABOUT))
    test = [argument for path in texts[1:] for argument in ("--test", f"lines={path}")]
    lex("card", "training", "--about", about, *test, "--length", 32, "--length", 64)
    about.unlink()
    (folder / "card").mkdir()
    for name in ("record.json", "README.md"):
        shutil.move(Path("training", name), folder / "card" / name)
    records, checkpoint = folder / "records.jsonl", Path("training/checkpoint-2")
    measured = lex("evaluate", checkpoint, *texts, "--length", 32, "--records", records, "--json")
    (folder / "perplexity.json").write_text(measured)
    records.write_bytes(records.read_bytes()[:1000])  # as a kill while the third text was written leaves it
    # Nothing reads training_args.bin, a pickle of a class.
    shutil.copytree(checkpoint, folder / "training/checkpoint-2", ignore=shutil.ignore_patterns("training_args.bin"))
    shutil.copy("training/recipe.yaml", folder / "training")
    shutil.copy("training/model.safetensors", folder / "trained.safetensors")


if __name__ == "__main__":
    assert FORMAT == "lex_hf cache 1", "this is not lex-hf 0.1.0: set PYTHONPATH to its sources"
    with tempfile.TemporaryDirectory() as work:
        os.chdir(work)
        for old in (path for path in HERE.iterdir() if path.name not in ("README.md", "make.py")):
            shutil.rmtree(old) if old.is_dir() else old.unlink()
        model_and_cache(HERE)
        training_and_records(HERE)
