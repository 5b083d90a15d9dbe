"""Arms: which links they are of, what they score, how many fit, and which are chosen; each written out link by link."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedrts.errors import InputError
from fedrts.sparse import budget, rigl
from fedrts.sparse.arms import block_of, known_unit, smaller
from fedrts.sparse.layout import Layout
from fedrts.sparse.mask import Mask
from fedrts.sparse.schedule import Schedule
from fedrts.sparse.topk import top, top_arms, top_arms_of_all, top_indices

UNITS = ("kernel", "block:2×2", "block:4×3")


def network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 6, 1), nn.Conv2d(6, 6, 3, groups=3), nn.Linear(6, 8), nn.Linear(8, 2))


def layout_of(unit: str) -> Layout:
    return Layout.of(network(), unit=unit)


def members(layout: Layout) -> list[list[int]]:
    """The links of every arm: those whose output and input channels are in the same block."""
    arms, first = [], 0
    for entry in layout.layers:
        rows, columns = entry.block or (1, 1)
        found: dict[tuple[int, ...], list[int]] = {}
        for link, place in enumerate(itertools.product(*map(range, entry.shape))):
            key = place if entry.block is None else (place[0] // rows, place[1] // columns)
            found.setdefault(key, []).append(first + link)
        arms += [found[key] for key in sorted(found)]
        first += entry.size
    return arms


def score(scores: torch.Tensor, links: list[int]) -> float:
    return math.sqrt(sum(float(scores[link]) ** 2 for link in links) / len(links))


@pytest.mark.parametrize("unit", UNITS)
def test_arms_are_blocks_of_channels_with_all_positions(unit):
    layout, scores = layout_of(unit), torch.rand(layout_of(unit).links)
    arms = members(layout)
    assert layout.arms == len(arms) == sum(layout.sizes.arms)
    assert layout.sizes.links_of_arms.tolist() == [len(links) for links in arms]
    assert (arm_of := layout.sizes.arm_of) is not None
    for arm, links in enumerate(arms):
        assert (arm_of == arm).nonzero().squeeze(-1).tolist() == links
    wanted = torch.tensor([score(scores, links) for links in arms])
    torch.testing.assert_close(layout.sizes.scored(scores), wanted)
    torch.testing.assert_close(layout.sizes.scored(-scores), -wanted)  # what speaks against a link speaks against its arm
    torch.testing.assert_close(layout.sizes.scored(torch.stack([scores, -scores])), torch.stack([wanted, -wanted]))
    assert torch.equal(layout.sizes.picked(layout.sizes.spread(wanted)), wanted)
    one = torch.zeros(layout.links, dtype=torch.bool).index_fill_(0, torch.tensor([arms[-1][-1]]), True)
    assert layout.sizes.touched(one).nonzero().squeeze(-1).tolist() == arms[-1]


def test_a_layer_that_a_block_does_not_divide_has_smaller_arms():
    assert [block_of("block:4×4", shape) for shape in ((16, 16, 3, 3), (8, 3, 3, 3), (6, 4), (3, 5), (5, 3, 3, 3))] == [
        (4, 4),
        (4, 1),
        (2, 4),
        None,
        (1, 1),
    ]
    assert [block_of("kernel", shape) for shape in ((16, 16, 3, 3), (16, 16, 1, 1), (6, 4), (6,))] == [(1, 1), None, None, None]
    shapes = {"a": (16, 16, 3, 3), "b": (8, 3, 3, 3), "c": (3, 5), "d": (7, 5)}
    assert smaller("block:4×4", shapes) == (
        "layers that it does not divide have arms of their own: 'b' in blocks of 4×1, 'c' and 1 more in links"
    )
    assert smaller("kernel", shapes) is smaller("link", shapes) is None


def test_a_unit_has_one_spelling():
    assert [known_unit(unit) for unit in ("link", "kernel", "block:4x8", "block:04×8")] == ["link", "kernel", "block:4×8", "block:4×8"]
    for unit in ("blocks", "block:4", "block:0x4", "block:4x-1", "block:4x4x4"):
        with pytest.raises(InputError, match=r"topology\.unit must be link, kernel, or block:R×C"):
            known_unit(unit)


def test_links_are_the_layout_that_there_was_and_another_unit_is_another_model():
    plain, kernels = layout_of("link"), layout_of("kernel")
    assert not plain.sizes.grouped
    assert plain.arms == plain.links
    assert plain.sizes.mean(scores := torch.rand(plain.links)) is plain.sizes.scored(scores) is plain.sizes.spread(scores) is scores
    assert len({layout_of(unit).fingerprint for unit in ("link", *UNITS)}) == 4
    assert plain.fingerprint == Layout(tuple(type(e)(e.names, e.shape) for e in kernels.layers), kernels.dense, kernels.buffers).fingerprint


@given(st.sampled_from(UNITS), st.data())
def test_the_best_arms_of_every_layer(unit, data):
    layout = layout_of(unit)
    scores = torch.rand(layout.links, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99))))
    k = [data.draw(st.integers(0, size)) for size in layout.sizes]
    arms, first, expected = members(layout), 0, set()
    for each, number, room in zip(layout.sizes.each, layout.sizes.arms, k, strict=True):
        ranked = sorted(arms[first : first + number], key=lambda links: -score(scores, links))
        expected |= {link for links in ranked[: room // each] for link in links}
        first += number
    chosen = top(scores, k, layout.sizes)
    assert set(chosen.nonzero().squeeze(-1).tolist()) == expected
    assert torch.equal(top(layout.sizes.scored(scores), k, layout.sizes), chosen)  # arms may be scored beforehand
    assert torch.equal(layout.sizes.spread(top_arms(scores, k, layout.sizes)), chosen)
    mask = Mask(chosen, layout.sizes)
    assert [*mask.counts] == [*layout.sizes.whole(k)]
    few = [count // 2 for count in mask.counts]
    among = top(scores[mask.active], few, mask.counts)  # on values on the mask alone, the same arms
    assert torch.equal(mask.active[among], top_indices(scores, few, mask.bits, layout.sizes))
    assert mask.arms.number == sum(mask.sizes.in_arms(mask.counts))
    assert Mask.of_arms(mask.arms.bits, layout.sizes) == mask


@given(st.sampled_from(("link", *UNITS)), st.integers(0, 99), st.data())
def test_the_best_arms_of_all_layers_leave_no_room_for_another(unit, seed, data):
    layout = layout_of(unit)
    scores = torch.rand(layout.links, generator=torch.Generator().manual_seed(seed))
    number = data.draw(st.integers(sum(layout.sizes.each), layout.links))
    chosen = top_arms_of_all(scores, number, layout.sizes)
    each = layout.sizes.links_of_arms
    left = number - int(each[chosen].sum())
    assert left >= 0
    assert not (each[~chosen] <= left).any()
    worst = layout.sizes.scored(scores)[chosen].min()
    for size in each.unique():  # of arms of one size no better one is left out
        inside, outside = (layout.sizes.scored(scores)[part & (each == size)] for part in (chosen, ~chosen))
        assert not len(inside) or not len(outside) or inside.min() > outside.max()
    assert worst > 0
    whole = Mask.top_of_all(scores, number, layout.sizes)
    assert min(whole.counts) > 0
    assert whole.number <= number


@pytest.mark.parametrize("kind", budget.BUDGETS)
@given(unit=st.sampled_from(UNITS), density=st.floats(0.5, 1.0))
def test_budgets_are_of_whole_arms_and_never_exceeded(kind, unit, density):
    layout = layout_of(unit)
    kept, counts = budget.links_to_keep(layout, density), budget.layer_counts(layout, density, kind=kind)
    links = budget.BUDGETS[kind]([entry.shape for entry in layout.layers], kept)
    assert layout.sizes.whole(counts) == tuple(counts)
    assert sum(counts) <= kept
    assert all(each <= count <= size for each, count, size in zip(layout.sizes.each, counts, layout.sizes, strict=True))
    whole = layout.sizes.whole(links)
    if min(layout.sizes.in_arms(links)) > 0:  # else the others give way to the one arm that a layer has at least
        assert all(count in (least, least + each) for count, least, each in zip(counts, whole, layout.sizes.each, strict=True))
    one_more = [each for each, count, wanted in zip(layout.sizes.each, counts, links, strict=True) if count < wanted]
    assert all(sum(counts) + each > kept for each in one_more)
    if density == 1:
        assert tuple(counts) == layout.sizes


def test_a_density_that_leaves_no_arm_to_a_layer_names_the_least_one():
    with pytest.raises(InputError, match=r"keeps at least one arm; the smallest feasible density is 0\.\d+"):
        budget.layer_counts(layout_of("block:4×3"), 0.1)


def test_quotas_are_of_whole_arms():
    layout = layout_of("kernel")
    counts = budget.layer_counts(layout, 0.6)
    quota = Schedule().quota(0, counts, layout.sizes)
    assert layout.sizes.whole(quota) == quota
    for q, links, each in zip(quota, Schedule().quota(0, counts, tuple(layout.sizes)), layout.sizes.each, strict=True):
        assert q == links // each * each


@pytest.mark.parametrize("unit", UNITS)
def test_the_weakest_arms_are_dropped_and_the_most_promising_grown(unit):
    layout, generator = layout_of(unit), torch.Generator().manual_seed(1)
    strength, promise, first = (torch.rand(layout.links, generator=generator) for _ in range(3))
    mask = Mask.top(first, budget.layer_counts(layout, 0.6), layout.sizes)
    quota = layout.sizes.in_links([min(1, a // 2) for a in mask.arms.free])
    kept, new = rigl.step(strength, promise, mask, quota)
    arms = members(layout)
    begin = 0
    for number, q, each in zip(layout.sizes.arms, quota, layout.sizes.each, strict=True):
        own = arms[begin : begin + number]
        active = sorted((links for links in own if mask.bits[links[0]]), key=lambda links: score(strength, links))
        gone = active[: q // each]
        free = [links for links in own if links in gone or not mask.bits[links[0]]]
        grown = sorted(free, key=lambda links: -score(promise, links))[: q // each]
        for links in own:
            assert kept.bits[links].tolist() == [links in active and links not in gone] * len(links)
            assert new.bits[links].tolist() == [(links in active and links not in gone) or links in grown] * len(links)
        begin += number
