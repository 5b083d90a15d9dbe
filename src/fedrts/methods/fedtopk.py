"""Top-k with error feedback (Stich et al., 2018; Sattler et al., 2019): dense training with sparse uploads.

A client uploads T(W^k − W_t + e_k), the largest magnitudes of each layer with their places, and keeps the rest:
e_k ← W^k − W_t + e_k − T(…). The server adds the mean, W ← W + Σ p_k T_k.

Settled here: the broadcast is the whole model. A client that sat out rounds lacks what all of them changed, and so does almost every
client where few of many take part; `wire.value_type` shortens both ways.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from fedrts.methods import register
from fedrts.methods.base import Method
from fedrts.methods.contract import Exchange, Round
from fedrts.wire.fields import Largest


@register("fedtopk")
class FedTopK(Method):
    """Dense averaging whose uploads are the largest changes; clients send what they left out later."""

    share: Annotated[float, Field(gt=0, le=1, description="share of each layer's links whose changes travel up")] = 0.05

    def exchanges(self, round: Round) -> tuple[Exchange, ...]:
        return tuple(Exchange(exchange.down, exchange.steps, {"weights": Largest(self.share)}) for exchange in super().exchanges(round))
