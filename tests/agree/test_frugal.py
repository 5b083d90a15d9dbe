"""Modules that train with less memory, against plain PyTorch and NumPy; and how much they really keep."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from fedrts.sparse.frugal import (
    BitReLU,
    SparseInputConv2d,
    SparseInputLinear,
    StandardisedConv2d,
    pack,
    save_activations_sparsely,
    standardise_convolutions,
    unpack,
)
from fedrts.sparse.layout import Layout

# -- one bit an element ---------------------------------------------------------------------------------------------------


@given(st.lists(st.booleans(), max_size=70))
def test_bits_survive_packing(flags):
    packed = pack(torch.tensor(flags, dtype=torch.bool))
    assert packed.dtype == torch.uint8
    assert len(packed) == math.ceil(len(flags) / 8)
    assert unpack(packed, len(flags)).tolist() == flags


@given(st.lists(st.sampled_from([0.0, -0.0, 1e-45, -1e-45]) | st.floats(-2, 2, width=32), min_size=1, max_size=40), st.integers(0, 99))
def test_the_bit_relu_is_the_relu(values, seed):
    """Forward and backward, at 0 and below too, for sizes that fill no byte."""
    upstream = torch.randn(len(values), generator=torch.Generator().manual_seed(seed))
    found = []
    for act in (F.relu, BitReLU()):
        x = torch.tensor(values, requires_grad=True)
        y = act(x)
        y.backward(upstream)
        assert x.grad is not None
        found.append((y.detach(), x.grad))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def test_the_bit_relu_takes_any_shape_and_layout():
    for shape in ((), (1,), (3, 5), (2, 3, 5, 7)):
        x = torch.randn(shape, requires_grad=True)
        BitReLU()(x).sum().backward()
        assert x.grad is not None
        assert torch.equal(x.grad, (x > 0).float())
    x = torch.randn(4, 6, requires_grad=True)
    upstream = torch.randn(6, 4)
    BitReLU()(x.T).backward(upstream)
    assert x.grad is not None
    assert torch.equal(x.grad, (upstream * (x.T > 0)).T)


# -- inputs that are kept sparsely ----------------------------------------------------------------------------------------

CONVOLUTIONS: list[dict[str, Any]] = [
    {"in_channels": 4, "out_channels": 6, "kernel_size": 3},
    {"in_channels": 4, "out_channels": 6, "kernel_size": 3, "stride": 2, "padding": 1, "bias": False},
    {"in_channels": 4, "out_channels": 6, "kernel_size": (3, 2), "stride": (1, 2), "padding": (2, 0), "dilation": 2},
    {"in_channels": 4, "out_channels": 6, "kernel_size": 3, "padding": 1, "groups": 2},
    {"in_channels": 4, "out_channels": 8, "kernel_size": 1, "groups": 4, "bias": False},
]
LAYERS: list[Callable[[], nn.Module]] = [partial(nn.Conv2d, **options) for options in CONVOLUTIONS]
LAYERS += [lambda: nn.Linear(7, 5), lambda: nn.Linear(7, 5, bias=False)]


def pair_of(make, share):
    """A layer, and the same that keeps a share of its input."""
    torch.manual_seed(1)
    plain = make().double()
    torch.manual_seed(1)
    frugal = save_activations_sparsely(nn.Sequential(make().double()), share, linear=True)[0]
    assert isinstance(frugal, (SparseInputConv2d, SparseInputLinear))
    assert frugal.share == share
    return plain, frugal


def gradients(layer, x, upstream=None):
    x = x.clone().requires_grad_()
    output = layer(x)
    upstream = torch.ones_like(output) if upstream is None else upstream
    output.backward(upstream)
    return output.detach(), x.grad, [p.grad.clone() for p in layer.parameters()]


def input_of(layer):
    generator = torch.Generator().manual_seed(2)
    shape = (3, 4, 9, 8) if isinstance(layer, nn.Conv2d) else (3, 2, 7)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def upstream_of(layer, x):
    return torch.randn(layer(x).shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


@pytest.mark.parametrize("make", LAYERS)
def test_a_whole_input_gives_exact_gradients(make):
    plain, frugal = pair_of(make, 1.0)
    x = input_of(plain)
    upstream = upstream_of(plain, x)
    for a, b in zip(gradients(plain, x, upstream), gradients(frugal, x, upstream), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("rate", [0.5, 0.75, 0.96875])
@pytest.mark.parametrize("make", LAYERS)
def test_the_weight_sees_a_pruned_input_and_the_input_an_exact_gradient(make, rate):
    plain, frugal = pair_of(make, 1 - rate)
    x = input_of(plain)
    upstream = upstream_of(plain, x)
    output, to_input, to_parameters = gradients(frugal, x, upstream)
    exact, exact_input, exact_parameters = gradients(plain, x, upstream)
    torch.testing.assert_close(output, exact)
    torch.testing.assert_close(to_input, exact_input)

    flat = x.flatten().tolist()
    kept = sorted(range(len(flat)), key=lambda i: -abs(flat[i]))[: math.ceil((1 - rate) * len(flat))]
    pruned = torch.zeros(len(flat), dtype=x.dtype)
    pruned[kept] = x.flatten()[kept]
    plain.zero_grad()
    _, _, from_pruned = gradients(plain, pruned.view_as(x), upstream)
    torch.testing.assert_close(to_parameters, from_pruned)  # the bias needs no input: exact either way
    assert not torch.allclose(to_parameters[0], exact_parameters[0])


def test_only_layers_that_keep_plain_inputs_are_replaced():
    act = nn.ReLU(inplace=True)
    odd = [nn.Conv2d(2, 2, 3, padding="same"), nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular"), nn.ConvTranspose2d(2, 2, 3)]
    module = nn.Sequential(nn.Conv2d(2, 2, 3), act, nn.Sequential(act, *odd), nn.Flatten(), nn.Linear(2, 2))
    before = [type(part) for part in (*odd, module[4])]
    x = torch.randn(1, 2, 9, 9)
    expected = module[:3](x.clone())
    save_activations_sparsely(module, 0.3)
    assert isinstance(module[0], SparseInputConv2d)
    assert isinstance(module[1], BitReLU)
    assert isinstance(module.get_submodule("2.0"), BitReLU), "the second place of a shared module"
    assert [type(part) for part in (*odd, module[4])] == before
    torch.testing.assert_close(module[:3](x.clone()), expected)
    assert isinstance(save_activations_sparsely(module, 0.3, linear=True)[4], SparseInputLinear)


# -- what is kept for the backward pass -----------------------------------------------------------------------------------


def kept_bytes(module, x):
    """Bytes of the distinct storages that autograd keeps, but for the parameters'."""
    own = {p.untyped_storage().data_ptr() for p in module.parameters()} | {x.untyped_storage().data_ptr()}
    held, sizes = [], {}

    def pack_hook(tensor):
        held.append(tensor)  # alive, so that no address comes twice
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack_hook, lambda tensor: tensor):
        loss = module(x).sum()
    loss.backward()
    return sum(sizes.values())


def stack(norm):
    torch.manual_seed(0)
    block = lambda a, b: [nn.Conv2d(a, b, 3, padding=1, bias=not norm), *([nn.BatchNorm2d(b)] if norm else []), nn.ReLU()]  # noqa: E731
    return nn.Sequential(*block(3, 16), *block(16, 16), *block(16, 16), *block(16, 16), nn.Conv2d(16, 4, 1))


def kept(norm=True, ws=False, sap=False, bits=True, rate=0.7):
    """Bytes an element of the 16-channel activations, of which there are four."""
    module = stack(norm)
    if ws:
        standardise_convolutions(module)
    if sap:
        save_activations_sparsely(module, 1 - rate)
    if sap and not bits:
        for place, part in enumerate(module):
            if isinstance(part, BitReLU):
                module[place] = nn.ReLU()
    return kept_bytes(module, torch.randn(8, 3, 24, 24)) / (4 * 8 * 16 * 24 * 24)


def test_sap_and_ws_keep_less_than_a_third_of_what_batchnorm_networks_keep():
    """Plain: input of BatchNorm and output of ReLU, 4 + 4 bytes. Both: 0.3·(4 + 4) bytes of values and places and one bit."""
    plain, sap, both = kept(), kept(sap=True), kept(sap=True, ws=True)
    assert plain == pytest.approx(8, rel=0.02)
    assert sap == pytest.approx(4 + 0.3 * 8 + 1 / 8, rel=0.1)
    assert both == pytest.approx(0.3 * 8 + 1 / 8, rel=0.2)
    assert plain / both > 2.7
    assert plain / sap < 1.3, "BatchNorm alone keeps its input whole"


def test_without_the_bit_relu_sap_keeps_more_than_before():
    """A plain ReLU keeps its output whole, which the convolution after it shares: 4 bytes; then 0.3·8 bytes come on top."""
    plain, alone, with_bits = kept(norm=False), kept(norm=False, sap=True, bits=False), kept(norm=False, sap=True)
    assert plain == pytest.approx(4, rel=0.02)
    assert alone == pytest.approx(4 + 0.3 * 8, rel=0.1)
    assert alone > plain
    assert with_bits == pytest.approx(0.3 * 8 + 1 / 8, rel=0.1)
    assert kept(sap=True, bits=False) > kept(), "with BatchNorm too"


def test_a_higher_rate_keeps_less():
    amounts = [kept(ws=True, sap=True, rate=rate) for rate in (0.0, 0.5, 0.7, 0.9)]
    assert amounts == sorted(amounts, reverse=True)
    assert amounts[0] > 2 * amounts[2] > 2 * amounts[3]


# -- standardised convolutions --------------------------------------------------------------------------------------------


def standardised(options, seed=0, dtype=torch.float64, density=0.5):
    """A standardised convolution with gains, a bias and zeros of its own, and numpy copies of weight and gain."""
    torch.manual_seed(seed)
    layer = standardise_convolutions(nn.Sequential(nn.Conv2d(**options)))[0].to(dtype)
    assert type(layer) is StandardisedConv2d
    assert layer.bias is not None
    with torch.no_grad():
        layer.weight *= torch.rand(layer.weight.shape) < density
        layer.gain.copy_(torch.randn(layer.gain.shape))
        layer.bias.copy_(torch.randn(layer.bias.shape))
    return layer, layer.weight.detach().numpy().copy(), layer.gain.detach().numpy().copy()


def by_hand(weight, gain):
    """W' of every output channel, and the scale of each."""
    result, scales = np.zeros_like(weight), []
    for channel, row in enumerate(weight):
        mean = row.sum() / row.size
        variance = ((row - mean) ** 2).sum() / row.size
        scales.append(gain[channel] / math.sqrt(max(variance * row.size, 1e-4)))
        for place in np.argwhere(row != 0):
            result[(channel, *place)] = (row[tuple(place)] - mean) * scales[-1]
    return result, np.array(scales)


@pytest.mark.parametrize("options", CONVOLUTIONS)
def test_the_standardised_weight_by_hand(options):
    layer, weight, gain = standardised(options)
    expected, _ = by_hand(weight, gain)
    found = layer.standardised(layer.weight).detach().numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-12)
    assert (found[weight == 0] == 0).all()
    assert (weight == 0).any()
    x = torch.randn(2, 4, 9, 8, dtype=torch.float64)
    settings = (layer.bias, layer.stride, layer.padding, layer.dilation, layer.groups)
    torch.testing.assert_close(layer(x), F.conv2d(x, torch.from_numpy(expected), *settings))


def test_a_channel_of_hardly_any_variance_is_not_blown_up():
    layer, _, _ = standardised({"in_channels": 1, "out_channels": 2, "kernel_size": 2})
    with torch.no_grad():
        layer.weight.zero_()
        layer.weight[0, 0, 0, 0] = 1e-6
        layer.gain.fill_(1.0)
    found = layer.standardised(layer.weight).detach()
    assert float(found[0, 0, 0, 0]) == pytest.approx((1e-6 - 0.25e-6) / math.sqrt(1e-4))
    assert found[1].count_nonzero() == 0


@pytest.mark.parametrize("options", CONVOLUTIONS)
@pytest.mark.parametrize("sap", [False, True])
def test_gradients_of_active_links_gains_and_biases_are_right(options, sap):
    """Against finite differences, as a function of the active links alone."""
    layer, _, _ = standardised(options, seed=4)
    if sap:
        (layer,) = save_activations_sparsely(nn.Sequential(layer), 1.0)
        assert isinstance(layer, StandardisedConv2d)
        assert isinstance(layer, SparseInputConv2d)
    places = layer.weight.detach().flatten().nonzero().squeeze(-1)
    x = torch.randn(2, 4, 5, 6, dtype=torch.float64, requires_grad=True)

    def output(active, gain, bias, x):
        weight = torch.zeros(layer.weight.numel(), dtype=torch.float64).scatter(0, places, active).view(layer.weight.shape)
        return torch.func.functional_call(layer, {"weight": weight, "gain": gain, "bias": bias}, (x,))

    active = layer.weight.detach().flatten()[places].clone().requires_grad_()
    gain, bias = (p.detach().clone().requires_grad_() for p in (layer.gain, layer.bias))
    assert torch.autograd.gradcheck(output, (active, gain, bias, x))


def test_gradients_of_all_links_by_hand():
    """dL/dW_k = s·(G_k − ΣG/n) + Σ G(W − mean)·ds/dW_k with sums over active links; G_k counts for inactive links as well."""
    layer, weight, gain = standardised({"in_channels": 3, "out_channels": 5, "kernel_size": 3}, seed=5)
    upstream = torch.randn(weight.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    layer.standardised(layer.weight).backward(upstream)
    _, scales = by_hand(weight, gain)
    expected, to_gain = np.zeros_like(weight), np.zeros_like(gain)
    for channel, (row, g, s) in enumerate(zip(weight, upstream.numpy(), scales, strict=True)):
        mean, active, n = row.mean(), row != 0, row.size
        power = ((row - mean) ** 2).sum()
        assert power > 1e-4
        through_mean = -s / n * g[active].sum()
        through_scale = -s / power * (row - mean) * (g * (row - mean))[active].sum()
        expected[channel] = s * g + through_mean + through_scale
        to_gain[channel] = (g * (row - mean))[active].sum() / math.sqrt(power)
    np.testing.assert_allclose(layer.weight.grad.numpy(), expected, rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(layer.gain.grad.numpy(), to_gain, rtol=1e-9)


def test_an_inactive_link_is_judged_by_the_gradient_of_its_effective_weight():
    """Where the active links' effective weights have no gradient, exactly gain/std times its own is left."""
    layer, weight, gain = standardised({"in_channels": 3, "out_channels": 5, "kernel_size": 3}, seed=6)
    off = torch.from_numpy(weight == 0)
    upstream = torch.randn(weight.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * off
    layer.standardised(layer.weight).backward(upstream)
    _, scales = by_hand(weight, gain)
    torch.testing.assert_close(layer.weight.grad, upstream * torch.from_numpy(scales).view(-1, 1, 1, 1))
    assert layer.weight.grad[off].count_nonzero() == off.sum()


def test_standardising_takes_batchnorm_away_and_adds_dense_gains():
    norm = nn.BatchNorm2d(4)
    module = nn.Sequential(nn.Conv2d(1, 4, 3, bias=False), norm, nn.Sequential(nn.Conv2d(4, 4, 3), norm), nn.BatchNorm2d(4), nn.Flatten())
    module.append(nn.Linear(4, 2))
    bias = module.get_parameter("2.0.bias").detach().clone()
    standardise_convolutions(module)
    assert not any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in module.modules())
    assert [p.tolist() for name, p in module.named_parameters() if name.endswith("gain")] == [[1.0] * 4] * 2
    assert torch.equal(module.get_parameter("2.0.bias"), bias)
    assert torch.equal(module.get_parameter("0.bias"), torch.zeros(4))
    layout = Layout.of(module)
    assert [entry.name for entry in layout.layers] == ["0.weight", "2.0.weight"]
    assert {"0.gain", "0.bias", "2.0.gain"} <= {entry.name for entry in layout.dense}
    assert layout.buffers == ()
    assert standardise_convolutions(module) is module
    assert len([name for name, _ in module.named_parameters() if name.endswith("gain")]) == 2


def test_masked_training_keeps_exact_zeros_and_new_links_leave_zero():
    """Steps along masked gradients: what is inactive stays 0, an active link that starts at 0 does not."""
    torch.manual_seed(0)
    module = save_activations_sparsely(standardise_convolutions(nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3))), 0.5)
    layers = [part for part in module.modules() if isinstance(part, StandardisedConv2d)]
    assert len(layers) == 2
    masks = [torch.rand(layer.weight.shape) < 0.5 for layer in layers]
    new = [mask.flatten().nonzero()[0, 0] for mask in masks]
    with torch.no_grad():
        for layer, mask, link in zip(layers, masks, new, strict=True):
            layer.weight *= mask
            layer.weight.view(-1)[link] = 0.0
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    x, y = torch.randn(16, 2, 6, 6), torch.randn(16, 2, 2, 2)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = F.mse_loss(module(x), y)
        loss.backward()
        for layer, mask in zip(layers, masks, strict=True):
            assert layer.weight.grad is not None
            layer.weight.grad *= mask
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    for layer, mask, link in zip(layers, masks, new, strict=True):
        assert layer.weight[~mask].count_nonzero() == 0
        assert layer.standardised(layer.weight)[~mask].count_nonzero() == 0
        assert layer.weight.view(-1)[link].item() != 0
