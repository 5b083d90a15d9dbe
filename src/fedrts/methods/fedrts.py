"""FedRTS (Huang et al., 2025): the topology is drawn from Beta posteriors, one per link (TSAdj, Algorithms 1 and 2).

Every link is an arm of a combinatorial bandit. Each round judges the active links by weight magnitude, of the average
and of every client; each outer round also judges the inactive ones by the clients' votes, the indices of their
largest gradients. Gradients themselves never leave a client.

Settled where the paper is ambiguous: votes are taken among *inactive* links (Eq. 5 and the text; Algorithm 2 masks with
m_t); p_n is normalised over the round's clients; K and κ are per layer; κ follows f(t) of the current round; γ weighs the
aggregate (Eq. 3); the posterior rests from T_end on, when the mask is fixed.

Two options go beyond the paper and are off by default. `discount`: the arms move while the model learns, so α ← 1 + ρ(α − 1), and β alike,
before a link is observed again. `candidates="named"`: inactive links outnumber active ones many times over, and among so many draws the
largest are those of links that nobody named; here only links that a client named in this round may be grown.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field, field_validator
from torch import Tensor

from fedrts.methods import register
from fedrts.methods.base import Sparse
from fedrts.methods.contract import Exchange, Means, ProbeGradient, Rng, Round, Setup, State, Train
from fedrts.sparse import importance, posterior
from fedrts.sparse.mask import Mask
from fedrts.sparse.topk import top
from fedrts.wire.fields import Indices, Message, Values


@dataclass(frozen=True)
class Outcome:
    """What a round showed: X in [0, 1] of the links `at` (None: of all), a mean over so many clients."""

    values: Tensor
    at: Tensor | None
    clients: int
    named: Tensor | None = None
    """In outer rounds: did any client speak for the link? bool `[P]`."""


class Bandit(Sparse):
    """Links as arms of a bandit: the outcomes X of Eq. 3 to 5. What is learned from them is the difference between bandits."""

    gamma: Annotated[float, Field(ge=0, le=1, description="γ: weight of the aggregate's outcome against the clients' (Eq. 3)")] = 0.5
    score: Annotated[str, Field(description="importance of active links: magnitude, fisher, or an import path")] = "magnitude"
    update_after_end: Annotated[bool, Field(description="go on observing after T_end, when the mask is fixed")] = False

    @field_validator("score")
    @classmethod
    def _known(cls, score: str) -> str:
        importance.get(score)
        return score

    def exchanges(self, round: Round) -> tuple[Exchange, ...]:
        exchanges = super().exchanges(round)
        if self.squares_in(round):
            exchanges = (exchanges[0].then(squares=Values("squares", on="active")),)
        if not round.outer:
            return exchanges
        return (exchanges[0].then(ProbeGradient(), votes=Indices(of="gradient", k=round.quota)),)  # I^n of Algorithm 2

    def training(self, round: Round) -> Train:
        return Train(record="squares") if self.squares_in(round) else super().training(round)

    def contribution(self, message: Message, state: State, round: Round) -> Message:
        return message if self.rests(round) else {**message, "core": self.core(message, round)}  # X^n, Eq. 4

    def update(self, state: State, mean: Means, round: Round, rng: Rng) -> State:
        updated = super().update(state, mean, round, rng)  # W^agg
        if self.rests(round):
            return updated
        active = self.gamma * self.core(mean, round) + (1 - self.gamma) * mean["core"]  # Eq. 3, 4
        if not round.outer:
            return self.learn(state, updated, Outcome(active, state.mask.active, mean.clients), round, rng)  # inactive links: None
        outcome = torch.add(self.gamma * 0.5, mean["votes"], alpha=1 - self.gamma)  # Eq. 3, 5: inactive links
        outcome[state.mask.active] = active
        return self.learn(state, updated, Outcome(outcome, None, mean.clients, mean["votes"] > 0), round, rng)

    @abstractmethod
    def learn(self, state: State, updated: State, outcome: Outcome, round: Round, rng: Rng) -> State:
        """`updated` with what the outcome teaches; in outer rounds with a new mask."""

    def core(self, model: Mapping[str, Tensor], round: Round) -> Tensor:
        """h(i, |W|, κ): is link i among the κ^l most important ones of its layer? `[..., A + n - P]` → bool `[..., A]` (Eq. 4)."""
        links = model["weights"][..., : sum(round.counts)]
        score = importance.get(self.score)
        return top(score(links, model["squares"]) if importance.needs_squares(score) else score(links), round.core, round.counts)

    def rests(self, round: Round) -> bool:
        return round.frozen and not self.update_after_end

    def squares_in(self, round: Round) -> bool:
        return importance.needs_squares(importance.get(self.score)) and round.index >= 0 and not self.rests(round)


@register("fedrts")
class FedRTS(Bandit):
    """Thompson sampling over links: a Beta posterior each, updated every round, drawn from in outer rounds."""

    topology: ClassVar[str] = "top K per layer of a draw from the posteriors"

    scale: Annotated[float, Field(gt=0, allow_inf_nan=False)] | Literal["clients"] = Field(
        10.0, description="λ: how much one observation counts (Eq. 6); clients: as many as took part in the round"
    )
    discount: Annotated[float, Field(gt=0, le=1, description="ρ: what is left of a link's history when it is observed again")] = 1.0
    candidates: Annotated[Literal["all", "named"], Field(description="inactive links that a draw may choose: all, or those just named")] = (
        "all"
    )

    def begin(self, setup: Setup) -> State:
        prior = torch.ones(setup.layout.links, dtype=torch.float32, device=setup.weights.device)  # Beta(1, 1): uniform
        return super().begin(setup).remember(alpha=prior, beta=prior.clone())

    def learn(self, state: State, updated: State, outcome: Outcome, round: Round, rng: Rng) -> State:
        scale = outcome.clients if self.scale == "clients" else self.scale
        alpha, beta = posterior.faded(state["alpha"], state["beta"], self.discount, outcome.at)
        alpha, beta = posterior.observe(alpha, beta, outcome.values, scale, outcome.at)  # Eq. 6
        if round.outer:
            drawn = posterior.draw(alpha, beta, rng("topology"))
            if self.candidates == "named" and outcome.named is not None:
                drawn *= state.mask.bits | outcome.named  # 0 is below every draw, and the active links alone are K^l
            updated = updated.with_mask(Mask.top(drawn, round.counts, state.mask.sizes))  # Eq. 2
        return updated.remember(alpha=alpha, beta=beta)

    def belief(self, state: State) -> Tensor:
        return posterior.mean(state["alpha"], state["beta"])
