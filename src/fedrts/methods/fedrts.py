"""FedRTS (Huang et al., 2025): the topology is drawn from Beta posteriors, one per link (TSAdj, Algorithms 1 and 2).

Every link is an arm of a combinatorial bandit. `bandit.py` has the outcomes X of a round (Eq. 3 to 5); here is what is made of them: the
posteriors (Eq. 6) and the draw that is the next topology (Eq. 2). The posterior rests from T_end on, when the mask is fixed.

Six options go beyond the paper and are off by default. `scope="global"`: layers do not keep their numbers of links; importance is judged,
and links are drawn, over all layers together. `discount`: the arms move while the model learns, so α ← 1 + ρ(α − 1), and β alike,
before a link is observed again. `candidates="named"`: inactive links outnumber active ones many times over, and among so many draws the
largest are those of links that nobody named; here only links that a client named in this round may be grown. `keep="core"`: a draw can
drop the strongest links by bad luck; here the κ^l largest of the average stay, and only the other places are drawn. `patience`: a new
link is weak because it is new; it is not judged (X = None) in its first rounds. `start`: a new link starts a step down the clients'
gradients instead of at 0; the step is measured by the links of its layer, so that no client can make it large.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedrts.errors import InputError
from fedrts.methods import register
from fedrts.methods.bandit import Bandit, Outcome
from fedrts.methods.contract import Rng, Round, Setup, State
from fedrts.sparse import posterior
from fedrts.sparse.mask import Mask
from fedrts.wire.fields import Indices, Message, Selection, carried


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
    keep: Annotated[Literal["none", "core"], Field(description="links that no draw can drop: none, or the average's core")] = "none"
    patience: Annotated[int, Field(ge=0, le=10_000, description="rounds in which a new link is not judged")] = 0
    start: Annotated[
        float,
        Field(
            ge=0,
            le=1,
            description="η: size of new links' first weights, against the clients' gradients, which then travel",
        ),
    ] = 0.0

    def begin(self, setup: Setup) -> State:
        arms, device = setup.layout.arms, setup.weights.device
        if self.start and setup.layout.sizes.grouped:
            raise InputError("method_options.start needs topology.unit = link: a group of links has no sign")
        prior = torch.ones(arms, dtype=torch.float32, device=device)  # Beta(1, 1): uniform
        state = super().begin(setup).remember(alpha=prior, beta=prior.clone())
        return state.remember(since=torch.full((arms,), -1 - self.patience, dtype=torch.int32, device=device)) if self.patience else state

    def votes(self, round: Round) -> Indices:
        return replace(super().votes(round), values=self.start > 0)

    def contribution(self, message: Message, state: State, round: Round) -> Message:
        told = super().contribution(message, state, round)
        if not (self.start and round.outer):
            return told
        named = carried(message["votes"], Selection)
        assert named.values is not None  # as `votes` asked
        return {**told, "votes": named.names, "signs": replace(named, values=named.values.sign())}

    def learn(self, state: State, updated: State, outcome: Outcome, round: Round, rng: Rng) -> State:
        scale = outcome.clients if self.scale == "clients" else self.scale
        values, at = self.judged(state, outcome, round)
        alpha, beta = posterior.faded(state["alpha"], state["beta"], self.discount, at)
        alpha, beta = posterior.observe(alpha, beta, values, scale, at)  # Eq. 6
        updated = updated.remember(alpha=alpha, beta=beta)
        if not round.outer:
            return updated
        drawn = posterior.draw(alpha, beta, rng("topology"))
        active = state.mask.arms
        if self.candidates == "named" and outcome.named is not None:
            drawn *= active.bits | outcome.named  # 0 is below every draw, and the active links alone are enough
        if self.keep == "core" and outcome.core is not None:
            drawn[active.active] += outcome.core  # above every draw
        return self.grown(state, updated, self.best(drawn, round, state.mask.sizes), outcome, round)  # Eq. 2

    def judged(self, state: State, outcome: Outcome, round: Round) -> tuple[Tensor, Tensor | None]:
        """Return X and the arms that it belongs to (None: all), without those that are active for `patience` rounds at most."""
        if not self.patience:
            return outcome.values, outcome.at
        arms = state.mask.arms.bits
        known = ~arms | (round.index - state["since"] > self.patience)
        if outcome.at is None:
            return outcome.values[known], known.nonzero().squeeze(-1)
        return outcome.values[known[outcome.at]], outcome.at[known[outcome.at]]

    def grown(self, before: State, updated: State, mask: Mask, outcome: Outcome, round: Round) -> State:
        """Return the state on its new mask, with what new links begin with: a weight, and the round in which they came."""
        after = updated.with_mask(mask)
        new = mask.arms.bits & ~before.mask.arms.bits
        if self.patience:
            after = after.remember(since=torch.where(new, round.index, before["since"]))
        if not self.start or outcome.signs is None:
            return after
        strong = [values.abs().mean() for values in updated.values[: updated.mask.number].split(list(updated.mask.counts))]
        steps = torch.cat([-self.start * mean * signs for mean, signs in zip(strong, outcome.signs.split(list(mask.sizes)), strict=True)])
        weights = after.weights.clone()
        weights[: len(new)][new] = steps[new].to(weights.dtype)
        return after.moved(weights, mask)

    def belief(self, state: State) -> Tensor:
        return posterior.mean(state["alpha"], state["beta"])
