"""Who holds which rows, for any number of clients."""

import resource
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedrts.data.holdings import Holdings
from fedrts.data.partition import divide
from fedrts.server import rounds
from fedrts.sparse import random


@given(st.lists(st.integers(0, 7), min_size=1, max_size=9))
def test_holdings_are_a_sequence_of_parts(sizes):
    parts = list(torch.randperm(sum(sizes)).split(sizes))
    held = Holdings.of(parts)
    assert len(held) == len(parts)
    assert list(held.sizes) == sizes
    assert held.largest == max(sizes)
    for index in range(-len(parts), len(parts)):
        assert torch.equal(held[index], parts[index])
    assert all(torch.equal(a, b) for a, b in zip(held, parts, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(held[1:3], parts[1:3], strict=True))
    assert Holdings.of(held) is held
    for beyond in (len(parts), -len(parts) - 1):
        with pytest.raises(IndexError):
            held[beyond]


@given(st.integers(0, 2**64 - 1), st.integers(1, 3000), st.integers(0, 50))
def test_the_first_of_a_permutation_without_the_rest(key, count, picks):
    assert random.first(key, count, picks).tolist() == random.permutation(key, count)[:picks].tolist()


def test_equal_parts_are_those_of_a_permutation_cut_into_pieces():
    held = divide("iid", torch.zeros(103, dtype=torch.int64), 10, 1.0, 1, key=5)
    expected = [part.sort().values for part in random.permutation(5, 103).tensor_split(10)]
    assert all(torch.equal(a, b) for a, b in zip(held, expected, strict=True))


def test_a_million_clients_are_divided_and_sampled_in_little_time_and_memory():
    clients = 1_000_000
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    held = divide("quantity", torch.zeros(2 * clients, dtype=torch.int64), clients, 1.0, 1, key=0)
    assert (len(held), sum(held.sizes), min(held.sizes)) == (clients, 2 * clients, 1)
    started = time.process_time()
    chosen = [rounds.sampled(0, index, 0, clients, 10) for index in range(5)]
    assert time.process_time() - started < 5 * 1.0
    assert len({client for some in chosen for client in some}) == 50
    assert all(len(held[client]) == held.sizes[client] for some in chosen for client in some)
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024 < 700
