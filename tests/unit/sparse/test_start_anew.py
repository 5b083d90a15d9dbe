"""Units whose active links are all 0 start anew where links come in groups."""

import math

import pytest
import torch
from torch import nn

from fedrts.sparse.layout import Layout
from fedrts.sparse.mask import Mask
from fedrts.sparse.units import start_anew

UNITS = ["kernel", "block:2×2"]


def model(unit):
    """A layout of two convolutions and a linear layer, a mask of half of the arms, and weights on it."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Conv2d(8, 6, 3), nn.Flatten(), nn.Linear(24, 10))
    layout = Layout.of(module, prune_output=True, unit=unit)
    mask = Mask.top(torch.rand(layout.arms), [size // 2 for size in layout.sizes], layout.sizes)
    weights = layout.flatten(module.state_dict())
    weights[: layout.links] *= mask.bits
    return layout, mask, weights


def rows(layout, vector, layer):
    return vector[: layout.links].split(list(layout.sizes))[layer].view(layout.layers[layer].shape[0], -1)


@pytest.mark.parametrize("unit", UNITS)
def test_a_unit_without_a_weight_gets_weights_like_the_others_of_its_layer(unit):
    layout, mask, weights = model(unit)
    active = rows(layout, mask.bits, 1)
    unit_at = int(active.any(1).nonzero()[0])
    rows(layout, weights, 1)[unit_at] = 0.0
    before = weights.clone()
    start_anew(layout.layers, weights, mask, key=7)
    new, own = rows(layout, weights, 1)[unit_at], active[unit_at]
    rest = rows(layout, before, 1)
    strength = float(rest[rest != 0].square().mean().sqrt())
    torch.testing.assert_close(new.abs(), strength * own)
    assert {float(sign) for sign in new[own].sign()} == {-1.0, 1.0}
    rows(layout, weights, 1)[unit_at] = 0.0
    assert torch.equal(weights, before)


@pytest.mark.parametrize("unit", UNITS)
def test_a_new_arm_beside_others_starts_with_a_tenth_of_their_strength(unit):
    layout, mask, weights = model(unit)
    arms = mask.arms.bits[: layout.sizes.arms[0]].view(layout.layers[0].grid)
    row = int((arms.sum(1) > 1).nonzero()[0])
    first = row * arms.shape[1] + int(arms[row].nonzero()[0])
    own = (layout.sizes.arm_of == first).nonzero().squeeze(-1)
    weights[own] = 0.0
    before = weights.clone()
    start_anew(layout.layers, weights, mask, key=7)
    rest = rows(layout, before, 0)
    strength = float(rest[rest != 0].square().mean().sqrt())
    torch.testing.assert_close(weights[own].abs(), torch.full((len(own),), 0.1 * strength))
    weights[own] = 0.0
    assert torch.equal(weights, before)


def test_a_layer_without_any_weight_starts_as_strong_as_in_pytorch():
    layout, mask, weights = model("kernel")
    rows(layout, weights, 0).zero_()
    start_anew(layout.layers, weights, mask, key=7)
    new, active = rows(layout, weights, 0), rows(layout, mask.bits, 0)
    deviation = 1 / math.sqrt(3 * float(active.sum(1).float().mean()))  # of uniform weights within 1/√inputs
    torch.testing.assert_close(new.abs(), deviation * active)


def test_the_same_round_gives_the_same_weights_and_another_one_others():
    layout, mask, weights = model("kernel")
    rows(layout, weights, 0).zero_()
    found = []
    for key in (7, 7, 8):
        found.append(weights.clone())
        start_anew(layout.layers, found[-1], mask, key)
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_single_links_and_units_without_links_are_left_alone():
    layout, mask, weights = model("link")
    rows(layout, weights, 0).zero_()
    before = weights.clone()
    start_anew(layout.layers, weights, mask, key=7)
    assert torch.equal(weights, before)
    layout, mask, weights = model("kernel")
    bits = mask.bits.clone()
    rows(layout, bits, 0)[2] = False
    rows(layout, weights, 0)[2] = 0.0
    before = weights.clone()
    start_anew(layout.layers, weights, Mask(bits, layout.sizes), key=7)
    assert torch.equal(weights, before)
