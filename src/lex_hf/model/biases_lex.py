"""Position schemes that add a bias to attention scores: by head and distance alone, or by query and distance."""

import math
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import initialization as init

from .fields_lex import MAX_SIZE, require
from .scheme_lex import PositionScheme


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


class ShawScheme(PositionScheme):
    """Relative vectors (Shaw et al., arXiv 1803.02155; LEX paper, Eq. 15): q · (k + w_min(distance, k)).

    One learned vector for each distance up to `shaw_max_distance`, in each layer, shared by its heads; keys further
    back have the last one. Those of values, which the formula also has, are left out: beside those of keys, Shaw et
    al. found that they make no difference.
    """

    @classmethod
    def validate_fields(cls, config: Any) -> None:
        """Check the number of vectors."""
        longest = config.shaw_max_distance
        require(1 <= longest <= MAX_SIZE, "shaw_max_distance", longest, f"must be at least 1 and at most {MAX_SIZE}")

    @classmethod
    def count_vectors(cls, config: Any) -> int:
        """One for each distance up to the largest; see [`PositionScheme.count_vectors`]."""
        return int(config.shaw_max_distance) + 1
