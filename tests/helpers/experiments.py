"""Toy experiments."""

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from lex_hf.reproduce import presets
from lex_hf.reproduce.running import Request, run

TINY = presets.PRESETS["tiny"]

TOY = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}


def toy_preset(paper: str) -> presets.Preset:
    """The tiny preset, smaller: l = 32, 4 steps."""
    full = TINY(paper)
    return replace(
        full,
        length=32,
        model={**full.model, **TOY},
        training={"max_steps": 4, "warmup_steps": 1, "learning_rate": 1e-2, "disable_tqdm": True},
        batch_tokens=64,
        test_tokens=600,
        segments=4,
        measured_segments=3,
    )


def toy_request(table: str, output: Path, texts: dict[str, Any], **options: Any) -> Request:
    return Request(table=table, preset="tiny", output=output, **{"seeds": (0, 1), "device": "cpu", **texts, **options})


def run_experiment(*arguments: Any, **options: Any) -> dict[str, Any]:
    return run(toy_request(*arguments, **options), console=Console(file=io.StringIO()))
