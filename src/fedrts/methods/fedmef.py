"""FedMef (Huang et al., 2024): FedTiny's server, with clients that move information out of links before they are dropped.

**Budget-aware extrusion** (`bae`, outer rounds): θ_low are the Q^l active links of least |W_t| in each layer, the same on all clients.
The authors' library extrudes in every round (`bae_in="all"`) and ranks inactive entries too (`theta_low="all"`).
The loss gets λ·‖θ_low‖², and step b of B takes the rate max(η, β_b) with β_b = p(b)·(2σ(‖θ_low‖) − 1)·η_0 and p(b) = (2B − 2b)/(2B −
b) (REX). With a constant η = η_0 the maximum is always η: the rate matters under `train.schedule`.

**Scaled activation pruning** (`sap`): of the input of a convolution only the largest `1 − sap_rate` share is kept for the backward
pass, and activations keep one bit an element. **Weight standardisation** (`ws`) takes the place of BatchNorm, whose inputs would have
to be kept.

Design decisions: λ = 0.01 without a ramp, the L2 norm inside the sigmoid, extrusion in outer rounds only (sources differ); sap and ws are
off, so that all methods train the same network.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from fedrts.methods import register
from fedrts.methods.contract import Round, Scalar, State, Train
from fedrts.methods.fedtiny import Progressive
from fedrts.sparse import rigl
from fedrts.sparse.frugal import save_activations_sparsely, standardise_convolutions
from fedrts.sparse.mask import Mask


@register("fedmef")
class FedMef(Progressive):
    """Growth by the clients' largest gradients; weak links are extruded before they go, activations may be kept sparsely."""

    topology: ClassVar[str] = "drop the Q weakest (extruded before), grow by the mean of the named gradients"

    bae: Annotated[bool, Field(description="budget-aware extrusion, in the rounds that `bae_in` says")] = True
    bae_in: Annotated[Literal["outer", "all"], Field(description="extrude in outer rounds, or in all rounds before T_end")] = "outer"
    theta_low: Annotated[
        Literal["active", "all"],
        Field(description="θ_low are the Q weakest of a layer's active links, or of all its entries, zeros included"),
    ] = "active"
    penalty: Annotated[float, Field(ge=0, allow_inf_nan=False, description="λ: weight of ‖θ_low‖² in the loss")] = 0.01
    sap: Annotated[bool, Field(description="keep activations sparsely for the backward pass")] = False
    sap_rate: Annotated[float, Field(ge=0, lt=1, description="share of a layer's input that is dropped for the backward pass")] = 0.7
    sap_linear: Annotated[bool, Field(description="prune the inputs of linear layers too")] = False
    ws: Annotated[bool, Field(description="weight-standardised convolutions instead of BatchNorm")] = False

    def prepare(self, module: nn.Module) -> nn.Module:
        if self.ws:
            module = standardise_convolutions(module)
        return save_activations_sparsely(module, 1 - self.sap_rate, self.sap_linear) if self.sap else module

    def training(self, round: Round) -> Train:
        if not self.extrudes(round):
            return super().training(round)
        return Train(influence=Extrusion(self.penalty), marks=partial(weak_marks, quota=round.outgoing, among=self.theta_low))

    def extrudes(self, round: Round) -> bool:
        return self.bae and (round.outer or (self.bae_in == "all" and not round.frozen))

    def overhead(self, round: Round, active: float, activations: float) -> float:
        """F_o = 4·d·n in rounds with extrusion, and n_a·log n_a to choose activations wherever they are pruned."""
        extrusion = 4 * active if self.extrudes(round) else 0.0
        return extrusion + (activations * math.log2(max(activations, 1)) if self.sap else 0.0)

    def remarks(self, before: State, after: State, round: Round) -> Mapping[str, float]:
        """Return the share of θ_low that was dropped (a link that was grown again also starts at 0)."""
        marked = weakest(before.weights, before.mask, round.outgoing, self.theta_low) & before.mask.bits
        gone = marked & (after.weights[: len(marked)] == 0)
        return {"marked_dropped": float(gone.sum()) / max(int(marked.sum()), 1)}


@dataclass(frozen=True)
class Extrusion:
    """The pull on θ_low (where marks are 1, elsewhere 0), and the rate of each step."""

    penalty: float

    def pull(self, weights: Tensor, marks: Tensor) -> Tensor:
        return 2 * self.penalty * marks * weights

    def rate(self, weights: Tensor, marks: Tensor, step: Scalar, steps: Scalar, rate: Scalar, initial: float) -> Scalar:
        norm = torch.linalg.vector_norm(marks * weights, dim=-1)
        left = (2 * steps - 2 * step) / (2 * steps - step)
        return (left * (2 * torch.sigmoid(norm) - 1) * initial).clamp(min=rate)


Among = Literal["active", "all"]


def weak_marks(received: Tensor, mask: Mask, quota: tuple[int, ...], among: Among = "active") -> Tensor:
    """Return 1 at θ_low of the received parameters `[N_all]`, 0 elsewhere."""
    marks = torch.zeros_like(received)
    marks[: len(mask.bits)] = weakest(received, mask, quota, among)
    return marks


def weakest(weights: Tensor, mask: Mask, quota: tuple[int, ...], among: Among = "active") -> Tensor:
    """Return θ_low `[P]`: the `quota[l]` links of smallest magnitude in each layer, among the active ones or among all."""
    ranked = mask if among == "active" else Mask.full(mask.sizes, weights.device)
    kept = rigl.weakest_dropped(weights[: len(mask.bits)].abs(), ranked, quota)
    return ranked.bits & ~kept.bits
