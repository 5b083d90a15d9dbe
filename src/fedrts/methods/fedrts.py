"""FedRTS (Huang et al., 2025): the topology is drawn from Beta posteriors, one per link (TSAdj, Algorithms 1 and 2).

Every link is an arm of a combinatorial bandit. Each round judges the active links by weight magnitude, of the average
and of every client; each outer round also judges the inactive ones by the clients' votes, the indices of their
largest gradients. Gradients themselves never leave a client.

Settled where the paper is ambiguous: votes are taken among *inactive* links (Eq. 5 and the text; Algorithm 2 masks with
m_t); p_n is normalised over the round's clients; K and κ are per layer; κ follows f(t) of the current round; γ weighs the
aggregate (Eq. 3); the posterior rests from T_end on, when the mask is fixed.
"""

from __future__ import annotations

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


@register("fedrts")
class FedRTS(Sparse):
    """Thompson sampling over links: a Beta posterior each, updated every round, drawn from in outer rounds."""

    gamma: Annotated[float, Field(ge=0, le=1, description="γ: weight of the aggregate's outcome against the clients' (Eq. 3)")] = 0.5
    scale: Annotated[float, Field(gt=0, allow_inf_nan=False, description="λ: how much one observation counts (Eq. 6)")] = 10.0

    update_after_end: Annotated[bool, Field(description="go on observing after T_end, when the mask is fixed")] = False

    def begin(self, setup: Setup) -> State:
        prior = torch.ones(setup.layout.links, dtype=torch.float32, device=setup.weights.device)  # Beta(1, 1): uniform
        return super().begin(setup).remember(alpha=prior, beta=prior.clone())

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
        alpha, beta = state["alpha"], state["beta"]
        active = self.gamma * core(mean["weights"], round) + (1 - self.gamma) * mean["core"]  # Eq. 3, 4
        if not round.outer:
            alpha, beta = posterior.observe(alpha, beta, active, self.scale, at=state.mask.active)  # Eq. 6; inactive: None
            return updated.remember(alpha=alpha, beta=beta)
        outcome = torch.add(self.gamma * 0.5, mean["votes"], alpha=1 - self.gamma)  # Eq. 3, 5: inactive links
        outcome[state.mask.active] = active
        alpha, beta = posterior.observe(alpha, beta, outcome, self.scale)  # Eq. 6
        drawn = posterior.draw(alpha, beta, rng("topology"))
        topology = Mask.top(drawn, round.counts, state.mask.sizes)  # Eq. 2
        return updated.with_mask(topology).remember(alpha=alpha, beta=beta)

    def rests(self, round: Round) -> bool:
        return round.frozen and not self.update_after_end

    def belief(self, state: State) -> Tensor:
        return posterior.mean(state["alpha"], state["beta"])


def core(weights: Tensor, round: Round) -> Tensor:
    """h(i, |W|, κ): is link i among the κ^l largest magnitudes of its layer? `[..., A + n - P]` → bool `[..., A]` (Eq. 4)."""
    links = weights[..., : sum(round.counts)]
    return top(links.abs(), round.core, round.counts)
