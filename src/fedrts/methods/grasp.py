"""GraSP (Wang et al., 2020): prune at initialisation so that the gradient's norm is preserved.

Removing link i changes ‖g‖² by about −2·w_i·(Hg)_i; the links of largest w·(Hg) are kept. Before round 0, twice with the clients of
round 0: the mean gradient g of the links at W_0 with outputs divided by 200; then g goes down and the mean product Hg over the same
batches comes up. One ranking over all layers; the mask never changes.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from fedrts.methods import register
from fedrts.methods.contract import Exchange, Means, ProbeCurvature, ProbeGradient, Rng, Round, State
from fedrts.methods.snip import SNIP
from fedrts.wire.fields import Values


@register("grasp")
class GraSP(SNIP):
    """A mask chosen once, before training, that preserves the flow of gradients."""

    topology: ClassVar[str] = "most gradient flow at the start, never changes"

    temperature: Annotated[float, Field(gt=0, allow_inf_nan=False, description="divides the model's outputs while links are scored")] = (
        200.0
    )

    def exchanges(self, round: Round) -> tuple[Exchange, ...]:
        if round.index >= 0:
            return super().exchanges(round)
        gradient = Values("gradient", on="links")
        first = ProbeGradient(batches="all", temperature=self.temperature)
        second = ProbeCurvature(along="gradient", temperature=self.temperature)
        return (
            Exchange({"weights": Values()}, (first,), {"gradient": gradient}),
            Exchange({"weights": Values(), "gradient": gradient}, (second,), {"curvature": Values("curvature", on="links")}),
        )

    def update(self, state: State, mean: Means, round: Round, rng: Rng) -> State:
        if round.index >= 0:
            return super().update(state, mean, round, rng)
        if round.exchange == 0:
            return state.remember(gradient=mean["gradient"])
        return self.pruned(state, state.weights[: len(state.mask.bits)] * mean["curvature"]).forget("gradient")
