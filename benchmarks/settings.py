"""What is measured: the shape of the layers, lengths, and how much time may be spent."""

from dataclasses import dataclass, fields
from typing import Any

import torch

PARTS = ("prefill", "decode", "training", "streaming", "precision")
ON_CPUS = ("precision",)  # parts that are measured there only


@dataclass(frozen=True)
class Settings:
    """One benchmark; the defaults are layers of GPT-medium.

    Attributes:
        device: `"cpu"` or `"cuda"`.
        dtype: Name of the dtype of weights and states.
        layers: Number of decoder layers of every system.
        hidden_size: Width of the residual stream.
        num_heads: Number of attention heads.
        intermediate_size: Width of the feed-forward layer where it has two matrices.
        training_length: `l` in tokens: two blocks, the window of Mistral, the length of a training example.
        lengths: Lengths of the texts that are prefilled, in tokens, ascending.
        contexts: Tokens in the cache when decoding begins, ascending.
        streaming: Lengths of the texts for streaming evaluation, ascending.
        repeats: Most calls of each system at each length of the prefill.
        budget: Seconds after which no further round of calls at one length is begun.
        call_limit: A peer is left out where one call would take more seconds than this.
        window_call_limit: The same for the peer whose window is that of LEX; past `call_limit` it is called only once.
        decode_tokens: Tokens that every peer decodes at each context; what reads in blocks decodes a whole block.
        warm_up: Tokens that are decoded before the clock runs.
        burst: Tokens that a system decodes before the next one has its turn.
        training_repeats: Calls of a training step, forwards and backwards.
        training_batch: Examples in a training step.
        read_bytes: Size of the matrix that is read to measure the memory bandwidth.
        matmul_size: Rows and columns of the matrices that are multiplied to measure arithmetic.
    """

    device: str = "cpu"
    dtype: str = "float32"
    layers: int = 4
    hidden_size: int = 1024
    num_heads: int = 16
    intermediate_size: int = 4096
    training_length: int = 1024
    lengths: tuple[int, ...] = (1024, 4096, 16384, 65536)
    contexts: tuple[int, ...] = (1024, 4096, 8192, 65536)
    streaming: tuple[int, ...] = (8192, 65536)
    repeats: int = 3
    budget: float = 240.0
    call_limit: float = 20.0
    window_call_limit: float = 120.0
    decode_tokens: int = 64
    warm_up: int = 2
    burst: int = 8
    training_repeats: int = 10
    training_batch: int = 1
    read_bytes: int = 2**29
    matmul_size: int = 2048

    def __post_init__(self) -> None:
        for field in fields(self):  # JSON has lists
            if isinstance(getattr(self, field.name), list):
                object.__setattr__(self, field.name, tuple(getattr(self, field.name)))
        for name in ("lengths", "contexts", "streaming"):
            numbers = getattr(self, name)
            if not numbers or list(numbers) != sorted(set(numbers)) or numbers[0] < 1:
                given = ", ".join(map(str, numbers)) or "nothing"
                raise ValueError(f"{name}: {given}. Give positive numbers of tokens, each larger than the one before.")
        for name in ("layers", "repeats", "training_repeats", "decode_tokens", "warm_up", "burst"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: it must be at least 1.")

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of weights and states."""
        return getattr(torch, self.dtype)

    @property
    def block(self) -> int:
        """Tokens in a block, `l / 2`."""
        return self.training_length // 2

    @property
    def gated_intermediate_size(self) -> int:
        """Width of a feed-forward layer with three matrices that does the same arithmetic as one with two.

        The multiple of 8 (which tensor cores want) nearest to two thirds.
        """
        return max(8, round(self.intermediate_size / 12) * 8)

    @property
    def vocab_size(self) -> int:
        """Ids of the byte tokenizer; embedding and head cost next to nothing, so that layers are what is measured."""
        return 257


PRESETS: dict[str, dict[str, Any]] = {
    "cpu": {},
    "precision": {"contexts": (1024,)},
    "gpu": {
        "device": "cuda",
        "dtype": "bfloat16",
        "layers": 24,
        "repeats": 20,
        "budget": 30.0,
        "training_repeats": 20,
        "training_batch": 16,
        "read_bytes": 2**32,
        "matmul_size": 8192,
    },
}
"""For two CPU cores, GPT-medium with 4 of its 24 layers, and of that only its precisions; for a GPU, all layers."""
