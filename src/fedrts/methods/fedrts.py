"""FedRTS (Huang et al., 2025): the topology is drawn from Beta posteriors, one per link (TSAdj, Algorithms 1 and 2).

Every link is an arm of a combinatorial bandit. Each round judges the active links by weight magnitude, of the average
and of every client; each outer round also judges the inactive ones by the clients' votes, the indices of their
largest gradients. Gradients themselves never leave a client.

Settled where the paper is ambiguous: votes are taken among *inactive* links (Eq. 5 and the text; Algorithm 2 masks with
m_t); p_n is normalised over the round's clients; K and κ are per layer; κ follows f(t) of the current round; γ weighs the
aggregate (Eq. 3); the posterior rests from T_end on, when the mask is fixed.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from fedrts.methods import register
from fedrts.methods.base import Sparse
from fedrts.methods.contract import Exchange, ProbeGradient, Rng, Round, Setup, State
from fedrts.sparse import posterior
from fedrts.sparse.mask import Mask
from fedrts.sparse.topk import top
from fedrts.wire.fields import Indices, Message


class Bandit(Sparse):
    """Links as arms of a bandit: the outcomes X of Eq. 3 to 5. What is learned from them is the difference between bandits."""

    gamma: Annotated[float, Field(ge=0, le=1, description="γ: weight of the aggregate's outcome against the clients' (Eq. 3)")] = 0.5
    update_after_end: Annotated[bool, Field(description="go on observing after T_end, when the mask is fixed")] = False

    def exchanges(self, round: Round) -> tuple[Exchange, ...]:
        exchanges = super().exchanges(round)
        if not round.outer:
            return exchanges
        return (exchanges[0].then(ProbeGradient(), votes=Indices(of="gradient", k=round.quota)),)  # I^n of Algorithm 2

    def contribution(self, message: Message, state: State, round: Round) -> Message:
        return message if self.rests(round) else {**message, "core": core(message["weights"], round)}  # X^n, Eq. 4

    def update(self, state: State, mean: Mapping[str, Tensor], round: Round, rng: Rng) -> State:
        updated = super().update(state, mean, round, rng)  # W^agg
        if self.rests(round):
            return updated
        active = self.gamma * core(mean["weights"], round) + (1 - self.gamma) * mean["core"]  # Eq. 3, 4
        if not round.outer:
            return self.learn(state, updated, active, state.mask.active, round, rng)  # inactive links: None
        outcome = torch.add(self.gamma * 0.5, mean["votes"], alpha=1 - self.gamma)  # Eq. 3, 5: inactive links
        outcome[state.mask.active] = active
        return self.learn(state, updated, outcome, None, round, rng)

    @abstractmethod
    def learn(self, state: State, updated: State, outcome: Tensor, at: Tensor | None, round: Round, rng: Rng) -> State:
        """`updated` with what `outcome` teaches: of the links `at`, or (None) of all; in outer rounds with a new mask."""

    def rests(self, round: Round) -> bool:
        return round.frozen and not self.update_after_end


@register("fedrts")
class FedRTS(Bandit):
    """Thompson sampling over links: a Beta posterior each, updated every round, drawn from in outer rounds."""

    scale: Annotated[float, Field(gt=0, allow_inf_nan=False, description="λ: how much one observation counts (Eq. 6)")] = 10.0

    def begin(self, setup: Setup) -> State:
        prior = torch.ones(setup.layout.links, dtype=torch.float32, device=setup.weights.device)  # Beta(1, 1): uniform
        return super().begin(setup).remember(alpha=prior, beta=prior.clone())

    def learn(self, state: State, updated: State, outcome: Tensor, at: Tensor | None, round: Round, rng: Rng) -> State:
        alpha, beta = posterior.observe(state["alpha"], state["beta"], outcome, self.scale, at)  # Eq. 6
        if round.outer:
            drawn = posterior.draw(alpha, beta, rng("topology"))
            updated = updated.with_mask(Mask.top(drawn, round.counts, state.mask.sizes))  # Eq. 2
        return updated.remember(alpha=alpha, beta=beta)

    def belief(self, state: State) -> Tensor:
        return posterior.mean(state["alpha"], state["beta"])


def core(weights: Tensor, round: Round) -> Tensor:
    """h(i, |W|, κ): is link i among the κ^l largest magnitudes of its layer? `[..., A + n - P]` → bool `[..., A]` (Eq. 4)."""
    links = weights[..., : sum(round.counts)]
    return top(links.abs(), round.core, round.counts)
