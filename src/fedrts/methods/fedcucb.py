"""FedCUCB: FedRTS with upper confidence bounds instead of Thompson sampling (the paper's comparison in its appendix).

Outcomes X are those of FedRTS. Every observed link i: Ψ_i += 1, μ_i ← (μ_i (Ψ_i − 1) + X_i) / Ψ_i. Outer rounds activate the
top K^l of μ_i + c·sqrt(3 ln t' / (2 Ψ_i)), where t' counts the updates so far, at least 2.

Design decisions: inactive links take their outcome in outer rounds (`observe_inactive`). The literal formula (false) leaves untried
links at infinity: each of the first outer rounds then swaps every unsaturated layer for untried links, which start at 0.
Among untried links the choice is random.
"""

from __future__ import annotations

import math
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from fedrts.methods import register
from fedrts.methods.bandit import Bandit, Outcome
from fedrts.methods.contract import Rng, Round, Setup, State
from fedrts.sparse import random


@register("fedcucb")
class FedCUCB(Bandit):
    """Upper confidence bounds over links: optimistic and deterministic where FedRTS draws."""

    topology: ClassVar[str] = "top K per layer of the upper confidence bounds"
    learned: ClassVar[tuple[str, ...]] = ("mean", "tried", "updates")

    confidence: Annotated[float, Field(ge=0, allow_inf_nan=False, description="c: width of the confidence bound")] = 1.0
    observe_inactive: Annotated[bool, Field(description="outer rounds observe inactive links too")] = True

    def begin(self, setup: Setup) -> State:
        nothing = torch.zeros(setup.layout.arms, dtype=torch.float32, device=setup.weights.device)
        return super().begin(setup).remember(mean=nothing, tried=nothing.clone(), updates=nothing.new_zeros(1))

    def learn(self, state: State, updated: State, outcome: Outcome, round: Round, rng: Rng) -> State:
        values, at = outcome.values, outcome.at
        if at is None and not self.observe_inactive:
            at = state.mask.arms.active
            values = values[at]
        links = torch.arange(len(state["mean"]), device=values.device) if at is None else at
        tried = state["tried"].index_add(0, links, torch.ones_like(values))
        mean = state["mean"].index_add(0, links, (values - state["mean"][links]) / tried[links])
        updates = state["updates"] + 1
        updated = updated.remember(mean=mean, tried=tried, updates=updates)
        if not round.outer:
            return updated
        width = self.confidence * torch.sqrt(1.5 * math.log(max(float(updates), 2.0)) / tried)  # untried: infinite
        untried = 1e30 * (1 + random.uniform(rng("untried"), len(mean), mean.device))  # a factor keeps the digits that a sum would lose
        bound = torch.where(tried > 0, mean + width, untried)
        return updated.with_mask(self.best(bound, round, state.mask.sizes))

    def belief(self, state: State) -> Tensor:
        return state["mean"]
