"""The interface of position schemes, and the scheme without positions.

A scheme may act in four places, and every hook does nothing by default: [`PositionScheme.embed`] adds to the token
embeddings, [`PositionScheme.rotation`] rotates queries and keys, [`PositionScheme.bias`] adds to attention scores what
depends on the distance, and vectors of [`PositionScheme.count_vectors`] distances what depends on the query, too. No
caller asks which scheme a layer has.
"""

from typing import Any, ClassVar

import torch
from torch import nn

from .fields_lex import require
from .rotation_lex import Rotation


class PositionScheme(nn.Module):
    """The scheme without positions, and the interface of all others.

    Attributes:
        choices: Fields of the config that name one of several kinds, with their names.
        adds_to_embeddings: Whether [`PositionScheme.embed`] does anything.
        key_fields: Fields of the config that decide how cached keys are rotated and scaled.
        num_vectors: [`PositionScheme.count_vectors`] of the config.
    """

    choices: ClassVar[dict[str, tuple[str, ...]]] = {}
    key_fields: ClassVar[tuple[str, ...]] = ()
    adds_to_embeddings = False

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.num_vectors = self.count_vectors(config)

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

    @classmethod
    def count_vectors(cls, config: Any) -> int | None:
        """Return for how many distances 0, 1, … each layer learns a vector that is added to its keys.

        Keys further back have the last one. The product of a query and a vector is a bias of that query, so keys stay
        what they are. `None` if there are none.
        """
        return None

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
