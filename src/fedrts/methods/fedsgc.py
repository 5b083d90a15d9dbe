"""FedSGC (Tian et al., 2024): FedDST guided by a map of the directions in which the global model moves.

d = sign(W_t − W_{t−1}) on the server; inactive links keep the sign that the last merge gave them before it was pruned. On a client,
after half of the epochs, D = sign(W − W_received) on active links and −sign(g) on inactive ones, which do not move. Of the Q^l links to
drop, up to ⌊λ_drop·Q^l⌋ are the weakest among those in conflict (D·d < 0), the rest the weakest of all others; of those to grow, up to
⌊λ_grow·Q^l⌋ have the largest gradients among those in agreement (D·d > 0), the rest the largest of all others.

Inferred: D on inactive links, and λ = 0.5 for both (the FedRTS authors' library has 0.01 but never applies its masks). Participants only
are averaged; in the original absent clients count with the old model (`residual`), which damps a step of ten in a hundred clients tenfold.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from fedrts.methods import register
from fedrts.methods.contract import Exchange, Means, Rng, Round, Setup, State
from fedrts.methods.feddst import Chooser, FedDST
from fedrts.sparse.mask import Mask
from fedrts.sparse.topk import top_indices
from fedrts.wire.fields import Signs


@register("fedsgc")
class FedSGC(FedDST):
    """FedDST whose clients prefer links that move with the global model, and drop those that move against it."""

    topology: ClassVar[str] = "as FedDST, conflicts with the global direction dropped first, agreements grown first"

    drop_guided: Annotated[float, Field(ge=0, le=1, description="λ_drop: share of dropped links chosen among conflicts")] = 0.5
    grow_guided: Annotated[float, Field(ge=0, le=1, description="λ_grow: share of grown links chosen among agreements")] = 0.5

    residual: Annotated[bool, Field(description="absent clients count with the old model (the original's Eq. 7)")] = False

    def begin(self, setup: Setup) -> State:
        still = torch.zeros(setup.layout.links, dtype=torch.int8, device=setup.weights.device)
        state = super().begin(setup).remember(direction=still)
        return state.remember(samples=torch.tensor(setup.samples)) if self.residual else state

    def exchanges(self, round: Round) -> tuple[Exchange, ...]:
        exchanges = super().exchanges(round)
        if not round.outer:
            return exchanges
        (exchange,) = exchanges
        return (Exchange({**exchange.down, "direction": Signs(of="direction")}, exchange.steps, exchange.up),)

    def rewire(self, round: Round) -> Chooser:
        return partial(by_direction, quota=round.quota, drop_guided=self.drop_guided, grow_guided=self.grow_guided)

    def update(self, state: State, mean: Means, round: Round, rng: Rng) -> State:
        links = len(state.mask.bits)
        mean = self.with_absent(state, mean) if self.residual else mean
        updated = super().update(state, mean, round, rng)
        if round.outer:
            direction = torch.sign(self.merged(state, mean)[:links] - state.weights[:links]).to(torch.int8)
        else:
            direction = state["direction"].clone()
            moved = updated.values[: state.mask.number] - state.values[: state.mask.number]
            direction[state.mask.active] = torch.sign(moved).to(torch.int8)
        return updated.remember(direction=direction)

    def with_absent(self, state: State, mean: Means) -> Means:
        """The means over everybody, where clients that took no part hold the old model on the old mask."""
        share = mean.samples / int(state["samples"])
        old = {"weights": state.values, "total": state.weights, "has": state.mask.bits}
        everybody = {name: share * tensor + (1 - share) * old[name].to(tensor.dtype) for name, tensor in mean.items()}
        return Means(everybody, mean.clients, int(state["samples"]))


def by_direction(
    tensors: Mapping[str, Tensor], mask: Mask, quota: tuple[int, ...], drop_guided: float, grow_guided: float
) -> tuple[Mask, Mask]:
    """The RigL step in which conflicts are dropped and agreements grown first."""
    links = len(mask.bits)
    weights, gradient = tensors["weights"][:links], tensors["gradient"]
    local = torch.where(mask.bits, torch.sign(weights - tensors["received"][:links]), -torch.sign(gradient))
    accord = local * tensors["direction"]
    dropped = _in_two_steps(-weights.abs(), mask.bits, mask.bits & (accord < 0), quota, drop_guided, mask.sizes)
    kept = mask.bits & ~dropped
    grown = _in_two_steps(gradient.abs(), ~kept, ~kept & (accord > 0), quota, grow_guided, mask.sizes)
    return Mask(kept, mask.sizes), Mask(kept | grown, mask.sizes)


def _in_two_steps(
    scores: Tensor, candidates: Tensor, preferred: Tensor, quota: tuple[int, ...], share: float, sizes: tuple[int, ...]
) -> Tensor:
    """`quota[l]` candidates of largest score per layer: up to ⌊share·quota⌋ among the preferred, then the largest of all others."""
    there = [int(part.count_nonzero()) for part in preferred.split(list(sizes))]
    first = [min(int(share * wanted), available) for wanted, available in zip(quota, there, strict=True)]
    chosen = torch.zeros_like(candidates)
    chosen[top_indices(scores, first, preferred, sizes)] = True
    rest = [wanted - already for wanted, already in zip(quota, first, strict=True)]
    chosen[top_indices(scores, rest, candidates & ~chosen, sizes)] = True
    return chosen
