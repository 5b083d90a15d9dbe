"""Who works against the units of a model, by unit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedrts.server.client_records import ClientRecords
from fedrts.server.guard import Guard
from fedrts.server.opposition import Hearing, agreed, cancelling, not_keeping, ranked
from fedrts.sparse.layout import Entry
from fedrts.sparse.mask import Mask
from fedrts.sparse.units import connected, cut_off, ends, number
from fedrts.wire.fields import OwnValues
from helping import order_of

LAYERS = (Entry(("first",), (3, 2)), Entry(("second",), (4, 3, 2, 2)), Entry(("third",), (2, 4)))
SIZES = [entry.size for entry in LAYERS]
STARTS = {0: (0, 3), 1: (4, 8), 2: (11, 13)}
"""Where each layer's own units begin, and those before it; all inputs of the first layer are one that is never lost."""


def expected_ends(bits: torch.Tensor) -> list[list[int]]:
    """The units around every active link, entry by entry."""
    found: list[list[int]] = [[], []]
    place = 0
    for index, entry in enumerate(LAYERS):
        for at in range(entry.size):
            if bits[place + at]:
                coordinates = torch.unravel_index(torch.tensor(at), entry.shape)
                own, before = STARTS[index]
                found[0].append(own + int(coordinates[0]))
                found[1].append(before + (int(coordinates[1]) if index else 0))
        place += entry.size
    return found


@given(st.lists(st.booleans(), min_size=sum(SIZES), max_size=sum(SIZES)), st.lists(st.booleans(), min_size=sum(SIZES), max_size=sum(SIZES)))
def test_links_join_the_units_that_lose_them(earlier, later):
    before, after = (Mask(torch.tensor(bits), SIZES) for bits in (earlier, later))
    assert ends(LAYERS, before).tolist() == expected_ends(before.bits)
    units = number(LAYERS)
    assert units == 17  # 3 + 1, 4 + 3, 2 + 4
    had, has = (torch.bincount(ends(LAYERS, mask).flatten(), minlength=units) > 0 for mask in (before, after))
    gone = had & ~has
    gone[3] = False
    assert (connected(LAYERS, before) & ~connected(LAYERS, after)).tolist() == gone.tolist()
    assert int(gone.count_nonzero()) == sum(entry.inputs + entry.outputs for entry in cut_off(LAYERS, after, before))


@pytest.fixture
def order(toy):
    run = toy("fedrts", "mlp", clients={"total": 3, "per_round": 3}, topology={"interval": 2, "end": 6})
    state = run.method.begin(run.setup)
    made: Any = order_of(run, run.method.exchanges(run.plan.round(2, state.mask))[0], state, 2)
    return made


def test_a_client_says_which_links_of_a_unit_it_keeps_and_how_large_they_are(order):
    hearing, mask, sent = Hearing(order), order.frame.mask, order.reference
    joined, links = ends(order.frame.layout.layers, mask), mask.number
    of_unit = [(joined == unit).any(0) for unit in range(number(order.frame.layout.layers))]
    weights = torch.randn(len(sent), generator=torch.Generator().manual_seed(1))

    def word(values, core=None):
        told = hearing.of({"weights": values}, {} if core is None else {"core": core})
        assert told is not None
        return told

    expected = torch.stack([weights[:links][at].norm() for at in of_unit])
    torch.testing.assert_close(word(weights), torch.stack([torch.tensor([float(at.any()) for at in of_unit]), expected]))
    core = torch.rand(links, generator=torch.Generator().manual_seed(2)) < 0.6
    shares = torch.tensor([float(core[at].float().mean()) if at.any() else 0.0 for at in of_unit])
    torch.testing.assert_close(word(weights, core)[0], shares)
    own = Mask(mask.bits.clone().index_fill(0, mask.active[~core], False), mask.sizes)
    told = hearing.of({"weights": OwnValues(own, own.compact(mask.expand(weights)))}, {})
    assert told is not None
    torch.testing.assert_close(told[0], shares)
    torch.testing.assert_close(told[1], torch.stack([(weights[:links] * core)[at].norm() for at in of_unit]))
    assert hearing.of({}, {}) is None


@pytest.mark.parametrize("unit", ["kernel", "block:2×1"])
def test_a_client_keeps_all_links_of_an_arm_or_none(toy, unit):
    run = toy("fedrts", "cnn", clients={"total": 3, "per_round": 3}, topology={"interval": 2, "end": 6, "unit": unit})
    state = run.method.begin(run.setup)
    order = order_of(run, run.method.exchanges(run.plan.round(2, state.mask))[0], state, 2)
    mask = order.frame.mask
    assert mask.arms.number < mask.number
    core = torch.rand(mask.arms.number, generator=torch.Generator().manual_seed(2)) < 0.6
    told = Hearing(order).of({"weights": order.reference}, {"core": core})
    assert told is not None
    kept, places = torch.zeros(len(mask.arms.bits), dtype=torch.bool), mask.arms.active
    kept[places[core]] = True
    of_link = mask.sizes.spread(kept)[mask.active]
    joined = ends(order.frame.layout.layers, mask)
    for unit_number in range(number(order.frame.layout.layers)):
        at = (joined == unit_number).any(0)
        expected = float(of_link[at].float().mean()) if at.any() else 0.0
        assert float(told[0][unit_number]) == pytest.approx(expected)


def test_who_is_loud_where_the_mean_is_silent_cancels():
    """Units: cancelled, one client's alone, weak for all."""
    norms = {3: [1.0, 0.0, 0.1], 1: [1.2, 8.0, 0.1], 4: [4.0, 0.0, 0.1], 0: [0.9, 0.0, 0.1]}
    words = {client: torch.tensor([[1.0, 1.0, 1.0], sizes]) for client, sizes in norms.items()}
    found = cancelling(words, dict.fromkeys(norms, 0.25), torch.tensor([0.1, 2.0, 0.1]))
    assert {client: units.tolist() for client, units in found.items()} == {4: [True, False, False]}
    assert cancelling({}, {}, torch.zeros(3)) == {}
    assert agreed(words, torch.tensor([0.5, 2.0, 0.1])).tolist() == [False, True, True]
    assert agreed(words, torch.tensor([0.6, 0.0, 0.0])).tolist() == [True, False, False]


def test_what_is_cancelled_is_remembered_until_clients_agree_again():
    records = ClientRecords.of(Guard())
    records.cancel({4: torch.tensor([True, True, False])}, torch.tensor([False, False, True]))
    records.cancel({4: torch.tensor([False, False, True]), 2: torch.tensor([True, False, False])}, torch.tensor([False, True, False]))
    again = ClientRecords.restored(records.tensors(), [1], Guard(), "cpu")
    for each in (records, again):
        assert {client: units.tolist() for client, units in each.cancelled.items()} == {4: [True, False, True], 2: [True, False, False]}
    again.cancel({}, torch.tensor([True, False, False]))
    assert {client: units.tolist() for client, units in again.cancelled.items()} == {4: [False, False, True]}


def test_the_clients_against_most_lost_units_come_first():
    kept = {7: [0.4, 1.0, 0.0, 0.5], 2: [1.0, 1.0, 0.0, 1.0], 5: [0.0, 0.3, 0.9, 0.4], 1: [0.5, 0.6, 1.0, 0.49]}
    against = not_keeping({client: torch.tensor([shares, [1.0] * 4]) for client, shares in kept.items()})
    assert list(ranked(against, torch.tensor([True, True, False, True])).items()) == [(5, 3), (1, 1), (7, 1)]


def test_large_models_are_watched_at_some_links(order, monkeypatch):
    monkeypatch.setattr("fedrts.server.opposition._WATCHED", 50)
    weights, links = torch.randn(len(order.reference)), order.frame.mask.number
    at = torch.arange(0, links, -(-links // 50))
    assert 25 < len(at) <= 50
    joined = ends(order.frame.layout.layers, order.frame.mask)[:, at]
    expected = [weights[at][(joined == unit).any(0)].norm() for unit in range(number(order.frame.layout.layers))]
    torch.testing.assert_close(Hearing(order).norms(weights), torch.tensor(expected))
