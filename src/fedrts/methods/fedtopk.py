"""Top-k with error feedback both ways (Stich et al., 2018; Sattler et al., 2019): dense training with sparse messages.

Clients hold the public model V. One uploads T(W^k − V + e_k), the largest magnitudes of each layer with their places, and keeps the
rest: e_k ← W^k − V + e_k − T(…). The server adds the mean, W ← W + Σ p_k T_k, and tells of its own model what is largest of the
difference: V ← V + T(W − V). What it leaves out stays in W − V, which is its error feedback.

Design decisions: a client that sat out rounds gets the step of each of them, or all of V where that is less, and the bytes of either count.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from fedrts.methods import register
from fedrts.methods.base import Method
from fedrts.methods.contract import Exchange, Means, Rng, Round, Setup, State
from fedrts.wire.fields import Frame, Largest, Missed
from fedrts.wire.value_types import ValueType


@register("fedtopk")
class FedTopK(Method):
    """Dense averaging in messages of the largest changes, both ways; what they leave out follows later."""

    share: Annotated[float, Field(gt=0, le=1, description="share of each layer's links whose changes travel up")] = 0.05
    share_down: Annotated[float, Field(gt=0, le=1, description="share of each layer's links whose changes travel down")] = 0.05
    values: Annotated[ValueType, Field(description="how the changes travel, both ways; rounded to the nearest")] = "float32"
    values_down: Annotated[ValueType | None, Field(description="how those of downloads travel; default: as `values`")] = None

    @property
    def broadcast(self) -> Missed:
        return Missed(Largest(self.share_down, type=self.values_down or self.values))

    def begin(self, setup: Setup) -> State:
        state = super().begin(setup)
        return state.remember(**self.broadcast.begun(state.values, Frame(setup.layout, state.mask, state.values.dtype)))

    def exchanges(self, round: Round) -> tuple[Exchange, ...]:
        up = Largest(self.share, type=self.values)
        return tuple(Exchange({"weights": self.broadcast}, exchange.steps, {"weights": up}) for exchange in super().exchanges(round))

    def update(self, state: State, mean: Means, round: Round, rng: Rng) -> State:
        frame = Frame(round.layout, state.mask, state.values.dtype)
        return super().update(state, mean, round, rng).remember(**self.broadcast.advanced(state.memory, mean["weights"], frame))
