"""What follows from a record: time for a token, floors, ratios, and whether the targets are met."""

from dataclasses import dataclass, replace

import numpy as np
from precision import PRECISIONS, of_name
from record import Record, Sample, find
from systems import IN_BLOCKS, SYSTEMS, attention_flops, cache_bytes


@dataclass(frozen=True)
class DecodeCost:
    """Seconds for a token of what reads in blocks.

    Attributes:
        ordinary: Median over the tokens for which there is a free slot.
        moving: Median over those before which the blocks move; `None` if there was none.
        amortised: `ordinary`, and the share that each token of a block has in the move.
    """

    ordinary: float
    moving: float | None
    amortised: float


def decode_cost(record: Record, sample: Sample) -> DecodeCost:
    """Separate the tokens before which the blocks move, one in each block, from the others."""
    block, first = record.settings.block, sample.length + record.settings.warm_up
    moves = [read >= 2 * block and read % block == 0 for read in range(first, first + len(sample.seconds))]
    seconds = np.array(sample.seconds)
    ordinary = float(np.median(seconds[np.logical_not(moves)]))
    if not any(moves):
        return DecodeCost(ordinary, None, ordinary)
    moving = float(np.median(seconds[moves]))
    return DecodeCost(ordinary, moving, ordinary + max(0.0, moving - ordinary) / block)


def per_token(record: Record, measure: str, system: str, length: int) -> float | None:
    """Seconds for a token: the median over calls; in decoding in blocks, with its share in their moves.

    Returns:
        `None` if it was not measured.
    """
    sample = find(record.samples, measure, system, length)
    if sample is None or not sample.seconds:
        return None
    if (system if measure == "decode" else of_name(system)[0] if measure == "precision" else None) in IN_BLOCKS:
        return decode_cost(record, sample).amortised
    return float(np.median(sample.seconds)) / sample.tokens


def half_spread(sample: Sample) -> float:
    """Half of the interquartile range of the seconds for a token."""
    low, high = np.percentile(sample.seconds, (25, 75))
    return float(high - low) / 2 / sample.tokens


def rate(record: Record, what: str) -> float | None:
    """The fastest of the operations that were tried: bytes, or floating-point operations, per second."""
    rates = [each.amount / float(np.median(each.seconds)) for each in record.rates if each.what == what]
    return max(rates, default=None)


def decode_floor(record: Record, system: str, context: int) -> float | None:
    """Seconds to read all weights, and the keys and values that a token meets, at the measured bandwidth.

    Returns:
        `None` if it was not measured.
    """
    bandwidth, sample = rate(record, "read"), find(record.samples, "decode", system, context)
    if bandwidth is None or sample is None or not sample.seconds:
        return None
    name, first = system.removesuffix("_compiled"), context + record.settings.warm_up
    keys = np.mean([SYSTEMS[name].keys(record.settings, first + place) for place in range(len(sample.seconds))])
    return (record.systems[name]["weight_bytes"] + cache_bytes(record.settings, float(keys))) / bandwidth


def precision_floor(record: Record, name: str) -> float | None:
    """Seconds to read, for a token, all weights and the keys and values that it meets.

    Each at the speed at which the fastest product in their dtype was measured to read.

    Returns:
        `None` if it was not measured.
    """
    system, precision = of_name(name)
    settings, context = record.settings, record.settings.contexts[0]
    sample, states = find(record.samples, "precision", name, context), PRECISIONS[precision].states
    weights, keys_and_values = (rate(record, f"read {each}") for each in (precision, states))
    if sample is None or not sample.seconds or weights is None or keys_and_values is None:
        return None
    first = context + settings.warm_up
    if system == "lex_rows":  # all slots, whatever a mask says
        keys = float(settings.training_length)
    else:
        keys = float(np.mean([SYSTEMS[system].keys(settings, first + place) for place in range(len(sample.seconds))]))
    read = cache_bytes(replace(settings, dtype=states), keys) / keys_and_values
    return read + record.systems[name]["weight_bytes"] / weights / sample.tokens


def arithmetic_share(record: Record, sample: Sample) -> float | None:
    """Floating-point operations of the model in a training step, as a share of what multiplying matrices reaches.

    Operations that gradient checkpointing repeats are not counted.
    """
    peak, name = rate(record, "multiply"), sample.system.removesuffix("_compiled")
    if peak is None:
        return None
    system = record.systems[name if name in record.systems else "lex"]
    attention = attention_flops(record.settings, (record.settings.training_length + 1) / 2)
    operations = 3 * sample.tokens * (2 * system["linear_weights"] + attention)
    return operations / float(np.median(sample.seconds)) / peak


def ratio(value: float | None, unit: float | None) -> float | None:
    """`value` in units of `unit`; `None` if one of them was not measured."""
    return None if value is None or unit is None else value / unit


@dataclass(frozen=True)
class Target:
    """What must hold.

    Attributes:
        text: The claim.
        value: What was measured; `None` if it was not.
        bound: What it is compared with.
        at_least: Whether it must be at least the bound; else at most.
    """

    text: str
    value: float | None
    bound: float
    at_least: bool = False

    @property
    def verdict(self) -> str:
        """Whether it holds, in words."""
        if self.value is None:
            return "not measured"
        holds = self.value >= self.bound if self.at_least else self.value <= self.bound
        return "holds" if holds else "does not hold"


def targets(record: Record) -> list[Target]:
    """Compare what was measured with what is aimed at."""

    def prefill(system: str, length: int) -> float | None:
        return per_token(record, "prefill", system, length)

    def in_chunks(length: int) -> float | None:
        return per_token(record, "chunked", "lex", length)

    def decode(system: str, context: int) -> float | None:
        return per_token(record, "decode", system, context)

    def train(system: str) -> float | None:
        return per_token(record, "training", system, record.settings.training_length)

    def fastest(context: int, *systems: str) -> float | None:
        known = [seconds for each in systems if (seconds := decode(each, context)) is not None]
        return min(known) if len(known) == len(systems) else None

    def precise(precision: str) -> float | None:
        return per_token(record, "precision", f"lex_{precision}", record.settings.contexts[0])

    def cached(system: str, context: int) -> float | None:
        sample = find(record.samples, "decode", system, context)
        return None if sample is None or sample.cache is None else float(sample.cache)

    streamed = {length: find(record.peaks, "streaming", "lex", length) for length in (8192, 65536)}
    memory = [None if peak is None else float(peak.peak) for peak in streamed.values()]
    return [
        Target(
            "prefill of 16k tokens, in units of the linear layers",
            ratio(prefill("lex", 16384), prefill("linear", 16384)),
            1.4,
        ),
        Target(
            "prefill of 16k tokens, times faster than Mistral with the same window",
            ratio(prefill("mistral", 16384), prefill("lex", 16384)),
            2.5,
            at_least=True,
        ),
        Target(
            "prefill in one pass, a token at 64k against 4k", ratio(prefill("lex", 65536), prefill("lex", 4096)), 1.1
        ),
        Target("prefill in chunks, a token at 64k against 4k", ratio(in_chunks(65536), in_chunks(4096)), 1.1),
        Target("decode, a token at 8k of context against 1k", ratio(decode("lex", 8192), decode("lex", 1024)), 1.05),
        Target(
            "decode at 1k against the fastest of GPT-NeoX, Llama and Mistral",
            ratio(decode("lex", 1024), fastest(1024, "gpt_neox", "llama", "mistral")),
            1.0,
        ),
        Target(
            "decode at 8k, times faster than the faster of GPT-NeoX and Llama",
            ratio(fastest(8192, "gpt_neox", "llama"), decode("lex", 8192)),
            5.0,
            at_least=True,
        ),
        Target("decode at 8k against Mistral", ratio(decode("lex", 8192), decode("mistral", 8192)), 1.0),
        *(
            Target(
                f"decode at {context // 1024}k, in units of the bandwidth floor",
                ratio(decode("lex", context), decode_floor(record, "lex", context)),
                1.3,
            )
            for context in (1024, 8192)
        ),
        Target("streaming evaluation, peak memory of 64k tokens against 8k", ratio(memory[1], memory[0]), 1.05),
        Target(
            "training step at l against the same model without positions", ratio(train("lex"), train("none")), 1.02
        ),
        Target(
            "blockwise Llama: prefill of 16k tokens, in units of Llama's linear layers",
            ratio(prefill("blockwise_llama", 16384), prefill("linear_llama", 16384)),
            1.4,
        ),
        Target(
            "blockwise Llama: prefill of 16k tokens, times faster than Mistral with the same window",
            ratio(prefill("mistral", 16384), prefill("blockwise_llama", 16384)),
            2.5,
            at_least=True,
        ),
        Target(
            "blockwise Llama: decode, a token at 8k of context against 1k",
            ratio(decode("blockwise_llama", 8192), decode("blockwise_llama", 1024)),
            1.05,
        ),
        Target(
            "blockwise Llama: bytes of the cache at 8k of context against 1k",
            ratio(cached("blockwise_llama", 8192), cached("blockwise_llama", 1024)),
            1.0,
        ),
        *(
            Target(f"decode with weights in {name}, against float32", ratio(precise(name), precise("float32")), bound)
            for name, bound in (("bfloat16", 0.8), ("int8", 0.65), ("int4", 0.5))
        ),
    ]
