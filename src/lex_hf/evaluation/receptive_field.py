"""Receptive field, the number of newest tokens that influence a prediction (Sandwich paper, arXiv 2212.10356, §5.1).

The gradient of the log probability of the predicted token is computed with respect to the embedding of each token that
was read. A token's share is the norm of its gradient divided by the sum of all norms, and the shares of the newest
tokens add up to the cumulative normalised gradient. The empirical receptive field (ERF) is the smallest number of
newest tokens that hold more than 99 % of it; the theoretical one (TRF) follows from the attention patterns of all
layers.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from accelerate.utils import find_executable_batch_size
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils.logging import tqdm

from lex_hf.evaluation.loading import evaluating
from lex_hf.model.configuration_lex import LexConfig
from lex_hf.model.masking_lex import BlockwisePattern, FullPattern
from lex_hf.rope.blockwise import reader_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def cumulative_gradient(norms: Tensor) -> Tensor:
    """Return the share of the gradient that the newest tokens hold (c_m of the Sandwich paper, newest first).

    Args:
        norms: Gradient norms in the order of the text, the newest token last, shape `(..., tokens)`.

    Returns:
        Shares of the newest 1, 2, …, all tokens, float64, shape `(..., tokens)`; the last is 1.

    Raises:
        ValueError: If a norm is negative or not finite, or all of them are 0.

    Example:
        >>> import torch
        >>> from lex_hf.evaluation.receptive_field import cumulative_gradient
        >>> cumulative_gradient(torch.tensor([0.0, 1.0, 3.0])).tolist()
        [0.75, 1.0, 1.0]
    """
    norms = norms.double()
    _check_norms(norms, bool(norms.any(dim=-1).all()))
    sums = norms.flip(-1).cumsum(dim=-1)
    return sums / sums[..., -1:]


def _check_norms(norms: Tensor, are_above_0: bool = True) -> None:
    if not are_above_0 or not (norms.isfinite() & (norms >= 0)).all():
        raise ValueError(
            "Gradient norms must be finite and at least 0, and one of each text above 0; check the weights, or load "
            "the model with dtype='float32'."
        )


def empirical_receptive_field(cumulative: Tensor, threshold: float = 0.99) -> Tensor:
    """Return the smallest number of newest tokens whose share exceeds the threshold.

    The paper prints ERF = min{m | c_m > 0.99} with m counted from the oldest token, which is always the first. This is
    the reading behind its "768, 1024, 1536 tokens".

    Args:
        cumulative: Shares of the newest 1, 2, … tokens, shape `(..., tokens)`; see [`cumulative_gradient`].
        threshold: A number from 0 up to, but not including, 1.

    Returns:
        Number of tokens, int64, shape `(...)`.

    Raises:
        ValueError: If the threshold is out of range.
    """
    if not 0 <= threshold < 1:
        raise ValueError(f"threshold = {threshold}: it must lie in [0, 1); the paper's is 0.99.")
    return (cumulative <= threshold).sum(dim=-1) + 1


def theoretical_receptive_field(config: LexConfig, position: int | None = None) -> int | None:
    """Return the number of tokens that can influence a prediction through the attention patterns.

    Each layer reaches back from the oldest token that the layers above it reach. A sliding window of w tokens adds
    w - 1, so R layers see R(w - 1) + 1 tokens. Blockwise attention adds the rest of the query's block and the whole
    block before it: R layers see the query's own block as far as it is filled, and R blocks more, (R + 1)h at most,
    h = l/2. The Sandwich paper's TRF = window × layers is an upper bound of both, reached only by one blockwise layer.

    Args:
        config: Configuration of a LEX model.
        position: Index of the newest token that is read, from 0; `None` means the position with the most.

    Returns:
        Number of tokens, the newest included; `None` for any position if a layer has full attention.

    Raises:
        ValueError: If the position is negative.

    Example:
        >>> from lex_hf import LexConfig
        >>> from lex_hf.evaluation.receptive_field import theoretical_receptive_field
        >>> theoretical_receptive_field(LexConfig(num_hidden_layers=3, training_length=32))
        64
    """
    if position is not None and position < 0:
        raise ValueError(f"position = {position}: it must be at least 0.")
    if position is not None:
        return _reach(config.patterns, position)
    if "full" in config.layer_patterns:
        return None
    block = config.attention_span("blockwise") or 1
    # From the beginning of this block on, no layer reaches the start of the text.
    far = 2 * block * sum(config.attention_span(pattern) or 0 for pattern in config.layer_patterns)
    return max(_reach(config.patterns, p) for p in range(far, far + block))


def _reach(patterns: Sequence[FullPattern], position: int) -> int:
    """Number of tokens that can influence the prediction after `position`."""
    oldest = position
    for pattern in reversed(patterns):
        span = pattern.block
        if span is None or pattern.sinks:
            return position + 1
        oldest -= oldest % span + span if isinstance(pattern, BlockwisePattern) else span - 1
        oldest = max(0, oldest)
    return position - oldest + 1


@dataclass(frozen=True)
class ReceptiveField:
    """Result of [`receptive_field`].

    Attributes:
        curves: Cumulative normalised gradient of every prediction, newest token first, float64, shape
            `(texts, positions, tokens)`: the share of the newest 1, 2, … tokens. Past the start of a text it stays 1.
        positions: Index of the newest token that each prediction read.
        threshold: Share that the empirical receptive field must exceed.
        theoretical: Largest number of tokens that can influence one of the predictions through the attention patterns,
            for LEX models and those that read in blocks; `None` for others.
        training_length: `l` of such a model in tokens; `None` for others.
    """

    curves: Tensor
    positions: list[int]
    threshold: float
    theoretical: int | None
    training_length: int | None

    @property
    def cumulative(self) -> Tensor:
        """Mean of all curves, newest token first, shape `(tokens,)`."""
        return self.curves.mean(dim=(0, 1))

    @property
    def erf(self) -> int:
        """Empirical receptive field of the mean curve, in tokens."""
        return int(empirical_receptive_field(self.cumulative, self.threshold))

    @property
    def erfs(self) -> Tensor:
        """Empirical receptive field of each prediction in tokens, int64, shape `(texts, positions)`."""
        return empirical_receptive_field(self.curves, self.threshold)

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain dictionaries, lists and numbers, ready for JSON."""
        return {
            "erf": self.erf,
            "theoretical": self.theoretical,
            "threshold": self.threshold,
            "training_length": self.training_length,
            "positions": self.positions,
            "erfs": self.erfs.tolist(),
            "cumulative": self.cumulative.tolist(),
        }

    def plot(self) -> "Figure":
        """Draw the mean curve, with the threshold, the ERF and the training length (Sandwich paper, Figure 4)."""
        from lex_hf.evaluation import plots  # imported here because measuring does not need matplotlib

        return plots.receptive_fields({"mean of all predictions": self}, title="Cumulative normalised gradient")


def receptive_field(
    model: PreTrainedModel,
    input_ids: Tensor,
    *,
    targets: Tensor | None = None,
    positions: Sequence[int] | None = None,
    threshold: float = 0.99,
    batch_size: int = 8,
    progress: bool = True,
) -> ReceptiveField:
    """Measure the receptive field of a causal language model (Sandwich paper, §5.1).

    Args:
        model: Any causal language model of transformers that accepts `inputs_embeds`. It runs in evaluation mode and
            is left as it was; its parameters get no gradients.
        input_ids: Texts of equal length, shape `(texts, sequence)` or `(sequence,)`; no padding.
        targets: The predicted token, for each text and position, shape `(texts,)` or `(texts, positions)`; for the
            token that actually follows position p, `input_ids[:, p + 1]`. `None` means the token that the model finds
            most likely.
        positions: Indices of the tokens after which a prediction is measured; `None` means the last token only. Of
            each text, the tokens up to that index are read.
        threshold: Share that the empirical receptive field must exceed.
        batch_size: Number of texts read at once; fewer if there is not enough memory.
        progress: Whether to show a progress bar, counted in texts.

    Raises:
        ValueError: If the shapes, the positions, the threshold or the batch size are impossible, the model does not
            accept `inputs_embeds` or is not causal, or gradients are not finite.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size = {batch_size}: it must be at least 1.")
    if not _accepts(model, "inputs_embeds"):
        raise ValueError(f"{type(model).__name__} does not accept inputs_embeds, which the gradients need.")
    ids, kept, wanted = _checked(input_ids, positions, targets)
    # Fails before any work if the threshold is out of range.
    empirical_receptive_field(torch.ones(1), threshold)

    @find_executable_batch_size(starting_batch_size=batch_size)
    def read(batch_size: int) -> Tensor:
        curves = []
        with tqdm(total=len(ids), unit="text", disable=not progress) as bar:
            for start in range(0, len(ids), batch_size):
                part = slice(start, start + batch_size)
                norms = _gradient_norms(model, ids[part], None if wanted is None else wanted[part], kept)
                curves.append(cumulative_gradient(norms))
                bar.update(len(norms))
        return torch.cat(curves)

    patterns, length = _known(model)
    with evaluating(model), torch.inference_mode(False), torch.enable_grad():
        curves = read()
    return ReceptiveField(
        curves=curves,
        positions=kept,
        threshold=threshold,
        theoretical=None if patterns is None else max(_reach(patterns, p) for p in kept),
        training_length=length,
    )


def _known(model: PreTrainedModel) -> tuple[Sequence[FullPattern] | None, int | None]:
    """Attention patterns of all layers and training length, as far as they are known."""
    if isinstance(model.config, LexConfig):
        return model.config.patterns, model.config.training_length
    reader = reader_of(model)
    return (None, None) if reader is None else (reader.patterns, reader.bound)


def _gradient_norms(model: PreTrainedModel, ids: Tensor, targets: Tensor | None, positions: list[int]) -> Tensor:
    """Norms of the gradients at the tokens up to each position, left-padded with zeros.

    Shape `(texts, positions, tokens)`, float64, on the CPU.
    """
    embeds = model.get_input_embeddings()(ids.to(model.device)).detach().requires_grad_()
    log_probs = _log_probs(model, embeds, positions)
    chosen = log_probs.argmax(dim=-1) if targets is None else targets.to(log_probs.device)
    # Texts are independent, so the gradient of the sum over a batch gives that of each.
    sums = log_probs.gather(2, chosen[..., None]).sum(dim=(0, 2))
    rows = []
    for index, position in enumerate(positions):
        (gradient,) = torch.autograd.grad(sums[index], embeds, retain_graph=index + 1 < len(positions))
        norms = gradient.double().norm(dim=-1).cpu()
        _check_norms(norms)
        if norms[:, position + 1 :].any():
            raise ValueError(
                f"{type(model).__name__} lets tokens after position {position} influence its prediction; the "
                "receptive field can be measured for causal language models only."
            )
        rows.append(F.pad(norms[:, : position + 1], (max(positions) - position, 0)))
    return torch.stack(rows, dim=1)


def _log_probs(model: PreTrainedModel, embeds: Tensor, positions: list[int]) -> Tensor:
    """Log probabilities of the token after each position, shape `(texts, positions, vocabulary)`."""
    index = torch.tensor(positions, device=embeds.device)
    if _accepts(model, "logits_to_keep"):
        logits = model(inputs_embeds=embeds, use_cache=False, logits_to_keep=index).logits
    else:
        logits = model(inputs_embeds=embeds, use_cache=False).logits[:, index]
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(dim=-1)


def _accepts(model: PreTrainedModel, argument: str) -> bool:
    return argument in inspect.signature(model.forward).parameters


def _checked(
    input_ids: Tensor, positions: Sequence[int] | None, targets: Tensor | None
) -> tuple[Tensor, list[int], Tensor | None]:
    """Texts `(texts, sequence)`, the positions, and the targets `(texts, positions)`."""
    ids = input_ids[None] if input_ids.dim() == 1 else input_ids
    if ids.dim() != 2 or ids.numel() == 0:
        raise ValueError(
            f"input_ids has the shape {tuple(ids.shape)}; give texts of equal length, at least one: (texts, sequence)."
        )
    texts, length = ids.shape
    kept = [length - 1] if positions is None else list(positions)
    if not kept or min(kept) < 0 or max(kept) >= length or len(set(kept)) < len(kept):
        raise ValueError(f"positions = {kept}: they must be different indices of tokens, 0 to {length - 1}.")
    if targets is None:
        return ids, kept, None
    if targets.shape not in ((texts, len(kept)), (texts,)) or targets.numel() != texts * len(kept):
        raise ValueError(
            f"targets has the shape {tuple(targets.shape)}; give a token for each text and position: "
            f"({texts}, {len(kept)})."
        )
    return ids, kept, targets.reshape(texts, len(kept))
