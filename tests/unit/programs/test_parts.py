"""Every part that the kernels know, against float64 autograd on the masked model; and what they do not know, by name."""

import threading
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from fedrts import models
from fedrts.client.local_step import Learner
from fedrts.client.training import LocalTraining
from fedrts.errors import InputError
from fedrts.programs import index
from fedrts.programs.parts import InputPart, LinksPart, UnknownPartError
from fedrts.programs.plan import Descent
from fedrts.programs.program import Feed, LinkProgram
from fedrts.programs.stages import Stage
from fedrts.sparse.layout import Layout
from fedrts.sparse.mask import Mask
from fedrts.tasks import Classification, Prediction, smoothed
from indouble import BEST, ISAS, Case


class Residual(nn.Module):
    """Sums of every kind: of a norm and a value, of two norms, of plain values, with and without ReLU, of a value with itself."""

    def __init__(self, norm):
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, padding=1)
        self.a, self.na = nn.Conv2d(4, 4, 3, padding=1, bias=False), norm(4)
        self.b, self.nb = nn.Conv2d(4, 6, 3, 2, padding=1), norm(6)
        self.short, self.ns = nn.Conv2d(4, 6, 1, 2, bias=False), norm(6)
        self.c = nn.Conv2d(6, 6, 3, padding=1)
        self.out = nn.Linear(6, 3)

    def forward(self, x):
        x = torch.relu(self.stem(x))
        x = torch.relu(self.na(self.a(x)) + x)
        x = F.relu(self.nb(self.b(x)) + self.ns(self.short(x)))
        x = self.c(x) + x
        x = x + x
        x = x.relu()
        return self.out(x.mean((2, 3)))


def convolutional(*parts, channels=3, out=4):
    return nn.Sequential(nn.Conv2d(2, channels, 3, padding=1), *parts, nn.Flatten(), nn.LazyLinear(out))


def built(module, shape):
    with torch.no_grad():
        module(torch.randn(2, *shape))
    return module


PARTS = {
    "linear": lambda: nn.Sequential(nn.Flatten(), nn.Linear(98, 7), nn.ReLU(), nn.Linear(7, 5, bias=False), nn.ReLU(), nn.Linear(5, 3)),
    "linear norm": lambda: nn.Sequential(nn.Flatten(), nn.Linear(98, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)),
    "stride": lambda: convolutional(nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 5, 3, 2, padding=1), nn.ReLU()),
    "stride 3": lambda: convolutional(nn.Conv2d(3, 5, 3, 3, padding=2, bias=False), nn.BatchNorm2d(5)),
    "window 5": lambda: convolutional(nn.Conv2d(3, 4, 5, 2, padding=2), nn.ReLU()),
    "no padding": lambda: convolutional(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 3, 2, 2)),
    "oblong": lambda: convolutional(nn.Conv2d(3, 4, (1, 3), (2, 1), padding=(0, 1)), nn.ReLU()),
    "groups": lambda: convolutional(nn.Conv2d(4, 6, 3, padding=1, groups=2), nn.BatchNorm2d(6), channels=4),
    "dilation": lambda: convolutional(nn.Conv2d(3, 4, 3, padding=2, dilation=2), nn.ReLU()),
    "batch norm": lambda: convolutional(nn.BatchNorm2d(3), nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, affine=False), nn.ReLU()),
    "norm first": lambda: nn.Sequential(nn.BatchNorm2d(2), nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(75, 3)),
    "group norm": lambda: convolutional(nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.GroupNorm(4, 4, affine=False), channels=4),
    "max pool": lambda: convolutional(nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(3, 3, 1), nn.MaxPool2d(3, 1, padding=1)),
    "average pool": lambda: convolutional(nn.AvgPool2d(3, 2, padding=1), nn.ReLU(), nn.AvgPool2d(2, 1, count_include_pad=False)),
    "padding apart": lambda: convolutional(nn.AvgPool2d(3, 2, padding=1, count_include_pad=False), nn.ReLU()),
    "adaptive": lambda: convolutional(nn.MaxPool2d(2, 1), nn.AdaptiveAvgPool2d(3), nn.ReLU(), nn.AdaptiveAvgPool2d(1)),
    "mean": lambda: convolutional(nn.BatchNorm2d(3), nn.ReLU(), nn.AvgPool2d(7)),
    "identity": lambda: convolutional(nn.Identity(), nn.Dropout(0.0), nn.ReLU(inplace=True)),
    "mean of a mean": lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.AvgPool2d(5), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 3)),
    "residual": lambda: Residual(nn.BatchNorm2d),
    "residual group": lambda: Residual(lambda channels: nn.GroupNorm(2, channels)),
}


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("samples", [2, 16, 21, 64])
@pytest.mark.parametrize("name", PARTS)
def test_a_part_computes_what_autograd_does(name, samples, isa):
    Case(built(PARTS[name](), (2, 7, 7)), (2, 7, 7), samples, isa=isa).check()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", PARTS)
def test_links_in_groups_of_channels_compute_the_same(name, isa, monkeypatch):
    """As many groups as there can be, which only wide layers have by themselves."""
    monkeypatch.setattr(index, "NEAR", 1)
    monkeypatch.setattr(index, "WORTH_A_GROUP", 1)
    case = Case(built(PARTS[name](), (2, 7, 7)), (2, 7, 7), 21, isa=isa)
    case.check()
    (made,) = [made for made in case.program._plans.values() if made.samples == 21]
    assert max(operation.as_.Gather.groups for operation in made.program if operation.kind == 0) > 1


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("near", [1, index.NEAR])
@pytest.mark.parametrize(("size", "samples"), [(4, 9), (4, 16), (4, 20), (2, 16), (2, 3)])
def test_images_of_one_tile(size, samples, near, isa, monkeypatch):
    """Those gradients of weights need no scratch."""
    monkeypatch.setattr(index, "NEAR", near)
    monkeypatch.setattr(index, "WORTH_A_GROUP", 1)
    module = nn.Sequential(nn.Conv2d(2, 5, 3, padding=1), nn.BatchNorm2d(5), nn.ReLU(), nn.Conv2d(5, 4, 3, padding=1), nn.Flatten())
    Case(nn.Sequential(*module, nn.Linear(4 * size * size, 3)), (2, size, size), samples, isa=isa).check()


def in_groups(unit: str, size: tuple[int, int], samples: int, isa: str, padding: int = 1) -> Case:
    """Convolutions with grouped links behind a layer that is whole; one has a norm behind it, one a bias, one a stride."""
    first, second = nn.Conv2d(4, 6, 3, padding=padding, bias=False), nn.Conv2d(6, 4, 3, padding=1)
    body = nn.Sequential(nn.Conv2d(1, 4, 1), first, nn.BatchNorm2d(6), nn.ReLU(), second, nn.ReLU(), nn.Conv2d(4, 4, 3, 2, padding=1))
    module = nn.Sequential(*body, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    return Case(module, (1, *size), samples, 0.4, isa=isa, whole=1, unit=unit)


def windows_of(case: Case) -> list[int]:
    """The sides of windows of a training program: of all its sums over links, in order, forward and backward."""
    (made,) = [made for made in case.program._plans.values() if not made.evaluates and made.samples == case.samples]
    return [
        (operation.as_.Gather if operation.kind == 0 else operation.as_.Weight).window for operation in made.program if operation.kind < 2
    ]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("unit", ["kernel", "block:2×2"])
@pytest.mark.parametrize(("size", "samples"), [((3, 5), 2), ((4, 4), 16), ((8, 9), 21), ((7, 35), 3), ((17, 16), 16), ((4, 1), 5)])
def test_whole_windows_compute_what_autograd_does(size, samples, unit, isa, monkeypatch):
    for near in (index.NEAR, 1):  # one group of channels, and as many as there can be
        monkeypatch.setattr(index, "NEAR", near)
        monkeypatch.setattr(index, "WORTH_A_GROUP", 1)
        case = in_groups(unit, size, samples, isa)
        case.check()
        assert windows_of(case).count(index.WINDOW) == 6  # forward, weights and back, of two layers


def test_windows_without_padding():
    case = in_groups("kernel", (9, 18), 20, BEST, padding=0)
    case.check()
    assert windows_of(case).count(index.WINDOW) == 6


def test_single_links_are_read_one_by_one_even_if_a_unit_is_larger():
    assert not any(windows_of(checked(in_groups("link", (8, 8), 16, BEST))))
    split = in_groups("kernel", (8, 8), 16, BEST)
    split.mask = Mask(split.mask.bits & (torch.rand(split.layout.links) < 0.5), list(split.layout.sizes))
    split.weights[: split.layout.links] *= split.mask.bits
    assert not any(windows_of(checked(split)))


def checked(case: Case) -> Case:
    case.check(rounding=3.0)
    return case


@given(
    samples=st.integers(2, 40),
    channels=st.integers(1, 6),
    outs=st.integers(1, 7),
    height=st.integers(3, 19),
    width=st.integers(3, 35),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 3),
    padding=st.integers(0, 2),
    density=st.floats(0.05, 1.0),
    isa=st.sampled_from(ISAS),
    norm=st.booleans(),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_convolutions_of_any_form(samples, channels, outs, height, width, kernel, stride, padding, density, isa, norm):
    """Both sides of the layer have parameters, so that gradients of its input and of its output are seen.

    The first layer is whole: a norm of a channel that is the same everywhere blows up rounding, here and in float32 torch.
    """
    middle = nn.Conv2d(channels, outs, kernel, stride, padding=padding, bias=not norm)
    after = [nn.BatchNorm2d(outs)] if norm else []
    module = nn.Sequential(nn.Conv2d(1, channels, 1), middle, *after, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(outs, 3))
    Case(module, (1, height, width), samples, density, isa=isa, whole=1).check()


@pytest.mark.parametrize("model", ["mlp", "cnn", "resnet18_small"])
def test_the_models_here_compute_what_autograd_does(model):
    Case(models.get(model)((3, 16, 16), 10), (3, 16, 16), 19, 0.3, seed=1).check()


@pytest.mark.parametrize("isa", ISAS)
def test_labels_may_be_smoothed(isa):
    Case(PARTS["linear"](), (2, 7, 7), 21, task=smoothed(Classification(), 0.2), isa=isa).check()


@pytest.mark.parametrize("isa", ISAS)
def test_the_squared_error_is_a_loss_too(isa):
    module = nn.Sequential(nn.Linear(9, 6), nn.ReLU(), nn.Linear(6, 4))
    Case(module, (9,), 21, task=Prediction(F.mse_loss), isa=isa, targets=lambda n, outs: torch.randn(n, outs)).check()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("wide", [False, True])
def test_variances_beside_large_means(isa, wide):
    """E[x²] − E[x]² has no digit of a variance of 1e-4 left beside a mean of 100."""
    flat = nn.Sequential(nn.Flatten(), nn.Linear(32, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 3))
    image = nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 3))
    case = Case(flat if wide else image, (2, 4, 4), 21, 1.0, isa=isa)
    values = case.mask.compact(case.weights)
    values[: case.mask.number] *= 0.01
    bias = case.layout.dense[0].size
    assert case.layout.dense[0].name.endswith("bias")
    values[case.mask.number : case.mask.number + bias] = 100.0
    module, vector, _ = case.in_double(case.mask.expand(values))
    module.train()(case.x[case.rows[0]].double())
    case.program.gradient(values, case.mask, case.batches)
    start, buffers = case.layout.parameters, case.layout.buffers
    assert [entry.name.rpartition(".")[2] for entry in buffers] == ["running_mean", "running_var"]
    found, expected = (part[-buffers[1].size :].double() for part in (values, vector))
    assert start < len(vector)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=0)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ["linear", "linear norm", "batch norm", "group norm", "max pool", "residual"])
def test_what_is_no_number_is_noticed(name, isa):
    case = Case(built(PARTS[name](), (2, 7, 7)), (2, 7, 7), 5, 1.0, isa=isa)
    case.x[case.rows[0, 2]] = torch.nan
    values = case.mask.compact(case.weights)
    _, loss = case.program.gradient(values, case.mask, case.batches)
    assert torch.isnan(loss)


TRAININGS: dict[str, Any] = {
    "plain": {},
    "momentum": {"momentum": 0.9, "weight_decay": 0.01},
    "proximal": {"proximal": 0.5, "clip": 0.05},
    "all": {"momentum": 0.5, "weight_decay": 0.1, "proximal": 0.3, "clip": 0.2},
}


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", TRAININGS)
def test_steps_are_those_of_the_client(name, frozen):
    """Six steps against `Learner` in float64."""
    case = Case(built(PARTS["stride"](), (2, 7, 7)), (2, 7, 7), 18)
    training = LocalTraining(lr=0.05, **TRAININGS[name])
    descent = Descent(training.momentum, training.weight_decay, training.proximal, training.clip)
    rows = torch.stack([torch.randperm(len(case.x))[:18] for _ in range(6)])
    values, number = case.mask.compact(case.weights), case.mask.number + case.layout.parameters - case.layout.links
    free = (torch.rand(number) < 0.5).float() if frozen else None
    losses = case.program.train(values, case.mask, Feed(case.x, case.y, rows), [0.05] * 6, descent, free=free)

    module, vector, gradient = case.in_double()
    module.train()
    allowed = torch.ones(case.layout.parameters, dtype=torch.float64)
    allowed[: case.layout.links] = case.mask.bits
    if free is not None:
        allowed *= case.mask.expand(torch.cat([free, torch.zeros(case.layout.length - case.layout.parameters)]))[: len(allowed)]
    weights, optimizer = vector[: case.layout.parameters], training.make_optimizer()
    past = {kept: torch.zeros_like(weights) for kept in optimizer.remembers}
    learner = Learner(training, optimizer, weights, weights.clone(), allowed, past, torch.zeros(()), torch.tensor(6))
    for step, batch in enumerate(rows):
        gradient.zero_()
        loss = F.cross_entropy(module(case.x[batch].double()), case.y[batch])
        loss.backward()
        assert abs(loss.item() - float(losses[step])) < 1e-5
        learner.step(gradient, torch.tensor(0.05, dtype=torch.float64))
    moved = float((vector - case.weights).norm())
    assert float((case.mask.expand(values) - vector).norm()) < 1e-4 * moved
    assert not values.isnan().any()


def test_threads_change_no_bit():
    case = Case(models.get("cnn")((3, 16, 16), 10), (3, 16, 16), 33, 0.2)
    rows = torch.stack([torch.randperm(len(case.x))[:33] for _ in range(4)])

    def trained():
        values = case.mask.compact(case.weights)
        losses = case.program.train(values, case.mask, Feed(case.x, case.y, rows), [0.1] * 4, Descent(0.9))
        return torch.cat([values, losses])

    alone, found = trained(), []
    threads = [threading.Thread(target=lambda: found.append(trained())) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6
    assert all(torch.equal(alone, other) for other in found)


def test_what_was_computed_before_leaves_no_trace():
    """Other masks, batch sizes and evaluations in the same memory."""
    case = Case(models.get("resnet18_small")((3, 16, 16), 10, width=4), (3, 16, 16), 20, 0.3)
    fresh = LinkProgram.read(case.module, case.layout, case.task, case.x[:2], case.y[:2], BEST)
    other = Mask(torch.rand(case.layout.links) < 0.8, case.layout.sizes)
    for mask, rows in ((other, case.rows), (other, case.rows[:, :7]), (case.mask, case.rows[:, :16])):
        values = mask.compact(case.weights)
        case.program.train(values, mask, Feed(case.x, case.y, rows), [0.1], Descent(0.9, clip=1.0))
        case.program.outputs(values, mask, case.x)
    one, two = case.mask.compact(case.weights), case.mask.compact(case.weights)
    case.program.train(one, case.mask, case.batches, [0.1], Descent())
    fresh.train(two, case.mask, case.batches, [0.1], Descent())
    assert torch.equal(one, two)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(9, 9)

    def forward(self, x):
        return self.layer(self.layer(x))


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(9, 9)

    def forward(self, x):
        return self.layer(x) if x.sum() > 0 else x


class Overwriting(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(9, 9)

    def forward(self, x):
        x = self.layer(x)
        return F.relu(x, inplace=True) + x


class Doing(nn.Module):
    """Two layers and a function of them."""

    def __init__(self, function, *layers):
        super().__init__()
        self.function, self.layers = function, nn.ModuleList(layers)

    def forward(self, x):
        return self.function(self.layers, x)


def in_place_and_unused(layers, x):
    x = layers[0](x)
    x.relu_()
    return layers[1](x)


def in_place_on_a_view(layers, x):
    x = layers[0](x)
    return layers[1](F.relu(x.flatten(1), inplace=True)) + layers[2](x.mean((2, 3)))


def beside_the_answer(layers, x):
    layers[1](x)
    return layers[0](x)


class Frozen(nn.Module):
    """Its norm never learns statistics."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(9, 9), nn.BatchNorm1d(9)

    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x):
        return self.norm(self.layer(x))


class OnlyInTraining(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(9, 9)

    def forward(self, x):
        return F.relu(self.layer(x)) if self.training else self.layer(x)


def hooked(backward):
    layer = nn.Linear(9, 9)
    if backward:
        layer.weight.register_hook(lambda slope: 2 * slope)
    else:
        layer.register_forward_hook(lambda layer, inputs, output: 2 * output)
    return nn.Sequential(layer, nn.ReLU())


class Own(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


UNKNOWN = {
    "GELU": nn.Sequential(nn.Linear(9, 9), nn.GELU()),
    r"Dropout\(p=0.5": nn.Sequential(nn.Linear(9, 9), nn.Dropout(0.5)),
    "LayerNorm": nn.Sequential(nn.Linear(9, 9), nn.LayerNorm(9)),
    "uses twice": Twice(),
    "depends on more than its layers": Branching(),
    "changes in place": Overwriting(),
    "'0.weight', which is used outside a layer": nn.Sequential(Own(9, 9)),
    "momentum=None": nn.Sequential(nn.Linear(9, 9), nn.BatchNorm1d(9, momentum=None)),
    "track_running_stats=False": nn.Sequential(nn.Linear(9, 9), nn.BatchNorm1d(9, track_running_stats=False)),
    "'relu_' at 'relu_', whose value the model does not use": Doing(in_place_and_unused, nn.Linear(9, 9), nn.Linear(9, 9)),
    "'layers.1', whose value the model does not use": Doing(beside_the_answer, nn.Linear(9, 9), nn.Linear(9, 9)),
    "'layers.1.weight', which the model does not use": Doing(lambda layers, x: layers[0](x), nn.Linear(9, 9), nn.Linear(9, 9)),
    "'norm', which keeps its mode": Frozen(),
    "otherwise in training": OnlyInTraining(),
    "a hook at '0'": hooked(backward=False),
    "a hook of '0.weight'": hooked(backward=True),
    "'add' at 'add' of different shapes": Doing(lambda layers, x: layers[0](x) + x.size(1), nn.Linear(9, 9)),
}
UNKNOWN_OF_IMAGES = {
    r"Linear\(.*\) at 'layers.0' of inputs \[2, 7, 7\]": Doing(lambda layers, x: layers[0](x).flatten(1), nn.Linear(7, 7)),
    "Relu that changes in place": Doing(in_place_on_a_view, nn.Conv2d(2, 4, 3), nn.Linear(100, 3), nn.Linear(4, 3)),
    "max_pool2d": Doing(lambda layers, x: F.max_pool2d(layers[0](x), 2, 2, 0, 1, True).flatten(1), nn.Conv2d(2, 4, 3)),
    "avg_pool2d": Doing(lambda layers, x: F.avg_pool2d(layers[0](x), 2, 2, 0, True).flatten(1), nn.Conv2d(2, 4, 3)),
    "padding=same": nn.Sequential(nn.Conv2d(2, 4, 3, padding="same"), nn.Flatten()),
    "padding_mode=reflect": nn.Sequential(nn.Conv2d(2, 4, 3, padding=1, padding_mode="reflect"), nn.Flatten()),
    "ceil_mode=True": nn.Sequential(nn.MaxPool2d(2, ceil_mode=True), nn.Conv2d(2, 4, 1), nn.Flatten()),
    "eps=0.0": nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4, eps=0.0), nn.Flatten()),
    "'permute'": Doing(lambda layers, x: layers[0](x).permute(0, 3, 2, 1).flatten(1), nn.Conv2d(2, 4, 3)),
    "outputs of shape": nn.Conv2d(2, 4, 3),
}


@pytest.mark.parametrize(
    ("said", "module", "shape"),
    [(said, module, shape) for known, shape in ((UNKNOWN, (9,)), (UNKNOWN_OF_IMAGES, (2, 7, 7))) for said, module in known.items()],
)
def test_an_unknown_part_is_named(said, module, shape):
    """What is not computed as PyTorch would is not computed at all."""
    with pytest.raises(UnknownPartError, match=said):
        LinkProgram.read(module, Layout.of(module), Classification(), torch.randn(2, *shape), torch.zeros(2, dtype=torch.int64), BEST)


def test_an_unknown_loss_is_named():
    module, y = nn.Linear(9, 9), torch.zeros(2, 9)
    for task, said in ((Prediction(F.l1_loss), "l1_loss"), (Classification(), "no labels"), (object(), "the task object")):
        with pytest.raises(UnknownPartError, match=said):
            LinkProgram.read(module, Layout.of(module), task, torch.randn(2, 9), y, BEST)  # type: ignore[arg-type]
    with pytest.raises(UnknownPartError, match="float64"):
        LinkProgram.read(module.double(), Layout.of(module), Prediction(F.mse_loss), torch.randn(2, 9).double(), y, BEST)


def test_one_sample_has_no_statistics():
    case = Case(nn.Sequential(nn.Linear(9, 4), nn.BatchNorm1d(4), nn.ReLU()), (9,), 5)
    with pytest.raises(InputError, match="no statistics of one sample"):
        case.program.gradient(case.mask.compact(case.weights), case.mask, Feed(case.x, case.y, case.rows[:, :1]))


def test_inputs_beyond_an_index_of_31_bits_are_refused():
    part = LinksPart(weight="weight")
    first, second = Stage(InputPart(), (2**20,), -1), Stage(part, (1,), 0)
    bits = np.zeros(2**20, bool)
    bits[-1] = True
    assert index.Index(16).link(second, first, 1, bits, backward=False).largest == 1
    with pytest.raises(InputError, match="batches of 4096: use smaller ones"):
        index.Index(4096).link(second, first, 1, bits, backward=False)


def test_bad_batches_are_refused_before_memory_is_touched():
    case = Case(nn.Linear(9, 4), (9,), 5)
    values = case.mask.compact(case.weights)
    with pytest.raises(ValueError, match="no class"):
        case.program.gradient(values, case.mask, Feed(case.x, case.y + 4, case.rows))
    with pytest.raises(IndexError, match="not there"):
        case.program.gradient(values, case.mask, Feed(case.x, case.y, case.rows + 8))
    with pytest.raises(ValueError, match="inputs of shape"):
        case.program.gradient(values, case.mask, Feed(case.x[:, :8].contiguous(), case.y, case.rows))
    with pytest.raises(ValueError, match="targets must be"):
        case.program.gradient(values, case.mask, Feed(case.x, case.y.float(), case.rows))


def test_memory_follows_the_density():
    """Weights, gradients, momentum and index of resnet18: 128 MiB dense; activations are the same."""
    module = models.get("resnet18")((3, 32, 32), 10, stem="cifar")
    layout = Layout.of(module)
    program = LinkProgram.read(module, layout, Classification(), torch.randn(2, 3, 32, 32), torch.zeros(2, dtype=torch.int64), BEST)
    mask = Mask(torch.rand(layout.links) < 0.1, layout.sizes)
    sizes = [program.bytes(mask, samples, Descent(0.9)) for samples in (16, 32)]
    without_activations = 2 * sizes[0] - sizes[1]
    assert without_activations < 30 * 2**20
