"""Models that several of the compared programs train; PyTorch alone."""

from __future__ import annotations

import math
from itertools import pairwise

from torch import nn


def two_conv(input_shape: tuple[int, ...], classes: int, dropout: float = 0.0) -> nn.Module:
    """The CNN of pfl-research's CIFAR-10 benchmark for inputs `[m, c, h, w]`: two 3×3 convolutions, max-pooling, one hidden layer of 128.

    There it has dropout (0.25 and 0.5), which is left out unless asked for: random numbers are not the same work on every side.
    """
    channels, height, width = input_shape
    drop = [nn.Dropout(0.25), nn.Dropout(0.5)] if dropout else [nn.Identity(), nn.Identity()]
    model = nn.Sequential(
        nn.Conv2d(channels, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        drop[0],
        nn.Flatten(),
        nn.Linear(64 * ((height - 4) // 2) * ((width - 4) // 2), 128),
        nn.ReLU(),
        drop[1],
        nn.Linear(128, classes),
    )
    for part in model.modules():
        if isinstance(part, nn.Conv2d | nn.Linear):
            nn.init.xavier_uniform_(part.weight)
    return model


def perceptron(input_shape: tuple[int, ...], classes: int, hidden: tuple[int, ...] = (256, 256)) -> nn.Module:
    """The multilayer perceptron of the default experiment."""
    widths = [math.prod(input_shape), *hidden]
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], classes))
