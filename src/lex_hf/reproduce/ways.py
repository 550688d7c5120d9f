"""Ways to read beside each other on models that are trained here: a tiny Llama and a tiny GPT-NeoX.

Both are trained on 128 tokens at a time, the start token and 127 bytes of the sources of Python's standard library.
They read the beginnings of files that were held back, 16 times as long, in every way that needs no training. The start
token comes to draw attention wherever there is nothing else to attend to, and how much is measured, too.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from matplotlib.figure import Figure
from rich.console import Console
from torch import Tensor
from transformers import AutoConfig

from lex_hf.data.packing import pack
from lex_hf.data.tokenizers import byte_tokenizer
from lex_hf.evaluation import plots
from lex_hf.evaluation.first_tokens import attention_to_first_tokens, even_share
from lex_hf.evaluation.loading import load_for_evaluation
from lex_hf.evaluation.texts import encode
from lex_hf.evaluation.ways import WaysResult, measure_ways
from lex_hf.evaluation.writing import check_measurements, write_measurements
from lex_hf.records import read_json
from lex_hf.reproduce.models import DONE, Job
from lex_hf.reproduce.tiny import (
    EXAMPLES_PER_STEP,
    RECIPE,
    TRAINING_LENGTH,
    Corpus,
    check_seeds,
    check_steps,
    standard_library,
    train_in,
)

NAME = "ways-to-read"
KINDS = {"llama": "Llama", "gpt_neox": "GPT-NeoX"}
LONGEST = 16 * TRAINING_LENGTH
TEXTS = 8
# A first token that is the same in every example comes to draw attention with a high learning rate, weight decay, and
# twice the steps of other tiny models (arXiv 2410.10781). With a short warm-up, that rate spoils its attention.
STEPS = 3000
_LEARNING_RATE, _WEIGHT_DECAY, _WARMUP = 5e-3, 0.1, 300


@dataclass(frozen=True)
class TinyResult:
    """What was measured of a tiny model.

    Attributes:
        ways: Perplexity by position, memory and time of all ways to read.
        first_tokens: Mean attention weights of the first quarter of texts of the training length, shape
            `(layers, heads, places)`; see [`attention_to_first_tokens`].
    """

    ways: WaysResult
    first_tokens: Tensor

    def to_dict(self) -> dict[str, Any]:
        """Return the ways, with the shares of attention that the very first token draws, by layer and head."""
        return self.ways.to_dict() | {"attention_to_first_token": self.first_tokens[:, :, 0].tolist()}

    def plot_first_tokens(self) -> Figure:
        """Draw the attention that first tokens draw."""
        title = f"{self.ways.model}: attention to the first tokens of {self.ways.training_length}"
        return plots.attention_to_first_tokens(self.first_tokens, even_share(self.ways.training_length), title=title)


def run(folder: Path, *, steps: int = STEPS, seed: int = 0, console: Console) -> dict[str, TinyResult]:
    """Train what is missing, and measure all ways; leave models, numbers and pictures in a folder.

    Args:
        folder: Where to put everything; models that were trained there before are used again.
        steps: Optimiser steps of each model, of 16 examples.
        seed: Seed of weights and of the order of examples.
        console: Where to say what is being done.

    Returns:
        What was measured, by the kind of the model.

    Raises:
        KeyboardInterrupt: If training was stopped; the same call resumes it.
        ValueError: If an argument does not fit, or the folder holds models of other settings.
    """
    check_steps(steps)
    check_seeds([seed])
    for kind in KINDS:
        check_measurements(folder, *_files(kind))
        _check_model(folder / kind, steps, seed)
    corpus = standard_library()
    examples, results = examples_with_start(corpus.documents()), {}
    for kind in KINDS:
        train_model(kind, folder / kind, examples, steps=steps, seed=seed, console=console)
        results[kind] = _measure(kind, folder, corpus, steps, console)
    return results


def examples_with_start(documents: Dataset) -> Dataset:
    """Pack documents into examples of `TRAINING_LENGTH` tokens, each of which begins with the start token.

    Args:
        documents: Texts in the column `text`.
    """
    tokenizer = byte_tokenizer()

    def with_start(rows: dict[str, Any]) -> dict[str, Any]:
        return {"input_ids": np.insert(rows["input_ids"], 0, tokenizer.bos_token_id, axis=1)}

    texts_alone = pack(documents, tokenizer, TRAINING_LENGTH - 1)
    return texts_alone.with_format("numpy").map(with_start, batched=True).with_format(None)


def _measure(kind: str, folder: Path, corpus: Corpus, steps: int, console: Console) -> TinyResult:
    """Measure a model that was trained, and leave numbers and pictures."""
    model, tokenizer = load_for_evaluation(str(folder / kind))
    documents = encode(model, tokenizer, corpus.test_texts()[:TEXTS], add_start_token=True, max_length=LONGEST)
    texts = [each.tokens for each in documents]
    beginnings = torch.stack([text[:TRAINING_LENGTH] for text in texts])
    ways = measure_ways(model, texts, name=f"tiny {KINDS[kind]}, {steps} steps", report=console.print)
    result = TinyResult(ways, attention_to_first_tokens(model, beginnings))
    pictures = (ways.plot, ways.plot_beyond, result.plot_first_tokens)
    write_measurements(folder, f"{NAME}-{kind}", result.to_dict(), dict(zip(_files(kind), pictures, strict=True)))
    return result


def model_config(kind: str) -> Any:
    """Return the configuration of a tiny model: 4 layers of 96, as the other tiny models are.

    Args:
        kind: `"llama"` or `"gpt_neox"`.
    """
    sizes = {name: RECIPE.model[name] for name in ("num_hidden_layers", "hidden_size", "num_attention_heads")}
    inner = {"llama": 256, "gpt_neox": 384}[kind]  # three matrices, or two: about as many parameters
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), byte_tokenizer().bos_token_id)
    return AutoConfig.for_model(
        kind,
        **sizes,
        **ids,
        intermediate_size=inner,
        vocab_size=RECIPE.model["vocab_size"],
        max_position_embeddings=TRAINING_LENGTH,
    )


def _files(kind: str) -> list[str]:
    """Names of the pictures of a model; the first is that of its numbers, too."""
    name = f"{NAME}-{kind}"
    return [name, f"{name}-beyond", f"{name}-first-tokens"]


def _check_model(folder: Path, steps: int, seed: int) -> None:
    """Refuse a folder whose model was trained otherwise."""
    done = folder / DONE
    if done.is_file():
        before = read_json(done)
        if (before.get("steps"), before.get("seed")) != (steps, seed):
            raise ValueError(
                f"{folder} holds a model of {before.get('steps')} steps and the seed {before.get('seed')}, and this "
                f"is one of {steps} steps and the seed {seed}: choose another folder."
            )


def train_model(kind: str, folder: Path, examples: Dataset, *, steps: int, seed: int = 0, console: Console) -> None:
    """Train a model and save it, from its last checkpoint if there is one; one that is there is left as it is.

    Args:
        kind: `"llama"` or `"gpt_neox"`.
        folder: Its folder.
        examples: From [`examples_with_start`].
        steps: Optimiser steps, of 16 examples.
        seed: Seed of weights and of the order of examples.
        console: Where to say what is being done.

    Raises:
        KeyboardInterrupt: If training was stopped; the same call resumes it.
        ValueError: If the folder holds a checkpoint of other settings.
    """
    if (folder / DONE).is_file():
        return
    console.print(
        f"{KINDS[kind]}: training for {steps} steps of {EXAMPLES_PER_STEP} examples of {TRAINING_LENGTH} tokens"
    )
    training = {
        "max_steps": steps,
        "learning_rate": _LEARNING_RATE,
        "weight_decay": _WEIGHT_DECAY,
        "warmup_steps": min(_WARMUP, steps // 3),
    }
    job = Job(model_config(kind), training, EXAMPLES_PER_STEP, seed, "bytes", "examples given", label=kind)
    result = train_in(folder, job, examples)
    console.print(f"{KINDS[kind]}: loss {result.losses[0][1]:.2f} → {result.losses[-1][1]:.2f} nats per byte")
