"""FedRTS (Huang et al., 2025): the topology is drawn from Beta posteriors, one per link (TSAdj, Algorithms 1 and 2).

Every link is an arm of a combinatorial bandit. `bandit.py` has the outcomes X of a round (Eq. 3 to 5); here is what is made of them: the
posteriors (Eq. 6) and the draw that is the next topology (Eq. 2). The posterior rests from T_end on, when the mask is fixed.

Three options go beyond the paper and are off by default. `scope="global"`: layers do not keep their numbers of links; importance is judged,
and links are drawn, over all layers together. `discount`: the arms move while the model learns, so α ← 1 + ρ(α − 1), and β alike,
before a link is observed again. `candidates="named"`: inactive links outnumber active ones many times over, and among so many draws the
largest are those of links that nobody named; here only links that a client named in this round may be grown.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedrts.methods import register
from fedrts.methods.bandit import Bandit, Outcome
from fedrts.methods.contract import Rng, Round, Setup, State
from fedrts.sparse import posterior


@register("fedrts")
class FedRTS(Bandit):
    """Thompson sampling over links: a Beta posterior each, updated every round, drawn from in outer rounds."""

    topology: ClassVar[str] = "top K per layer of a draw from the posteriors"
    learned: ClassVar[tuple[str, ...]] = ("alpha", "beta")

    scale: Annotated[float, Field(gt=0, allow_inf_nan=False)] | Literal["clients"] = Field(
        10.0, description="λ: how much one observation counts (Eq. 6); clients: the number of clients in the round"
    )
    discount: Annotated[float, Field(gt=0, le=1, description="ρ: factor on a link's history when it is observed again")] = 1.0
    candidates: Annotated[Literal["all", "named"], Field(description="inactive links that a draw may choose: all, or those just named")] = (
        "all"
    )

    def begin(self, setup: Setup) -> State:
        prior = torch.ones(setup.layout.arms, dtype=torch.float32, device=setup.weights.device)  # Beta(1, 1): uniform
        return super().begin(setup).remember(alpha=prior, beta=prior.clone())

    def learn(self, state: State, updated: State, outcome: Outcome, round: Round, rng: Rng) -> State:
        scale = outcome.clients if self.scale == "clients" else self.scale
        alpha, beta = posterior.faded(state["alpha"], state["beta"], self.discount, outcome.at)
        alpha, beta = posterior.observe(alpha, beta, outcome.values, scale, outcome.at)  # Eq. 6
        if round.outer:
            drawn = posterior.draw(alpha, beta, rng("topology"))
            if self.candidates == "named" and outcome.named is not None:
                drawn *= state.mask.arms.bits | outcome.named  # 0 is below every draw, and the active links alone are enough
            updated = updated.with_mask(self.best(drawn, round, state.mask.sizes))  # Eq. 2
        return updated.remember(alpha=alpha, beta=beta)

    def belief(self, state: State) -> Tensor:
        return posterior.mean(state["alpha"], state["beta"])
