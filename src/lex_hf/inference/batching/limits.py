"""What a manager may use: rows, tokens between two steps, room of full attention; from transformers' settings."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from transformers import CompileConfig, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.utils import WorkloadHints

from lex_hf.inference.caches import new_cache
from lex_hf.inference.machine import memory_of

# Of transformers' settings, those that are used, and those that say what holds without pages anyway.
_USED = {
    "max_requests_per_batch",
    "max_batch_tokens",
    "max_memory_percent",
    "max_queue_size",
    "scheduler_type",
    "seed",
    "return_logprobs",
    "decode_compile_config",
    "default_compile_level",
}
_TRUE_ANYWAY: dict[str, tuple[Any, ...]] = {
    "allow_block_sharing": (False,),
    "use_async_batching": (False,),
    "use_cuda_graph": (False, (False, False)),
    "auto_switch_to_flash": (False,),
    "per_request_processors": (True,),
    "drop_unsupported_processors": (False,),
}
_ORDERS = {"fifo": False, "prefill_first": True}

MEMORY_SHARE = 0.8  # of what is free
_MOST_ROWS = {"cpu": 32}  # beyond these, and 256 elsewhere, more rows hardly write more tokens a second
_PIECE = {"cpu": 256}  # tokens, and 2,048 elsewhere


@dataclass(frozen=True)
class Limits:
    """Limits of a manager.

    Attributes:
        most_rows: Number of rows at most.
        memory: Bytes for rows; `None` if their number was given.
        piece: Tokens of prompts that are read between two steps, at most.
        reads_all: Whether all prompts for which there are rows are read before the next step instead.
        room: Tokens that layers with full attention have room for.
        is_bounded: Whether there are no such layers.
        compile_config: How steps are compiled; `None` if they are not.
    """

    most_rows: int
    memory: int | None
    piece: int
    reads_all: bool
    room: int
    is_bounded: bool
    compile_config: CompileConfig | None

    @classmethod
    def of(
        cls,
        model: Any,
        generation_config: GenerationConfig,
        config: ContinuousBatchingConfig,
        hints: WorkloadHints | None,
    ) -> "Limits":
        """Check transformers' settings, and take from them what has a meaning for blocks.

        Raises:
            ImportError: If transformers' settings have no number of rows yet.
            ValueError: If a setting is impossible, or only pages have it; or layers with full attention do not know
                how long texts become.
        """
        if not hasattr(config, "max_requests_per_batch"):
            raise ImportError("Continuous batching needs a newer transformers than this: pip install -U transformers")
        _check(config)
        device = model.device.type
        hints = WorkloadHints() if hints is None else hints
        prompt, new = hints.max_prompt_length, hints.max_generated_length
        count = getattr(hints, "num_requests", 0)  # no field of it in older transformers
        is_bounded = is_constant(model)
        if not is_bounded and not (prompt and new):
            raise ValueError(
                "This model has layers with full attention, whose memory grows with a text: say how long texts "
                "become, workload_hints=WorkloadHints(max_prompt_length=…, max_generated_length=…)."
            )
        given = config.max_requests_per_batch
        most = given or min(_MOST_ROWS.get(device, 256), count or 256)
        memory = None if given else int((config.max_memory_percent or MEMORY_SHARE) * free_memory(model.device))
        compile_config = config.decode_compile_config or getattr(generation_config, "compile_config", None)
        if compile_config is None and getattr(config, "default_compile_level", False):
            compile_config = CompileConfig(dynamic=False)
        piece = config.max_batch_tokens or _PIECE.get(device, 2048)
        room = prompt + new if prompt and new else 1
        return cls(most, memory, piece, _ORDERS[config.scheduler_type], room, is_bounded, compile_config)

    def rows(self, row_bytes: int) -> int:
        """Return the number of rows.

        Raises:
            ValueError: If there is no memory for one.
        """
        rows = self.most_rows if self.memory is None else min(self.most_rows, self.memory // max(row_bytes, 1))
        if rows < 1:
            raise ValueError(
                f"A row takes {row_bytes / 2**20:,.0f} MiB, and {(self.memory or 0) / 2**20:,.0f} MiB may be used: "
                "free memory, or give ContinuousBatchingConfig a larger max_memory_percent."
            )
        return rows

    def check_length(self, prompt: int, limit: int | None) -> None:
        """Refuse a request that layers with full attention have no room for.

        Raises:
            ValueError: If there is none.
        """
        if not self.is_bounded and (limit is None or prompt + limit > self.room):
            raise ValueError(
                f"The request is for {prompt} tokens and {'any number' if limit is None else limit} new ones, and "
                f"layers with full attention have room for {self.room} in all: give max_new_tokens, or make the "
                "manager with larger workload_hints."
            )


def is_constant(model: Any) -> bool:
    """Return whether the memory of a text is constant, i.e. no layer has full attention."""
    return all(not hasattr(layer, "block") or layer.block is not None for layer in new_cache(model, 1).layers)


def _check(config: ContinuousBatchingConfig) -> None:
    default = type(config)()
    changed = [
        field.name
        for field in dataclasses.fields(config)
        if getattr(config, field.name) != getattr(default, field.name)
    ]
    for name in changed:
        value = getattr(config, name)
        if name not in _USED and value not in _TRUE_ANYWAY.get(name, ()):
            raise ValueError(
                f"ContinuousBatchingConfig.{name} = {value!r} belongs to paged caches, and rows of blocks have no "
                f"pages: leave it out. What is used: {', '.join(sorted(_USED))}."
            )
    for name in ("max_requests_per_batch", "max_batch_tokens"):
        value = getattr(config, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"ContinuousBatchingConfig.{name} = {value!r}: it must be at least 1, or None.")
    if config.max_memory_percent is not None and not 0 < config.max_memory_percent <= 1:
        raise ValueError(
            f"ContinuousBatchingConfig.max_memory_percent = {config.max_memory_percent!r}: it is a share, more than 0 "
            "and at most 1."
        )
    if config.scheduler_type not in _ORDERS:
        raise ValueError(
            f"ContinuousBatchingConfig.scheduler_type = {config.scheduler_type!r}: there are {', '.join(_ORDERS)}."
        )


def free_memory(device: torch.device) -> int:
    """Return the bytes that are free on a device."""
    return memory_of(device) if device.type == "cpu" else int(torch.get_device_module(device).mem_get_info(device)[0])
