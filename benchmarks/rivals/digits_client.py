"""What a client of `flower_digits` does; a module of its own, because Ray's workers import it."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

CLIENTS, PER_ROUND, EPOCHS, BATCH, RATE = 20, 10, 5, 16, 0.2


@cache
def parts() -> list[tuple[Tensor, Tensor]]:
    """The training rows of every client: four fifths of scikit-learn's digits, in equal parts."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    order = torch.randperm(len(bunch.target), generator=torch.Generator().manual_seed(0))[len(bunch.target) // 5 :]
    x = torch.from_numpy(bunch.images).to(torch.float32).div(16).unsqueeze(1)
    y = torch.from_numpy(bunch.target).to(torch.int64)
    return [(x[rows], y[rows]) for rows in order.tensor_split(CLIENTS)]


def local(model: torch.nn.Module, x: Tensor, y: Tensor) -> None:
    """Train on the full batches of every epoch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    model.train()
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(y))[: len(y) // BATCH * BATCH].split(BATCH):
            optimizer.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
