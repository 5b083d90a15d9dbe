"""Convolutions as products of matrices: the same numbers, for one client and under vmap."""

import pytest
import torch
from torch.func import grad, vmap
from torch.nn import functional as F

from fedrts.engines import convolution
from fedrts.engines.convolution import Unfolded

CASES = [
    {},
    {"stride": 2, "padding": 1},
    {"stride": (2, 1), "padding": (0, 2), "dilation": (1, 2)},
]


@pytest.mark.parametrize("options", CASES, ids=str)
@pytest.mark.parametrize("with_bias", [True, False])
def test_gradients_under_vmap_are_those_of_every_client(options, with_bias):
    generator = torch.Generator().manual_seed(1)
    weight, bias, x = (torch.randn(*shape, generator=generator).double() for shape in ((3, 5, 2, 3, 2), (3, 5), (3, 4, 2, 9, 8)))

    def loss(weight, bias, x):
        return F.conv2d(x, weight, bias if with_bias else None, **options).relu().square().sum()

    with Unfolded():
        found = vmap(grad(loss, (0, 1)))(weight, bias, x)
    for client in range(3):
        expected = grad(loss, (0, 1))(weight[client], bias[client], x[client])
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours[client], theirs)


def test_what_is_large_or_grouped_stays_with_the_kernels(monkeypatch):
    calls = []
    real = F.unfold
    monkeypatch.setattr(convolution.F, "unfold", lambda *args: calls.append(args) or real(*args))
    x, weight = torch.randn(2, 4, 6, 6), torch.randn(4, 4, 3, 3)
    expected, expected_same = F.conv2d(x, weight), F.conv2d(x, weight, padding="same")
    with Unfolded():
        torch.testing.assert_close(F.conv2d(x, weight), expected)
        assert len(calls) == 1
        F.conv2d(x, weight[:, :1], groups=4)
        torch.testing.assert_close(F.conv2d(x, weight, padding="same"), expected_same)
        monkeypatch.setattr(convolution, "MOST_NUMBERS", 2 * 36 * 16 - 1)
        F.conv2d(x, weight)
    assert len(calls) == 1
