"""Paired comparison of two systems that are measured on the same texts, or trained with the same seeds.

The differences in each pair are tested with the paired two-sided t-test (Sandwich paper, Table 3).
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy import stats

from lex_hf.evaluation.results import PerplexityResult
from lex_hf.evaluation.statistics import bootstrap_interval

SIGNIFICANCE_LEVEL = 0.05


@dataclass(frozen=True)
class PairedComparison:
    """Difference of two systems, A and B, over pairs of measurements of which lower is better.

    Attributes:
        mean_a: Mean of A's measurements; for results, of the mean NLL of each text in nats per token.
        mean_b: Mean of B's.
        difference: `mean_a` - `mean_b`; negative if A is better.
        confidence_interval: Lower and upper end of an interval for the difference, at the level
            `CONFIDENCE_LEVEL` of `statistics`, from a bootstrap over the pairs.
        p_value: p-value of the paired two-sided t-test. If all differences are equal, it is the limit: 1 if they
            are zero, else 0.
        n: Number of pairs.
        perplexity_ratio: Perplexity of A divided by that of B, over all tokens; `None` if plain numbers were compared.
        verdict: `"A is better"`, `"B is better"` or `"no significant difference"`, at `SIGNIFICANCE_LEVEL`.
    """

    mean_a: float
    mean_b: float
    difference: float
    confidence_interval: tuple[float, float]
    p_value: float
    n: int
    perplexity_ratio: float | None
    verdict: str

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as a plain dictionary, ready for JSON."""
        return asdict(self)


def compare(result_a: PerplexityResult, result_b: PerplexityResult) -> PairedComparison:
    """Compare two perplexity results over the same texts, paired by text.

    Every text counts once, by its mean NLL, however long it is; the ratio of perplexities is over all tokens.

    Raises:
        ValueError: If the texts differ, a text's number of scored tokens differs, or there are fewer than 2 texts.
    """
    a, b = result_a.documents, result_b.documents
    if len(a) != len(b):
        raise ValueError(f"The results are over {len(a)} and {len(b)} texts; they must be over the same texts.")
    for index, (one, other) in enumerate(zip(a, b, strict=True)):
        if one.text != other.text:
            raise ValueError(
                f"Text {index} (counted from 0) is not the same in the two results; both must be over the same texts "
                "in the same order, read to the same end (see max_length)."
            )
        if one.tokens != other.tokens:
            raise ValueError(
                f"Text {index} (counted from 0) has {one.tokens} scored tokens in one result and {other.tokens} in "
                "the other, so losses per token cannot be compared: tokenizers or protocols differ. Between "
                "tokenizers, compare bits_per_byte."
            )
    means = [[each.nll / each.tokens for each in documents] for documents in (a, b)]
    with np.errstate(over="ignore"):  # the ratio may be infinite
        return _compare(*means, ratio=float(np.exp(result_a.nll - result_b.nll)))


def compare_values(a: Sequence[float], b: Sequence[float]) -> PairedComparison:
    """Compare two sequences of measurements of which lower is better, in pairs, e.g. perplexities by seed.

    Raises:
        ValueError: If their numbers differ, there are fewer than 2, or one is not finite.
    """
    if len(a) != len(b):
        raise ValueError(f"There are {len(a)} measurements of A and {len(b)} of B; they must come in pairs.")
    return _compare(a, b, ratio=None)


def check_pairs(count: int) -> None:
    """Check, before any measuring, that there are enough pairs to compare, i.e. texts or seeds.

    Raises:
        ValueError: If there are fewer than 2.
    """
    if count < 2:
        raise ValueError(f"There are too few pairs, {count}: the test needs at least 2 texts or seeds.")


def _compare(a: Sequence[float], b: Sequence[float], *, ratio: float | None) -> PairedComparison:
    check_pairs(len(a))
    one, other = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    if not (np.isfinite(one).all() and np.isfinite(other).all()):
        raise ValueError("Not all measurements are finite numbers; check the run that made them.")
    differences = one - other
    difference, p_value = float(differences.mean()), _p_value(one, other)
    better = "A is better" if difference < 0 else "B is better"
    return PairedComparison(
        mean_a=float(one.mean()),
        mean_b=float(other.mean()),
        difference=difference,
        confidence_interval=bootstrap_interval(lambda drawn, axis: drawn.mean(axis), differences),
        p_value=p_value,
        n=len(one),
        perplexity_ratio=ratio,
        verdict="no significant difference" if p_value >= SIGNIFICANCE_LEVEL else better,
    )


def _p_value(a: Any, b: Any) -> float:
    differences = a - b
    rounding = 1e-14 * max(np.abs(a).max(), np.abs(b).max())
    if np.ptp(differences) <= rounding:  # the t statistic would divide by zero, or by noise
        return float(np.abs(differences).max() <= rounding)
    return float(stats.ttest_rel(a, b).pvalue)
