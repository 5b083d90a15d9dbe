"""FedPAQ (Reisizadeh et al., 2020): federated averaging with messages of few bits that are right on average.

A client uploads Q(W^n − W_t); the server keeps full precision, W ← W + Σ p_k Q(W^n − W_t). Q rounds s·|x_i|/scale (int8: s = 127) to one of
its two neighbours at random, so that E[Q(x)] = x and |Q(x) − x| ≤ scale/s. The broadcast model is quantised too (`downlink`);
BatchNorm statistics travel whole.

Design decisions: the scale is the largest magnitude of an output channel; QSGD's L2 norm of a whole tensor (`norm="l2"`,
`granularity="tensor"`) has a variance that grows with the tensor. The published 22.48 MB both ways need an 8-bit downlink.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fedrts.methods import register
from fedrts.methods.base import Method
from fedrts.methods.contract import Exchange, Round
from fedrts.wire.fields import Values
from fedrts.wire.quantise import Norm
from fedrts.wire.value_types import RoundedType, ValueType


@register("fedpaq")
class FedPAQ(Method):
    """Dense averaging in 8 bits or fewer, unbiased, both ways."""

    norm: Annotated[Norm, Field(description="the scale: linf (largest magnitude) or l2 (QSGD)")] = "linf"
    granularity: Annotated[Literal["channel", "tensor"], Field(description="values that share a scale")] = "channel"
    uplink: Annotated[RoundedType, Field(description="how the clients' changes travel")] = "int8"
    downlink: Annotated[Literal[RoundedType, "float32"], Field(description="how the broadcast model travels")] = "int8"

    def exchanges(self, round: Round) -> tuple[Exchange, ...]:
        down, up = self.typed(self.downlink), self.typed(self.uplink)
        return tuple(Exchange({"weights": down}, exchange.steps, {"weights": up}) for exchange in super().exchanges(round))

    def typed(self, type: ValueType) -> Values:
        return Values(type=type, scales=self.granularity, norm=self.norm, fixed=True)
