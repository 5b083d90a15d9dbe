import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fedrts.data.partition import divide
from fedrts.errors import InputError, Note

KINDS = st.sampled_from(["dirichlet", "quantity", "iid", "shards"])


@settings(max_examples=100)
@given(KINDS, st.integers(3, 12), st.floats(0.3, 20), st.integers(0, 1000), st.integers(1, 3))
def test_partitions_are_disjoint_complete_and_large_enough(kind, clients, alpha, key, each):
    assume(kind != "shards" or clients * each >= 5)
    labels = torch.arange(600) % 5
    parts = divide(kind, labels, clients, alpha, 5, key, each)
    assert len(parts) == clients
    assert min(map(len, parts)) >= 5
    assert sorted(torch.cat(list(parts)).tolist()) == list(range(600))
    again = divide(kind, labels, clients, alpha, 5, key, each)
    assert all(torch.equal(a, b) for a, b in zip(parts, again, strict=True))
    other = divide(kind, labels, clients, alpha, 5, key + 2, each)
    assert not all(torch.equal(a, b) for a, b in zip(parts, other, strict=True))


def test_lower_alpha_is_more_heterogeneous():
    labels = torch.arange(5000) % 10

    def largest_share(alpha):
        parts = divide("dirichlet", labels, 20, alpha, 10, key=1)
        return sum(float(torch.bincount(labels[rows], minlength=10).max()) / len(rows) for rows in parts) / 20

    assert largest_share(0.1) > largest_share(1.0) > largest_share(100.0)
    assert largest_share(100.0) < 0.2


@given(st.integers(1, 40), st.integers(0, 500), st.integers(1, 20), st.floats(0.05, 50), st.integers(0, 100))
def test_quantities_are_a_minimum_and_a_dirichlet_share_of_the_rest(clients, extra, min_size, alpha, key):
    rows = clients * min_size + extra
    sizes = [len(part) for part in divide("quantity", torch.zeros(rows, 3), clients, alpha, min_size, key)]
    draw = np.random.default_rng(key >> 1).dirichlet(np.full(clients, alpha)) * extra
    assert sum(sizes) == rows
    assert all(share - 1 < size - min_size < share + 1 for size, share in zip(sizes, draw, strict=True))
    rounded_up = [share % 1 for size, share in zip(sizes, draw, strict=True) if size - min_size > int(share)]
    rounded_down = [share % 1 for size, share in zip(sizes, draw, strict=True) if size - min_size == int(share)]
    assert not rounded_up or not rounded_down or min(rounded_up) >= max(rounded_down), "the remainder goes to the largest fractions"


def test_lower_alpha_makes_sizes_more_unequal():
    def spread(alpha):
        return float(np.std([len(part) for part in divide("quantity", torch.zeros(5000, 2), 20, alpha, 16, key=1)]))

    assert spread(0.1) > spread(5.0) > spread(1000.0)


def test_quantity_rows_are_mixed():
    parts = divide("quantity", torch.zeros(1000, 2), 5, 5.0, 16, key=1)
    assert all(part.float().mean() > 300 for part in parts), "slices of a random order, not of the rows"


def test_little_data_lower_the_minimum_of_quantity_with_a_word():
    with pytest.warns(Note, match="50 samples give each of 10 clients at least 5, not clients.min_size = 16"):
        parts = divide("quantity", torch.zeros(50, 2), 10, 5.0, 16, key=1)
    assert [len(part) for part in parts] == [5] * 10


@given(st.integers(1, 60), st.integers(1, 10), st.integers(0, 100))
def test_shards_give_every_client_that_many_labels(clients, each, key):
    assume(clients * each >= 10)
    labels = torch.arange(6000) % 10
    parts = divide("shards", labels, clients, 1.0, 1, key, each)
    assert all(len(labels[rows].unique()) == each for rows in parts)
    if clients * each % 10 == 0:
        assert max(map(len, parts)) - min(map(len, parts)) <= each


def test_shards_of_unequal_classes_follow_their_sizes():
    labels = torch.cat([torch.full((count,), label) for label, count in enumerate((900, 60, 40))])
    parts = divide("shards", labels, 20, 1.0, 10, 0, 1)
    holders = [sum(int(labels[rows[0]]) == label for rows in parts) for label in range(3)]
    assert holders[0] >= 16
    assert min(holders) >= 1


def test_pathological_requests_are_clear_errors():
    labels = torch.arange(200) % 10
    with pytest.raises(InputError, match=r"clients.alpha = 0.05.*raise clients.alpha"):
        divide("dirichlet", torch.arange(5000) % 10, 100, 0.05, 10, key=0)
    with pytest.raises(InputError, match="needs 2,000 training samples; there are 200"):
        divide("iid", labels, 200, 1.0, 10, key=0)
    with pytest.raises(InputError, match="there are 200"):
        divide("quantity", labels, 201, 1.0, 1, key=0)
    for clients, each in ((20, 11), (4, 2)):
        with pytest.raises(InputError, match=f"classes_per_client = {each}.*10 classes"):
            divide("shards", labels, clients, 1.0, 1, 0, each)
    uneven = torch.cat([torch.zeros(190), torch.arange(1, 11)]).long()
    with pytest.raises(InputError, match="'shards' leaves a client with 1 samples"):
        divide("shards", uneven, 12, 1.0, 10, 0, 1)
    with pytest.raises(InputError, match="beyond what a Dirichlet draw can take"):
        divide("quantity", labels, 10, 1e308, 1, key=0)


@pytest.mark.parametrize("kind", ["dirichlet", "shards"])
def test_without_labels_only_sizes_can_be_skewed(kind):
    with pytest.raises(InputError, match=f"'{kind}' needs one label per sample.*'iid' or 'quantity'"):
        divide(kind, torch.zeros(60, 4), 5, 1.0, 1, key=0)
