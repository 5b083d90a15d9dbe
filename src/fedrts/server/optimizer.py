"""The server's own optimiser: the change of a round as a pseudo-gradient (FedAvgM, FedAdam).

It comes after the method: what the method made of a round is the direction Δ = W_after − W_before, along which the server steps
on the method's new mask. So it works with every method, and topologies are chosen from plain averages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedrts.methods.contract import State

Kind = Literal["sgd", "momentum", "adam"]


DEFAULT_RATE: dict[Kind, float] = {"sgd": 1.0, "momentum": 1.0, "adam": 0.01}


@dataclass(frozen=True)
class ServerOptimizer:
    """`sgd` with rate 1 is federated averaging."""

    kind: Kind = "sgd"
    rate: float = 1.0
    momentum: float = 0.9
    """β (FedAvgM), β_1 (FedAdam)."""
    beta2: float = 0.99
    tau: float = 1e-3

    def step(self, before: State, after: State, parameters: int) -> State:
        """`after` with its `parameters` (the first values of the weights) where the optimiser puts them; statistics stay averages.

        A link that the method starts at 0 (or drops) is at 0, without a past.
        """
        if self.kind == "sgd" and self.rate == 1:
            return after
        old, new = before.weights[:parameters], after.weights[:parameters]
        alive = new != 0
        alive[len(after.mask.bits) :] = True
        change = torch.where(alive, new - old, torch.zeros_like(new))
        start = {"server_first": 0.0, "server_second": self.tau**2}
        moments = self._moments(change, {name: after.memory[name] for name in start if name in after.memory})
        memory = {name: torch.where(alive, moment, start[name]) for name, moment in moments.items()}
        moved = after.weights.clone()
        moved[:parameters] = torch.where(alive, old + self.rate * self._direction(change, memory), new)
        return after.moved(moved, after.mask).remember(**memory)

    def _moments(self, change: Tensor, memory: dict[str, Tensor]) -> dict[str, Tensor]:
        if self.kind == "sgd":
            return {}
        first = memory.get("server_first", torch.zeros_like(change))
        if self.kind == "momentum":
            return {"server_first": self.momentum * first + change}
        second = memory.get("server_second", torch.full_like(change, self.tau**2))
        return {
            "server_first": self.momentum * first + (1 - self.momentum) * change,
            "server_second": self.beta2 * second + (1 - self.beta2) * change.square(),
        }

    def _direction(self, change: Tensor, memory: dict[str, Tensor]) -> Tensor:
        if self.kind == "sgd":
            return change
        if self.kind == "momentum":
            return memory["server_first"]
        return memory["server_first"] / (memory["server_second"].sqrt() + self.tau)
