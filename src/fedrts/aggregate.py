"""Sums over clients: all that the server needs of them, in memory that does not grow with their number."""

from __future__ import annotations

import torch
from torch import Tensor

from fedrts.wire.fields import Message, Selection


class Sums:
    """Σ n_k·x_k in float64 for every name of the clients' contributions; divided by Σ n_k and cast once.

    Indicators give the weighted share of clients where they are true; selections the share that named a link (or, with
    values, the weighted mean in which clients that did not name it count as 0).
    """

    def __init__(self) -> None:
        self.weight = 0.0
        self._sums: dict[str, Tensor] = {}
        self._types: dict[str, torch.dtype] = {}

    def add(self, contribution: Message, weight: float) -> None:
        for name, payload in contribution.items():
            if isinstance(payload, Selection):
                total = self._sum(name, (payload.size,), payload.indices.device, torch.float32)
                values = total.new_ones(()).expand(len(payload.indices)) if payload.values is None else payload.values.double()
                total.index_add_(0, payload.indices, values, alpha=weight)
            else:
                kind = payload.dtype if payload.is_floating_point() else torch.float32
                self._sum(name, tuple(payload.shape), payload.device, kind).add_(payload, alpha=weight)
        self.weight += weight

    def mean(self) -> dict[str, Tensor]:
        return {name: (total / self.weight).to(self._types[name]) for name, total in self._sums.items()}

    def _sum(self, name: str, shape: tuple[int, ...], device: torch.device, kind: torch.dtype) -> Tensor:
        if name not in self._sums:
            self._sums[name] = torch.zeros(shape, dtype=torch.float64, device=device)
            self._types[name] = kind
        return self._sums[name]
