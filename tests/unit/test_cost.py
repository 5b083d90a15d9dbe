import pytest
import torch
from torch import nn

from fedrts import models
from fedrts.sparse.cost import Macs
from fedrts.sparse.layout import Layout, default_rule
from fedrts.sparse.mask import Mask


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
    assert by_name["transformer.wte.weight"] == 6 * 32 * 40
    assert by_name["transformer.h.0.attn.c_attn.weight"] == 6 * 32 * 96


def macs_of(module, sample, prunable=None):
    """Counted MACs by the name of the prunable tensor, and the rest."""
    layout = Layout.of(module, prunable)
    macs = Macs.of(module, layout, sample)
    return dict(zip([entry.name for entry in layout.layers], macs.layers, strict=True)), macs.rest


def test_macs_of_resnet18_are_those_of_the_papers_table():
    resnet = models.get("resnet18")((3, 32, 32), 10)
    layers, rest = macs_of(resnet, torch.zeros(2, 3, 32, 32))
    assert sum(layers.values()) + rest == 37_016_576
    assert layers["conv1.weight"] == 16 * 16 * 64 * 3 * 49
    assert layers["layer2.0.downsample.0.weight"] == 4 * 4 * 128 * 64
    assert rest == 512 * 10


def test_macs_of_grouped_and_transposed_convolutions():
    net = nn.Sequential(nn.Conv2d(8, 8, 3, groups=8), nn.ConvTranspose2d(8, 4, 2, stride=2, groups=2), nn.Conv2d(4, 1, 1))
    layers, rest = macs_of(net, torch.zeros(3, 8, 6, 6))
    assert layers == {"0.weight": 4 * 4 * 8 * 9, "1.weight": 4 * 4 * 8 * 2 * 4}
    assert rest == 8 * 8 * 4


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_macs_of_gpt2(attention):
    time, width, heads, words = 6, 16, 4, 40
    options = {"width": width, "layers": 2, "heads": heads, "positions": 9, "attention": attention}
    layers, rest = macs_of(models.get("gpt2_32m")((time,), words, **options), torch.zeros(2, time, dtype=torch.int32))
    expected = {"transformer.wte.weight": time * width * words, "transformer.wpe.weight": 0}  # looking up costs nothing
    for block in range(2):
        parts = {"attn.c_attn": 3, "attn.c_proj": 1, "mlp.c_fc": 4, "mlp.c_proj": 4}
        expected |= {f"transformer.h.{block}.{part}.weight": time * width * width * factor for part, factor in parts.items()}
    assert layers == expected
    assert rest == 2 * (2 * time * time * width), "q·k and a·v of every block, which no mask makes cheaper"


class Standardised(nn.Conv2d):
    """A layer that computes with something made of its weight."""

    def forward(self, x):
        return nn.functional.conv2d(x, (self.weight - self.weight.mean()) * torch.ones_like(self.weight), self.bias)


class Own(nn.Module):
    """Products written by hand, in the ways that people write them."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.direct = nn.Parameter(torch.ones(8, 5))
        self.summed = nn.Parameter(torch.ones(5, 4))
        self.conv = Standardised(4, 6, 1)
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        x = torch.einsum("btk,ko->bto", self.encoder(x) @ self.direct, self.summed)
        return self.head(self.conv(x.transpose(1, 2).unsqueeze(-1)).flatten(2).mean(-1))


@pytest.mark.parametrize("frozen", [False, True])  # in evaluation torch would take one opaque kernel for a frozen encoder
def test_macs_of_a_users_model(frozen):
    net = Own()
    rule = default_rule(net)
    layers, rest = macs_of(net.requires_grad_(not frozen), torch.zeros(2, 3, 8), rule)
    assert layers == {
        "direct": 3 * 8 * 5,
        "summed": 3 * 5 * 4,
        "encoder.self_attn.in_proj_weight": 3 * 8 * 24,
        "encoder.self_attn.out_proj.weight": 3 * 8 * 8,
        "encoder.linear1.weight": 3 * 8 * 16,
        "encoder.linear2.weight": 3 * 16 * 8,
        "conv.weight": 3 * 4 * 6,
    }
    assert rest == 2 * 3 * 3 * 8 + 6 * 2, "attention scores and the output layer"


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_macs_of_recurrent_layers(kind):
    gates = {nn.LSTM: 4, nn.GRU: 3}[kind]

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = kind(6, 5, batch_first=True)
            self.head = nn.Linear(5, 2)

        def forward(self, x):
            return self.head(self.rnn(x)[0][:, -1])

    layers, rest = macs_of(Net(), torch.zeros(2, 7, 6))
    assert layers == {"rnn.weight_ih_l0": 7 * 6 * 5 * gates, "rnn.weight_hh_l0": 7 * 5 * 5 * gates}
    assert rest == 5 * 2
