"""Reducers: what takes the place of the weighted mean where replies are not trusted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedrts.client.order import Order
from fedrts.errors import InputError
from fedrts.server.aggregate import Reduction, Sums
from fedrts.server.guard import Guard
from fedrts.wire.fields import Field, Values


def check_reducer(guard: Guard, fields: Mapping[str, Field]) -> None:
    """Can the guard's reducer make one model of uploads of these fields?"""
    if guard.reducer != "mean" and "weights" in fields and not isinstance(fields["weights"], Values):
        raise InputError(
            f"guard.reducer = '{guard.reducer}' needs weights on one mask; this method's clients have masks of their own: use 'mean'"
        )


def reduction(guard: Guard, order: Order) -> Reduction | None:
    """The reducer of the weights that the guard asks for in an exchange; None for the mean."""
    if guard.reducer == "mean" or order.reference is None or order.values is None or "weights" not in order.exchange.up:
        return None
    check_reducer(guard, order.exchange.up)
    if guard.reducer == "clip":
        return Clipped(order.values, len(order.values) - order.frame.statistics, guard.bound(order.reference_norm))
    return Sorted(guard.trim if guard.reducer == "trimmed_mean" else 0.5)


@dataclass
class Clipped:
    """The mean of updates that are scaled down to a norm of at most `bound`: one client moves the model by p_k · bound at most."""

    reference: Tensor
    parameters: int
    bound: float
    _sums: Sums = field(default_factory=Sums)

    def add(self, weights: Tensor, weight: int) -> None:
        update = weights.double() - self.reference
        update *= (self.bound / torch.linalg.vector_norm(update[: self.parameters])).clamp_(max=1.0)
        self._sums.add({"update": update}, weight)

    def merge(self, other: Clipped) -> None:
        self._sums.merge(other._sums)

    def result(self) -> Tensor:
        return (self.reference + self._sums.mean()["update"]).to(self.reference.dtype)


@dataclass
class Sorted:
    """Per coordinate, the mean of the clients' values without the `trim` share at each end; half of them gives the median."""

    trim: float
    _held: list[Tensor] = field(default_factory=list)

    def add(self, weights: Tensor, weight: int) -> None:
        self._held.append(weights)

    def merge(self, other: Sorted) -> None:
        self._held += other._held

    def result(self) -> Tensor:
        count = len(self._held)
        cut = min(int(self.trim * count), (count - 1) // 2)
        ordered = torch.stack(self._held).sort(0).values[cut : count - cut]
        return ordered.double().mean(0).to(ordered.dtype)
