"""Means, standard errors and the paired test against their definitions and against scipy."""

import math

import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from fedrts.comparison.statistics import holm, mean_of, paired, student_p

values = st.lists(st.floats(-100, 100).map(lambda x: round(x, 3)), min_size=2, max_size=12)


def tail_by_integration(t: float, freedom: int) -> float:
    """P(|T| ≥ t) by Simpson's rule over Student's density."""
    constant = math.gamma((freedom + 1) / 2) / (math.sqrt(freedom * math.pi) * math.gamma(freedom / 2))

    def density(x: float) -> float:
        return constant * math.pow(1 + x * x / freedom, -(freedom + 1) / 2)

    steps = 2000
    h = t / steps
    inner = sum((4 if k % 2 else 2) * density(k * h) for k in range(1, steps))
    return 1 - 2 * h / 3 * (density(0) + inner + density(t))


@pytest.mark.parametrize(("t", "freedom"), [(0.5, 1), (1.0, 4), (2.776, 4), (3.0, 9), (6.0, 2)])
def test_tail_of_student(t, freedom):
    assert student_p(t, freedom) == pytest.approx(tail_by_integration(t, freedom), abs=1e-7)
    assert student_p(-t, freedom) == student_p(t, freedom)


def test_a_textbook_value():
    assert student_p(2.776445, 4) == pytest.approx(0.05, abs=1e-6)  # the 97.5 % quantile with 4 degrees of freedom


def test_mean_and_standard_error_by_hand():
    mean = mean_of([1.0, 2.0, 4.0, 5.0])
    assert (mean.value, mean.count) == (3.0, 4)
    assert mean.error == pytest.approx(math.sqrt((4 + 1 + 1 + 4) / 3 / 4))
    assert mean_of([0.7]).error is None


@given(values, values)
def test_paired_is_scipys(ours, theirs):
    count = min(len(ours), len(theirs))
    found = paired(dict(enumerate(ours[:count])), dict(enumerate(theirs[:count])))
    assert found is not None
    differences = [a - b for a, b in zip(ours, theirs, strict=False)]
    assert found.mean.value == pytest.approx(sum(differences) / count, abs=1e-9)
    if max(differences) - min(differences) > 1e-6:
        assert found.p == pytest.approx(scipy.stats.ttest_rel(ours[:count], theirs[:count]).pvalue, rel=1e-6, abs=1e-12)


def test_pairs_are_equal_seeds():
    found = paired({0: 1.0, 1: 2.0, 7: 50.0}, {1: 1.0, 0: 1.0, 3: 9.0})
    assert found is not None
    assert (found.mean.value, found.mean.count) == (0.5, 2)


def test_where_there_is_no_test():
    assert paired({0: 1.0}, {1: 1.0}) is None
    one, steady = paired({0: 1.0}, {0: 0.5}), paired({0: 1.0, 1: 2.0}, {0: 0.5, 1: 1.5})
    assert one is not None
    assert one.p is None
    assert steady is not None
    assert steady.p is None


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])  # 3 · 0.01, then 2 · 0.03, then no less than that
    assert holm([0.6, 0.5]) == [1.0, 1.0]
    assert holm([]) == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_rejects_what_its_steps_reject(values):
    """At every level: go from the smallest p to larger ones and stop at the first above level / (how many are left)."""
    for level in (0.01, 0.05, 0.2):
        rejected = set()
        for rank, place in enumerate(sorted(range(len(values)), key=values.__getitem__)):
            if values[place] * (len(values) - rank) > level:
                break
            rejected.add(place)
        assert {place for place, p in enumerate(holm(values)) if p <= level} == rejected


def test_large_numbers():
    found = mean_of([1e200, 2e200])
    assert found.value == pytest.approx(1.5e200)
    assert found.error == pytest.approx(0.5e200)
    assert mean_of([1.7e308] * 3).value == pytest.approx(1.7e308)
    large, small = paired({0: 3e300, 1: 5e300, 2: 8e300}, {0: 1e300, 1: 2e300, 2: 3e300}), paired({0: 3, 1: 5, 2: 8}, {0: 1, 1: 2, 2: 3})
    assert large is not None
    assert small is not None
    assert large.p == pytest.approx(small.p)
    assert mean_of([float("inf"), 1.0]).value == float("inf")
