"""A small convolutional network with BatchNorm."""

from __future__ import annotations

from torch import nn

from fedrts.models import checks, register


@register("cnn")
def cnn(input_shape: tuple[int, ...], classes: int, width: int = 16) -> nn.Module:
    """Three 3×3 convolutions with BatchNorm and ReLU (width, 2·width, 2·width channels), global average pooling, a linear layer."""

    def block(channels: int, out: int, stride: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(channels, out, 3, stride, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU())

    return nn.Sequential(
        block(checks.images("cnn", input_shape), width, 1),
        block(width, 2 * width, 2),
        block(2 * width, 2 * width, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * width, classes),
    )
