"""A data set of one's own: a function that returns `Data`. The experiment `own_data.toml` names it by its import path."""

import torch

from fedrts.data.contract import Data


def rings(samples: int = 1200, noise: float = 0.1) -> Data:
    """Points of the plane on three rings; arguments are set in the table [data_options]."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(samples) % 3
    angle = torch.rand(samples, generator=generator) * 6.2832
    radius = 1.0 + y + noise * torch.randn(samples, generator=generator)
    x = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
    test = samples // 6
    return Data(x[test:], y[test:], x[:test], y[:test], classes=3)
