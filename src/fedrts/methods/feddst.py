"""FedDST (Bibikar et al., 2022): clients rewire their own masks, the server merges and prunes.

Outer round on a client: half of the epochs (rounded down; `adjust_after`), the gradient on one batch, a RigL step with Q^l links, the
other half under its own mask m^n. Server: per coordinate the mean over the clients that have the link, W_i = Σ n_k m^k_i W^k_i / Σ n_k
m^k_i (0 where nobody has it), then per layer the K^l largest magnitudes. `merge="plain"` counts absent links as 0, as the
FedRTS authors' library does; it penalises links that few clients grew.

Design decisions: the schedule is that of all methods; the first library (Bibikar) ignores the decayed ratio and grows over active links.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedrts.methods import register
from fedrts.methods.base import Scored
from fedrts.methods.contract import Exchange, Means, ProbeGradient, Rewire, Rng, Round, State, Train
from fedrts.methods.rewiring import DropAndGrow
from fedrts.wire.fields import Message, OnOwnMask, OwnValues, carried


@register("feddst")
class FedDST(DropAndGrow, Scored):
    """Clients rewire their own masks by gradient; the server averages per link and keeps the largest."""

    topology: ClassVar[str] = "each client drops and grows by its gradient; merged, then top K by magnitude"

    merge: Annotated[Literal["sparse", "plain"], Field(description="mean over the clients that have a link, or over all")] = "sparse"
    adjust_after: Annotated[
        float, Field(ge=0, le=1, description="share of the epochs (rounded down) before a client rewires: 0 before training, 1 after it")
    ] = 0.5

    def grow_score(self, seen: Mapping[str, Tensor]) -> Tensor:
        return seen["gradient"].abs()

    def scoring(self, exchange: Exchange, round: Round) -> Exchange:
        rewire = Rewire(partial(self.rewired, round=round))
        steps = (Train(stop=self.adjust_after), ProbeGradient(), rewire, Train(start=self.adjust_after))
        return Exchange(exchange.down, steps, {"weights": OnOwnMask(counts=round.targets)})

    def contribution(self, message: Message, state: State, round: Round) -> Message:
        own = message["weights"]
        if not isinstance(own, OwnValues):
            return message
        values = carried(own.values, Tensor)
        return {"total": own.mask.expand(values), "has": own.mask.arms.bits.to(values.dtype)}  # weighted by samples: no vote

    def update(self, state: State, mean: Means, round: Round, rng: Rng) -> State:
        if not round.outer:
            return super().update(state, mean, round, rng)
        return self.pruned(state, self.merged(state, mean), round)

    def merged(self, state: State, mean: Means) -> Tensor:
        """Return the clients' models merged into one vector `[n]`, before pruning."""
        weights, has = mean["total"].clone(), state.mask.sizes.spread(mean["has"])
        if self.merge == "sparse":
            links = weights[: len(has)]
            links.copy_(torch.where(has > 0, links / has, torch.zeros_like(links)))
        return weights

    def pruned(self, state: State, weights: Tensor, round: Round) -> State:
        return state.moved(weights, self.best(weights[: len(state.mask.bits)].abs(), round, state.mask.sizes))
