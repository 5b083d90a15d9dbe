"""FedRTS whose clients try links before they are chosen: FedDST's rewiring under FedRTS's posteriors. Ours, not the paper's.

In outer rounds a client drops its Q^l weakest links after half of the epochs, grows the Q^l of largest gradient and trains on under its
own mask m^k, as in FedDST. That mask says what Eq. 4 and 5 ask of a client: X^k_i = m^k_i is 1 for the κ^l links that it kept and for the
Q^l that it speaks for. X^agg_i of an active link: is it among the K^l largest magnitudes of the merged model? Of an inactive one ½, as in
Eq. 5. A link that is chosen starts with the weight that the clients who tried it gave it, not with 0.

The posterior, the draw and the inner rounds are those of FedRTS, with two other defaults: only links just tried may be grown, and history
fades, so that links tried late can catch up. In outer rounds importance is magnitude, whatever `score` says.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field

from fedrts.methods import register
from fedrts.methods.bandit import Outcome
from fedrts.methods.contract import Exchange, Means, Rng, Round, State
from fedrts.methods.feddst import FedDST
from fedrts.methods.fedrts import FedRTS
from fedrts.sparse.mask import Mask
from fedrts.wire.fields import Message


@register("fedrts_trial")
class FedRTSTrial(FedRTS, FedDST):
    """Thompson sampling over links that clients have tried: they rewire their own masks, the server draws from posteriors."""

    topology: ClassVar[str] = "each client drops and grows by its gradient; merged, then top K of a draw from the posteriors"

    discount: Annotated[float, Field(gt=0, le=1, description="ρ: factor on a link's history when it is observed again")] = 0.8
    candidates: Annotated[Literal["all", "named"], Field(description="inactive links that a draw may choose: all, or those just tried")] = (
        "named"
    )
    start: Annotated[float, Field(ge=0, le=0, description="always 0: new links keep the weights of the clients that tried them")] = 0.0

    def exchanges(self, round: Round) -> tuple[Exchange, ...]:
        return FedDST.exchanges(self, round) if round.outer else super().exchanges(round)

    def contribution(self, message: Message, state: State, round: Round) -> Message:
        return FedDST.contribution(self, message, state, round) if round.outer else super().contribution(message, state, round)

    def update(self, state: State, mean: Means, round: Round, rng: Rng) -> State:
        if not round.outer:
            return super().update(state, mean, round, rng)
        weights, sizes = self.merged(state, mean), state.mask.sizes
        largest = self.best(weights[: sum(sizes)].abs(), round, sizes).arms.bits
        aggregate = torch.where(state.mask.arms.bits, largest.float(), 0.5)  # X^agg
        outcome = self.gamma * aggregate + (1 - self.gamma) * mean["has"]
        tried = mean["has"] > 0
        updated = state.moved(weights, Mask.of_arms(tried, sizes))
        seen = Outcome(outcome, None, mean.clients, largest[state.mask.arms.active], tried)
        return self.learn(state, updated, seen, round, rng)
