"""SNIP (Lee et al., 2019): prune at initialisation by the sensitivity |w · ∂L/∂w|.

Before round 0 the clients of round 0 upload the gradient of all links at W_0, averaged over their data; the server scores |W_0 · Σ p_k
g_k| and keeps the largest, over all layers at once (`scope="global"`, the original) or with each layer's own budget (`scope="erk"`).
The mask never changes.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedrts.methods import register
from fedrts.methods.base import Sparse
from fedrts.methods.contract import Exchange, Means, ProbeGradient, Rng, Round, Setup, State
from fedrts.sparse.mask import Mask
from fedrts.sparse.topk import top_arms, top_arms_of_all
from fedrts.wire.fields import Values


@register("snip")
class SNIP(Sparse):
    """A mask chosen once, before training, by the sensitivity of the loss to each link."""

    topology: ClassVar[str] = "largest sensitivity at the start, never changes"

    scope: Annotated[Literal["global", "erk"], Field(description="rank over all layers, or within each layer's budget")] = "global"

    def begin(self, setup: Setup) -> State:
        budget = torch.tensor(setup.counts(self.density))
        return State.of(setup.weights, Mask.full(setup.layout.sizes, setup.weights.device)).remember(budget=budget)

    def exchanges(self, round: Round) -> tuple[Exchange, ...]:
        if round.index >= 0:
            return super().exchanges(round)
        return (Exchange({"weights": Values()}, (ProbeGradient(batches="all"),), {"gradient": Values("gradient", on="links")}),)

    def update(self, state: State, mean: Means, round: Round, rng: Rng) -> State:
        if round.index >= 0:
            return super().update(state, mean, round, rng)
        return self.pruned(state, sensitivity(state.weights[: len(state.mask.bits)], mean["gradient"]))

    def pruned(self, state: State, scores: Tensor) -> State:
        """Return the links with the largest `scores [P]`, as many as the budget allows."""
        budget, sizes = state["budget"].tolist(), state.mask.sizes
        chosen = top_arms(scores, budget, sizes) if self.scope == "erk" else top_arms_of_all(scores, sum(budget), sizes)
        return state.with_mask(Mask.of_arms(chosen, sizes)).forget("budget")


def sensitivity(weights: Tensor, gradient: Tensor) -> Tensor:
    """Return |w · ∂L/∂w| `[P]`, 0 where either is 0."""
    return (weights * gradient).abs()
