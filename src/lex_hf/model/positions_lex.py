"""Position schemes: how the order of tokens reaches a model.

A scheme may act in three places, and every hook does nothing by default: [`PositionScheme.embed`] adds to the token
embeddings, [`PositionScheme.rotation`] rotates queries and keys, [`PositionScheme.bias`] adds to attention scores.
No caller asks which scheme a model has; a new one is one class, one row of `SCHEMES`, and its fields in the config.

Queries and keys are rotated at their absolute positions, by angles that are computed in float64: only differences act,
and position 10^8 is as exact as position 0. What would grow with the text, the scale of xPos, is relative to the pair
of blocks: its exponents are *offsets* from the second block of the pair.
"""

import math
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import initialization as init

from .fields_lex import MAX_SIZE, require, require_finite
from .rotation_lex import Rotation


class PositionScheme(nn.Module):
    """The scheme without positions, and the interface of all others.

    Attributes:
        choices: Fields of the config that name one of several kinds, with their names.
        adds_to_embeddings: Whether [`PositionScheme.embed`] does anything.
    """

    choices: ClassVar[dict[str, tuple[str, ...]]] = {}
    adds_to_embeddings = False

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads

    @classmethod
    def validate_fields(cls, config: Any) -> None:
        """Check each field of the config that belongs to this scheme, whether it is in use or not.

        Raises:
            ValueError: If one of them is impossible.
        """
        for name, known in cls.choices.items():
            require(getattr(config, name) in known, name, getattr(config, name), f"must be one of {known}")

    @classmethod
    def validate_sizes(cls, config: Any) -> None:
        """Check what this scheme, if it is in use, asks of the sizes of the model and of its fields together.

        Raises:
            ValueError: If they do not fit.
        """

    def reset_parameters(self) -> None:
        """Initialise what the scheme learns."""

    def embed(self, hidden_states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Add absolute positions to token embeddings; called if `adds_to_embeddings`.

        Args:
            hidden_states: Token embeddings, shape `(batch, sequence, hidden_size)`.
            positions: Position of each token in its own sequence, shape `(batch or 1, sequence)`.
        """
        return hidden_states

    def rotation(
        self, positions: torch.Tensor, offsets: torch.Tensor, block: int | None, dtype: torch.dtype
    ) -> Rotation:
        """Return what a forward pass does to queries and keys.

        Args:
            positions: Position of each token in its text, shape `(sequence,)` or `(batch, sequence)`.
            offsets: Slot of each token in its pair of blocks, counted from the second block; its position where there
                are no blocks. Shape as `positions`.
            block: Block length of the attention pattern; `None` if it has no blocks.
            dtype: Dtype of the states.
        """
        return Rotation()

    def advance(self, rotation: Rotation, distance: int) -> Rotation:
        """Return the rotation of tokens in the same slots of a later pair of blocks.

        Args:
            rotation: What [`PositionScheme.rotation`] returned.
            distance: Number of tokens from its positions to the later ones.
        """
        return rotation

    def check_length(self, length: int, block: int | None, dtype: torch.dtype) -> None:
        """Check that a text of `length` tokens is within the reach of the scheme.

        Args:
            length: Number of tokens.
            block: Block length of the attention pattern; `None` if it has no blocks.
            dtype: Dtype of the states.

        Raises:
            ValueError: If it is not.
        """

    def forward(
        self, query_slots: torch.Tensor, key_slots: torch.Tensor, num_slots: int, dtype: torch.dtype
    ) -> torch.Tensor | None:
        """Return the bias; as a call, so that offloaded parameters are there. See [`PositionScheme.bias`]."""
        return self.bias(query_slots, key_slots, num_slots, dtype)

    def bias(
        self, query_slots: torch.Tensor, key_slots: torch.Tensor, num_slots: int, dtype: torch.dtype
    ) -> torch.Tensor | None:
        """Return what is added to scores that are already divided by √head_dim.

        Args:
            query_slots: Shape `(..., query)`.
            key_slots: Shape `(..., key)`, on the same axis as `query_slots`; only differences count.
            num_slots: An upper bound of all slots, exclusive.
            dtype: The dtype to compute in, float32 or float64.

        Returns:
            Shape `(..., num_heads, query, key)`, or `None` for a scheme that adds nothing. Keys after their query get
            the bias of distance 0: attention is causal.
        """
        return None


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
            f"gives {config.num_attention_heads} heads of {config.head_dim}, and {config.position_embedding_type} "
            "rotates pairs: the width of a head must be even",
        )

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        pairs = torch.arange(config.head_dim // 2, dtype=torch.float64, device="cpu") * 2 / config.head_dim
        angle = config.rope_theta**-pairs
        is_rope = config.position_embedding_type == "rope"
        if not (config.xpos_rotation or is_rope):
            angle = torch.zeros_like(angle)
        gamma = config.xpos_gamma
        zeta = {
            "vector": (pairs + gamma) / (1 + gamma),
            "scalar": torch.full_like(pairs, gamma / (1 + gamma)),
            "none": torch.ones_like(pairs),
        }["none" if is_rope else config.xpos_scale]
        # Plain numbers, not buffers: transformers re-creates non-persistent buffers empty, and `.to(dtype)` rounds
        # them.
        self._angle: list[float] = angle.tolist()
        self._decay: list[float] = (zeta.log() / config.xpos_scale_base).tolist()
        self._is_scaled = any(self._decay)
        self._made: dict[Any, tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = {}

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


def _column(numbers: torch.Tensor, place: torch.device) -> torch.Tensor:
    """Return positions or offsets as float64, shape `(batch or 1, 1, sequence, 1)`."""
    return numbers.to(place, torch.float64).view(-1, 1, numbers.shape[-1], 1)


class BiasScheme(PositionScheme):
    """Base of ALiBi, T5, KERPLE and Sandwich: a bias that depends on head and distance alone."""

    def by_distance(self, distance: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the bias at distances 0, 1, …, shape `(num_heads, distances)`.

        Args:
            distance: Number of tokens from the key on to the query, int64, shape `(distances,)`.
            dtype: The dtype to compute in, float32 or float64.
        """
        raise NotImplementedError

    def bias(
        self, query_slots: torch.Tensor, key_slots: torch.Tensor, num_slots: int, dtype: torch.dtype
    ) -> torch.Tensor | None:
        """Return what is added to scores; see [`PositionScheme.bias`]."""
        table = self.by_distance(torch.arange(num_slots, device=query_slots.device), dtype)
        distance = (query_slots[..., :, None] - key_slots[..., None, :]).clamp(min=0)
        return table[:, distance].movedim(0, -3)

    def _head_exponents(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """8n/H for heads n = 1 … H, shape `(num_heads, 1)`: h_n of the Sandwich paper."""
        return torch.arange(1, self.num_heads + 1, dtype=dtype, device=device)[:, None] * 8 / self.num_heads


class AlibiScheme(BiasScheme):
    """ALiBi: -m_n · distance (Press et al., arXiv 2108.12409; LEX paper, Eq. 17; Sandwich paper, Eq. 3).

    The slopes are m_n = 2^(-8n/H). Where H is no power of two, ALiBi's authors (and BLOOM and MPT) take the slopes of
    the next lower power of two P and then every second slope of 2P: `alibi_slopes="official"`. The Sandwich paper
    writes 2^(-8n/H) for every H: `"geometric"`. `alibi_slope_shift` Δ adds to the exponent (its §4.1: 2^-(h+Δ)),
    `alibi_shared_slope` h gives all heads 2^-h (§4.2).
    """

    choices: ClassVar = {"alibi_slopes": ("official", "geometric")}

    @classmethod
    def validate_fields(cls, config: Any) -> None:
        """Check the fields of ALiBi."""
        super().validate_fields(config)
        for name in ("alibi_slope_shift", "alibi_shared_slope"):
            value = getattr(config, name)
            require(value is None or abs(value) <= 100, name, value, "must lie in [-100, 100]: it is an exponent of 2")

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        heads, shared = config.num_attention_heads, config.alibi_shared_slope
        exponents = _geometric(heads) if config.alibi_slopes == "geometric" else _official(heads)
        exponents = exponents if shared is None else [float(shared)] * heads
        self._slopes = [2.0 ** -(exponent + config.alibi_slope_shift) for exponent in exponents]

    def by_distance(self, distance: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """-m_n · distance."""
        return -torch.tensor(self._slopes, dtype=dtype, device=distance.device)[:, None] * distance


def _geometric(heads: int) -> list[float]:
    """Exponents 8n/H."""
    return [8 * n / heads for n in range(1, heads + 1)]


def _official(heads: int) -> list[float]:
    """Exponents by the rule of ALiBi's authors for any number of heads."""
    power = 1 << (heads.bit_length() - 1)
    return _geometric(power) + _geometric(2 * power)[::2][: heads - power]


class T5Scheme(BiasScheme):
    """T5's relative bias (Raffel et al., arXiv 1910.10683): one learned number for each bucket of distances and head.

    The first half of the buckets holds one distance each, the second half distances in steps that grow with the
    logarithm, up to `t5_max_distance`; all beyond share the last. One table serves all layers. T5 itself leaves scores
    undivided; here they are divided by √head_dim as for every other scheme. To make up for it, KERPLE's code (which
    made the papers' T5 baselines) multiplies the table by √head_dim: `t5_scaled`. The function space is the same, but
    the table is learned as much faster.
    """

    @classmethod
    def validate_fields(cls, config: Any) -> None:
        """Check the fields of T5."""
        buckets, longest = config.t5_num_buckets, config.t5_max_distance
        is_even = 2 <= buckets <= MAX_SIZE and buckets % 2 == 0
        require(is_even, "t5_num_buckets", buckets, f"must be even, at least 2 and at most {MAX_SIZE}")
        require(1 <= longest <= MAX_SIZE, "t5_max_distance", longest, f"must be at least 1 and at most {MAX_SIZE}")

    @classmethod
    def validate_sizes(cls, config: Any) -> None:
        """Check that distances are left for the second half of the buckets."""
        buckets, longest = config.t5_num_buckets, config.t5_max_distance
        require(longest > buckets // 2, "t5_max_distance", longest, f"must exceed t5_num_buckets / 2 = {buckets // 2}")

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.num_buckets, self.max_distance = config.t5_num_buckets, config.t5_max_distance
        self.scale = config.head_dim**0.5 if config.t5_scaled else 1.0
        self.relative_attention_bias = nn.Embedding(config.t5_num_buckets, config.num_attention_heads)

    def buckets(self, distance: torch.Tensor) -> torch.Tensor:
        """Return the bucket of each distance, same shape."""
        exact = self.num_buckets // 2
        ratio = torch.log(distance.clamp(min=exact).double() / exact) / math.log(self.max_distance / exact)
        spread = exact + (ratio * (self.num_buckets - exact)).long()
        return torch.where(distance < exact, distance, spread.clamp(max=self.num_buckets - 1))

    def by_distance(self, distance: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The learned number of each distance's bucket."""
        # Called, not indexed: offloaded weights are loaded by a call.
        table = self.relative_attention_bias(torch.arange(self.num_buckets, device=distance.device))
        return self.scale * table.to(dtype)[self.buckets(distance)].T


class KerpleScheme(BiasScheme):
    """KERPLE (Chi et al., arXiv 2205.09921): -r₁ log(1 + r₂ · distance), or -r₁ · distance^r₂ (`kerple_variant`).

    r₁ and r₂ are learned, a pair for each head, shared by all layers, and kept in the range of the official code:
    at least 0.01, and the power's r₂ at most 2.
    """

    choices: ClassVar = {"kerple_variant": ("log", "power")}

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.is_log = config.kerple_variant == "log"
        self.r1 = nn.Parameter(torch.empty(config.num_attention_heads))
        self.r2 = nn.Parameter(torch.empty(config.num_attention_heads))

    def reset_parameters(self) -> None:
        """Draw the official code's initial values."""
        init.uniform_(self.r1, 0.0, 2.0 if self.is_log else 1.0)
        init.uniform_(self.r2, 0.0, 1.0 if self.is_log else 2.0)

    def by_distance(self, distance: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The logarithm or the power of the distance."""
        r1 = self.r1.to(dtype).clamp(min=0.01)[:, None]
        r2 = self.r2.to(dtype).clamp(min=0.01, max=None if self.is_log else 2.0)[:, None]
        if self.is_log:
            return -r1 * torch.log1p(r2 * distance)
        # At distance 0 the power is 0, but its derivative is not defined.
        return torch.where(distance > 0, -r1 * distance.clamp(min=1).to(dtype) ** r2, 0.0)


class SandwichScheme(BiasScheme):
    """Sandwich (arXiv 2212.10356, §6.1, Eq. 6): inner products of sinusoidal embeddings, made a bias.

    (Σ_i cos(distance / 10000^(2i/d̄)) - d̄/2) / h_n with d̄ = `sandwich_dim` and h_n = 8n/H. The sum is printed, and
    coded elsewhere, over i = 1 … d̄/2; `sandwich_first_index=0` takes i = 0 … d̄/2 - 1, the frequencies of the
    sinusoidal embedding itself.
    """

    @classmethod
    def validate_fields(cls, config: Any) -> None:
        """Check the fields of Sandwich."""
        super().validate_fields(config)
        width, first = config.sandwich_dim, config.sandwich_first_index
        is_even = 2 <= width <= MAX_SIZE and width % 2 == 0
        require(is_even, "sandwich_dim", width, f"must be even, at least 2 and at most {MAX_SIZE}")
        require(first in (0, 1), "sandwich_first_index", first, "must be 1 (as printed) or 0")

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.width, self.first = config.sandwich_dim, config.sandwich_first_index

    def by_distance(self, distance: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The sum of cosines, compressed for each head."""
        return self._cosines(distance).to(dtype) / self._head_exponents(dtype, distance.device)

    def _cosines(self, distance: torch.Tensor) -> torch.Tensor:
        """Σ_i cos(distance / 10000^(2i/d̄)) - d̄/2, in float64."""
        index = torch.arange(self.first, self.first + self.width // 2, dtype=torch.float64, device=distance.device)
        return (distance[:, None] / 10000 ** (2 * index / self.width)).cos().sum(dim=1) - self.width / 2


class SmoothedSandwichScheme(SandwichScheme):
    """Sandwich without its ripples: (8/h_n)(a · log(1 + distance) + c) (arXiv 2212.10356, §6.4 and its footnote).

    `smoothed_sandwich_fit="printed"` takes the curve that the paper prints, a = -0.825 and c = -0.8;
    `"points"` fits a and c to Sandwich at distances 0 … 49 by least squares, as the footnote says. The two are
    different curves: to 0.01, the printed one is the fit to all 8192 distances of the sum that begins at i = 0.
    """

    FIT_DISTANCES = 50
    choices: ClassVar = {"smoothed_sandwich_fit": ("printed", "points")}

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.slope, self.offset = -0.825, -0.8
        if config.smoothed_sandwich_fit == "points":
            distance = torch.arange(self.FIT_DISTANCES, device="cpu")
            curve = torch.log1p(distance.double())
            design = torch.stack((curve, torch.ones_like(curve)), dim=1)
            target = self._cosines(distance)[:, None] / 8
            self.slope, self.offset = torch.linalg.lstsq(design, target).solution[:, 0].tolist()

    def by_distance(self, distance: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The logarithmic curve, compressed for each head."""
        curve = self.slope * torch.log1p(distance.to(dtype)) + self.offset
        return 8 / self._head_exponents(dtype, distance.device) * curve


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
    "rope": RotaryScheme,
    "alibi": AlibiScheme,
    "t5": T5Scheme,
    "kerple": KerpleScheme,
    "sandwich": SandwichScheme,
    "smoothed_sandwich": SmoothedSandwichScheme,
    "sinusoidal": SinusoidalScheme,
    "learned": LearnedScheme,
    "none": PositionScheme,
}
