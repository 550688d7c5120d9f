"""The whole story in a few minutes on two CPU cores: train short, read and write long.

A tiny xPos model and the same model with RoPE are trained on 128-byte examples of the Python standard library, and
evaluated on files they have never seen, at lengths up to 2048. Nothing is downloaded.
"""

import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from itertools import product
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed

from lex_hf.evaluation import plots
from lex_hf.evaluation.loading import load_for_evaluation
from lex_hf.evaluation.perplexity import compute_perplexity
from lex_hf.model.cache_lex import LexCache
from lex_hf.records import check_folder, read_json, to_json, write_text
from lex_hf.reproduce.console import plain_console
from lex_hf.reproduce.tiny import (
    LENGTHS,
    PATTERNS,
    TRAINING_LENGTH,
    Corpus,
    check_steps,
    perplexity_by_length,
    standard_library,
    tiny_config,
    train_tiny,
)

SCHEMES = {"xPos": "xpos", "RoPE": "rope"}
RESULTS, PLOT = "results.json", "perplexity.png"
STEPS = 600  # of each model: enough to see what happens beyond the training length, in a few minutes
_MOST_TOKENS = 10**9


@dataclass(frozen=True)
class DemoResult:
    """Measurements of the demo.

    Attributes:
        perplexity: Perplexity of the held-back files, by system and by length in tokens.
        stream_tokens: Tokens of the long document that was read in one pass.
        stream_perplexity: Its perplexity.
        cache_bytes: Bytes of the cache while the long document is read, by the number of tokens read so far.
        generated_tokens: Tokens generated after a prompt.
        generation_cache_bytes: Bytes of the cache after the last of them.
        seconds: How long each part took.
    """

    perplexity: dict[str, dict[int, float]]
    stream_tokens: int
    stream_perplexity: float
    cache_bytes: dict[int, int]
    generated_tokens: int
    generation_cache_bytes: int
    seconds: dict[str, float]


def run(folder: Path, *, steps: int = STEPS, generate: int = 2000, console: Console | None = None) -> DemoResult:
    """Train, evaluate, stream and generate; leave models, results and a plot in `folder`.

    Args:
        folder: Where to put everything; a folder of an earlier demo is replaced.
        steps: Optimiser steps for each of the two models.
        generate: Tokens to generate.
        console: Where to print.

    Raises:
        ValueError: If `folder` holds anything but an earlier demo or cannot be written to, or a number is out of
            range; all that before any work.
    """
    console = console or plain_console()
    check_steps(steps)
    if not 1 <= generate <= _MOST_TOKENS:
        raise ValueError(f"generate = {generate}: it must be from 1 to {_MOST_TOKENS}.")
    _clear(folder)
    corpus, seconds = standard_library(), dict[str, float]()
    with _timed(seconds, "train"):
        _train_all(folder, corpus, steps, console)
    with _timed(seconds, "evaluate"):
        perplexity = _evaluate_all(folder, corpus, console)
    _print_table(perplexity, console)
    model, tokenizer = load_for_evaluation(str(folder / "xpos"), device="cpu")
    with _timed(seconds, "stream"):
        text = corpus.long.read_text(encoding="utf-8")
        streamed = compute_perplexity(model, tokenizer, [text], protocol="streaming", length=1024)
        cache_bytes = _cache_bytes(model, tokenizer, text)
    with _timed(seconds, "generate"):
        generation_bytes = _generate(model, tokenizer, generate, console)
    result = DemoResult(
        perplexity, streamed.tokens, streamed.perplexity, cache_bytes, generate, generation_bytes, seconds
    )
    try:
        _write(folder, result)
    finally:  # is printed also if it cannot be written
        _print_summary(folder, corpus, result, console)
    return result


def _train_all(folder: Path, corpus: Corpus, steps: int, console: Console) -> None:
    examples = corpus.examples()
    console.print(
        f"{len(corpus.train)} files to train on, {len(examples)} examples of {TRAINING_LENGTH} bytes; "
        f"{len(corpus.test)} files and {corpus.long.name} are held back."
    )
    for name, scheme in SCHEMES.items():
        losses = train_tiny(tiny_config(scheme), folder / scheme, examples, steps=steps).losses
        console.print(f"{name}: loss {losses[0][1]:.2f} → {losses[-1][1]:.2f} nats per byte in {steps} steps")


def _evaluate_all(folder: Path, corpus: Corpus, console: Console) -> dict[str, dict[int, float]]:
    """Perplexity of the beginnings of the held-back files, by system and length; the same bytes everywhere."""
    texts = corpus.test_texts()
    table: dict[str, dict[int, float]] = {}
    for (name, scheme), (pattern, suffix) in product(SCHEMES.items(), PATTERNS.items()):
        model, tokenizer = load_for_evaluation(str(folder / scheme), device="cpu", attention_pattern=pattern)
        table[name + suffix] = perplexity_by_length(model, tokenizer, texts, LENGTHS)
        console.print(f"evaluated {name + suffix}")
    return table


@torch.inference_mode()
def _cache_bytes(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str) -> dict[int, int]:
    """Bytes of the cache at every doubling of the tokens read."""
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    cache, marks, read = LexCache(model.config), dict[int, int](), 0
    while read < ids.shape[1]:
        stop = min(max(2 * read, TRAINING_LENGTH), ids.shape[1])
        model(ids[:, read:stop], past_key_values=cache, logits_to_keep=1)
        read, marks[stop] = stop, cache.nbytes()
    return marks


def _generate(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tokens: int, console: Console) -> int:
    set_seed(0)
    prompt = tokenizer("def read_text(path):\n", return_tensors="pt")
    output = model.generate(
        **prompt,
        min_new_tokens=tokens,
        max_new_tokens=tokens,
        do_sample=True,
        temperature=0.7,
        return_dict_in_generate=True,
    )
    text = tokenizer.decode(output.sequences[0])
    console.rule(f"{tokens} generated tokens: the first and the last 300 characters")
    console.print(f"{text[:300]}\n[…]\n{text[-300:]}", markup=False, highlight=False)
    return output.past_key_values.nbytes()


def _print_table(perplexity: Mapping[str, Mapping[int, float]], console: Console) -> None:
    table = Table(title=f"Perplexity per byte of held-back files (trained on {TRAINING_LENGTH} bytes)")
    table.add_column("length", justify="right")
    for system in perplexity:
        table.add_column(system, justify="right")
    for length in LENGTHS:
        table.add_row(str(length), *(f"{curve[length]:.3f}" for curve in perplexity.values()))
    console.print(table)


def _print_summary(folder: Path, corpus: Corpus, result: DemoResult, console: Console) -> None:
    marks = result.cache_bytes
    console.rule("Memory")
    console.print(
        f"{corpus.long.name}, {result.stream_tokens} tokens, read in one pass: "
        f"perplexity {result.stream_perplexity:.3f}"
    )
    console.print("cache bytes by tokens read: " + ", ".join(f"{tokens}: {size}" for tokens, size in marks.items()))
    console.print(f"cache bytes after {result.generated_tokens} generated tokens: {result.generation_cache_bytes}")
    peak = max(*marks.values(), result.generation_cache_bytes)
    grown = "it did not grow" if len({*marks.values(), result.generation_cache_bytes}) == 1 else "it grew"
    console.print(f"peak cache bytes: {peak}; {grown}")
    times = ", ".join(f"{part} {value:.0f} s" for part, value in result.seconds.items())
    console.print(f"{times}. Models, {RESULTS} and {PLOT} are in {folder}.")


def _write(folder: Path, result: DemoResult) -> None:
    write_text(folder / RESULTS, to_json(asdict(result), indent=2) + "\n")
    title = "Held-back files of the Python standard library"
    plots.save(plots.perplexity_by_length(result.perplexity, TRAINING_LENGTH, title=title), folder / PLOT)


def _clear(folder: Path) -> None:
    """Make a folder that holds nothing but empty results; only what an earlier demo left is removed."""
    check_folder(folder, "--output")
    found = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if found and not (found <= {*SCHEMES.values(), RESULTS, PLOT} and _is_result(folder / RESULTS)):
        raise ValueError(f"{folder} exists and is not an earlier demo's: choose another folder for the output.")
    for name in found:
        path = folder / name
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / RESULTS, "{}\n")  # by which a later demo knows the folder, if this one is stopped


def _is_result(path: Path) -> bool:
    try:
        found = read_json(path)
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and set(found) in (set(), {each.name for each in fields(DemoResult)})


@contextmanager
def _timed(seconds: dict[str, float], part: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[part] = round(time.perf_counter() - start, 1)
