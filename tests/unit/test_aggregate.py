import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedrts.server.aggregate import Sums
from fedrts.wire.fields import Selection


@given(
    st.lists(st.tuples(st.integers(1, 500), st.lists(st.floats(-100, 100, width=32), min_size=3, max_size=3)), min_size=1, max_size=6),
    st.randoms(),
)
def test_means_are_weighted_and_do_not_depend_on_order(clients, shuffler):
    def mean(order):
        sums = Sums()
        for samples, values in order:
            sums.add({"x": torch.tensor(values), "flag": torch.tensor(values) > 0}, samples)
        return sums.mean()

    total = sum(samples for samples, _ in clients)
    expected = [sum(samples * values[i] for samples, values in clients) / total for i in range(3)]
    share = [sum(samples * (values[i] > 0) for samples, values in clients) / total for i in range(3)]
    first = mean(clients)
    assert first["x"].dtype == torch.float32
    assert first["x"].tolist() == pytest.approx(expected, rel=1e-6, abs=1e-6)
    assert first["flag"].tolist() == pytest.approx(share, rel=1e-6)
    shuffled = list(clients)
    shuffler.shuffle(shuffled)
    torch.testing.assert_close(mean(shuffled), first, rtol=1e-6, atol=1e-6)


def test_identical_clients_average_to_themselves_exactly():
    weights = torch.randn(1000) * 10.0 ** torch.randint(-8, 8, (1000,))
    sums = Sums()
    for samples in (17, 900, 3, 41):
        sums.add({"weights": weights}, samples)
    assert torch.equal(sums.mean()["weights"], weights)


def test_selections_give_shares_or_means_in_which_absence_is_zero():
    sums = Sums()
    sums.add({"votes": Selection(torch.tensor([0, 2]), 4), "g": Selection(torch.tensor([1]), 4, torch.tensor([8.0]))}, 30)
    sums.add({"votes": Selection(torch.tensor([2, 3]), 4), "g": Selection(torch.tensor([1]), 4, torch.tensor([4.0]))}, 10)
    mean = sums.mean()
    assert mean["votes"].tolist() == [0.75, 0, 1, 0.25]
    assert mean["g"].tolist() == [0, 7, 0, 0]


def test_float64_models_stay_float64():
    sums = Sums()
    sums.add({"x": torch.ones(2, dtype=torch.float64) / 3}, 7)
    assert sums.mean()["x"].dtype == torch.float64


def test_votes_of_clients_with_billions_of_samples_are_counted():
    sums = Sums()
    for weight in (2**31 - 1, 2**31 - 1, 2):
        sums.add({"core": torch.tensor([True, False]), "votes": Selection(torch.tensor([1]), 3)}, weight)
    assert sums.mean()["core"].tolist() == [1.0, 0.0]
    assert sums.mean()["votes"].tolist() == [0.0, 1.0, 0.0]
