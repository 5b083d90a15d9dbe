"""Sums over clients: all that the server needs of them, in memory that does not grow with their number."""

from __future__ import annotations

import torch
from torch import Tensor

from fedrts.wire.fields import Message, Selection


class Sums:
    """Σ n_k·x_k for every name of the clients' contributions, divided by Σ n_k and cast once: the order of clients does not matter.

    Values are added in float64. Indicators are counted in integers, which is exact: their mean is the weighted share of
    clients where they are true, that of a selection the share that named a link (or, with values, the weighted mean in which
    clients that did not name it count as 0).
    """

    def __init__(self) -> None:
        self.weight = 0
        self._sums: dict[str, Tensor] = {}
        self._types: dict[str, torch.dtype] = {}

    def add(self, contribution: Message, weight: int) -> None:
        """Add one client's contribution with its number of samples."""
        for name, payload in contribution.items():
            if isinstance(payload, Selection):
                named = payload.indices.new_ones(1, dtype=torch.bool).expand(payload.indices.shape)
                values = named if payload.values is None else payload.values
                total = self._sum(name, (payload.size,), values)
                total.index_add_(0, payload.indices, values.to(total.dtype), alpha=weight)
            else:
                self._sum(name, tuple(payload.shape), payload).add_(payload, alpha=weight)
        self.weight += weight

    def mean(self) -> dict[str, Tensor]:
        """Weighted means by name, in the type of the contributions (shares in float32)."""
        return {name: (total / self.weight).to(self._types[name]) for name, total in self._sums.items()}

    def _sum(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        if name not in self._sums:
            counted = like.dtype == torch.bool
            self._sums[name] = torch.zeros(shape, dtype=torch.int32 if counted else torch.float64, device=like.device)
            self._types[name] = torch.float32 if counted else like.dtype
        return self._sums[name]
