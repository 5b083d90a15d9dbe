import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedrts.data.partition import divide
from fedrts.errors import InputError


@settings(max_examples=30)
@given(st.sampled_from(["dirichlet", "iid"]), st.integers(1, 12), st.floats(0.3, 20), st.integers(0, 1000))
def test_partitions_are_disjoint_complete_and_large_enough(kind, clients, alpha, key):
    labels = torch.arange(600) % 5
    parts = divide(kind, labels, clients, alpha, 5, key)
    assert len(parts) == clients
    assert min(map(len, parts)) >= 5
    assert sorted(torch.cat(parts).tolist()) == list(range(600))
    again = divide(kind, labels, clients, alpha, 5, key)
    assert all(torch.equal(a, b) for a, b in zip(parts, again, strict=True))


def test_lower_alpha_is_more_heterogeneous():
    labels = torch.arange(5000) % 10

    def largest_share(alpha):
        parts = divide("dirichlet", labels, 20, alpha, 10, key=1)
        return sum(float(torch.bincount(labels[rows], minlength=10).max()) / len(rows) for rows in parts) / 20

    assert largest_share(0.1) > largest_share(1.0) > largest_share(100.0)
    assert largest_share(100.0) < 0.2


def test_pathological_requests_are_clear_errors():
    labels = torch.arange(200) % 10
    with pytest.raises(InputError, match=r"clients.alpha = 0.05.*raise clients.alpha"):
        divide("dirichlet", torch.arange(5000) % 10, 100, 0.05, 10, key=0)
    with pytest.raises(InputError, match="needs 2,000 training samples; there are 200"):
        divide("iid", labels, 200, 1.0, 10, key=0)
