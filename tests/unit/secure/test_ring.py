"""Words whose sums cannot wrap: the sum of encoded levels and counters is read back exactly."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedrts.errors import InputError
from fedrts.secure.errors import SecureError
from fedrts.secure.ring import Ring, rounded

SHAPES = st.tuples(st.integers(1, 60), st.integers(2, 24), st.integers(0, 20), st.integers(0, 70))


def extremes(ring: Ring, clients: int, draw: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Levels and flags of so many clients, many of them at the ends of what is allowed."""
    levels = draw.choice([-ring.most, ring.most, 0, 1, -1], (clients, ring.values)).astype(np.int64)
    return levels, draw.random((clients, ring.counters)) < draw.choice([0.0, 0.5, 1.0])


@settings(max_examples=150, deadline=None)
@given(SHAPES, st.integers(0, 2**32 - 1), st.data())
def test_the_sum_of_words_is_the_sum_of_levels_and_counters(shape, seed, data):
    clients, bits, values, counters = shape
    if (2 * ((1 << bits - 1) - 1) * clients).bit_length() > 32:
        with pytest.raises(InputError, match="lower one"):
            Ring(clients, bits, values, counters)
        return
    ring = Ring(clients, bits, values, counters)
    present = data.draw(st.integers(1, clients))
    draw = np.random.default_rng(seed)
    levels, flags = extremes(ring, present, draw)
    total = np.zeros(ring.words, np.uint32)
    for one, flag in zip(levels, flags, strict=True):
        noise = draw.integers(0, 2**32, ring.words, np.uint32)
        masked = ring.encoded(one, flag) + noise
        total += ring.unpacked(ring.packed(masked)) - noise
    found, counts, beyond = ring.decoded(total, present)
    assert beyond == 0
    assert (found == levels.sum(0)).all()
    assert (counts == flags.sum(0)).all()
    assert len(ring.packed(total)) == ring.size


@pytest.mark.parametrize("extreme", [-1, 1])
def test_all_clients_at_the_end_of_the_range_still_fit(extreme):
    ring = Ring(16, 18, 3, 5)
    words = ring.encoded(np.full(3, extreme * ring.most), np.ones(5, bool))
    levels, counts, beyond = ring.decoded(words * np.uint32(16), 16)
    assert beyond == 0
    assert levels.tolist() == [extreme * 16 * (2**17 - 1)] * 3
    assert counts.tolist() == [16] * 5


def test_a_sum_that_honest_clients_cannot_reach_is_cut_and_counted():
    """As if three summed where two say that they did."""
    ring = Ring(3, 8, 2, 2)
    words = ring.encoded(np.array([ring.most, 0]), np.array([True, False])) * np.uint32(3)
    levels, counts, beyond = ring.decoded(words, 2)
    assert (levels.tolist(), counts.tolist(), beyond) == ([2 * ring.most, ring.most], [2, 0], 2)


def test_another_length_is_refused():
    ring = Ring(3, 8, 5, 3)
    with pytest.raises(SecureError, match="bytes of masked words"):
        ring.unpacked(bytes(ring.size + 1))
    with pytest.raises(ValueError, match="are due"):
        ring.encoded(np.zeros(4, np.int64), np.zeros(3, bool))
    with pytest.raises(ValueError, match="beyond"):
        ring.encoded(np.full(5, ring.most + 1), np.zeros(3, bool))


def test_rounding_is_right_on_average_and_within_the_clip():
    draw = np.random.default_rng(0)
    values = np.repeat([-2.0, -1.0, -0.3, 0.0, 0.123, 1.0, 7.0], 20_000)
    levels = rounded(values, 10, draw.random(len(values), np.float32)).reshape(7, -1)
    assert levels.min() == -10
    assert levels.max() == 10
    assert np.abs(levels.mean(1) / 10 - np.clip([-2.0, -1.0, -0.3, 0.0, 0.123, 1.0, 7.0], -1, 1)).max() < 0.002
    assert set(levels[4]) == {1, 2}
    assert set(levels[1]) == {-10}


def test_what_is_not_finite_does_not_leave():
    for bad in (np.nan, np.inf):
        with pytest.raises(SecureError, match="not finite"):
            rounded(np.array([0.0, bad]), 10, np.zeros(2, np.float32))


def test_an_upload_of_sixteen_is_shorter_than_float32():
    ring = Ring(16, 18, 1_100_000, 1_000_000)
    assert ring.size < 4 * 1_100_000
