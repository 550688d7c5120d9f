"""The rotation of queries and keys."""

from dataclasses import dataclass

import torch

from .batch_lex import Movable


@dataclass(frozen=True)
class Rotation(Movable):
    """Factors by which a forward pass rotates and scales queries and keys; by default it leaves them as they are.

    Attributes:
        query: Complex factors of queries as (real, imaginary) pairs, shape
            `(batch or 1, 1, sequence, head_dim / 2, 2)`.
        key: Factors of keys, same shape.
        decay: What keys are multiplied by when their block becomes the previous one, shape `(head_dim,)`; `None` if
            nothing changes.
        turn: A further complex factor of queries and keys, shape `(head_dim / 2, 2)`; `None` for none.
        temperature: A real factor of queries, shape `(batch or 1, 1, sequence, 1)`; `None` for none.
    """

    query: torch.Tensor | None = None
    key: torch.Tensor | None = None
    decay: torch.Tensor | None = None
    turn: torch.Tensor | None = None
    temperature: torch.Tensor | None = None

    def rotate(self, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate queries and keys.

        Args:
            query: Shape `(batch, num_heads, sequence, head_dim)`.
            key: Shape `(batch, num_key_value_heads, sequence, head_dim)`.

        Returns:
            Tensors like these.
        """
        query = scaled(query, self.temperature)
        if self.query is None or self.key is None:
            return query, key
        return rotate(query, self._turned(self.query)), rotate(key, self._turned(self.key))

    def _turned(self, factors: torch.Tensor) -> torch.Tensor:
        return factors if self.turn is None else rotate(factors.flatten(-2), self.turn).view_as(factors)

    def scales(self, before: int, size: int) -> torch.Tensor | None:
        """Return what keys of a block and of the `before` slots before it are multiplied by, `(slots, head_dim)`."""
        if self.decay is None:
            return None
        return torch.cat((self.decay.expand(before, -1), self.decay.new_ones((size, len(self.decay)))))


def scaled(states: torch.Tensor, factors: torch.Tensor | None) -> torch.Tensor:
    """Multiply states by real factors, in float32 or float64, rounded once.

    Args:
        states: Shape `(..., head_dim)`.
        factors: Broadcastable to `states`; `None` leaves them as they are.
    """
    return states if factors is None else (states * factors).to(states.dtype)


def rotate(states: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Multiply adjacent pairs of channels, read as complex numbers, by complex factors.

    Args:
        states: Real tensor, shape `(..., head_dim)`; channels `2i` and `2i + 1` are one complex number.
        factors: Shape broadcastable to `(..., head_dim / 2, 2)`, float32 or float64.

    Returns:
        A tensor like `states`. Half-precision states are multiplied in float32 and rounded once.
    """
    exact = states.to(factors.dtype)
    if torch.compiler.is_compiling():  # compilers fuse real arithmetic, and call out for complex numbers
        (a, b), (c, d) = exact.unflatten(-1, (-1, 2)).unbind(-1), factors.unbind(-1)
        product = torch.stack((a * c - b * d, a * d + b * c), dim=-1).flatten(-2)
    elif torch.is_grad_enabled() and states.requires_grad:
        pairs = torch.view_as_complex(exact.unflatten(-1, (-1, 2)))
        product = torch.view_as_real(pairs * torch.view_as_complex(factors)).flatten(-2)
    else:  # the same by fewer calls, which counts where single tokens are read
        product = (exact.view(factors.dtype.to_complex()) * torch.view_as_complex(factors)).view(factors.dtype)
    return product.to(states.dtype)
