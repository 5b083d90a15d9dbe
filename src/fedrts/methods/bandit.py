"""Links as arms of a combinatorial bandit: the outcomes X of Algorithm 1 (Eq. 3 to 5), for methods that learn from them.

Each round rates the active links by importance, for the aggregate and for every client; each outer round also rates the inactive ones by
the clients' votes, the indices of their largest gradients. Gradients themselves never leave a client. If links are grouped
(`topology.unit`), an arm is a group with one outcome, one vote and one posterior: everything said here of links then holds for arms, of
which there are U, B of them active. Otherwise U = P and B = A.

Settled where the paper is ambiguous: votes are taken among *inactive* links (Eq. 5 and the text; Algorithm 2 masks with m_t); p_n is
normalised over the round's clients; K and κ are per layer; κ follows f(t) of the current round; γ weighs the aggregate (Eq. 3).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field, field_validator
from torch import Tensor

from fedrts.methods.base import Scored
from fedrts.methods.contract import Exchange, Means, ProbeGradient, Rng, Round, State, Train
from fedrts.sparse import fresh, importance
from fedrts.sparse.topk import top_arms, top_arms_of_all
from fedrts.wire.fields import Indices, Message, Payload, Values, carried


@dataclass(frozen=True)
class Outcome:
    """The outcome of a round: X in [0, 1] of the arms `at` (None: all), a mean over this many clients."""

    values: Tensor
    at: Tensor | None
    clients: int
    core: Tensor | None = None
    """Which active arms are among the most important ones of the average, bool `[B]` (X^agg of Eq. 4)."""
    named: Tensor | None = None
    """In outer rounds: did any client speak for the arm? bool `[U]`."""
    signs: Tensor | None = None
    """In outer rounds, for methods that send them: the mean sign of the clients' gradients `[U]`, 0 from those that did not name an arm."""


class Bandit(Scored):
    """Links as arms of a bandit, with the outcomes X of Eq. 3 to 5. Subclasses define what to learn from them."""

    gamma: Annotated[float, Field(ge=0, le=1, description="γ: weight of the aggregate's outcome against the clients' (Eq. 3)")] = 0.5
    score: Annotated[str, Field(description="importance of active links: magnitude, fisher, or an import path")] = "magnitude"
    update_after_end: Annotated[bool, Field(description="keep observing after T_end, when the mask is fixed")] = False

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
        return (exchanges[0].then(ProbeGradient(), votes=self.votes(round)),)

    def votes(self, round: Round) -> Indices:
        """Return I^n of Algorithm 2."""
        return Indices(of="gradient", k=round.quota)

    def training(self, round: Round) -> Train:
        return Train(record="squares") if self.squares_in(round) else super().training(round)

    def contribution(self, message: Message, state: State, round: Round) -> Message:
        return message if self.rests(round) else {**message, "core": self.core(message, round)}  # X^n, Eq. 4

    def update(self, state: State, mean: Means, round: Round, rng: Rng) -> State:
        updated = super().update(state, mean, round, rng)  # W^agg
        if self.rests(round):
            return updated
        core = self.core(mean, round)  # X^agg, Eq. 4
        active = self.gamma * core + (1 - self.gamma) * mean["core"]  # Eq. 3, 4
        if not round.outer:
            seen = Outcome(active, state.mask.arms.active, mean.clients, core)  # inactive links: None
            return self.learn(state, updated, seen, round, rng)
        votes = mean["votes"]
        even = torch.tensor(self.gamma * 0.5)  # Eq. 3, 5: inactive links
        outcome = torch.add(even, votes, alpha=1 - self.gamma, out=fresh.empty(votes.shape, votes))
        outcome[state.mask.arms.active] = active
        seen = Outcome(outcome, None, mean.clients, core, votes > 0, mean.get("signs"))
        return self.learn(state, updated, seen, round, rng)

    @abstractmethod
    def learn(self, state: State, updated: State, outcome: Outcome, round: Round, rng: Rng) -> State:
        """Return `updated` with what the outcome teaches and, in outer rounds, with a new mask."""

    def core(self, model: Mapping[str, Payload], round: Round) -> Tensor:
        """h(i, |W|, κ): is link i among the κ^l most important ones of its layer? `[..., A + n - P]` → bool `[..., B]` (Eq. 4).

        With a global scope: among the Σ κ^l most important ones of all.
        """
        links = carried(model["weights"], Tensor)[..., : sum(round.counts)]
        score = importance.get(self.score)
        scores = score(links, carried(model["squares"], Tensor)) if importance.needs_squares(score) else score(links)
        if self.scope == "global":
            return top_arms_of_all(scores, sum(round.core), round.counts)
        return top_arms(scores, round.core, round.counts)

    def rests(self, round: Round) -> bool:
        return round.frozen and not self.update_after_end

    def squares_in(self, round: Round) -> bool:
        return importance.needs_squares(importance.get(self.score)) and round.index >= 0 and not self.rests(round)
