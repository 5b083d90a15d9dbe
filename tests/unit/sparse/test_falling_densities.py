"""Densities that fall: exact ends, exact totals, no layer that grows."""

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from fedrts.errors import InputError
from fedrts.methods.contract import Round, Setup
from fedrts.sparse import budget, falling
from fedrts.sparse.falling import Fall
from fedrts.sparse.layout import Entry, Layout
from fedrts.sparse.mask import Mask
from fedrts.sparse.schedule import Schedule

BY_HAND = {
    "cubic": [1.0, 0.421875, 0.125, 0.015625, 0.0],
    "cosine": [1.0, (2 + math.sqrt(2)) / 4, 0.5, (2 - math.sqrt(2)) / 4, 0.0],
    "linear": [1.0, 0.75, 0.5, 0.25, 0.0],
}
shape = st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple)


def layout(shapes, dense=0):
    rest = (Entry(("bias",), (dense,)),) if dense else ()
    return Layout(tuple(Entry((f"layer{index}.weight",), shape) for index, shape in enumerate(shapes)), rest, ())


def first_counts(fall):
    """K^l of the first mask."""
    setup = Setup(
        fall.layout,
        torch.zeros(fall.layout.length),
        (),
        lambda purpose: 0,
        nn.Module(),
        0,
        fall.budget,
        fall.layer_density,
        density_start=fall.start,
    )
    return setup.counts(fall.end)


@pytest.mark.parametrize("curve", falling.names())
def test_curves_by_hand(curve):
    assert [falling.left(curve, progress) for progress in (0.0, 0.25, 0.5, 0.75, 1.0)] == pytest.approx(BY_HAND[curve], abs=1e-12)
    assert falling.left(curve, 1.0) == 0.0


def test_a_curve_of_ones_own_that_stops_short_ends_at_the_target_all_the_same(monkeypatch):
    monkeypatch.setitem(falling.curves._known, "short", lambda progress: 1 - progress / 2)
    assert [Fall(0.8, 0.4, "short", layout([(9,)])).density(progress) for progress in (0.0, 0.5, 1.0)] == pytest.approx([0.8, 0.7, 0.4])


@given(st.integers(1, 12), st.integers(2, 60), st.booleans(), st.booleans())
def test_progress_goes_from_the_first_outer_round_to_the_last_before_the_end(interval, end, late, at_end):
    schedule = Schedule(interval, end, 0.4, interval if late else 0, at_end)
    outers = [t for t in range(end) if schedule.is_outer(t)]
    if len(outers) < 2:
        return
    expected = [index / (len(outers) - 1) for index in range(len(outers))]
    assert [schedule.progress(t) for t in outers] == pytest.approx(expected)
    assert (schedule.progress(outers[0]), schedule.progress(outers[-1]), schedule.progress(end)) == (0.0, 1.0, 1.0)


@given(
    st.lists(shape, min_size=1, max_size=6),
    st.floats(0.01, 1),
    st.floats(0.01, 1),
    st.integers(2, 9),
    st.sampled_from(sorted(budget.BUDGETS)),
    st.sampled_from(falling.names()),
)
@example([(2,), (5,), (5,)], 8.1 / 12, 9.1 / 12, 2, "er", "linear")  # rounded: [1, 4, 4] of nine links, [2, 3, 3] of eight
@example([(2,), (5,), (5,)], 8.1 / 12, 10.1 / 12, 3, "er", "linear")
def test_layers_fall_from_the_first_counts_to_those_of_the_target(shapes, one, other, outers, kind, curve):
    model = layout(shapes)
    low, high = sorted((one, other))
    if math.floor(low * model.links) < len(shapes):
        return
    fall = Fall(high, low, curve, model, "prunable", kind)
    counts = first_counts(fall)
    assert sum(counts) == math.floor(high * model.links)
    for index in range(outers):
        progress = index / (outers - 1)
        targets = fall.targets(progress, counts)
        assert all(1 <= new <= old for new, old in zip(targets, counts, strict=True)), "no layer gains"
        assert sum(targets) == min(math.floor(fall.density(progress) * model.links), sum(counts))
        counts = targets
    assert list(counts) == budget.layer_counts(model, low, "prunable", kind), "what a run at the target has"


@given(st.lists(st.tuples(st.integers(1, 400), st.integers(0, 400)), min_size=1, max_size=6), st.floats(0, 1), st.randoms())
def test_a_mask_with_other_layers_gets_to_the_same_number_of_links(layers, share, chance):
    """A pool, given weights, or links that compete over all layers: K^l need not be the budget's."""
    sizes = [low + more for low, more in layers]
    model = layout([(size,) for size in sizes])
    counts = [chance.randint(1, size) for size in sizes]
    start, end = sum(counts) / model.links, (len(sizes) + share * (sum(counts) - len(sizes))) / model.links + 1e-9
    if end > start:
        return
    fall = Fall(start, end, "linear", model, "prunable", "uniform")
    for progress in (0.0, 0.5, 1.0):
        targets = fall.targets(progress, counts)
        assert all(1 <= new <= old for new, old in zip(targets, counts, strict=True))
        assert sum(targets) == min(math.floor(fall.density(progress) * model.links), sum(counts))
        counts = list(targets)


def test_where_a_layer_lacks_links_the_others_share_them_in_proportion():
    assert budget.between([10, 20, 30], [1, 1, 1], [10, 20, 30]) == [10, 20, 30]
    assert budget.between([10, 20, 30], [1, 1, 1], [4, 90, 90]) == [4, 22, 34]  # 56 in the proportions 2 : 3, by largest remainder
    assert budget.between([10, 20, 30], [16, 1, 1], [90, 90, 90]) == [16, 18, 26]
    assert budget.between([10, 20, 30], [1, 1, 1], [5, 5, 5]) == [5, 5, 5]


def test_many_links_take_no_longer_than_few():
    found = budget.between([4_000_000, 6_000_000], [1, 1], [1_000_000, 9_500_000])
    assert found == [1_000_000, 9_000_000]


@given(st.integers(0, 39), st.floats(0, 1), st.floats(0.2, 1), st.lists(st.integers(4, 60), min_size=1, max_size=5))
def test_what_is_exchanged_fits_into_the_next_mask(t, adjust, start, sizes):
    """Q^l = min(⌊f·T^l⌋, n^l − K^l) ≤ T^l, κ^l = T^l − Q^l; K^l − κ^l go, Q^l come, and T^l are there."""
    model = layout([(size,) for size in sizes])
    fall = Fall(start, 0.2, "cubic", model, "prunable", "uniform") if math.floor(0.2 * model.links) >= len(sizes) else None
    schedule = Schedule(4, 40, adjust, fall=fall)
    mask = Mask.top(torch.zeros(sum(sizes)), first_counts(fall) if fall else sizes, sizes)
    current = Round.of(t, schedule, mask, model)
    if not schedule.is_outer(t):
        assert current.targets == current.counts
    fraction = schedule.fraction(t)
    for active, target, q, core, gone, size in zip(
        current.counts, current.targets, current.quota, current.core, current.outgoing, sizes, strict=True
    ):
        assert q == min(math.floor(fraction * target), size - active)
        assert core == target - q >= 0
        assert active - gone + q == target


def test_a_curve_of_ones_own_that_gives_no_share_is_one_line(monkeypatch):
    monkeypatch.setitem(falling.curves._known, "wild", lambda progress: 1 + progress)
    monkeypatch.setitem(falling.curves._known, "mute", lambda progress: None)
    with pytest.raises(InputError, match=r"topology\.density_schedule = 'wild' gives 1\.5 for 0\.5: what is left of the way is 0 to 1"):
        falling.left("wild", 0.5)
    with pytest.raises(InputError, match=r"topology\.density_schedule = 'mute' gives no number for 0"):
        falling.left("mute", 0.0)
