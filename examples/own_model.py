"""Your own model, clients, loss and metric: hourly readings of eight sites, a regression.

python examples/own_model.py
"""

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import fedrts


class Readings(Dataset[tuple[Tensor, Tensor]]):
    """A site's readings: 24 hours in, the mean of the next six out. Any map-style dataset will do."""

    def __init__(self, site: int, days: int = 150) -> None:
        noise = torch.Generator().manual_seed(site)
        phase = torch.rand(days, 1, generator=noise) * 6.28 + 0.2 * site
        hours = torch.arange(30) / 24 * 6.28
        self.series = torch.sin(hours + phase) + 0.05 * torch.randn(days, 30, generator=noise)

    def __len__(self) -> int:
        return len(self.series)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.series[index, :24], self.series[index, 24:].mean()


class Forecaster(nn.Module):
    """Any `nn.Module` will do; weights of linear and convolutional layers are pruned, the last layer is not."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, x: Tensor) -> Tensor:
        forecast: Tensor = self.layers(x).squeeze(-1)
        return forecast


def loss(output: Tensor, target: Tensor) -> Tensor:
    """The mean loss of a batch."""
    return nn.functional.mse_loss(output, target)


def close_enough(output: Tensor, target: Tensor) -> Tensor:
    """How many answers of a batch count as right: what `accuracy` is made of."""
    return ((output - target).abs() < 0.2).sum()


def main() -> None:
    """Train at a quarter of the weights and print what came of it."""
    result = fedrts.train(
        model=Forecaster(),
        clients=[Readings(site) for site in range(8)],
        test=Readings(site=99),
        method=fedrts.methods.FedRTS(density=0.25),
        rounds=20,
        loss=loss,
        correct=close_enough,
        lr=0.2,
        epochs=2,
        batch_size=16,
    )
    print(f"accuracy {result.summary['accuracy']:.3f} density {result.summary['density']:.3f}")


if __name__ == "__main__":
    main()
