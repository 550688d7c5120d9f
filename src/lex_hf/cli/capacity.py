"""`lex-hf serve --dry-run`: what a device holds and what its bandwidth allows, on paper."""

import re
from collections.abc import Collection
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Column

from lex_hf.cli import options
from lex_hf.cli.printing import new_table, number, print_json, session

if TYPE_CHECKING:
    from lex_hf.inference.capacity import Capacity, Rows

DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Serve nothing: print bytes, rows that fit and tokens per second, from the configuration alone.",
    ),
]
DeviceMemory = Annotated[
    str | None,
    typer.Option(help="With --dry-run: memory of a device, e.g. 80GiB or 80GB; what is there now by default."),
]
Bandwidth = Annotated[
    str | None,
    typer.Option(help="With --dry-run: how fast a device reads memory, e.g. 3.35TB/s; measured here by default."),
]

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([kKMGTP]?)(i?)B", re.ASCII)
_POWERS = {prefix: power for power, prefix in enumerate(("", "K", "M", "G", "T", "P"))}
_MOST = 2**60
_OWN = {"dry_run", "device_memory", "bandwidth", "as_json"}
_USED = {"model", "blockwise", "sinks", "device", "dtype", "trust_remote_code"} | _OWN
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def parse_size(text: str, name: str, per_second: bool = False) -> int:
    """Read a number of bytes with its unit: 80GiB is 80 times 2^30, 80GB is 80 times 10^9.

    Args:
        text: What was typed.
        name: The option, for errors.
        per_second: Whether it is a bandwidth, e.g. `900GB/s`.

    Raises:
        ValueError: If it is not such a number, or it is not between 1 and 2^60.
    """
    example = "3.35TB/s or 900GB/s" if per_second else "80GiB (80 times 2^30 bytes) or 80GB (80 times 10^9)"
    size = text.strip()
    matched = _SIZE.fullmatch(size.removesuffix("/s")) if size.endswith("/s") is per_second else None
    if matched is None:
        raise ValueError(f"{name} {text}: it must be a number and its unit, e.g. {example}.")
    amount, prefix, binary = matched.groups()
    found = int(Fraction(amount) * (1024 if binary else 1000) ** _POWERS[prefix.upper()])
    if (binary and not prefix) or not 1 <= found <= _MOST:
        raise ValueError(f"{name} {text}: it must be between 1 byte and 2^60, e.g. {example}.")
    return found


@dataclass(frozen=True)
class Asked:
    """What a user typed."""

    model: str  # folder or Hub id; `id@revision` names a revision
    device_memory: str | None
    bandwidth: str | None
    blockwise: str | None
    sinks: int
    device: str | None
    dtype: str | None
    trust_remote_code: bool
    given: Collection[str]  # names of all parameters that were typed


def typed(context: typer.Context) -> list[str]:
    """Return the names of all parameters that were typed."""
    # By name: older versions of typer have it of click, newer ones of their own copy.
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]


def dry_run(asked: Asked, *, is_wanted: bool, as_json: bool) -> None:
    """Print what serving a model would take and give, without its weights.

    Args:
        asked: Model and options.
        is_wanted: Whether `--dry-run` was given, to which the other options belong.
        as_json: Whether to print JSON.

    Raises:
        ValueError: For options that do not fit, or a model that cannot be counted.
    """
    if not is_wanted:
        raise ValueError("--device-memory, --bandwidth and --json belong to --dry-run: give it as well.")
    with session(as_json) as console:
        found, sources = _compute(asked)
    if as_json:
        print_json({"model": asked.model, **found.to_dict(), "found_here": sources})
    else:
        _print(console, asked.model, found, sources)


def _check_options(asked: Asked) -> None:
    """Refuse options that have no effect on figures."""
    if asked.model.startswith("-"):
        raise ValueError(f"{asked.model} is an option, not a MODEL: give lex-hf serve MODEL, and then the options.")
    for name in asked.given:
        if name not in _USED:
            raise ValueError(
                f"--{name.replace('_', '-')} has no effect with --dry-run, which serves nothing; leave it out."
            )


def _compute(asked: Asked) -> "tuple[Capacity, dict[str, str]]":
    """Return the figures, and how memory and bandwidth were found where they were not given."""
    from transformers import AutoConfig

    from lex_hf.errors import explained
    from lex_hf.inference import machine
    from lex_hf.inference.capacity import capacity

    _check_options(asked)
    blocks = options.blocks(asked.blockwise, asked.sinks)
    memory = None if asked.device_memory is None else parse_size(asked.device_memory, "--device-memory")
    speed: float | None = None
    if asked.bandwidth is not None:
        speed = parse_size(asked.bandwidth, "--bandwidth", per_second=True)
    name, _, revision = asked.model.partition("@")
    trust, sources = asked.trust_remote_code, dict[str, str]()
    with explained(asked.model, "the configuration of a model (config.json)"):
        config = AutoConfig.from_pretrained(name, revision=revision or "main", trust_remote_code=trust)
    if memory is None or speed is None:
        device = machine.device_of(asked.device)
        there = machine.memory_of(device)
        if memory is None:
            memory, sources["device_memory"] = there, f"{machine.HOW_MEMORY_IS_FOUND[device.type]} ({device})"
        if speed is None:
            speed = machine.measure_bandwidth(device, there)
            sources["bandwidth"] = f"{machine.HOW_BANDWIDTH_IS_MEASURED} ({device})"
    settings = {"dtype": asked.dtype, "trust_remote_code": trust, **blocks}
    return capacity(config, device_memory=memory, bandwidth=speed, **settings), sources


def _print(console: Console, model: str, found: "Capacity", sources: dict[str, str]) -> None:
    from lex_hf.inference.capacity import HOW_IT_IS_COUNTED

    facts = [
        ("parameters", f"{found.parameters:,} in {found.dtype}"),
        ("weights", amount(found.weights_bytes)),
        ("of these read in a step", amount(found.weights_read)),
        ("memory of the device", _with_source(amount(found.device_memory), sources.get("device_memory"))),
        ("bandwidth", _with_source(f"{found.bandwidth / 1e9:,.4g} GB/s", sources.get("bandwidth"))),
    ]
    console.print(new_table(f"{model}: what it takes", [Column("what"), Column("how much", overflow="fold")], facts))
    rows = [_row(found.attention or "", each) for each in found.blocks] + [_row("full", each) for each in found.full]
    columns = [Column("attention"), *map(number, ("tokens", "a row", "rows", "tokens/s", "1 row: tokens/s"))]
    console.print(new_table("rows that fit, and tokens per second", columns, rows))
    for note in _notes(found):
        console.print(note)
    console.print(HOW_IT_IS_COUNTED)


def _row(name: str, rows: "Rows") -> tuple[str, ...]:
    tokens = "any" if rows.tokens is None else f"{rows.tokens:,}"
    speeds = ["-" if each is None else _speed(each) for each in (rows.tokens_per_second, rows.tokens_per_second_alone)]
    return name, tokens, amount(rows.row_bytes), f"{rows.rows:,}" if rows.rows else "none", *speeds


def _notes(found: "Capacity") -> list[str]:
    """Return what is to be said of these figures."""
    notes = []
    if not found.weights_fit:
        notes.append("The weights alone do not fit into the memory of the device: nothing can be served.")
    elif not all(each.rows for each in (*found.blocks, *found.full)):
        notes.append("none: beside the weights, not even one row with a text of that length fits.")
    if not found.blocks and found.is_lex:
        notes.append("All layers have full attention; with blocks (attention_pattern='blockwise') a row is constant.")
    elif not found.blocks:
        notes.append("With --blockwise auto, a model with rotary positions has rows of constant size.")
    elif not found.is_lex:
        notes.append("Whether this model can read in blocks is tried when it is loaded.")
    return notes


def _with_source(value: str, source: str | None) -> str:
    return value if source is None else f"{value}, {source}"


def _speed(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def amount(size: int) -> str:
    """Return a number of bytes as a person reads it, e.g. 1.5 GiB."""
    value, unit = float(size), 0
    while value >= 1000 and unit < len(_UNITS) - 1:  # so that three digits are enough
        value, unit = value / 1024, unit + 1
    return f"{size} B" if unit == 0 else f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {_UNITS[unit]}"
