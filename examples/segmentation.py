"""Segmentation: a small U-Net finds discs and squares in noisy pictures, and a metric of one's own measures the overlap.

python examples/segmentation.py
"""

import sys

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import fedrts
from fedrts.tasks.metrics import Metric


def pictures(seed: int, count: int = 40, size: int = 24) -> TensorDataset:
    """Pictures [1, size, size] with one shape each, and where it is [size, size]; odd seeds have discs, even ones squares."""
    random = torch.Generator().manual_seed(seed)
    places = torch.arange(size)
    centre = torch.randint(7, size - 7, (count, 2), generator=random)
    radius = torch.randint(3, 7, (count, 1, 1), generator=random)
    rows, columns = (places - centre[:, 0, None])[:, :, None], (places - centre[:, 1, None])[:, None, :]
    disc, square = rows**2 + columns**2 <= radius**2, torch.maximum(rows.abs(), columns.abs()) <= radius
    there = (disc if seed % 2 else square).float()
    return TensorDataset((there + 0.7 * torch.randn(there.shape, generator=random))[:, None], there)


def block(channels: int, out: int) -> nn.Module:
    """A convolution that keeps the size."""
    return nn.Sequential(nn.Conv2d(channels, out, 3, padding=1), nn.GroupNorm(4, out), nn.ReLU())


class UNet(nn.Module):
    """Two levels: what is fine is handed over to the way back."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.down = block(1, width)
        self.deep = nn.Sequential(nn.MaxPool2d(2), block(width, 2 * width), block(2 * width, 2 * width), nn.Upsample(scale_factor=2))
        self.up = block(3 * width, width)
        self.out = nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.down(x)
        logits: Tensor = self.out(self.up(torch.cat([fine, self.deep(fine)], 1)))
        return logits.squeeze(1)


class Overlap:
    """Intersection over union of all pixels, added up batch by batch."""

    def __init__(self) -> None:
        self.both = self.either = 0

    def update(self, output: Tensor, target: Tensor) -> None:
        """Logits and truth [m, size, size]."""
        said, there = output > 0, target > 0
        self.both += int((said & there).sum())
        self.either += int((said | there).sum())

    def compute(self) -> float:
        """The metric of all batches."""
        return self.both / max(self.either, 1)


def main(short: bool = False) -> None:
    """Train at 40 % of the weights; every other client has seen discs alone, or squares."""
    torch.manual_seed(0)
    result = fedrts.train(
        model=UNet(),
        clients=[pictures(seed) for seed in range(6)],
        test=pictures(101, 30),
        loss=nn.functional.binary_cross_entropy_with_logits,
        metrics=[Metric("iou", "intersection over union", lower_is_better=False, format="percent", meter=Overlap)],
        method="fedrts",
        density=0.4,
        rounds=4 if short else 15,
        lr=0.3,
        epochs=2,
        batch_size=8,
    )
    print(f"IoU {result.summary['iou']:.3f} density {result.summary['density']:.3f}")
    assert result.summary["iou"] > (0.4 if short else 0.8)


if __name__ == "__main__":
    main(short="--short" in sys.argv)
