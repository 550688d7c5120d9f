"""Confidence intervals: of any statistic by the bootstrap, of shares by Wilson's formula."""

from collections.abc import Callable
from typing import Any

import numpy as np
from scipy import stats

CONFIDENCE_LEVEL = 0.95
_RESAMPLES = 9999
_DRAWN_AT_ONCE = 2**22  # numbers, so that memory does not grow with the number of texts


def bootstrap_interval(statistic: Callable[..., Any], *samples: Any) -> tuple[float, float]:
    """Return a percentile bootstrap interval, the same at every call.

    Args:
        statistic: Function of the samples and of the `axis` that it reduces, vectorised.
        *samples: Samples of equal size, at least 2 each; they are drawn together.

    Returns:
        Lower and upper end, at the level `CONFIDENCE_LEVEL`.
    """
    found = stats.bootstrap(
        samples,
        statistic,
        paired=True,
        vectorized=True,
        n_resamples=_RESAMPLES,
        batch=max(1, _DRAWN_AT_ONCE // len(samples[0])),
        confidence_level=CONFIDENCE_LEVEL,
        method="percentile",  # unlike BCa, it is defined if all texts are alike
        rng=np.random.default_rng(0),
    )
    return float(found.confidence_interval.low), float(found.confidence_interval.high)


def wilson_interval(successes: int, trials: int) -> tuple[float, float]:
    """Return the interval of Wilson (1927) for the probability of a success, at the level `CONFIDENCE_LEVEL`.

    Unlike that of the normal approximation, it is useful at 0 and all successes too.

    Args:
        successes: Number of successes.
        trials: Number of trials, at least 1.

    Example:
        >>> from lex_hf.evaluation.statistics import wilson_interval
        >>> [round(end, 3) for end in wilson_interval(10, 10)]
        [0.722, 1.0]
    """
    found = stats.binomtest(successes, trials).proportion_ci(CONFIDENCE_LEVEL, method="wilson")
    return float(found.low), float(found.high)
