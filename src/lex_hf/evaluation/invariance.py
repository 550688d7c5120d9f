"""Order variance and translation invariance of a model, measured (LEX paper, Eq. 1 and 2)."""

import math
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from lex_hf.evaluation.loading import evaluating


@dataclass(frozen=True)
class PositionCheck:
    """Largest absolute differences of logits; see [`check_positions`].

    Attributes:
        order_variance: Change of the last token's logits when the tokens before it are permuted. Above 0: the model
            knows the order of tokens (Eq. 1).
        left_padding: Change when masked padding is prepended (Eq. 2).
        right_padding: Change when masked padding is appended (Eq. 2).
        shifted_positions: Change when `shift` is added to all `position_ids`; `None` if the model refuses those
            positions.
        text_in_front: Change of the last token's logits when other text is prepended; `None` if the model refuses
            that length. Not a property of the paper: 0 only if the text is longer than the model reaches back and,
            with blockwise attention, `shift` is a multiple of the block length.
        shift: Number of tokens prepended or appended.
        tolerance: Largest difference that counts as rounding.
    """

    order_variance: float
    left_padding: float
    right_padding: float
    shifted_positions: float | None
    text_in_front: float | None
    shift: int
    tolerance: float

    @property
    def is_order_variant(self) -> bool:
        """True if Eq. 1 holds."""
        return self.order_variance > self.tolerance

    @property
    def ignores_padding(self) -> bool:
        """True if Eq. 2 holds."""
        return max(self.left_padding, self.right_padding) <= self.tolerance

    @property
    def ignores_shifts(self) -> bool:
        """True if the model only knows relative positions."""
        return self.shifted_positions is not None and self.shifted_positions <= self.tolerance


def check_positions(
    model: PreTrainedModel, input_ids: torch.Tensor, *, shift: int = 7, tolerance: float = 1e-4, seed: int = 0
) -> PositionCheck:
    """Measure order variance and translation invariance of a causal language model.

    Args:
        model: Any causal language model of transformers; it runs in evaluation mode and is left as it was.
        input_ids: A text of at least 3 tokens, shape `(1, sequence)` or `(sequence,)`. Beyond two blocks it also shows
            what the attention pattern does.
        shift: Number of tokens of padding or text that are prepended or appended.
        tolerance: Largest difference that counts as rounding.
        seed: Seed of the permutation and of the text that is prepended.

    Raises:
        ValueError: If the input is not one text of at least 3 tokens, `shift` is less than 1, the tolerance is
            negative or not finite, or a logit is not finite.
    """
    ids = input_ids.reshape(1, -1) if input_ids.dim() == 1 else input_ids
    if ids.dim() != 2 or ids.shape[0] != 1 or ids.shape[1] < 3:
        raise ValueError(f"input_ids has the shape {tuple(input_ids.shape)}; give one text of at least 3 tokens.")
    if shift < 1:
        raise ValueError(f"shift = {shift}: it must be at least 1.")
    if not 0 <= tolerance < math.inf:
        raise ValueError(f"tolerance = {tolerance}: it must be a finite number, at least 0.")
    ids = ids.to(model.device)
    generator, length = torch.Generator().manual_seed(seed), ids.shape[1]
    order = torch.cat((torch.randperm(length - 1, generator=generator), torch.tensor([length - 1]))).to(ids.device)
    filler = ids[:, torch.randint(length, (shift,), generator=generator).to(ids.device)]
    real, padding = torch.ones_like(ids), torch.zeros_like(filler)
    in_front, behind = torch.cat((filler, ids), dim=1), torch.cat((ids, filler), dim=1)
    shifted = torch.arange(shift, shift + length, device=ids.device)[None]
    with evaluating(model), torch.inference_mode():
        logits = _logits(model, ids)
        permuted = _logits(model, ids[:, order])
        left = _logits(model, in_front, attention_mask=torch.cat((padding, real), dim=1))
        right = _logits(model, behind, attention_mask=torch.cat((real, padding), dim=1))
        return PositionCheck(
            order_variance=_difference(permuted[:, -1], logits[:, -1]),
            left_padding=_difference(left[:, shift:], logits),
            right_padding=_difference(right[:, :length], logits),
            shifted_positions=_unless_refused(model, ids, logits, position_ids=shifted),
            text_in_front=_unless_refused(model, in_front, logits[:, -1:]),
            shift=shift,
            tolerance=tolerance,
        )


def _logits(model: PreTrainedModel, ids: torch.Tensor, **options: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, use_cache=False, **options).logits.double()


def _unless_refused(
    model: PreTrainedModel, ids: torch.Tensor, expected: torch.Tensor, **options: torch.Tensor
) -> float | None:
    """Difference of the last logits; `None` if a table of positions is too short."""
    try:
        logits = _logits(model, ids, **options)
    except (ValueError, IndexError):
        return None
    return _difference(logits[:, -expected.shape[1] :], expected)


def _difference(one: torch.Tensor, other: torch.Tensor) -> float:
    largest = (one - other).abs().max().item()
    if not math.isfinite(largest):  # NaN is neither equal nor different
        raise ValueError(
            "The logits of the model are not all finite numbers, so its positions cannot be checked: check its "
            "weights, or load it with dtype='float32'."
        )
    return largest
