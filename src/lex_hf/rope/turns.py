"""How keys that a model has rotated are turned on, as if their tokens stood later in the text.

The rotation of a model is recognised numerically: the same tokens are read at two places of a text, and what a layer
has at the one is turned until it is what it has at the other, by any frequencies of the model and in any layout.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from lex_hf.rope import probe
from lex_hf.rope.angles import frequencies_of, modules_with_angles

_TOKENS = 4
_DISTANCES = (1, 5)  # by which tokens are moved


@dataclass(frozen=True)
class Turn:
    """A rotation of pairs of channels.

    Attributes:
        module: The module with the frequencies; `None` for a layer that does not rotate.
        buffer: The name of their buffer.
        offset: First channel that is rotated.
        is_adjacent: Whether pairs are adjacent channels, and not the first and second half of all that are rotated.
        sign: -1 for a model that rotates the other way round.
    """

    module: nn.Module | None = None
    buffer: str = ""
    offset: int = 0
    is_adjacent: bool = False
    sign: int = 1

    def __call__(self, keys: torch.Tensor, distance: torch.Tensor) -> torch.Tensor:
        """Turn keys.

        Args:
            keys: Rotated keys, shape `(batch, num_key_value_heads, keys, head_dim)`.
            distance: By how many tokens, shape `(batch or 1, keys or 1)`.

        Returns:
            A tensor like `keys`, computed in float32 or float64 from angles in float64, and rounded once.
        """
        if self.module is None:
            return keys
        device = torch.device("cpu") if keys.device.type == "mps" else keys.device  # MPS has no float64
        frequencies = getattr(self.module, self.buffer).to(device, torch.float64)
        dtype = torch.promote_types(keys.dtype, torch.float32)
        angles = distance.to(device, torch.float64)[:, None, :, None] * (self.sign * frequencies)
        cos, sin = (part.to(keys.device, dtype) for part in (angles.cos(), angles.sin()))
        before, pairs, after = keys.tensor_split([self.offset, self.offset + 2 * len(frequencies)], dim=-1)
        axis = -1 if self.is_adjacent else -2
        first, second = pairs.to(dtype).unflatten(-1, (-1, 2) if self.is_adjacent else (2, -1)).unbind(axis)
        turned = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=axis).flatten(-2)
        return torch.cat((before, turned.to(keys.dtype), after), dim=-1)


@dataclass(frozen=True)
class Turns:
    """How a layer's sinks are turned.

    Attributes:
        attended: The keys to which it attends.
        stored: What its cache stores as keys and as values; with latent attention, the latter are rotated.
    """

    attended: Turn
    stored: tuple[Turn, Turn]


def recognise(
    model: PreTrainedModel, decoder: nn.Module, layers: list[int], function: Callable[..., Any]
) -> dict[int, Turns]:
    """Find out how the sinks of each layer are turned.

    Args:
        model: The model; it is left as it was.
        decoder: The module that holds its layers.
        layers: Indices of the layers.
        function: As of [`probe.examine`].

    Raises:
        ValueError: If those of a layer follow in none of the known ways.
    """
    near, *far = (probe.states_at(model, _TOKENS, distance, function) for distance in (0, *_DISTANCES))
    turns = {}
    for layer in layers:
        attended, *stored = (
            _recognise(model, decoder, layer, states, dict(zip(_DISTANCES, moved, strict=True)))
            for states, *moved in zip(near[layer], *(each[layer] for each in far), strict=True)
        )
        turns[layer] = Turns(attended, (stored[0], stored[1]) if stored else (attended, Turn()))
    return turns


def _recognise(
    model: PreTrainedModel, decoder: nn.Module, layer: int, near: torch.Tensor, far: Mapping[int, torch.Tensor]
) -> Turn:
    """Find out how states at one place of a text become those at others, which are given by their distance."""
    states = near.float()

    def error(turn: Turn) -> float:
        turned = {distance: turn(states, torch.full((1, 1), distance, device=states.device)) for distance in far}
        return max(float((turned[distance] - moved.float()).abs().max()) for distance, moved in far.items())

    best = min(_candidates(decoder, states.shape[-1]), key=error)
    rounding = max(torch.finfo(dtype).eps for dtype in (near.dtype, torch.float32))  # models have float32 angles
    # Another rotation would differ by as much as the states themselves.
    if error(best) <= rounding**0.5 * float(states.abs().max()):
        return best
    raise ValueError(
        f"{type(model).__name__} cannot be made blockwise with sinks: the keys of layer {layer} are rotated in a way "
        "that is not known here, so they cannot be turned to stand before another block. Use sinks=0."
    )


def _candidates(decoder: nn.Module, width: int) -> Iterator[Turn]:
    yield Turn()
    for module in modules_with_angles(decoder):
        for name in frequencies_of(module):
            rotated = 2 * len(getattr(module, name))
            for offset in dict.fromkeys((0, width - rotated)):
                for is_adjacent, sign in itertools.product((False, True), (1, -1)):
                    if offset >= 0:
                        yield Turn(module, name, offset, is_adjacent, sign)
