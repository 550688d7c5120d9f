"""Which keys each query sees, at places along a text."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lex_hf.model.masking_lex import FullPattern

PLACES = 96  # of queries, and of keys, at most
_LENGTHS = 3  # training lengths that are drawn


@dataclass(frozen=True)
class Seen:
    """Keys that queries see.

    Attributes:
        step: Tokens between two places; every `step`-th token is looked at.
        visible: Whether the query at a place sees the key at another, shape `(places, places)`, bool.
    """

    step: int
    visible: Tensor

    @property
    def tokens(self) -> int:
        """Length of the text."""
        return self.step * len(self.visible)

    def runs(self) -> list[tuple[int, int, int]]:
        """Return query, first key and number of keys, all in places, of keys beside each other that are seen."""
        found = []
        for query, row in enumerate(self.visible.tolist()):
            begin = None
            for key, is_seen in enumerate([*row, False]):
                if is_seen and begin is None:
                    begin = key
                elif not is_seen and begin is not None:
                    found.append((query, begin, key - begin))
                    begin = None
        return found


def seen(pattern: FullPattern, training_length: int) -> Seen:
    """Return which keys queries see, in a text of about three training lengths.

    Args:
        pattern: The attention pattern of a layer.
        training_length: Of the model, in tokens.
    """
    step = max(1, _LENGTHS * training_length // PLACES)
    places = torch.arange(min(PLACES, _LENGTHS * training_length)) * step
    return Seen(step, pattern.visible(places, places))
