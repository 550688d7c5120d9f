"""Decoding with weights and states of fewer bytes, and the fastest product that reads each kind of weights."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from interleave import Job, interleave, timed
from memory import random_states
from record import Rate, Record, Sample
from rich.console import Console
from settings import Settings
from systems import IN_BLOCKS, SYSTEMS, held_bytes, linear_weights, new_cache, weight_bytes
from torch import Tensor, nn
from transformers import Cache

from lex_hf import LexStaticCache, PackedWeightsConfig
from lex_hf.inference.packed_weights import PackedLinear, pack_weights
from lex_hf.model.linear_lex import LexLinear

MEASURED = ("lex", "llama", "blockwise_llama")
ROWS = 16  # of LEX in one step, in a preallocated cache, each with a text of its own length
WIDTHS = (1024, 4096)  # inputs of the matrices that are read to find the floor


@dataclass(frozen=True)
class Precision:
    """A column of the tables.

    Attributes:
        states: Name of the dtype of states, and of weights that are not packed.
        bits: Bits of packed weights; `None` if they are not packed.
    """

    states: str
    bits: int | None = None


PRECISIONS: dict[str, Precision] = {
    "float32": Precision("float32"),
    "bfloat16": Precision("bfloat16"),
    "int8": Precision("float32", 8),
    "int4": Precision("float32", 4),
}
SYSTEMS_MEASURED = (*MEASURED, "lex_rows")


def name_of(system: str, precision: str) -> str:
    """Return the name in a record of a system in a precision."""
    return f"{system}_{precision}"


def of_name(name: str) -> tuple[str, str]:
    """Return system and precision of a name in a record."""
    system, _, precision = name.rpartition("_")
    return system, precision


@torch.no_grad()
def measure_precisions(record: Record, console: Console) -> None:
    """Time single tokens after the first of the contexts, of all systems in all precisions, in turns."""
    settings, jobs = record.settings, dict[str, Job]()
    context, caches = settings.contexts[0], dict[str, Cache]()
    for precision in PRECISIONS:
        console.print(f"precision: filling caches with {context} tokens, {precision}")
        own = replace(settings, dtype=PRECISIONS[precision].states)
        for system in MEASURED:
            model, numbers = _built(own, system, precision)
            for name, rows in ((system, 1), ("lex_rows", ROWS)) if system == "lex" else ((system, 1),):
                key = name_of(name, precision)
                record.systems[key] = _described(name, precision, model, numbers)
                caches[key] = _filled(own, model, context, rows, name)
                jobs[key] = _job(own, model, caches[key], rows, name)
    rates = list(_reading(settings))
    console.print(f"precision: {len(jobs)} texts in turns")
    rounds = -(-settings.block // settings.burst)
    interleave([*jobs.values(), *(job for *_, job in rates)], rounds, settings.device)
    record.samples += [
        Sample("precision", key, context, _rows(key), job.seconds, cache=held_bytes(caches[key]))
        for key, job in jobs.items()
    ]
    record.rates += [Rate(f"read {precision}", how, size, job.seconds) for precision, how, size, job in rates]


def _rows(key: str) -> int:
    return ROWS if of_name(key)[0] == "lex_rows" else 1


def _built(settings: Settings, system: str, precision: str) -> tuple[Any, int]:
    """Return a model, and how many numbers its linear layers have."""
    model, bits = SYSTEMS[system].build(settings), PRECISIONS[precision].bits
    numbers = linear_weights(model)
    return (model if bits is None else pack_weights(model, PackedWeightsConfig(bits))), numbers  # type: ignore[arg-type]


def _described(system: str, precision: str, model: nn.Module, numbers: int) -> dict[str, Any]:
    what = f"LEX, {ROWS} rows in a preallocated cache" if system == "lex_rows" else SYSTEMS[system].description
    return {
        "description": f"{what}; weights in {precision}, states in {PRECISIONS[precision].states}",
        "linear_weights": numbers,
        "weight_bytes": weight_bytes(model),
    }


def _filled(settings: Settings, model: Any, context: int, rows: int, system: str) -> Cache:
    """Make a cache with `context` random keys and values; those of rows that differ are up to half a block apart."""
    if system == "lex_rows":
        cache = LexStaticCache(model.config, 2 * context)
        model(inputs_embeds=random_states(settings, rows, 1), past_key_values=cache)
        for layer in cache.layers:
            layer.keys.normal_()
            layer.values.normal_()
            layer.lengths.copy_(context - torch.arange(rows) * settings.block // (2 * rows))
            layer.columns.fill_(context)
        return cache
    cache = new_cache(model)
    assert cache is not None
    if system in IN_BLOCKS:
        for part in random_states(settings, 1, context).split(settings.training_length, dim=1):
            model(inputs_embeds=part, past_key_values=cache)
        return cache
    states = random_states(settings, 1, context).view(1, context, settings.num_heads, -1).transpose(1, 2)
    for layer in range(settings.layers):
        cache.update(states, states, layer)
    return cache


def _job(settings: Settings, model: Any, cache: Cache, rows: int, system: str) -> Job:
    call = partial(model, inputs_embeds=random_states(settings, rows, 1), past_key_values=cache, use_cache=True)
    for _ in range(settings.warm_up):
        timed(call, settings.device)
    turns = None if system in IN_BLOCKS else -(-settings.decode_tokens // settings.burst)
    return Job(call, turns=turns, calls=settings.burst)


def _reading(settings: Settings) -> Iterator[tuple[str, str, int, Job]]:
    """What must be read to decode, and nothing else: matrices in each precision, by every product that there is."""
    turns = -(-settings.decode_tokens // settings.burst)
    for precision, kind in PRECISIONS.items():
        dtype = getattr(torch, kind.states)
        for width in WIDTHS:
            # As many weights in each precision: none of these fits into the caches of a processor.
            layer = LexLinear(width, max(64, settings.read_bytes // 8 // width), bias=False).to(dtype)
            vector, products = torch.randn(1, width, dtype=dtype), dict[str, Callable[[], Tensor]]()
            if kind.bits is None:
                size = layer.weight.nbytes
                products["torch.mv"] = partial(torch.mv, layer.weight.detach(), vector[0])
                products["LexLinear"] = partial(layer, vector)
            else:
                packed = PackedLinear(layer, PackedWeightsConfig(kind.bits))
                size = packed.packed.nbytes + packed.scales.nbytes
                products["PackedLinear"] = partial(packed, vector)
            for how, call in products.items():
                call()
                yield precision, f"{how}, {width} inputs", size, Job(call, turns=turns)
