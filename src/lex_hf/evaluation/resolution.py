"""Attention resolution: how well attention separates distances (LEX paper, arXiv 2212.10554, §3.1, §3.2 and §4.3).

s[n] is the attention score, before softmax, that is expected between a query and the key n tokens before it (Eq. 3);
R(s) reduces it to one number (Eq. 4), which is high if scores fall from each distance to the next. s comes from theory
([`expected_attention`], Eq. 10) or from a model that reads a text ([`measure_resolution`], Eq. 13).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
import torch.nn.functional as F
from accelerate.utils import find_executable_batch_size
from torch import Tensor, nn
from transformers import AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.logging import tqdm

from lex_hf.evaluation.loading import evaluating
from lex_hf.model.biases_lex import BiasScheme
from lex_hf.model.configuration_lex import LexConfig
from lex_hf.model.positions_lex import SCHEMES
from lex_hf.rope.blockwise import attending_with

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Reading = Literal["A", "B", "C"]

# Models create the masks of eager attention for it: floats added to scores, shape (batch or 1, 1, query, key).
_IMPLEMENTATION = "lex_hf_resolution"
AttentionMaskInterface.register(_IMPLEMENTATION, eager_mask)
_CHECKED_TOKENS = 64


def attention_resolution(s: Tensor | Sequence[float], *, reading: Reading = "A") -> float:
    """Return R(s) = Σ_i e^s[i] (e^s[i] - e^s[i+1]) / (Σ_i e^s[i])² (LEX paper, Eq. 4).

    Eq. 4 sums over i = 0 … N and so needs s[N+1], which a measurement over N + 1 distances does not have. There are
    three readings of that:

    * `"A"` (the default): softmax over all values, and all differences between neighbours. No measured value is left
      out, none is invented, and R stays between -1 and 1.
    * `"B"`: the equation to the letter. The last value is s[N+1]; it is not part of the softmax, and if it is large, R
      falls without limit. In a measurement that value is the least certain one.
    * `"C"`: s[N+1] = -∞, as if attention ended after the last value; a flat s then has R > 0.

    They agree to many digits once s has decayed. Adding a constant to s does not change R.

    R never exceeds 1 in any reading, for e^s[i] (e^s[i] - e^s[i+1]) ≤ (e^s[i])². So the 1.08 in the paper's Table 3
    cannot be Eq. 4 as printed, and the scale of its numbers is unknown: compare the order of models with that table,
    not the values.

    Args:
        s: Scores at distances 0, 1, 2, …, at least two.
        reading: `"A"`, `"B"` or `"C"`.

    Raises:
        ValueError: If there are fewer than two scores, one is not finite, or the reading is unknown.

    Example:
        >>> import math
        >>> from lex_hf.evaluation.resolution import attention_resolution
        >>> round(attention_resolution([math.log(4), math.log(2), math.log(1)]) * 49)
        10
    """
    if reading not in get_args(Reading):
        raise ValueError(f"reading = {reading!r}: it must be one of {', '.join(get_args(Reading))}.")
    scores = torch.as_tensor(s, dtype=torch.float64, device="cpu")
    if scores.dim() != 1 or len(scores) < 2:
        raise ValueError(f"s has the shape {tuple(scores.shape)}; give at least two scores, of distances 0, 1, ….")
    broken = (~scores.isfinite()).nonzero()
    if len(broken):
        first = int(broken[0])
        raise ValueError(
            f"s[{first}] = {scores[first].item()}: all scores must be finite. If a model was measured, check its "
            "weights, or load it with dtype='float32'."
        )
    largest = scores[:-1].max() if reading == "B" else scores.max()
    weights = (scores - largest).exp()
    if reading == "C":
        weights = F.pad(weights, (0, 1))
    total = weights[:-1].sum() if reading == "B" else weights.sum()
    return (-(weights[:-1] * weights.diff()).sum() / total**2).item()


def expected_attention(config: LexConfig, n: Tensor, layer: int = 0) -> Tensor:
    """Return the s[n] that follows from a position scheme, whatever the weights.

    For the rotary schemes this is g_ζ[n] = Σ_i cos(nθ_i) ζ_i^(n/B) (LEX paper, Eq. 10 and Figure 2) over the d/2
    pairs of channels i = 0 … d/2 - 1; Eq. 10 prints one more, and no base B, which Eq. 12 and the code have. For RoPE
    ζ = 1. It is the score up to a factor that depends on the model: R of g and R of g/√d differ. For ALiBi and
    Sandwich it is the bias, averaged over the heads: the rest of the score is assumed to be equal at all distances.

    Args:
        config: Configuration of a LEX model.
        n: Distances in tokens, integers of any shape.
        layer: Index of the layer; they differ where `config.position_embedding_type` is a list.

    Returns:
        Expected scores, float64, the shape of `n`.

    Raises:
        ValueError: If a distance is negative or not an integer, or the scheme has no expectation of its own.

    Example:
        >>> import torch
        >>> from lex_hf import LexConfig
        >>> from lex_hf.evaluation.resolution import expected_attention
        >>> expected_attention(LexConfig(hidden_size=64, num_attention_heads=1), torch.tensor([0])).tolist()
        [32.0]
    """
    if n.is_floating_point() or n.is_complex() or n.dtype == torch.bool or n.numel() == 0 or n.min() < 0:
        raise ValueError(f"n = {n}: distances are integers, at least one, none negative.")
    name = config.layer_schemes[layer]
    scheme = SCHEMES[name](config)
    distance = n.flatten().cpu().long()
    if isinstance(scheme, BiasScheme) and not any(True for _ in scheme.parameters()):
        return scheme.by_distance(distance, torch.float64).mean(dim=0).view(n.shape)
    # The key is at position 0; of states that are 1 in each pair, the factors are left.
    positions = F.pad(distance, (1, 0))
    rotation = scheme.rotation(positions, positions, None, torch.float64)
    if rotation.query is None or rotation.key is None:
        raise ValueError(
            f"position_embedding_type = {name!r} has no expectation by distance that "
            "follows from the configuration; xpos, rope, alibi, sandwich and smoothed_sandwich have. Its scores "
            "depend on what was learned: use measure_resolution on a model."
        )
    return (rotation.query[0, 0, 1:] * rotation.key[0, 0, 0]).sum(dim=(1, 2)).view(n.shape)


@dataclass(frozen=True)
class Resolution:
    """Result of [`measure_resolution`].

    Attributes:
        curves: For each layer its s[n], float64, shape `(distances,)`: the mean score at distance n = 0, 1, …, up to
            the largest distance of a query and a key under the layer's attention pattern.
        pairs: For each layer the number of pairs of query and key behind each value of its curve, int64, same shape.
        by_layer: R of each layer's curve.
        mean: Mean of `by_layer`.
        reading: Reading of Eq. 4; see [`attention_resolution`].
        length: Length of the texts in tokens.
        texts: Number of texts.
        patterns: Attention pattern of each layer for LEX models, `None` for others.
    """

    curves: tuple[Tensor, ...]
    pairs: tuple[Tensor, ...]
    by_layer: list[float]
    mean: float
    reading: Reading
    length: int
    texts: int
    patterns: list[str] | None

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain dictionaries, lists and numbers, ready for JSON."""
        lists = {name: [each.tolist() for each in getattr(self, name)] for name in ("curves", "pairs")}
        return asdict(self) | lists

    def plot(self) -> "Figure":
        """Draw the curve and the resolution of each layer."""
        from lex_hf.evaluation import plots  # imported here because measuring does not need matplotlib

        return plots.resolution(self)


def measure_resolution(
    model: PreTrainedModel,
    input_ids: Tensor,
    *,
    reading: Reading = "A",
    batch_size: int = 8,
    progress: bool = True,
) -> Resolution:
    """Measure the attention resolution of a causal language model (LEX paper, §4.3, Eq. 13 and 4).

    s[n] is the mean of the scores before softmax, divided by √d and with the position scheme applied, over all pairs
    of a query and the key n tokens before it, over the heads of a layer, and over the texts. Pairs that the attention
    pattern masks do not count, so with blockwise attention the curve ends before distance 2h, and with sliding
    attention before the window. R is computed from each layer's curve; Table 3 reports the mean over layers, but not
    on the same scale: see [`attention_resolution`]. To measure a LEX model without BCA, load it with
    `attention_pattern="full"`.

    It works for every model that attends through transformers' attention interface (LEX, GPT-2, Llama, GPT-NeoX and
    most others), and refuses those whose attention does more than a softmax of masked scores. A layer's scores are
    computed for one text, or for one pair of blocks, at a time.

    Args:
        model: The model; it runs in evaluation mode and is left as it was.
        input_ids: Texts of equal length, at least 2 tokens, shape `(texts, sequence)` or `(sequence,)`; no padding.
        reading: Reading of Eq. 4; see [`attention_resolution`].
        batch_size: Number of texts read at once; fewer if there is not enough memory.
        progress: Whether to show a progress bar, counted in texts.

    Raises:
        ValueError: If the shape of the input is another one, the batch size is less than 1, scores or hidden states
            are not finite, or the model's attention cannot be measured.
    """
    ids = _texts(input_ids, batch_size).to(model.device)

    @find_executable_batch_size(starting_batch_size=batch_size)
    def read(batch_size: int) -> _Recorder:
        recorder = _Recorder(ids.shape[1])
        with _recording(model, recorder), tqdm(total=len(ids), unit="text", disable=not progress) as bar:
            for batch in ids.split(batch_size):
                model.base_model(input_ids=batch, use_cache=False)
                bar.update(len(batch))
        return recorder

    with torch.inference_mode(), evaluating(model):
        _check_attention(model, ids[:1, :_CHECKED_TOKENS])
        sums = read().layers.values()  # in the order in which the layers attend
    curves = tuple(each.curve() for each in sums)
    by_layer = [attention_resolution(curve, reading=reading) for curve in curves]
    return Resolution(
        curves=curves,
        pairs=tuple(each.seen_pairs() for each in sums),
        by_layer=by_layer,
        mean=fmean(by_layer),
        reading=reading,
        length=ids.shape[1],
        texts=len(ids),
        patterns=model.config.layer_patterns if isinstance(model.config, LexConfig) else None,
    )


def _texts(input_ids: Tensor, batch_size: int) -> Tensor:
    ids = input_ids[None] if input_ids.dim() == 1 else input_ids
    if ids.dim() != 2 or len(ids) == 0 or ids.shape[1] < 2:
        raise ValueError(
            f"input_ids has the shape {tuple(input_ids.shape)}; give texts of equal length, at least one, of at least "
            "2 tokens: (texts, sequence)."
        )
    if batch_size < 1:
        raise ValueError(f"batch_size = {batch_size}: it must be at least 1.")
    return ids


class _ScoreSums:
    """Sums of scores by distance, for one layer."""

    def __init__(self, length: int) -> None:
        self.total = torch.zeros(length, dtype=torch.float64)
        self.pairs = torch.zeros(length, dtype=torch.long)

    def add(self, scores: Tensor, seen: Tensor, distance: Tensor) -> None:
        """Add the scores of the pairs that are seen; all shapes are `(query, key)`."""
        met, length = distance[seen], len(self.total)
        self.total += scores.new_zeros(length).index_add_(0, met, scores[seen]).cpu()
        self.pairs += met.bincount(minlength=length).cpu()

    def curve(self) -> Tensor:
        return self.total[: len(self.seen_pairs())] / self.seen_pairs()

    def seen_pairs(self) -> Tensor:
        return self.pairs[: int(self.pairs.nonzero().max()) + 1]


class _Recorder:
    """An attention function for transformers' interface that also sums its scores by distance.

    The queries of a call are at the positions of its last keys.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self.layers: dict[nn.Module, _ScoreSums] = {}

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        sums = self.layers.setdefault(module, _ScoreSums(self.length))
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        repeats = query.shape[1] // key.shape[1]
        key, value = (states.repeat_interleave(repeats, dim=1) for states in (key, value))
        mask = _checked_mask(module, query, key, attention_mask)
        positions = torch.arange(key.shape[2], device=query.device)
        distance = positions[-query.shape[2] :, None] - positions
        # Masked pairs have the lowest number of the dtype.
        seen = (mask > torch.finfo(mask.dtype).min / 2).any(dim=1)
        if (seen & (distance < 0)).any():
            raise ValueError(
                f"{type(module).__name__} lets a query see later keys; resolution can be measured for causal language "
                "models only."
            )
        exact, outputs = torch.promote_types(query.dtype, torch.float32), []
        for index in range(len(query)):
            row = index % len(mask)  # one mask for all texts, or one for each
            scores = query[index].to(exact) @ key[index].to(exact).mT * scaling + mask[row]
            sums.add(scores.mean(dim=0), seen[row], distance)
            outputs.append(scores.softmax(dim=-1).to(value.dtype) @ value[index])
        return torch.stack(outputs).transpose(1, 2), None


def _checked_mask(module: nn.Module, query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
    """The mask, `(batch or 1, heads or 1, query, key)`; without one, a single query sees every key."""
    if mask is not None:
        return mask
    if query.shape[2] > 1:
        raise ValueError(
            f"{type(module).__name__} passes no mask to its attention function, so the keys that a query sees are not "
            "known. Only models that create their masks with transformers.masking_utils can be measured."
        )
    return query.new_zeros(1, 1, 1, key.shape[2])


def _check_attention(model: PreTrainedModel, ids: Tensor) -> None:
    """Refuse models whose attention the recorder does not reproduce: soft caps, sinks, biases of their own."""
    expected = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    recorder = _Recorder(ids.shape[1])
    with _recording(model, recorder):
        found = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    # Both: on some processors PyTorch's attention makes zeros of queries that are NaN, for fewer than 16 keys.
    if not (expected.isfinite().all() and found.isfinite().all()):
        raise ValueError(
            f"The hidden states of {type(model).__name__} are not all finite numbers: check its weights, or load it "
            "with dtype='float32'."
        )
    if not recorder.layers:
        raise ValueError(
            f"{type(model).__name__} does not attend through transformers' attention interface, which is where scores "
            "are measured; LEX, GPT-2, Llama, GPT-NeoX and most others do."
        )
    tolerance = torch.finfo(expected.dtype).eps ** 0.5 * expected.abs().max()
    if (found - expected).abs().max() > tolerance:
        raise ValueError(
            f"The attention of {type(model).__name__} is more than a softmax of masked scores (soft caps, sinks or "
            "biases that it adds itself), so its resolution cannot be measured."
        )


@contextmanager
def _recording(model: PreTrainedModel, recorder: Callable[..., Any]) -> Iterator[None]:
    """Make `recorder` the attention function of a model, temporarily."""
    ALL_ATTENTION_FUNCTIONS[_IMPLEMENTATION] = recorder
    try:
        with attending_with(model, _IMPLEMENTATION):
            yield
    finally:
        del ALL_ATTENTION_FUNCTIONS[_IMPLEMENTATION]
