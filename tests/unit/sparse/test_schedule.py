import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedrts.sparse.schedule import Schedule


def test_the_papers_schedule_has_thirty_outer_rounds():
    schedule = Schedule(interval=10, end=300, adjust=0.4)
    assert [t for t in range(500) if schedule.is_outer(t)] == list(range(0, 300, 10))
    late = Schedule(interval=10, end=300, adjust=0.4, first_outer=10)
    assert [t for t in range(500) if late.is_outer(t)] == list(range(10, 300, 10))


def test_fraction_is_a_cosine_that_ends():
    schedule = Schedule(10, 300, 0.4)
    assert schedule.fraction(0) == pytest.approx(0.4)
    assert schedule.fraction(150) == pytest.approx(0.2)
    assert schedule.fraction(100) == pytest.approx(0.2 * (1 + math.cos(math.pi / 3)))
    assert [schedule.fraction(t) for t in (300, 301, 450, 600, -1)] == [0] * 5


@given(st.integers(0, 60), st.integers(1, 50), st.floats(0, 1), st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), max_size=5))
def test_quota_fits_into_every_layer(t, end, adjust, layers):
    counts, sizes = [min(a, b) for a, b in layers], [max(a, b) for a, b in layers]
    quota = Schedule(1, end, adjust).quota(t, counts, sizes)
    fraction = Schedule(1, end, adjust).fraction(t)
    for q, active, size in zip(quota, counts, sizes, strict=True):
        assert 0 <= q <= active
        assert active + q <= size
        assert q == math.floor(fraction * active) or q == size - active


@given(st.integers(1, 12), st.integers(1, 50), st.booleans())
def test_an_outer_round_at_the_end_is_one_more(interval, end, late):
    """t = ΔT·i ≤ T_end instead of < T_end; f is 0 there, and the topology rests afterwards."""
    first = interval if late else 0
    plain, last = (Schedule(interval, end, 0.4, first, outer_at_end=flag) for flag in (False, True))
    expected = list(range(first, end + 1, interval))
    assert [t for t in range(80) if last.is_outer(t)] == expected
    assert [t for t in range(80) if plain.is_outer(t)] == [t for t in expected if t < end]
    assert [last.outers_before(t) for t in range(80)] == [sum(other < t for other in expected) for t in range(80)]
    assert [t for t in range(80) if not last.is_frozen(t)] == [*range(end), *([end] if end in expected else [])]
    assert [t for t in range(80) if not plain.is_frozen(t)] == list(range(end))
    assert last.quota(end, [5], [9]) == (0,)
