"""Many requests at once against one after another: tokens a second, pauses, and memory while requests pass through."""

import itertools
import json
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import psutil
import torch
import typer
from settings import PRESETS, Settings
from systems import lex_config
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from lex_hf import LexForCausalLM
from lex_hf.inference.batching import BlockBatchingManager

_SMALL = {"num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}

app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None, add_completion=False)


@dataclass(frozen=True)
class Load:
    """Requests of mixed lengths.

    Attributes:
        prompts: Their ids.
        new: Number of tokens that each writes.
    """

    prompts: list[list[int]]
    new: list[int]

    @classmethod
    def random(cls, count: int, prompt: tuple[int, int], new: tuple[int, int], vocab_size: int) -> "Load":
        """Draw requests; lengths are uniform between two bounds, in tokens."""
        source = random.Random(0)
        lengths = [source.randint(*prompt) for _ in range(count)]
        prompts = [[source.randrange(vocab_size) for _ in range(length)] for length in lengths]
        return cls(prompts, [source.randint(*new) for _ in range(count)])


@contextmanager
def managed(model: Any, rows: int, piece: int) -> Iterator[BlockBatchingManager]:
    """Run a manager."""
    config = ContinuousBatchingConfig(max_requests_per_batch=rows, max_batch_tokens=piece)
    with model.continuous_batching_context_manager(continuous_batching_config=config) as manager:
        yield manager


def at_once(model: Any, load: Load, rows: int, piece: int) -> tuple[float, list[list[int]]]:
    """Return the seconds for all requests together, and what they wrote."""
    with managed(model, rows, piece) as manager:
        begin = time.perf_counter()
        names = [manager.add_request(ids, max_new_tokens=new) for ids, new in zip(load.prompts, load.new, strict=True)]
        results = {}
        while len(results) < len(names):
            result = manager.get_result()
            assert result is not None
            results[result.request_id] = result.generated_tokens
        seconds = time.perf_counter() - begin
    return seconds, [results[name] for name in names]


def one_by_one(model: Any, load: Load) -> tuple[float, list[list[int]]]:
    """Return the seconds for all requests one after another, by `generate`, and what they wrote."""
    begin, written = time.perf_counter(), []
    for ids, new in zip(load.prompts, load.new, strict=True):
        output = model.generate(torch.tensor([ids]), max_new_tokens=new, do_sample=False)
        written.append(output[0, len(ids) :].tolist())
    return time.perf_counter() - begin, written


def pause(model: Any, rows: int, piece: int, prompt: int) -> dict[str, float]:
    """Let a long prompt come to running requests; return how long these wait for their tokens, in seconds."""
    vocab_size = model.config.vocab_size
    running = Load.random(rows - 1, (16, 256), (60, 60), vocab_size)
    late = Load.random(1, (prompt, prompt), (2, 2), vocab_size)
    with managed(model, rows, piece) as manager:
        names = [manager.add_request(ids, max_new_tokens=10**6, record_timestamps=True) for ids in running.prompts]
        while manager.counts()["running"] < len(names) or manager.counts()["steps"] < 30:
            time.sleep(0.01)
        begin = time.perf_counter()
        newcomer = manager.add_request(late.prompts[0], max_new_tokens=2, streaming=True)
        manager.get_result(newcomer)
        end = time.perf_counter()
        for name in names:
            manager.cancel_request(name)
        times = manager.get_result(names[0]).timestamps
    gaps = [(before, after - before) for before, after in itertools.pairwise(times)]
    calm = [gap for at, gap in gaps if at + gap < begin][-20:]
    disturbed = [gap for at, gap in gaps if begin <= at + gap <= end]
    return {
        "step": statistics.median(calm),
        "step_with_a_piece": statistics.median(disturbed),
        "longest_pause": max(disturbed),
        "first_token": end - begin,
        "pieces": len(disturbed),
    }


def pass_through(model: Any, requests: int, rows: int, piece: int) -> list[dict[str, float]]:
    """Let many short requests pass through; return memory and threads in the course of it."""
    load = Load.random(requests, (1, 100), (1, 20), model.config.vocab_size)
    process, seen, marks = psutil.Process(), 0, []
    with managed(model, rows, piece) as manager:
        for ids, new in zip(load.prompts, load.new, strict=True):
            manager.add_request(ids, max_new_tokens=new)
        while seen < requests:
            manager.get_result()
            seen += 1
            if seen % max(requests // 10, 1) == 0:
                storage = sum(layer.nbytes() for layer in manager.rows.cache.layers)
                marks.append(
                    {
                        "requests": seen,
                        "resident_bytes": process.memory_info().rss,
                        "row_bytes": storage,
                        "threads": process.num_threads(),
                    }
                )
    return marks


@app.command()
def main(
    preset: Annotated[str, typer.Option(help=f"{' or '.join(PRESETS)}: shape and device.")] = "cpu",
    rows: Annotated[int, typer.Option(help="Rows, and requests of the comparison.")] = 16,
    piece: Annotated[int, typer.Option(help="Tokens of prompts between two steps.")] = 256,
    prompt: Annotated[str, typer.Option(help="Shortest and longest prompt, in tokens.")] = "16,64",
    new: Annotated[str, typer.Option(help="Fewest and most new tokens.")] = "128,256",
    turns: Annotated[int, typer.Option(help="How often both ways have their turn.")] = 3,
    long: Annotated[int, typer.Option(help="Tokens of the prompt that comes to running requests.")] = 4096,
    requests: Annotated[int, typer.Option(help="Requests that pass through.")] = 1000,
    output: Annotated[Path | None, typer.Option(help="File to write the figures to, as JSON.")] = None,
) -> None:
    """Measure continuous batching on layers of GPT-medium."""
    settings = Settings(**PRESETS[preset])
    bounds = [tuple(int(number) for number in text.split(",")) for text in (prompt, new)]
    model = _model(settings).to(settings.device, getattr(torch, settings.dtype))
    load = Load.random(rows, *bounds, model.config.vocab_size)  # type: ignore[arg-type]
    ratios, rates = [], {"at once": list[float](), "one by one": list[float]()}
    for _ in range(turns):
        together, texts = at_once(model, load, rows, piece)
        alone, expected = one_by_one(model, load)
        if texts != expected:
            raise AssertionError("A request wrote other tokens than alone.")
        ratios.append(alone / together)
        rates["at once"].append(sum(load.new) / together)
        rates["one by one"].append(sum(load.new) / alone)
    figures = {
        "settings": asdict(settings),
        "prompt_tokens": sum(map(len, load.prompts)),
        "new_tokens": sum(load.new),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "tokens_per_second": {name: statistics.median(each) for name, each in rates.items()},
        "pause": pause(model, rows, piece, long),
        "pass_through": pass_through(_model(settings, **_SMALL), requests, rows, piece),
    }
    if output is not None:
        output.write_text(json.dumps(figures, indent=1), encoding="utf-8")
    print(json.dumps({name: each for name, each in figures.items() if name != "settings"}, indent=1))


def _model(settings: Settings, **fields: int) -> LexForCausalLM:
    """A random model whose texts nothing ends before their number of tokens."""
    torch.manual_seed(0)
    config = lex_config(settings)
    config.update({"eos_token_id": None, **fields})
    return LexForCausalLM(config).eval()


if __name__ == "__main__":
    app()
