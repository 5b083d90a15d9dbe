"""The server's own optimiser: the change of a round as a pseudo-gradient (FedAvgM, FedAdam).

It comes after the method: what the method made of a round is the direction Δ = W_after − W_before, along which the server steps
on the method's new mask. So it works with every method, and topologies are chosen from plain averages.

A class registered with `@register("name")`, or named by import path, is all that a new one needs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedrts.methods.contract import State
from fedrts.registry import Registry

_MEMORY = "server_{}".format
"""What a moment is called among all that a run remembers."""


@dataclass(frozen=True)
class ServerOptimizer(ABC):
    """How the server steps after a round; the options are the keys `train.server_…`."""

    default_rate: ClassVar[float] = 1.0

    rate: float = 1.0
    momentum: float = 0.9
    """β (FedAvgM), β_1 (FedAdam)."""
    beta2: float = 0.99
    tau: float = 1e-3

    def start(self) -> dict[str, float]:
        """Return the moments that it remembers, by name, with their initial values."""
        return {}

    def moments(self, change: Tensor, before: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the moments after a round with this `change` of the parameters."""
        return {}

    @abstractmethod
    def direction(self, change: Tensor, moments: Mapping[str, Tensor]) -> Tensor:
        """Return the direction of a step of length `rate`."""

    def step(self, before: State, after: State, parameters: int) -> State:
        """`after` with its `parameters` (the first values of the weights) where the optimiser puts them; statistics stay averages.

        A link that the method starts at 0 (or drops) is at 0, without a past.
        """
        old, new = before.weights[:parameters], after.weights[:parameters]
        alive = new != 0
        alive[len(after.mask.bits) :] = True
        change = torch.where(alive, new - old, torch.zeros_like(new))
        start = self.start()
        past = {name: after.memory.get(_MEMORY(name), torch.full_like(change, value)) for name, value in start.items()}
        moments = {name: torch.where(alive, moment, start[name]) for name, moment in self.moments(change, past).items()}
        moved = after.weights.clone()
        moved[:parameters] = torch.where(alive, old + self.rate * self.direction(change, moments), new)
        return after.moved(moved, after.mask).remember(**{_MEMORY(name): moment for name, moment in moments.items()})


optimizers: Registry[type[ServerOptimizer]] = Registry("server optimiser", base=ServerOptimizer)
register = optimizers.register
names = optimizers.names
get = optimizers.get


@register("sgd")
class Averaging(ServerOptimizer):
    """Step along the change itself: federated averaging at rate 1."""

    def step(self, before: State, after: State, parameters: int) -> State:
        return after if self.rate == 1 else super().step(before, after, parameters)

    def direction(self, change: Tensor, moments: Mapping[str, Tensor]) -> Tensor:
        return change


@register("momentum")
class FedAvgM(ServerOptimizer):
    """Step along a decaying sum of changes."""

    def start(self) -> dict[str, float]:
        return {"first": 0.0}

    def moments(self, change: Tensor, before: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"first": self.momentum * before["first"] + change}

    def direction(self, change: Tensor, moments: Mapping[str, Tensor]) -> Tensor:
        return moments["first"]


@register("adam")
class FedAdam(ServerOptimizer):
    """Step along the mean change, divided by its recent size."""

    default_rate = 0.01

    def start(self) -> dict[str, float]:
        return {"first": 0.0, "second": self.tau**2}

    def moments(self, change: Tensor, before: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {
            "first": self.momentum * before["first"] + (1 - self.momentum) * change,
            "second": self.beta2 * before["second"] + (1 - self.beta2) * change.square(),
        }

    def direction(self, change: Tensor, moments: Mapping[str, Tensor]) -> Tensor:
        return moments["first"] / (moments["second"].sqrt() + self.tau)
