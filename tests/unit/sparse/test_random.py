import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedrts.sparse import random


def splitmix64(state: int) -> int:
    """One output of the published generator, in Python integers."""
    mask = (1 << 64) - 1
    z = state & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


@given(st.integers(0, 2**64 - 1), st.integers(1, 40))
def test_bits_are_splitmix64_of_key_and_counter(key, count):
    ours = [value % 2**64 for value in random.bits(key, count).tolist()]
    assert ours == [splitmix64(key + (i + 1) * 0x9E3779B97F4A7C15) for i in range(count)]


def test_keys_are_stable_and_tell_their_parts_apart():
    assert random.key(0, "order", 1) == 7167907109325818258
    several: list[tuple[int | str, ...]] = [(1, 23), (12, 3), (1, "23"), ("1", 23), (1, 2, 3), (123,), ("a", "b"), ("ab",)]
    keys = {random.key(*parts) for parts in several}
    assert len(keys) == 8
    assert random.key(5, "x") == random.key(5, "x")


def test_uniform_is_uniform():
    sample = random.uniform(7, 200_000).double().numpy()
    assert sample.min() >= 0
    assert sample.max() < 1
    counts, _ = np.histogram(sample, bins=50, range=(0, 1))
    chi2 = ((counts - 4000) ** 2 / 4000).sum()
    assert chi2 < 49 + 5 * np.sqrt(2 * 49)
    assert abs(np.corrcoef(sample[:-1], sample[1:])[0, 1]) < 0.01


@given(st.integers(0, 2**63), st.integers(0, 300))
def test_permutation_is_one(key, count):
    assert sorted(random.permutation(key, count).tolist()) == list(range(count))


def test_every_order_is_equally_likely():
    orders = [tuple(random.permutation(random.key("p", i), 3).tolist()) for i in range(6000)]
    counts = np.array([orders.count(order) for order in set(orders)])
    assert len(counts) == 6
    assert np.abs(counts - 1000).max() < 150


@pytest.mark.parametrize(("count", "picks"), [(10, 10), (100, 10), (1, 1)])
def test_choose_picks_different_numbers_in_order(count, picks):
    chosen = random.choose(3, count, picks)
    assert len(set(chosen)) == picks
    assert chosen == sorted(chosen)
    assert set(chosen) <= set(range(count))


def test_nothing_touches_the_global_generator():
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    random.uniform(1, 10), random.permutation(1, 10), random.choose(1, 10, 3)
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize(("key", "number"), [(0, 0), (2**63 - 1, 2**63 - 1), (2**63, -(2**63)), (2**64 - 1, -1)])
def test_a_key_stands_in_a_tensor_as_the_int64_of_its_bits(key, number):
    assert random.signed(key) == number
    assert torch.tensor([random.signed(key)]).item() == number
