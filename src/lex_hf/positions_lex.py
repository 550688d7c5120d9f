"""Position schemes: what a model knows of the order of its tokens.

A scheme may act in three places, and every hook does nothing by default: [`PositionScheme.embed`] adds to the token
embeddings, [`PositionScheme.rotation`] turns queries and keys, [`PositionScheme.bias`] adds to attention scores.
Attention calls all three without asking which scheme it has; a new scheme is one class and one row of `SCHEMES`.

Coordinates are *slots*, not absolute positions: a query and the keys it meets lie in one pair of blocks, so a table of
the pair's slots serves texts of any length, and no exponent ever grows with the text.
"""

import math
from dataclasses import dataclass

import torch
from torch import nn

from .configuration_lex import LexConfig

Tables = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Rotation:
    """Complex factors for the tokens of one forward pass, stored as (real, imaginary) pairs.

    Attributes:
        query: Factors for queries, shape `(sequence, head_dim / 2, 2)` or `(batch, sequence, head_dim / 2, 2)`.
        key: Factors for keys, same shape.
        shift: Factors that move a key back by one block, shape `(head_dim / 2, 2)`.
    """

    query: torch.Tensor
    key: torch.Tensor
    shift: torch.Tensor


def rotate(states: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Multiply adjacent pairs of channels, read as complex numbers, by complex factors.

    Args:
        states: Real tensor, shape `(..., head_dim)`; channels `2i` and `2i + 1` are one complex number.
        factors: Shape broadcastable to `(..., head_dim / 2, 2)`, float32 or float64.

    Returns:
        A tensor like `states`. Half-precision states are multiplied in float32 and rounded once.
    """
    pairs = states.to(factors.dtype).unflatten(-1, (-1, 2))
    if torch.compiler.is_compiling():  # compilers fuse real arithmetic, and call out for complex numbers
        (a, b), (c, d) = pairs.unbind(-1), factors.unbind(-1)
        product = torch.stack((a * c - b * d, a * d + b * c), dim=-1)
    else:
        product = torch.view_as_real(torch.view_as_complex(pairs) * torch.view_as_complex(factors))
    return product.flatten(-2).to(states.dtype)


class PositionScheme(nn.Module):
    """The scheme without positions, and the interface of all others."""

    def __init__(self, config: LexConfig) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads

    def embed(self, hidden_states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Add absolute positions to token embeddings.

        Args:
            hidden_states: Token embeddings, shape `(batch, sequence, hidden_size)`.
            positions: Position of each token in its own sequence, shape `(batch or 1, sequence)`.
        """
        return hidden_states

    def rotation(self, slots: torch.Tensor, num_slots: int, block: int | None, like: torch.Tensor) -> Rotation | None:
        """Return the factors that turn queries and keys.

        Args:
            slots: Slot of each token, shape `(sequence,)` or `(batch, sequence)`, on the device of `like`.
            num_slots: An upper bound of `slots`, exclusive.
            block: Block length of the attention pattern; `None` if it has no blocks.
            like: A tensor whose device and dtype the factors are for.

        Raises:
            ValueError: If the factors leave the range of the dtype.
        """
        return None

    def bias(self, query_slots: torch.Tensor, key_slots: torch.Tensor) -> torch.Tensor | None:
        """Return what is added to scores that are already divided by √head_dim.

        Args:
            query_slots: Shape `(..., query)`.
            key_slots: Shape `(..., key)`, on the same axis as `query_slots`; only differences count.

        Returns:
            Shape `(..., num_heads, query, key)`, or `None` for a scheme that adds nothing.
        """
        return None


class RotaryScheme(PositionScheme):
    r"""XPos and its ablations, RoPE among them.

    With pairs of channels read as complex numbers, a query at position p and a key at position p' have the score
    $\sum_i \mathrm{Re}(q_i \bar k_i e^{iθ_i(p-p')}) ζ_i^{(p-p')/B} / \sqrt d$, where θ_i = rope_theta^(-2i/d) and
    ζ_i = (2i/d + γ)/(1 + γ) (LEX paper, Eq. 8, 11, 12, Algorithm 1). Algorithm 1 prints ζ^m without B; Eq. 12 and the
    official code divide the exponent by B, and so does this.

    A token in slot s of a pair of blocks of h gets the exponent (s - h)/B, so exponents stay in [-h/B, 2h/B] whatever
    the length of the text. Without blocks the slot is the position itself, and xPos ends where ζ leaves the dtype.
    """

    def __init__(self, config: LexConfig) -> None:
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
        # them. From these, tables are made on demand, in float64.
        self._angle: list[float] = angle.tolist()
        self._decay: list[float] = (zeta.log() / config.xpos_scale_base).tolist()
        self._tables: dict[tuple[int, torch.device, torch.dtype], Tables] = {}

    def rotation(self, slots: torch.Tensor, num_slots: int, block: int | None, like: torch.Tensor) -> Rotation | None:
        """Return the factors that turn queries and keys; see [`PositionScheme.rotation`]."""
        if block is None:
            self._check_range(num_slots, like.dtype)
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        query, key, shift = self._tables_for(num_slots, block or 0, like.device, dtype)
        return Rotation(query[slots], key[slots], shift)

    def _tables_for(self, num_slots: int, anchor: int, device: torch.device, dtype: torch.dtype) -> Tables:
        """Factors of queries, of keys (a row a slot, at least `num_slots` rows) and of the shift; made once, kept."""
        tables = self._tables.get((anchor, device, dtype))
        if tables is not None and tables[0].shape[0] >= num_slots:
            return tables
        rows = max(3 * anchor, 1 << (num_slots - 1).bit_length())
        # Made outside of inference mode, or a model that was evaluated first could not be trained afterwards.
        with torch.inference_mode(False):
            slots = torch.arange(rows, dtype=torch.float64, device="cpu")
            query = self._factors(slots, slots - anchor)
            key = self._factors(slots, anchor - slots)
            shift = self._factors(slots.new_tensor([-anchor]), slots.new_tensor([anchor]))[0]
            tables = (query.to(device, dtype), key.to(device, dtype), shift.to(device, dtype))
        if type(tables[0]) is torch.Tensor:  # not a tracer's stand-in, which must not outlive the trace
            self._tables[anchor, device, dtype] = tables
        return tables

    def _factors(self, angles: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
        """e^{iθ·angle} ζ^{exponent/B} in float64, shape `(rows, head_dim / 2, 2)`."""
        angle = angles[:, None] * angles.new_tensor(self._angle)
        scale = torch.exp(exponents[:, None] * angles.new_tensor(self._decay))
        return torch.stack((angle.cos() * scale, angle.sin() * scale), dim=-1)

    def _check_range(self, length: int, dtype: torch.dtype) -> None:
        """Full attention scales position p by ζ^(p/B): refuse texts whose scale would leave the dtype."""
        steepest = -min(self._decay)
        if steepest == 0:
            return
        # Room for states up to 2^4, so that neither end is rounded to zero or infinity.
        limit = int((-math.log(torch.finfo(dtype).tiny) - 4 * math.log(2)) / steepest)
        if length > limit:
            raise ValueError(
                f"xPos with full attention reaches {limit} tokens in {str(dtype).removeprefix('torch.')}; this text "
                f"has {length}. Load the model with attention_pattern='blockwise' (any length), or use float32."
            )


SCHEMES: dict[str, type[PositionScheme]] = {"xpos": RotaryScheme, "rope": RotaryScheme}
