"""Policies: how each estimates the arms and learns from the outcomes of those that it played.

All repetitions are played at once: arms are flat, `[R·N]`. A policy estimates the means; the greedy oracle turns the estimate into an
action; only the arms played are observed (semi-outcomes, as in the paper's analysis).
"""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fedrts.sparse import posterior


class Policy(Protocol):
    def estimate(self, step: int, rng: np.random.Generator) -> Tensor:
        """Return the estimate that the oracle uses in place of μ, `[R·N]`; steps count from 1."""

    def learn(self, outcome: Tensor, at: Tensor) -> None:
        """Update with outcomes X `[m]` of the arms with the indices `at [m]`."""


class TSAdj:
    """Thompson sampling with Beta posteriors, using the method's own functions (Eq. 2 and 6)."""

    def __init__(self, arms: int, scale: float) -> None:
        self.alpha, self.beta = torch.ones(arms), torch.ones(arms)
        self.scale = scale

    def estimate(self, step: int, rng: np.random.Generator) -> Tensor:
        return posterior.draw(self.alpha, self.beta, int(rng.integers(2**63)))  # ξ_i ~ Beta(α_i, β_i)

    def learn(self, outcome: Tensor, at: Tensor) -> None:
        self.alpha, self.beta = posterior.observe(self.alpha, self.beta, outcome, self.scale, at)  # Eq. 6


class Greedy(TSAdj):
    """The posterior's mean instead of a sample: it never explores on purpose."""

    def __init__(self, arms: int) -> None:
        super().__init__(arms, scale=1.0)

    def estimate(self, step: int, rng: np.random.Generator) -> Tensor:
        return posterior.mean(self.alpha, self.beta)


class CUCB:
    """Upper confidence bounds μ̂_i + sqrt(3 ln t / (2 Ψ_i)) (the paper's appendix); arms never played come first."""

    def __init__(self, arms: int) -> None:
        self.mean, self.played = torch.zeros(arms), torch.zeros(arms)

    def estimate(self, step: int, rng: np.random.Generator) -> Tensor:
        width = torch.sqrt(1.5 * math.log(max(step, 2)) / self.played)  # Ψ = 0: infinite
        return self.mean + width

    def learn(self, outcome: Tensor, at: Tensor) -> None:
        self.played[at] += 1
        self.mean[at] += (outcome - self.mean[at]) / self.played[at]


class RandomPolicy:
    """K random arms: the control."""

    def __init__(self, arms: int) -> None:
        self.arms = arms

    def estimate(self, step: int, rng: np.random.Generator) -> Tensor:
        return torch.from_numpy(rng.random(self.arms, dtype=np.float32))

    def learn(self, outcome: Tensor, at: Tensor) -> None:
        pass
