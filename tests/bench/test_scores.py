"""Rouge-L, rank correlation and resampled intervals, by hand and beside slow twins."""

import itertools
import math

import numpy as np
import pytest

from blendkv.bench.intervals import Resamples
from blendkv.bench.measure import paired_bootstrap
from blendkv.bench.scores import common_subsequence, first_line, rank_correlation, rouge_l


def test_rouge_l_by_hand():
    # LCS "police the gunman" = 3 of 4 and 4 words (Lin 2004's example)
    assert rouge_l("police kill the gunman", "police killed the gunman") == pytest.approx(3 / 4)
    assert rouge_l("the gunman kill police", "police killed the gunman") == pytest.approx(2 / 4)
    assert rouge_l("Ada wrote notes", "ADA, WROTE: notes!") == 1.0
    # 2 of 3 said words in order, 2 of 5 wanted: F = 2*2/(3+5)
    assert rouge_l("a b z", "a x b y w") == pytest.approx(0.5)
    assert rouge_l("b", ["a", "b c", "b"]) == 1.0
    assert rouge_l("", "a") == rouge_l("a", "") == rouge_l("", "") == rouge_l("a", []) == 0.0


def longest(first, second):
    """Slow: every subsequence of the first."""
    best = 0
    for n in range(len(first) + 1):
        for chosen in itertools.combinations(first, n):
            rest = iter(second)
            if all(word in rest for word in chosen):
                best = max(best, n)
    return best


def test_common_subsequence_beside_all_subsequences():
    rng = np.random.default_rng(0)
    for _ in range(40):
        first, second = (["abc"[i] for i in rng.integers(3, size=rng.integers(0, 9))] for _ in range(2))
        assert common_subsequence(first, second) == longest(first, second)


def test_rank_correlation_by_hand():
    assert rank_correlation([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    # ranks 1 2 3 4 5 and 2 1 4 3 5: 1 - 6 * 4 / (5 * 24)
    assert rank_correlation([1, 2, 3, 4, 5], [20, 10, 400, 300, 5000]) == pytest.approx(1 - 24 / 120)
    # ties share their mean: 0.5 0.5 2 beside 0 1 2
    assert rank_correlation([7, 7, 9], [1, 2, 3]) == pytest.approx(1.5 / math.sqrt(1.5 * 2))
    assert math.isnan(rank_correlation([1, 1], [1, 2]))
    with pytest.raises(ValueError, match="1 and 2 values"):
        rank_correlation([1], [1, 2])


def test_the_first_line_that_says_something_counts():
    assert first_line("\n\n  Oslo, Norway \nQuestion: why") == "Oslo, Norway"
    assert first_line(" \n") == ""


def test_the_mean_is_the_paired_bootstrap():
    values = [0.1, 0.5, 0.2, 0.9, 0.0]
    assert Resamples.of(5).mean(values) == pytest.approx(paired_bootstrap(values))


def test_a_ratio_keeps_prompts_paired():
    values = np.linspace(1, 2, 30)
    draws = Resamples.of(30, resamples=500)
    assert draws.ratio(0.5 * values, values) == pytest.approx((0.5, 0.5, 0.5))  # unpaired, it would be an interval
    noisy = draws.ratio(values[::-1], values)
    slow = [values[::-1][c].mean() / values[c].mean() for c in draws.chosen]
    assert noisy.mean == pytest.approx(1)
    assert (noisy.low, noisy.high) == pytest.approx(tuple(np.quantile(slow, [0.025, 0.975])))
    assert noisy.low < 0.95 < 1.05 < noisy.high
    assert all(math.isnan(x) for x in draws.ratio(values, 0 * values))


def test_a_median_has_an_interval_too():
    found = Resamples.of(5).median([1, 2, 3, 4, 100])
    assert found.mean == 3
    assert 1 <= found.low < 3 < found.high <= 100
    with pytest.raises(ValueError, match="at least one prompt"):
        Resamples.of(0)
