"""Ablation of the paper: FedRTS with γ = 1."""

from typing import Annotated

from pydantic import Field

from fedrts.methods import register
from fedrts.methods.fedrts import FedRTS


@register("fedrts_gamma1")
class FedRTSGamma1(FedRTS):
    """FedRTS that uses only the aggregate (γ = 1): votes have no effect, and growth is random around 0.5."""

    gamma: Annotated[float, Field(ge=1, le=1, description="γ, fixed")] = 1.0
