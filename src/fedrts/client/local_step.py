"""One step of local training, the same for one client and for many side by side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedrts.client.optimizers import LocalOptimizer
from fedrts.client.training import LocalTraining
from fedrts.methods.contract import Influence


@dataclass(frozen=True)
class Learner:
    """One client `[N_all]` in training, or several side by side `[k, N_all]`; other tensors have the same leading axes or broadcast.

    learner.step(gradient, rate)  # the weights have moved
    """

    training: LocalTraining
    optimizer: LocalOptimizer
    weights: Tensor
    """The parameters `[..., N_all]`: steps change them in place."""
    received: Tensor
    """The parameters that the server sent."""
    allowed: Tensor | None
    """1 where a parameter may change, 0 elsewhere; None: all may."""
    past: Mapping[str, Tensor]
    """What the optimiser remembers, `[..., N_all]` each."""
    taken: Tensor
    """Steps that were made `[...]`."""
    planned: Tensor
    """Steps that will have been made `[...]`."""
    influence: Influence | None = None
    marks: Tensor | None = None
    """What the influence goes by `[N_all]`."""

    def step(self, gradient: Tensor, rate: Tensor) -> None:
        """Move the weights. Overwrites `gradient [..., N_all]` of the batch's loss; `rate` is this round's."""
        training, weights = self.training, self.weights
        if self.influence is not None and self.marks is not None:
            gradient += self.influence.pull(weights, self.marks)
            bent = self.influence.rate(weights, self.marks, self.taken, self.planned, rate, training.lr)
            rate = torch.as_tensor(bent)[..., None]
        if training.proximal:
            gradient.add_(weights - self.received, alpha=training.proximal)
        if training.clip:
            gradient *= _shortening(gradient if self.allowed is None else gradient * self.allowed, training.clip)
        self.taken.add_(1)
        rates = rate if self.allowed is None else rate * self.allowed
        self.optimizer.step(weights, gradient, rates, self.taken, self.past)


def _shortening(gradient: Tensor, most: float) -> Tensor:
    """Return the factor `[..., 1]`, at most 1, that clips a gradient to this norm."""
    norm = torch.linalg.vector_norm(gradient, dim=-1, keepdim=True)
    return torch.clamp(most / (norm + 1e-6), max=1.0)
