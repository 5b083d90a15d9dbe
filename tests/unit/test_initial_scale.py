"""`topology.init_scale = "sparse"`: with few links as strong a signal as with all of them."""

import math
from typing import Any

import pytest
import torch
from torch import nn

import fedrts
from fedrts import methods
from fedrts.methods.contract import Setup
from fedrts.sparse import random
from fedrts.sparse.layout import Layout

SIZES = (400, 300, 200)


def setup_of(init_scale, seed=0):
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(*SIZES[:2]), nn.ReLU(), nn.Linear(*SIZES[1:]), nn.ReLU(), nn.Linear(SIZES[2], 10))
    layout = Layout.of(module)
    weights = layout.flatten(module.state_dict())
    return Setup(layout, weights, (SIZES[0],), lambda purpose: random.key(seed, purpose), module, init_scale=init_scale)


@pytest.mark.parametrize("name", ["random", "fedrts", "feddst", "fedcucb", "synflow"])
def test_links_are_multiplied_layer_by_layer(name):
    setup = setup_of("sparse")
    method = methods.get(name)(density=0.1)
    begun = method.begin(setup)
    counts, sizes = begun.mask.counts, setup.layout.sizes
    mask, links = begun.mask.bits.split(list(sizes)), begun.weights[: setup.layout.links].split(list(sizes))
    for number, first in enumerate(setup.weights[: setup.layout.links].split(list(sizes))):
        expected = torch.where(mask[number], first * math.sqrt(sizes[number] / counts[number]), torch.zeros_like(first))
        torch.testing.assert_close(links[number], expected)
    assert torch.equal(begun.weights[setup.layout.links :], setup.weights[setup.layout.links :])  # biases and the output layer
    assert torch.equal(begun.mask.bits, method.begin(setup_of("dense")).mask.bits)


def test_the_pool_of_masks_is_judged_with_scaled_weights():
    setup = setup_of("sparse")
    begun = methods.get("fedtiny")(density=0.1).begin(setup)
    assert torch.equal(begun.weights, setup.scaled_weights(setup.counts(0.1)))
    assert begun.mask.is_full


@pytest.mark.parametrize("name", ["fedavg", "snip", "grasp"])
def test_who_begins_with_the_dense_model_has_its_weights(name):
    setup = setup_of("sparse")
    assert torch.equal(methods.get(name)(density=0.1).begin(setup).weights, setup.weights)


def test_signals_keep_their_strength():
    """The spread over inputs of a unit's input, root mean square over units: as in the dense model, within a tenth."""
    x = torch.randn(2000, SIZES[0], generator=torch.Generator().manual_seed(1))

    def strength(weights, layout):
        first = weights[: layout.sizes[0]].view(SIZES[1], SIZES[0])
        return float((x @ first.T).var(0).mean().sqrt())

    dense = setup_of("dense")
    whole = strength(dense.weights, dense.layout)
    plain, scaled = (
        strength(methods.get("random")(density=0.1).begin(setup_of(scale)).weights, dense.layout) for scale in ("dense", "sparse")
    )
    assert scaled == pytest.approx(whole, rel=0.1)
    assert plain < 0.5 * whole


def test_through_the_experiment(tmp_path):
    small: dict[str, Any] = {"rounds": 1, "density": 0.05, "method": "random", "lr": 1e-12, "device": "cpu"}
    plain, scaled = (fedrts.run(out=tmp_path / scale, topology={"init_scale": scale}, **small) for scale in ("dense", "sparse"))
    name = next(iter(plain.masks))
    ratio = scaled.model.state_dict()[name] / plain.model.state_dict()[name]
    factor = math.sqrt(plain.masks[name].numel() / int(plain.masks[name].sum()))
    assert torch.allclose(ratio[plain.masks[name]], torch.tensor(factor), rtol=1e-4)
