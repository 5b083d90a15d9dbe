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
from dataclasses import replace
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from fedrts.methods import register
from fedrts.methods.contract import Exchange, Means, Rng, Round, Setup, State
from fedrts.methods.feddst import FedDST
from fedrts.sparse.mask import Mask
from fedrts.sparse.topk import by_layer, top_indices
from fedrts.wire.fields import Signs


@register("fedsgc")
class FedSGC(FedDST):
    """FedDST whose clients prefer links that move with the global model, and drop those that move against it."""

    topology: ClassVar[str] = "as FedDST, conflicts with the global direction dropped first, agreements grown first"
    learned: ClassVar[tuple[str, ...]] = ("direction",)

    drop_guided: Annotated[float, Field(ge=0, le=1, description="λ_drop: share of dropped links chosen among conflicts")] = 0.5
    grow_guided: Annotated[float, Field(ge=0, le=1, description="λ_grow: share of grown links chosen among agreements")] = 0.5

    residual: Annotated[bool, Field(description="absent clients count with the old model (the original's Eq. 7)")] = False

    def begin(self, setup: Setup) -> State:
        still = torch.zeros(setup.layout.links, dtype=torch.int8, device=setup.weights.device)
        state = super().begin(setup).remember(direction=still)
        return state.remember(samples=torch.tensor(setup.samples)) if self.residual else state

    def scoring(self, exchange: Exchange, round: Round) -> Exchange:
        scored = super().scoring(exchange, round)
        return replace(scored, down={**scored.down, "direction": Signs(of="direction")})

    def rewired(self, seen: Mapping[str, Tensor], mask: Mask, round: Round) -> tuple[Mask, Mask]:
        """The same step, but it drops conflicting links and grows agreeing links first."""
        links, quota, promise = len(mask.bits), self.quota(round), self.grow_score(seen)
        weights = seen["weights"][:links]
        local = torch.where(mask.bits, torch.sign(weights - seen["received"][:links]), -torch.sign(seen["gradient"]))  # D
        accord = mask.sizes.spread(mask.sizes.mean(local * seen["direction"]))  # of an arm: do its links agree on the whole?
        dropped = preferring(accord < 0, -weights.abs(), mask.bits, self.outgoing(round), self.drop_guided, mask.sizes)
        kept = mask.bits & ~dropped
        grown = preferring(accord > 0, promise, ~kept, quota, self.grow_guided, mask.sizes)
        return Mask(kept, mask.sizes), Mask(kept | grown, mask.sizes)

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
        """Return means over all clients, where absent ones hold the old model on the old mask."""
        share = mean.samples / int(state["samples"])
        old = {"weights": state.values, "total": state.weights, "has": state.mask.arms.bits}
        everybody = {name: share * tensor + (1 - share) * old[name].to(tensor.dtype) for name, tensor in mean.items()}
        return Means(everybody, mean.clients, int(state["samples"]))


def preferring(
    preferred: Tensor, scores: Tensor, candidates: Tensor, quota: tuple[int, ...], share: float, sizes: tuple[int, ...]
) -> Tensor:
    """Return `quota[l]` candidates with the largest scores per layer: up to ⌊share·quota⌋ preferred ones, then the best others."""
    liked = candidates & preferred
    first = [min(int(share * wanted), there) for wanted, there in zip(quota, by_layer(liked, sizes), strict=True)]
    urgent = scores.index_fill(0, top_indices(scores, first, liked, sizes), torch.inf)
    chosen = torch.zeros_like(candidates)
    chosen[top_indices(urgent, quota, candidates, sizes)] = True
    return chosen
