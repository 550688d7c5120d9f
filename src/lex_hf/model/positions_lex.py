"""Position schemes: how the order of tokens reaches a model.

A new scheme is one class, one row of `SCHEMES`, and its fields in the config; see `scheme_lex.py`, and `biases_lex.py`
for those that act on scores.

Queries and keys are rotated at their absolute positions, by angles that are computed in float64: only differences act,
and position 10^8 is as exact as position 0. What would grow with the text, the scale of xPos, is relative to the pair
of blocks: its exponents are *offsets* from the second block of the pair.
"""

import math
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn

from .biases_lex import AlibiScheme, KerpleScheme, SandwichScheme, ShawScheme, SmoothedSandwichScheme, T5Scheme
from .fields_lex import require, require_finite
from .rotation_lex import Rotation
from .scheme_lex import PositionScheme


class RotaryScheme(PositionScheme):
    r"""XPos and its ablations, RoPE among them.

    With pairs of channels read as complex numbers, a query at position p and a key at position p' have the score
    $\sum_i \mathrm{Re}(q_i \bar k_i e^{iθ_i(p-p')}) ζ_i^{(p-p')/B} / \sqrt d$, where θ_i = rope_theta^(-2i/d) and
    ζ_i = (2i/d + γ)/(1 + γ) (LEX paper, Eq. 8, 11, 12, Algorithm 1). Algorithm 1 prints ζ^m without B; Eq. 12 and the
    official code divide the exponent by B, and so does this.

    Angles are those of absolute positions. A token in slot s of a pair of blocks of h gets the exponent (s - h)/B, so
    exponents stay in [-h/B, h/B] whatever the length of the text; when its block becomes the previous one, a key is
    multiplied by ζ^(h/B). Without blocks the exponent is p/B, and xPos ends where ζ^(p/B) leaves the dtype.
    """

    choices: ClassVar = {"xpos_scale": ("vector", "scalar", "none")}
    key_fields: ClassVar[tuple[str, ...]] = (
        "rope_theta",
        "xpos_gamma",
        "xpos_scale_base",
        "xpos_rotation",
        "xpos_scale",
    )

    @classmethod
    def validate_fields(cls, config: Any) -> None:
        """Check the fields of xPos."""
        super().validate_fields(config)
        for name in ("rope_theta", "xpos_gamma", "xpos_scale_base"):
            require_finite(config, name, above=0)

    @classmethod
    def validate_sizes(cls, config: Any) -> None:
        """Check that channels of a head pair up."""
        require(
            config.head_dim % 2 == 0,
            "hidden_size",
            config.hidden_size,
            f"gives {config.num_attention_heads} heads of {config.head_dim}, and xpos and rope rotate pairs: the "
            "width of a head must be even",
        )

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        pairs = torch.arange(config.head_dim // 2, dtype=torch.float64, device="cpu") * 2 / config.head_dim
        angle, zeta = self._angles_and_zeta(config, pairs)
        # Plain numbers, not buffers: transformers re-creates non-persistent buffers empty, and `.to(dtype)` rounds
        # them.
        self._angle: list[float] = angle.tolist()
        self._decay: list[float] = (zeta.log() / config.xpos_scale_base).tolist()
        self._is_scaled = any(self._decay)
        self._made: dict[Any, tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = {}

    @staticmethod
    def _angles_and_zeta(config: Any, pairs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """θ_i and ζ_i for 2i/d, float64, shape `(head_dim / 2,)`."""
        angle, gamma = config.rope_theta**-pairs, config.xpos_gamma
        zeta = {
            "vector": (pairs + gamma) / (1 + gamma),
            "scalar": torch.full_like(pairs, gamma / (1 + gamma)),
            "none": torch.ones_like(pairs),
        }[config.xpos_scale]
        return angle if config.xpos_rotation else torch.zeros_like(angle), zeta

    def rotation(
        self, positions: torch.Tensor, offsets: torch.Tensor, block: int | None, dtype: torch.dtype
    ) -> Rotation:
        """Return the factors of queries and keys; see [`PositionScheme.rotation`]."""
        dtype = torch.promote_types(dtype, torch.float32)
        theta, decay, previous = self._constants(positions, block, dtype)
        angle = _column(positions, theta.device) * theta
        factors = torch.stack((angle.cos(), angle.sin()), dim=-1)
        if not self._is_scaled:
            factors = factors.to(positions.device, dtype)
            return Rotation(factors, factors)
        scale = torch.exp(_column(offsets, decay.device) * decay).unsqueeze(-1)
        query, key = ((factors * exact).to(positions.device, dtype) for exact in (scale, 1 / scale))
        return Rotation(query, key, previous)

    def advance(self, rotation: Rotation, distance: int) -> Rotation:
        """Turn the factors of queries and keys further; see [`PositionScheme.advance`]."""
        assert rotation.query is not None
        angle = torch.tensor(self._angle, dtype=torch.float64, device="cpu") * distance
        return replace(rotation, turn=torch.stack((angle.cos(), angle.sin()), dim=-1).to(rotation.query))

    def _constants(
        self, positions: torch.Tensor, block: int | None, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return θ and log(ζ)/B, float64, and what keys are multiplied by when their block becomes the previous one.

        They are made once for each device; compilers and tensors without storage get constants of their own.
        """
        key = positions.device, block, dtype
        is_plain = type(positions) is torch.Tensor and not torch.compiler.is_compiling()
        if is_plain and key in self._made:
            return self._made[key]
        with torch.inference_mode(False):
            # In float64, also of far positions: an angle of float32 has lost its fraction at position 10^7.
            place = "cpu" if positions.device.type == "mps" else positions.device  # MPS has no float64
            theta, decay = torch.tensor((self._angle, self._decay), dtype=torch.float64, device=place)
            previous = None
            if block is not None and self._is_scaled:
                previous = torch.exp(block * decay).repeat_interleave(2).to(positions.device, dtype)
        if is_plain:
            self._made[key] = theta, decay, previous
        return theta, decay, previous

    def check_length(self, length: int, block: int | None, dtype: torch.dtype) -> None:
        """Check that full attention, which scales position p by ζ^(p/B), stays within the range of the dtype."""
        if block is not None or not self._is_scaled:
            return
        # Room for states up to 2^4, so that neither end is rounded to zero or infinity.
        limit = int((-math.log(torch.finfo(dtype).tiny) - 4 * math.log(2)) / -min(self._decay))
        if length > limit:
            raise ValueError(
                f"xPos with full attention reaches {limit} tokens in {str(dtype).removeprefix('torch.')}; this text "
                f"has {length}. Load the model with attention_pattern='blockwise' (any length), or use float32."
            )


class RopeScheme(RotaryScheme):
    """RoPE (Su et al., arXiv 2104.09864): xPos with ζ = 1."""

    key_fields: ClassVar[tuple[str, ...]] = ("rope_theta",)

    @staticmethod
    def _angles_and_zeta(config: Any, pairs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return config.rope_theta**-pairs, torch.ones_like(pairs)


def _column(numbers: torch.Tensor, place: torch.device) -> torch.Tensor:
    """Return positions or offsets as float64, shape `(batch or 1, 1, sequence, 1)`."""
    return numbers.to(place, torch.float64).view(-1, 1, numbers.shape[-1], 1)


class SinusoidalScheme(PositionScheme):
    """Sinusoidal embeddings (Vaswani et al., arXiv 1706.03762; LEX paper, Eq. 14), added to the token embeddings.

    Channels 2i and 2i + 1 hold sin and cos of position / 10000^(2i/hidden_size).
    """

    adds_to_embeddings = True

    @classmethod
    def validate_sizes(cls, config: Any) -> None:
        """Check that channels pair up."""
        require(
            config.hidden_size % 2 == 0, "hidden_size", config.hidden_size, "must be even for sinusoidal positions"
        )

    def embed(self, hidden_states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Add sine and cosine of the positions."""
        width = hidden_states.shape[-1]
        exact = torch.float32 if positions.device.type == "mps" else torch.float64
        index = torch.arange(0, width, 2, dtype=exact, device=positions.device)
        angle = positions[..., None] / 10000 ** (index / width)
        return hidden_states + torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(-2).to(hidden_states.dtype)


class LearnedScheme(PositionScheme):
    """Learned embeddings as in GPT-2: one for each of the `training_length` positions, and none beyond."""

    adds_to_embeddings = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.embedding = nn.Embedding(config.training_length, config.hidden_size)

    def embed(self, hidden_states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Add the embeddings of the positions.

        Raises:
            ValueError: If a position has no embedding.
        """
        if not torch.compiler.is_compiling() and int(positions.max()) >= self.embedding.num_embeddings:
            raise ValueError(
                f"Learned positions end at {self.embedding.num_embeddings} tokens (training_length), and this text "
                f"reaches {int(positions.max()) + 1}. Shorten it, or use a scheme without an end, as 'xpos'."
            )
        return hidden_states + self.embedding(positions)


SCHEMES: dict[str, type[PositionScheme]] = {
    "xpos": RotaryScheme,
    "rope": RopeScheme,
    "alibi": AlibiScheme,
    "t5": T5Scheme,
    "shaw": ShawScheme,
    "kerple": KerpleScheme,
    "sandwich": SandwichScheme,
    "smoothed_sandwich": SmoothedSandwichScheme,
    "sinusoidal": SinusoidalScheme,
    "learned": LearnedScheme,
    "none": PositionScheme,
}


def make_schemes(config: Any) -> nn.Module:
    """Make the scheme of a model, or an `nn.ModuleDict` of several by their names where layers differ."""
    names = dict.fromkeys(config.layer_schemes)
    schemes = {name: SCHEMES[name](config) for name in names}
    return nn.ModuleDict(schemes) if len(schemes) > 1 else schemes[next(iter(names))]
