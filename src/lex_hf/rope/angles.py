"""Angles of a model's own rotation, as exact at position 10^8 as at 0.

Models compute angles in float32, where those of position 10^6 have lost their fraction; some change their frequencies
with the length of the text. Of both, a model that reads in blocks needs nothing: tokens that meet are less than the
training length apart. So a hook shows the module that computes angles a position within the training length, and
computes the angles of the true positions in float64, from the frequencies and in the layout of the module.

Where layers keep full attention, their angles may have frequencies of their own: those of another module, which is the
first one scaled. They travel with the others, and hooks of these layers take them.
"""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lex_hf.rope.per_thread import PerThread

_PROBED = 16  # positions at which a layout is recognised
_TOLERANCE = 1e-5
_ARGUMENT = "position_embeddings"  # of layers, by which transformers hands them angles


def _halves(angles: torch.Tensor) -> torch.Tensor:
    return torch.cat((angles, angles), dim=-1)


def _pairs(angles: torch.Tensor) -> torch.Tensor:
    return angles.repeat_interleave(2, dim=-1)


def _once(angles: torch.Tensor) -> torch.Tensor:
    return angles


_LAYOUTS = (_halves, _pairs, _once)


@dataclass(frozen=True)
class _Formula:
    """How a module's output follows from a buffer of frequencies."""

    buffer: str
    layout: Any
    scale: float

    def compute(self, module: nn.Module, positions: torch.Tensor, like: Any) -> Any:
        """Return cosines and sines, or complex numbers, in the form of an output `like` this, of other positions."""
        device = torch.device("cpu") if positions.device.type == "mps" else positions.device  # MPS has no float64
        frequencies = getattr(module, self.buffer).to(device, torch.float64)
        angles = self.layout(positions.to(device, torch.float64).unsqueeze(-1) * frequencies)
        parts = angles.cos() * self.scale, angles.sin() * self.scale
        if isinstance(like, torch.Tensor):
            whole = torch.complex(*parts)
            return whole.to(like.device, like.dtype).reshape(like.shape)
        return tuple(
            part.to(each.device, each.dtype).reshape(each.shape) for part, each in zip(parts, like, strict=True)
        )


class _Angles(tuple[torch.Tensor, torch.Tensor]):
    """Cosines and sines, with those of layers that keep full attention."""

    far: tuple[torch.Tensor, torch.Tensor]


class ExactAngles:
    """Hooks of a module that computes angles.

    Args:
        module: The module, which has buffers of frequencies.
        length: Training length in tokens.
        far: The same module with the frequencies of layers that keep full attention; `None` if they have no others.
    """

    def __init__(self, module: nn.Module, length: int, far: nn.Module | None = None) -> None:
        self.length, self.far = length, far
        self.signature = inspect.signature(module.forward)
        self._positions: PerThread[torch.Tensor] = PerThread()  # of the call that is going on
        self.formulas: dict[Any, _Formula] = {}
        self.far_formulas: dict[Any, _Formula] = {}
        self.is_learning = True  # of the formulas, while a model is examined
        self.takes_near = False  # whether layers that keep full attention get the angles of the others
        self._hooks: list[Any] = []
        self._hooks = [
            module.register_forward_pre_hook(self._show_near, with_kwargs=True),
            module.register_forward_hook(self._put_right, with_kwargs=True),
        ]

    def remove(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _show_near(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[()], dict[str, Any]]:
        """Show the module the last position of the training length, which decides on its frequencies."""
        kwargs = {**dict(zip(self.signature.parameters, args, strict=False)), **kwargs}
        positions = kwargs.get("position_ids")
        if not isinstance(positions, torch.Tensor) or positions.dim() not in (2, 3):
            raise ValueError(
                f"{type(module).__name__} cannot be made blockwise: it computes angles from something else than "
                "position_ids of the shape (batch, tokens)."
            )
        # Of the positions in time, height and width, text has three times the same.
        self._positions.value = positions if positions.dim() == 2 else positions[0]
        return (), {**kwargs, "position_ids": torch.full_like(positions, self.length - 1)}

    def _put_right(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Return the angles of the true positions."""
        positions, self._positions.value = self._positions.value, None
        assert positions is not None
        states, *_ = self.signature.parameters  # of which only dtype and device count
        key = tuple(sorted((name, value) for name, value in kwargs.items() if name not in (states, "position_ids")))
        if self.is_learning and key not in self.formulas:
            exact = {**kwargs, states: kwargs[states].float()}
            self.formulas[key] = _recognise(module, exact, self.length)
            if self.far is not None:
                self.far_formulas[key] = _recognise(self.far, exact, self.length)
        angles = self.formulas[key].compute(module, positions, output)
        if self.far is None:
            return angles
        if isinstance(angles, torch.Tensor):
            raise ValueError(
                f"{type(module).__name__} cannot be made blockwise with a yarn_factor: its angles are complex numbers."
            )
        angles = _Angles(angles)
        angles.far = angles if self.takes_near else self.far_formulas[key].compute(self.far, positions, output)
        return angles


def give_far_angles(layer: nn.Module) -> Any:
    """Let a layer take the angles of those that keep full attention; return the handle of the hook."""

    def take(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
        angles = kwargs.get(_ARGUMENT)
        if not isinstance(angles, _Angles):
            raise ValueError(
                f"{type(module).__name__} cannot be made blockwise with a yarn_factor: it does not take the angles as "
                f"{_ARGUMENT}, so they cannot be others in some layers."
            )
        return args, {**kwargs, _ARGUMENT: angles.far}

    return layer.register_forward_pre_hook(take, with_kwargs=True)


def modules_with_angles(decoder: nn.Module) -> list[nn.Module]:
    """Return the modules of a decoder that have buffers of rotary frequencies."""
    return [module for module in decoder.modules() if any(True for _ in frequencies_of(module))]


def frequencies_of(module: nn.Module) -> Iterator[str]:
    """Names of the buffers of a module that hold frequencies."""
    for name, buffer in module.named_buffers(recurse=False):
        if name.endswith("inv_freq") and buffer.dim() == 1 and "original" not in name:
            yield name


def _recognise(module: nn.Module, kwargs: dict[str, Any], length: int) -> _Formula:
    """Find out how a module's output follows from its frequencies.

    Raises:
        ValueError: If it follows in none of the known ways.
    """
    device = kwargs["position_ids"].device
    near = torch.arange(_PROBED, device=device).clamp(max=length - 1)
    shown = torch.cat((near, near.new_tensor([length - 1])))[None]  # the last decides on the frequencies
    with torch.no_grad():
        output = module.forward(**{**kwargs, "position_ids": shown})
    is_complex = isinstance(output, torch.Tensor) and output.is_complex()
    parts = (output.real, output.imag) if is_complex else output
    if isinstance(parts, tuple) and len(parts) == 2:
        exact = [part.double() for part in parts]
        scale = float(exact[0].flatten()[0])  # the cosine at position 0
        for name in frequencies_of(module):
            for layout in _LAYOUTS:
                formula = _Formula(name, layout, scale)
                if _fits(formula, module, shown, exact):
                    return formula
    raise ValueError(
        f"{type(module).__name__} cannot be made blockwise: it computes angles in a way that is not known here, so "
        "they could not be made exact far from the start of a text."
    )


def _fits(formula: _Formula, module: nn.Module, shown: torch.Tensor, exact: list[torch.Tensor]) -> bool:
    frequencies = getattr(module, formula.buffer)
    width = formula.layout(frequencies[None]).shape[-1]
    if any(part.numel() != shown.numel() * width for part in exact):
        return False
    found = formula.compute(module, shown, tuple(part.float() for part in exact))
    # The last position is large: there, the module's own angles are not exact.
    return all(
        torch.allclose(
            one.double().reshape(shown.shape[1], width)[:-1],
            other.reshape(shown.shape[1], width)[:-1],
            atol=_TOLERANCE * max(1.0, abs(formula.scale)),
            rtol=0,
        )
        for one, other in zip(found, exact, strict=True)
    )
