"""Ablation of the paper: FedRTS without Thompson sampling, "momentum (FedAdam) and a deterministic choice".

The paper gives no more than these words. Inferred (`score="moments"`): FedTiny's exchange and RigL step, ranked by the server's
moments instead of the round's values. Every round M_w ← β_1 M_w + (1 − β_1)|W^agg| on active links; every outer round M_g ← β_1 M_g +
(1 − β_1) G and V_g ← β_2 V_g + (1 − β_2) G² with G = Σ p_k g (0 where nobody named a link). The Q^l smallest M_w are dropped, the Q^l
largest |M_g| / (√V_g + τ) grown; a link that is dropped or grown starts with M_w = 0.

`score="outcome"` is the literal reading: M averages FedRTS's outcomes X of the aggregate (γ = 1), which are ½ for every inactive link,
and the K^l largest M are active, ties broken at random.

`score="blend"` is inferred from a branch of the authors' library (January 2025): the model itself has the momentum, W ← b·W_{t−1} +
(1 − b)·W^agg in every round after the first, G ← b·G_before + (1 − b)·Σ p_k g in every outer round after the first, with b = `old`; then
a plain RigL step by |W| and |G|.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedrts.methods import register
from fedrts.methods.base import Sparse
from fedrts.methods.contract import Exchange, Means, Rng, Round, Setup, State
from fedrts.methods.fedtiny import Progressive
from fedrts.sparse import random
from fedrts.sparse.mask import Mask
from fedrts.sparse.topk import top


@register("fedrts_no_ts")
class FedRTSNoTS(Progressive):
    """History by momentum and a deterministic choice, where FedRTS keeps posteriors and draws."""

    topology: ClassVar[str] = "drop the Q smallest moments of the weights, grow the largest of the gradients"
    learned: ClassVar[tuple[str, ...]] = ("outcome", "strength", "gradient", "square")

    score: Annotated[
        Literal["moments", "outcome", "blend"],
        Field(
            description="rank by moments of weights and gradients, by moments of outcomes, or by a blend of new and old model and gradients"
        ),
    ] = "moments"
    beta1: Annotated[float, Field(ge=0, lt=1, description="β_1: memory of the first moments")] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1, description="β_2: memory of the squared gradients")] = 0.99
    tau: Annotated[float, Field(gt=0, allow_inf_nan=False, description="τ: added to √V_g")] = 1e-3
    old: Annotated[float, Field(ge=0, lt=1, description="b: share of the old model and gradients in a blend")] = 0.1

    def begin(self, setup: Setup) -> State:
        nothing = torch.zeros(setup.layout.links, dtype=torch.float32, device=setup.weights.device)
        unnamed = torch.zeros(setup.layout.arms, dtype=torch.float32, device=setup.weights.device)
        if self.score == "outcome":
            return super().begin(setup).remember(outcome=nothing)
        if self.score == "blend":
            return super().begin(setup).remember(gradient=unnamed)
        return super().begin(setup).remember(strength=nothing, gradient=unnamed, square=unnamed.clone())

    def scoring(self, exchange: Exchange, round: Round) -> Exchange:
        return super().scoring(exchange, round) if self.score != "outcome" else exchange

    def update(self, state: State, mean: Means, round: Round, rng: Rng) -> State:
        updated = Sparse.update(self, state, mean, round, rng)
        if self.score == "blend":
            return self.blended(state, updated, mean, round)
        if round.frozen:
            return updated
        if self.score == "outcome":
            return self.by_outcome(state, updated, round, rng)
        active = state.mask.active
        strength = state["strength"].clone()
        strength[active] = self.averaged(strength[active], updated.values[: state.mask.number].abs())  # M_w
        if not round.outer:
            return updated.remember(strength=strength)
        gradient = self.averaged(state["gradient"], mean["growth"])  # M_g
        square = self.beta2 * state["square"] + (1 - self.beta2) * mean["growth"].square()  # V_g
        promise = gradient / (square.sqrt() + self.tau)
        kept, new = self.rewired({"weights": strength, "growth": promise}, state.mask, round)
        return updated.with_mask(kept).with_mask(new).remember(strength=strength * kept.bits, gradient=gradient, square=square)

    def blended(self, state: State, updated: State, mean: Means, round: Round) -> State:
        old = self.old
        if round.index > 0:
            updated = updated.with_values((old * state.values + (1 - old) * updated.values).to(state.values.dtype))
        if not round.outer:
            return updated
        named = mean["growth"].to(state["gradient"].dtype)
        gradient = old * state["gradient"] + (1 - old) * named if round.outers else named
        kept, new = self.rewired({"weights": updated.weights, "growth": gradient}, state.mask, round)
        return updated.with_mask(kept).with_mask(new).remember(gradient=gradient)

    def by_outcome(self, state: State, updated: State, round: Round, rng: Rng) -> State:
        outcome = state["outcome"].clone()
        active = state.mask.active
        important = top(updated.values[: state.mask.number].abs(), round.core, round.counts)  # X^agg, Eq. 4
        outcome[active] = self.averaged(outcome[active], important.float())
        if not round.outer:
            return updated.remember(outcome=outcome)
        inactive = state.mask.inactive
        outcome[inactive] = self.averaged(outcome[inactive], torch.tensor(0.5))
        chance = random.uniform(rng("ties"), len(outcome), outcome.device).double()
        mask = Mask.top(outcome.double() + 1e-9 * chance, round.targets, state.mask.sizes)
        return updated.with_mask(mask).remember(outcome=outcome)

    def averaged(self, before: Tensor, now: Tensor) -> Tensor:
        return self.beta1 * before + (1 - self.beta1) * now.to(before.dtype)
