"""Prefill, decoding, training and streaming, measured."""

import copy
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import memory
import torch
from interleave import Job, interleave, timed
from memory import random_states, training_step
from precision import measure_precisions
from record import Rate, Record, Sample
from rich.console import Console
from settings import Settings
from systems import (
    FLOORS,
    IN_BLOCKS,
    OWN,
    SYSTEMS,
    WITHOUT_POSITIONS,
    cache_bytes,
    extrapolated,
    free_memory,
    held_bytes,
    linear_weights,
    new_cache,
    weight_bytes,
    why_not,
)
from torch import Tensor, nn
from transformers import Cache, StaticCache

from lex_hf import LexStaticCache
from lex_hf.model.linear_lex import LexLinear

FLOOR_EVERY = 4  # chunks, when a text is read in chunks
COMPILED = ("lex", "llama")
PEERS_IN_TRAINING = ("gpt_neox", "llama", "mistral")
PEER_TURNS = 5  # in training, peers have one turn in so many rounds
Caches = dict[int, dict[str, Cache | None]]  # by number of tokens read, and name of the system


def measure(record: Record, parts: Collection[str], *, compiled: bool, console: Console) -> None:
    """Measure what `parts` name and add it to the record.

    Args:
        record: Where everything goes.
        parts: Some of `PARTS`.
        compiled: Whether to measure compiled decoding and training too.
        console: Where to say what is being done.
    """
    settings = record.settings
    torch.manual_seed(0)
    for task, system, lengths in _memory_tasks(settings, parts):
        console.print(f"memory: {task}, {system}, {_listed(lengths)} tokens")
        record.peaks += memory.in_a_process(settings, task, system, lengths)
    if "precision" in parts:
        measure_precisions(record, console)
    if set(parts) <= {"streaming", "precision"}:
        return
    models = {name: system.build(settings) for name, system in SYSTEMS.items()}
    record.systems = {name: _described(name, model) for name, model in models.items()} | record.systems
    if "prefill" in parts:
        record.samples += prefill(settings, models, console)
    if "prefill" in parts or "decode" in parts:
        lengths = (settings.lengths if "prefill" in parts else ()) + (settings.contexts if "decode" in parts else ())
        console.print(f"prefill in chunks of {settings.training_length} tokens: up to {max(lengths)}")
        samples, caches = chunked(settings, models, sorted(set(lengths)))
        record.samples += samples
    if "decode" in parts:
        samples, rates = decode(settings, models, caches, console, compiled=compiled)
        record.samples += samples
        record.rates += rates
    if "training" in parts:
        console.print(f"training: {settings.training_batch} examples of {settings.training_length} tokens")
        samples, rates = training(settings, models, compiled=compiled)
        record.samples += samples
        record.rates += rates


def _listed(lengths: Collection[int]) -> str:
    return ", ".join(map(str, lengths))


def _described(name: str, model: nn.Module) -> dict[str, Any]:
    return {
        "description": SYSTEMS[name].description,
        "linear_weights": linear_weights(model),
        "weight_bytes": weight_bytes(model),
    }


def _memory_tasks(settings: Settings, parts: Collection[str]) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    if "prefill" in parts:
        yield from (("prefill", name, settings.lengths) for name in SYSTEMS if name not in FLOORS)
    if "training" in parts:
        yield from ((task, "lex", (settings.training_length,)) for task in ("training", "checkpointed"))
    if "streaming" in parts:
        yield from (("streaming", "lex", (length,)) for length in settings.streaming)


@torch.no_grad()
def prefill(settings: Settings, models: dict[str, Any], console: Console) -> list[Sample]:
    """Time the reading of a text in one pass, with the cache that each model makes."""
    samples: list[Sample] = []
    known: dict[str, dict[int, float]] = {name: {} for name in models}
    for length in settings.lengths:
        inputs, jobs = random_states(settings, 1, length), dict[str, Job]()
        for name, model in models.items():
            reason = None if name in OWN else why_not(settings, SYSTEMS[name], length, known[name])
            if reason:
                samples.append(Sample("prefill", name, length, length, [], reason))
                continue
            is_slow = bool(known[name]) and extrapolated(known[name], length) > settings.call_limit and name not in OWN
            jobs[name] = Job(partial(_read, model, inputs), turns=1 if is_slow else None)
            if length == settings.lengths[0]:
                jobs[name].call()
        console.print(f"prefill: {length} tokens, {', '.join(jobs)}")
        interleave(list(jobs.values()), settings.repeats, settings.device, settings.budget)
        for name, job in jobs.items():
            known[name][length] = sorted(job.seconds)[len(job.seconds) // 2]
            samples.append(Sample("prefill", name, length, length, job.seconds))
    return samples


def _read(model: Any, inputs: Tensor) -> object:
    return model(inputs_embeds=inputs, past_key_values=new_cache(model), use_cache=True)


@torch.no_grad()
def chunked(settings: Settings, models: dict[str, Any], stops: list[int]) -> tuple[list[Sample], Caches]:
    """Read one text in blocks, in chunks of `l` tokens, and in between chunks with the linear layers alone.

    Returns:
        For each of `stops`, the times of the chunks from the stop before up to it; and copies of the caches there.
    """
    size, samples, copies, done = settings.training_length, list[Sample](), Caches(), 0
    inputs, caches = random_states(settings, 1, size), {name: new_cache(models[name]) for name in IN_BLOCKS}
    for name in OWN:
        _read(models[name], inputs)
    for stop in stops:
        times = defaultdict[str, list[float]](list)
        for number, begin in enumerate(range(done, stop, size)):
            piece = inputs[:, : min(size, stop - begin)]
            calls = {
                name: partial(models[name], inputs_embeds=piece, past_key_values=cache)
                for name, cache in caches.items()
            }
            if number % FLOOR_EVERY == 0:
                calls |= {name: partial(_read, models[name], piece) for name in FLOORS}
            for name, call in calls.items():
                seconds = timed(call, settings.device)
                if piece.shape[1] == size:  # the rest of a text takes its time, but not that of a chunk
                    times[name].append(seconds)
        samples += [Sample("chunked", name, stop, size, seconds) for name, seconds in times.items()]
        done, copies[stop] = stop, copy.deepcopy(caches)
    return samples, copies


@dataclass
class _Decoding:
    """One system in the middle of a text."""

    name: str
    context: int
    job: Job
    cache: Cache | None


@torch.no_grad()
def decode(
    settings: Settings, models: dict[str, Any], caches: Caches, console: Console, *, compiled: bool
) -> tuple[list[Sample], list[Rate]]:
    """Time single tokens after contexts of several lengths, all in turns, and what reading memory takes.

    What reads in blocks decodes a whole block at each context, so that its blocks move once in each. It has read its
    contexts; the caches of the others are filled with random keys and values, which take as long.
    """
    token, samples, running = random_states(settings, 1, 1), [], []
    rounds = -(-settings.block // settings.burst)
    for context in settings.contexts:
        console.print(f"decode: filling caches with {context} tokens")
        for name, model in models.items():
            if reason := _no_room(settings, name, context):
                samples.append(Sample("decode", name, context, 1, [], reason))
                continue
            in_blocks = name in IN_BLOCKS
            cache = caches[context][name] if in_blocks else _filled(settings, model, new_cache(model), context)
            running.append(_Decoding(name, context, _job(settings, model, token, cache, in_blocks), cache))
        for name in COMPILED if compiled else ():
            console.print(f"decode: compiling {name}")
            cache = _static_cache(settings, models[name], context)
            mode = "reduce-overhead" if settings.device == "cuda" else None
            step = torch.compile(models[name], mode=mode, fullgraph=True)  # an error rather than half of it eager
            job = _job(settings, step, token, cache, name == "lex")
            running.append(_Decoding(f"{name}_compiled", context, job, cache))
    console.print(f"decode: {len(running)} texts in turns")
    rates = [*_reading(settings)]
    interleave([*(each.job for each in running), *(job for _, job in rates)], rounds, settings.device)
    samples += [
        Sample("decode", each.name, each.context, 1, each.job.seconds, cache=held_bytes(each.cache))
        for each in running
    ]
    return samples, [Rate("read", how, settings.read_bytes, job.seconds) for how, job in rates]


def _no_room(settings: Settings, name: str, context: int) -> str | None:
    """Say why a cache cannot be filled; there must be room for the copy that grows it, too."""
    size = 2 * cache_bytes(settings, SYSTEMS[name].keys(settings, context))
    return f"its cache takes {size / 2**31:.0f} GiB" if size > free_memory(settings) / 2 else None


def _filled(settings: Settings, model: Any, cache: Cache | None, context: int) -> Cache | None:
    """Put random keys and values into a cache of transformers."""
    if cache is not None:
        states = random_states(settings, 1, context).view(1, context, settings.num_heads, -1).transpose(1, 2)
        for layer in range(settings.layers):
            cache.update(states, states, layer)
    return cache


def _static_cache(settings: Settings, model: Any, context: int) -> Cache:
    """Make a cache of fixed size with `context` tokens."""
    room = context + settings.warm_up + settings.block + settings.burst
    if model.config.model_type != "lex":
        cache = StaticCache(config=model.config, max_cache_len=room)
        filled = _filled(settings, model, cache, context)
        assert filled is not None
        return filled
    cache = LexStaticCache(model.config, room)
    for begin in range(0, context, settings.training_length):
        size = min(settings.training_length, context - begin)
        model(inputs_embeds=random_states(settings, 1, size), past_key_values=cache)
    return cache


def _job(settings: Settings, model: Any, token: Tensor, cache: Cache | None, whole_block: bool) -> Job:
    """Warm up, and plan as many tokens as are wanted and can be afforded."""
    call = partial(model, inputs_embeds=token, past_key_values=cache, use_cache=cache is not None)
    seconds = [timed(call, settings.device) for _ in range(settings.warm_up)][-1]
    if whole_block:
        return Job(call, calls=settings.burst)
    affordable = int(settings.call_limit / (seconds * settings.burst))
    wanted = -(-settings.decode_tokens // settings.burst)
    return Job(call, turns=max(1, min(wanted, affordable)), calls=settings.burst)


def _reading(settings: Settings) -> Iterator[tuple[str, Job]]:
    """What must be read to decode, and nothing else: a large matrix, by the products that there are."""
    columns = 4096
    rows = max(1, settings.read_bytes // settings.torch_dtype.itemsize // columns)
    matrix = torch.ones(rows, columns, device=settings.device, dtype=settings.torch_dtype)
    with torch.device("meta"):
        layer = LexLinear(columns, rows, bias=False)
    layer.weight = nn.Parameter(matrix, requires_grad=False)
    calls: dict[str, Callable[[], object]] = {
        "matrix times vector": partial(torch.mv, matrix, matrix[0].clone()),
        "linear layer": partial(layer, matrix[:1].clone()),
    }
    for how, call in calls.items():
        call()
        yield how, Job(call, turns=-(-settings.decode_tokens // settings.burst))


def training(settings: Settings, models: dict[str, Any], *, compiled: bool) -> tuple[list[Sample], list[Rate]]:
    """Time training steps at `l`, forwards and backwards; the optimiser is the same for all and left out."""
    batch, length = settings.training_batch, settings.training_length
    inputs, direction = (random_states(settings, batch, length) for _ in range(2))
    trained = {"lex": models["lex"], "none": WITHOUT_POSITIONS.build(settings)}
    trained["lex_checkpointed"] = SYSTEMS["lex"].build(settings)
    trained["lex_checkpointed"].activation_checkpointing_enable()
    if compiled:
        torch.compiler.reset()  # what was compiled for decoding counts towards the limit of a function
        trained |= {f"{name}_compiled": torch.compile(trained[name], fullgraph=True) for name in ("lex", "none")}
    trained |= {name: models[name] for name in PEERS_IN_TRAINING}
    turns = max(1, settings.training_repeats // PEER_TURNS)
    jobs = {}
    for name, model in trained.items():
        is_compared = name.removesuffix("_compiled") in ("lex", "none")
        call = partial(training_step, model.train(), inputs, direction)
        jobs[name] = Job(call, turns=None if is_compared else turns)
        call()
    size = settings.matmul_size
    factors = torch.randn(2, size, size, device=settings.device, dtype=settings.torch_dtype)
    multiply = Job(partial(torch.matmul, *factors))
    multiply.call()
    interleave([*jobs.values(), multiply], settings.training_repeats, settings.device)
    for model in trained.values():
        model.zero_grad(set_to_none=True)
        model.eval()
    rate = Rate("multiply", f"square matrices of {size} rows", 2 * size**3, multiply.seconds)
    return [Sample("training", name, length, batch * length, job.seconds) for name, job in jobs.items()], [rate]
