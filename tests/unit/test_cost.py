import pytest
import torch
from torch import nn

from fedrts import models
from fedrts.methods.contract import Exchange
from fedrts.sparse.cost import Macs
from fedrts.sparse.layout import Layout
from fedrts.sparse.mask import Mask
from fedrts.wire.fields import Indices, Values


def test_macs_of_convolutions_and_linear_layers():
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 4 * 4, 5))
    layout = Layout.of(net)
    macs = Macs.of(net, layout, torch.zeros(1, 3, 4, 4))
    assert macs.layers == (8 * 3 * 9 * 16,)
    assert macs.rest == 8 * 16 * 5
    half = Mask(torch.arange(layout.links) % 2 == 0, layout.sizes)
    assert macs.forward(half) == macs.layers[0] / 2 + macs.rest
    assert macs.forward(Mask.full(layout.sizes)) == macs.dense


def test_macs_of_a_tied_head_follow_the_tied_mask():
    gpt = models.get("tiny_gpt")((6,), 40)
    layout = Layout.of(gpt)
    macs = Macs.of(gpt, layout, torch.zeros(1, 6, dtype=torch.long))
    by_name = dict(zip([e.name for e in layout.layers], macs.layers, strict=True))
    assert by_name["tokens.weight"] == 6 * 32 * 40
    assert by_name["blocks.0.attention.weight"] == 6 * 32 * 96


def resnet18_layout() -> Layout:
    from fedrts.sparse.layout import Entry

    return Layout((Entry(("conv",), (11_166_912,)),), (Entry(("rest",), (14_730,)),), (Entry(("statistics",), (9_600,)),))


@pytest.mark.parametrize(
    ("exchange", "density", "megabytes"),
    [
        (Exchange({"weights": Values()}, (), {"weights": Values()}), 1.0, 89.530),
        (Exchange({"weights": Values()}, (), {"weights": Values()}), 0.2, 20.853),
        (Exchange({"weights": Values()}, (), {"weights": Values(), "votes": Indices("gradient", ())}), 0.2, 20.853 * 1.1),
    ],
)
def test_the_papers_accounting_of_resnet18(exchange, density, megabytes):
    total = sum(f.paper_length(resnet18_layout(), density, 0.4) for way in (exchange.down, exchange.up) for f in way.values())
    assert total / 1e6 == pytest.approx(megabytes, abs=6e-4)
