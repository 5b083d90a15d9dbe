"""Ablation of the paper: FedRTS with γ = 0."""

from typing import Annotated

from pydantic import Field

from fedrts.methods import register
from fedrts.methods.fedrts import FedRTS


@register("fedrts_gamma0")
class FedRTSGamma0(FedRTS):
    """FedRTS that uses only the clients' votes (γ = 0): an inactive link is worth its share of votes."""

    gamma: Annotated[float, Field(ge=0, le=0, description="γ, fixed")] = 0.0
