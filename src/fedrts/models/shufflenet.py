"""ShuffleNet V2. Tensors are named and initialised as in torchvision, so that weights interchange."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedrts.models import checks, register

STAGES = {0.5: (24, 48, 96, 192, 1024), 1.0: (24, 116, 232, 464, 1024)}
"""Channels of the stem, the three stages and the last convolution, by width."""

REPEATS = (4, 8, 4)


def _conv(channels: int, out: int, kernel: int = 1, stride: int = 1, relu: bool = True) -> list[nn.Module]:
    layers = [nn.Conv2d(channels, out, kernel, stride, padding=kernel // 2, bias=False), nn.BatchNorm2d(out)]
    return [*layers, nn.ReLU()] if relu else layers


def _depthwise(channels: int, stride: int) -> list[nn.Module]:
    return [nn.Conv2d(channels, channels, 3, stride, padding=1, groups=channels, bias=False), nn.BatchNorm2d(channels)]


class Unit(nn.Module):
    """Half of the channels pass through `branch2`, the others around it (all through both where the image is halved); then they are
    mixed.
    """

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        half = out // 2
        self.split = stride == 1
        self.branch1 = nn.Sequential(*([] if self.split else _depthwise(channels, stride) + _conv(channels, half)))
        self.branch2 = nn.Sequential(*_conv(half if self.split else channels, half), *_depthwise(half, stride), *_conv(half, half))

    def forward(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=1) if self.split else (x, x)
        joined = torch.cat([self.branch1(first), self.branch2(second)], dim=1)
        return F.channel_shuffle(joined, 2)


class ShuffleNetV2(nn.Module):
    """Stem with pooling, three stages of units, a 1×1 convolution, average pooling, a linear layer."""

    def __init__(self, channels: int, classes: int, width: float) -> None:
        super().__init__()
        checks.one_of("width", width, STAGES)
        stem, *stages, last = STAGES[width]
        self.conv1 = nn.Sequential(*_conv(channels, stem, 3, 2))
        self.maxpool = nn.MaxPool2d(3, 2, padding=1)
        self.stage2, self.stage3, self.stage4 = (
            nn.Sequential(Unit(before, out, 2), *(Unit(out, out, 1) for _ in range(repeats - 1)))
            for before, out, repeats in zip([stem, *stages], stages, REPEATS, strict=False)
        )
        self.conv5 = nn.Sequential(*_conv(stages[-1], last))
        self.fc = nn.Linear(last, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map images `[batch, channels, height, width]` to logits `[batch, classes]`."""
        x = self.stage4(self.stage3(self.stage2(self.maxpool(self.conv1(x)))))
        logits: Tensor = self.fc(self.conv5(x).mean((2, 3)))
        return logits


@register("shufflenet_v2")
def shufflenet_v2(input_shape: tuple[int, ...], classes: int, width: float = 0.5) -> nn.Module:
    """ShuffleNet V2 as in torchvision; width 0.5 (352,042 parameters at 10 classes) or 1.0 (1,263,854)."""
    return ShuffleNetV2(checks.images("shufflenet_v2", input_shape), classes, width)
