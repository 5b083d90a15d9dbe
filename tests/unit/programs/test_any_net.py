"""Small nets of known parts, drawn at random, against float64 autograd."""

import copy
import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedrts.tasks import Classification, Prediction, smoothed
from indouble import ISAS, Case


def pair(numbers: list[int]) -> tuple[int, int]:
    first, second = numbers
    return first, second


class Drawn(nn.Module):
    """A chain of parts with shortcuts; `steps` say what becomes of the values so far."""

    def __init__(self, draw: random.Random, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.draw, self.layers, self.shapes = draw, nn.ModuleList(), [shape]
        self.steps: list[tuple[Any, ...]] = []
        for _ in range(draw.randint(1, 7)):
            self.grow()
        while len(self.shapes[-1]) > 1:
            self.add(draw.choice([nn.Flatten(), nn.AdaptiveAvgPool2d(1)]))
        self.add(nn.Linear(self.shapes[-1][0], 3, bias=draw.random() < 0.8))
        del self.draw, self.shapes

    def add(self, layer: nn.Module, source: int = -1) -> int:
        """The place of a layer's value."""
        source %= len(self.shapes)
        with torch.no_grad():
            shape = tuple(copy.deepcopy(layer).eval()(torch.zeros(2, *self.shapes[source])).shape[1:])
        self.layers.append(layer)
        return self.step(shape, len(self.layers) - 1, source)

    def step(self, shape: tuple[int, ...], *what: int | str) -> int:
        self.steps.append(what)
        self.shapes.append(shape)
        return len(self.shapes) - 1

    def grow(self) -> None:
        """One more part, or several."""
        draw, shape, last = self.draw, self.shapes[-1], len(self.shapes) - 1
        image = len(shape) == 3
        kind = draw.choice(["links", "links", "norm", "relu", "sum", "block", "pool", "flat", "same"])
        if kind == "links":
            self.add(self.links(draw.randint(1, 7)))
        elif kind == "norm":
            self.add(self.norm(shape))
        elif kind == "relu":
            self.add(nn.ReLU()) if draw.random() < 0.5 else self.step(shape, "relu", last)
        elif kind == "sum":  # of something before of the same shape, itself too
            self.step(shape, "sum", last, draw.choice([place for place, other in enumerate(self.shapes) if other == shape]))
        elif kind == "block":
            first = self.links(draw.randint(1, 5))
            both = [self.add(first, last), self.add(copy.deepcopy(first), last)]
            both = [self.add(self.norm(self.shapes[place]), place) if draw.random() < 0.6 else place for place in both]
            self.step(self.shapes[-1], "sum", *draw.sample(both, 2))
        elif kind == "pool" and image and shape[1:] != (1, 1):  # which the kernels may hold as features
            self.pool(shape)
        elif kind == "flat" and image and draw.random() < 0.5:
            self.add(draw.choice([nn.Flatten(), nn.AdaptiveAvgPool2d(1)]))
        elif kind == "same":
            self.add(nn.Identity())

    def links(self, outs: int) -> nn.Module:
        draw, shape, bias = self.draw, self.shapes[-1], self.draw.random() < 0.5
        if len(shape) == 1:
            return nn.Linear(shape[0], outs, bias=bias)
        groups = draw.choice([n for n in range(1, shape[0] + 1) if shape[0] % n == 0])
        once = shape[1:] == (1, 1)
        kernel, dilation, stride, padding = ([draw.randint(low, high) for _ in "yx"] for low, high in ((1, 3), (1, 2), (1, 3), (0, 3)))
        for axis, size in enumerate(shape[1:]):
            if dilation[axis] * (kernel[axis] - 1) >= size + 2 * padding[axis] or once:
                kernel[axis], padding[axis] = 1, 0
        return nn.Conv2d(shape[0], outs * groups, pair(kernel), pair(stride), pair(padding), pair(dilation), groups, bias)

    def norm(self, shape: tuple[int, ...]) -> nn.Module:
        draw, affine = self.draw, self.draw.random() < 0.7
        if len(shape) == 1:
            return nn.BatchNorm1d(shape[0], eps=1e-2, affine=affine)
        if shape[1:] != (1, 1) and draw.random() < 0.4:
            return nn.GroupNorm(draw.choice([n for n in range(1, shape[0] + 1) if shape[0] % n == 0]), shape[0], eps=1e-2, affine=affine)
        return nn.BatchNorm2d(shape[0], eps=1e-2, affine=affine, momentum=draw.choice([0.1, 0.7, 1.0]))

    def pool(self, shape: tuple[int, ...]) -> None:
        draw = self.draw
        window = pair([draw.randint(1, min(3, size)) for size in shape[1:]])
        stride, padding = pair([draw.randint(1, 3) for _ in "yx"]), pair([draw.randint(0, size // 2) for size in window])
        even = pair([draw.choice([n for n in (1, 2, 3) if size % n == 0]) for size in shape[1:]])
        mean = nn.AvgPool2d(window, stride, padding, count_include_pad=draw.random() < 0.5)
        self.add(draw.choice([nn.MaxPool2d(window, stride, padding), mean, nn.AdaptiveAvgPool2d(even)]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = [x]
        for what, *sources in self.steps:
            if what == "relu":
                values.append(F.relu(values[sources[0]]))
            elif what == "sum":
                values.append(values[sources[0]] + values[sources[1]])
            else:
                values.append(self.layers[what](values[sources[0]]))
        return values[-1]


def targets_of_numbers(rows, outs):
    return torch.randn(rows, outs)


def check(seed: int) -> None:
    """A net, a mask, a batch, a loss and an instruction set, all drawn by this seed."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    shape = draw.choice([(draw.randint(1, 20),), *[(draw.randint(1, 5), draw.randint(1, 18), draw.randint(1, 36))] * 3])
    module = Drawn(draw, shape)
    samples = draw.choice([2, 3, 15, 16, 17, 31, 33, 48])
    density = draw.choice([0.02, 0.3, 0.7, 1.0])
    task, targets = draw.choice(
        [(Classification(), None), (smoothed(Classification(), 0.1), None), (Prediction(F.mse_loss), targets_of_numbers)]
    )
    Case(module, shape, samples, density, task, draw.choice(ISAS), seed, targets).check(rounding=4)


@pytest.mark.parametrize("seed", range(60))
def test_a_net_drawn_at_random(seed):
    check(seed)
