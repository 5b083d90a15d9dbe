"""Residual networks of basic blocks. Tensors are named and initialised as in torchvision, so that weights interchange."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from fedrts.models import checks, register

MakeNorm = Callable[[int], nn.Module]


def _group_norm(channels: int) -> nn.Module:
    return nn.GroupNorm(1 if channels % 16 else channels // 16, channels)  # 16 channels a group, or all in one


NORMS: dict[str, MakeNorm] = {"batch": nn.BatchNorm2d, "group": _group_norm}
STEMS = ("imagenet", "cifar")


class BasicBlock(nn.Module):
    """Two 3×3 convolutions beside a shortcut; where the shape changes the shortcut is a 1×1 convolution with a norm."""

    def __init__(self, channels: int, out: int, stride: int, norm: MakeNorm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, padding=1, bias=False)
        self.bn1 = norm(out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.bn2 = norm(out)
        self.relu = nn.ReLU()
        same = stride == 1 and channels == out
        self.downsample = None if same else nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), norm(out))

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        activated: Tensor = self.relu(out + (x if self.downsample is None else self.downsample(x)))
        return activated


class ResNet(nn.Module):
    """A stem, stages `layer1`, `layer2`, … of two basic blocks each, average pooling, a linear layer.

    The stem "imagenet" is a 7×7 convolution and a pooling that quarter the image, "cifar" a 3×3 convolution that keeps its size.
    """

    def __init__(self, channels: int, classes: int, widths: Sequence[int], stem: str, norm: str) -> None:
        super().__init__()
        checks.one_of("stem", stem, STEMS)
        checks.one_of("norm", norm, NORMS)
        large = stem == "imagenet"
        self.conv1 = nn.Conv2d(channels, widths[0], 7 if large else 3, 2 if large else 1, padding=3 if large else 1, bias=False)
        self.bn1 = NORMS[norm](widths[0])
        self.relu = nn.ReLU()
        self.maxpool = nn.MaxPool2d(3, 2, padding=1) if large else nn.Identity()
        self.stages = [f"layer{number}" for number in range(1, len(widths) + 1)]
        for stage, before, width in zip(self.stages, [widths[0], *widths], widths, strict=False):
            first = BasicBlock(before, width, 1 if stage == "layer1" else 2, NORMS[norm])
            self.add_module(stage, nn.Sequential(first, BasicBlock(width, width, 1, NORMS[norm])))
        self.fc = nn.Linear(widths[-1], classes)
        for part in self.modules():
            if isinstance(part, nn.Conv2d):
                nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Map images `[batch, channels, height, width]` to logits `[batch, classes]`."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for stage in self.stages:
            x = self.get_submodule(stage)(x)
        logits: Tensor = self.fc(x.mean((2, 3)))
        return logits


@register("resnet18")
def resnet18(input_shape: tuple[int, ...], classes: int, stem: str = "imagenet", norm: str = "batch") -> nn.Module:
    """ResNet-18 as in torchvision (11.2 M parameters); stem "imagenet" or "cifar", norm "batch" or "group"."""
    return ResNet(checks.images("resnet18", input_shape), classes, (64, 128, 256, 512), stem, norm)


@register("resnet18_small")
def resnet18_small(input_shape: tuple[int, ...], classes: int, norm: str = "batch", width: int = 16) -> nn.Module:
    """A ResNet for 32×32 images: 3×3 stem, stages of 16, 32 and 64 channels (175,258 parameters); norm "batch" or "group".

    Stages have `width`, 2·width and 4·width channels; 5 gives as few parameters as a density of 0.1.
    """
    checks.counts(width=width)
    return ResNet(checks.images("resnet18_small", input_shape), classes, (width, 2 * width, 4 * width), "cifar", norm)
