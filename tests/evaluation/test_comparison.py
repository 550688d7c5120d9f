"""Statistics: formulas by hand, loops instead of scipy, and every way in which results do not compare."""

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate

from lex_hf.evaluation.comparison import PairedComparison, compare, compare_values
from lex_hf.evaluation.results import DocumentScore, PerplexityResult
from lex_hf.evaluation.statistics import bootstrap_interval


def result_of(nll: list[float], tokens: list[int] | None = None, texts: str = "abcdefgh") -> PerplexityResult:
    """A result with these mean losses; only what a comparison looks at has meaning."""
    tokens = tokens or [10] * len(nll)
    documents = [
        DocumentScore(text, mean * count, count, count)
        for text, mean, count in zip(texts[: len(nll)], nll, tokens, strict=True)
    ]
    mean = sum(each.nll for each in documents) / sum(tokens)
    return PerplexityResult(
        perplexity=math.exp(min(mean, 700)),
        nll=mean,
        tokens=sum(tokens),
        bits_per_byte=0.0,
        confidence_interval=None,
        confidence_level=0.95,
        confidence_note="",
        perplexities=[],
        mean_perplexity=0.0,
        protocol="chunked",
        length=4,
        options={},
        loss_by_position=[],
        documents=documents,
    )


def p_value_by_hand(differences: list[float]) -> float:
    """Two-sided p of the t statistic, from the density of Student's distribution."""
    n = len(differences)
    mean = sum(differences) / n
    variance = sum((each - mean) ** 2 for each in differences) / (n - 1)
    t, freedom = abs(mean) / math.sqrt(variance / n), n - 1
    factor = math.gamma((freedom + 1) / 2) / math.sqrt(freedom * math.pi) / math.gamma(freedom / 2)
    middle, _ = integrate.quad(lambda x: factor * (1 + x * x / freedom) ** (-(freedom + 1) / 2), 0, t)
    return 1 - 2 * middle


@settings(max_examples=20)
@given(st.lists(st.tuples(st.floats(1, 5), st.floats(-1, 1)), min_size=2, max_size=9))
def test_p_value_is_the_formula(pairs: list[tuple[float, float]]) -> None:
    b = [base for base, _ in pairs]
    a = [base + difference + 0.01 * index**2 for index, (base, difference) in enumerate(pairs)]
    differences = [one - other for one, other in zip(a, b, strict=True)]
    found = compare_values(a, b)
    assert found.p_value == pytest.approx(p_value_by_hand(differences), abs=1e-6)
    assert found.difference == pytest.approx(sum(differences) / len(differences), abs=1e-12)
    assert (found.n, found.perplexity_ratio) == (len(pairs), None)
    assert (found.mean_a, found.mean_b) == pytest.approx((sum(a) / len(a), sum(b) / len(b)))
    low, high = found.confidence_interval
    assert min(differences) - 1e-9 <= low <= high <= max(differences) + 1e-9


def test_results_are_compared_text_by_text() -> None:
    a, b = result_of([2.0, 3.0, 4.0], [10, 20, 70]), result_of([2.1, 3.3, 4.2], [10, 20, 70])
    found = compare(a, b)
    assert found.difference == pytest.approx(-0.2)
    assert found.p_value == pytest.approx(p_value_by_hand([-0.1, -0.3, -0.2]), abs=1e-9)
    assert found.perplexity_ratio == pytest.approx(math.exp(-(0.1 * 10 + 0.3 * 20 + 0.2 * 70) / 100))
    assert found.perplexity_ratio == pytest.approx(a.perplexity / b.perplexity)
    other_way = compare(b, a)
    assert other_way.difference == pytest.approx(0.2)
    assert other_way.p_value == pytest.approx(found.p_value)
    assert PairedComparison(**(json.loads(json.dumps(found.to_dict())) | {"confidence_interval": (0, 0)})) == replace(
        found, confidence_interval=(0, 0)
    )


@pytest.mark.parametrize(
    ("a", "verdict"),
    [
        ([1.0, 2.0, 3.1, 4.0], "A is better"),
        ([2.0, 3.1, 4.0, 5.1], "B is better"),
        ([1.6, 2.4, 3.6, 4.4], "no significant difference"),
    ],
)
def test_verdicts(a: list[float], verdict: str) -> None:
    found = compare_values(a, [1.5, 2.5, 3.5, 4.5])
    assert found.verdict == verdict
    assert (found.p_value < 0.05) == ("better" in verdict)


@pytest.mark.parametrize(
    ("shift", "p_value", "verdict"),
    [(0.0, 1.0, "no significant difference"), (0.25, 0.0, "B is better"), (-0.25, 0.0, "A is better")],
)
def test_equal_differences(shift: float, p_value: float, verdict: str) -> None:
    found = compare_values([1 + shift, 2 + shift], [1.0, 2.0])
    assert (found.p_value, found.verdict) == (p_value, verdict)
    assert found.confidence_interval == (shift, shift)


def test_differences_that_are_equal_up_to_rounding() -> None:
    losses = [0.1, 0.2, 0.3, 0.7]
    shifted = [loss + 0.1 for loss in losses]
    assert len({b - a for a, b in zip(losses, shifted, strict=True)}) > 1
    assert compare(result_of(shifted), result_of(losses)).p_value == 0.0
    noisy = [0.1, 0.2, 0.1 + 0.2, 0.7]
    assert noisy != losses
    assert compare(result_of(noisy), result_of(losses)).p_value == 1.0


def test_infinite_ratio() -> None:
    assert compare(result_of([800.0, 801.0]), result_of([1.0, 3.0])).perplexity_ratio == math.inf


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        (result_of([1.0, 2.0]), result_of([1.0]), "over 2 and 1 texts"),
        (result_of([1.0]), result_of([2.0]), "too few pairs, 1"),
        (result_of([1.0, 2.0]), result_of([1.0, 2.0], texts="ax"), "Text 1 .* is not the same in the two results"),
        (
            result_of([1.0, 2.0]),
            result_of([1.0, 2.0], [10, 9]),
            "Text 1 .* has 10 scored tokens in one result and 9 in the other, .* bits_per_byte",
        ),
    ],
)
def test_results_that_do_not_compare(a: PerplexityResult, b: PerplexityResult, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compare(a, b)


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        ([1.0, 2.0], [1.0], "2 measurements of A and 1 of B"),
        ([], [], "too few pairs, 0"),
        ([1.0, math.nan], [1.0, 2.0], "Not all measurements are finite"),
        ([1.0, 2.0], [1.0, math.inf], "Not all measurements are finite"),
    ],
)
def test_numbers_that_do_not_compare(a: list[float], b: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compare_values(a, b)


def test_bootstrap_is_a_loop_over_draws() -> None:
    generator = np.random.default_rng(5)
    losses, counts = generator.gamma(2.0, 30.0, size=12), generator.integers(5, 60, size=12)

    def ratio(one: Any, other: Any, axis: int = -1) -> Any:
        return one.sum(axis) / other.sum(axis)

    found = bootstrap_interval(ratio, losses, counts)
    drawn = [generator.integers(0, 12, size=12) for _ in range(8000)]
    expected = np.quantile([ratio(losses[draw], counts[draw]) for draw in drawn], [0.025, 0.975])
    assert found == pytest.approx(expected, rel=0.03)
    assert bootstrap_interval(ratio, losses, counts) == found


def test_bootstrap_in_parts_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = np.random.default_rng(0).normal(size=50)
    sizes = []

    def mean(drawn: Any, axis: int) -> Any:
        sizes.append(drawn.size)
        return drawn.mean(axis)

    bootstrap_interval(mean, sample)
    monkeypatch.setattr("lex_hf.evaluation.statistics._DRAWN_AT_ONCE", 1000)
    assert max(sizes) == 9999 * 50
    sizes.clear()
    low, high = bootstrap_interval(mean, sample)
    assert max(sizes) == 1000
    assert low == pytest.approx(sample.mean() - 1.96 * sample.std() / math.sqrt(50), abs=0.03)
    assert high == pytest.approx(sample.mean() + 1.96 * sample.std() / math.sqrt(50), abs=0.03)
