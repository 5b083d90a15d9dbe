"""FedTiny (Huang et al., 2023): a starting mask chosen by the clients, then progressive pruning by their largest gradients.

**Adaptive BatchNorm selection** (`abns`, before round 0): the server draws a pool of masks whose layer densities vary by ±50 % within
the budget. Clients pass their data through each without a step and upload the BatchNorm statistics; with the averaged ones they
evaluate each candidate. The mask of least mean loss is taken, with its statistics. Models without BatchNorm are judged by loss alone.

**Progressive pruning**: in outer rounds clients upload the Q^l inactive links of largest gradient with their values; the server adds
p_k·g (0 where a client did not name the link) and makes a RigL step by |W^agg| and |Σ p_k g|. `group` adjusts all layers each time, or
one layer or one block, from the output to the input, by the number of the outer round.

Design decisions: weights are random (there is no public data to train the pool on); statistics come from training data and are averaged
over all clients (the authors' library averages over the last alone and takes test data); the schedule is that of all methods.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedrts.methods import register
from fedrts.methods.contract import Calibrate, Evaluate, Exchange, Means, ProbeGradient, Rng, Round, Setup, State
from fedrts.methods.rewiring import DropAndGrow
from fedrts.sparse import budget, random
from fedrts.sparse.mask import Mask
from fedrts.wire import fields as wire
from fedrts.wire.fields import Indices, Masks, Values


class Progressive(DropAndGrow):
    """Drop by magnitude, grow by the clients' largest gradients, which travel with their links' names."""

    def grow_score(self, seen: Mapping[str, Tensor]) -> Tensor:
        return seen["growth"].abs()

    def scoring(self, exchange: Exchange, round: Round) -> Exchange:
        return exchange.then(ProbeGradient(), growth=Indices(of="gradient", k=self.quota(round), values=True))


@register("fedtiny")
class FedTiny(Progressive):
    """A starting mask that clients choose from a pool by BatchNorm statistics, then growth by their largest gradients."""

    topology: ClassVar[str] = "best of a pool at first; then drop the Q weakest, grow by the mean of the named gradients"

    abns: Annotated[bool, Field(description="let clients choose the starting mask from a pool")] = True
    candidates: Annotated[int, Field(ge=1, le=100, description="C: masks in the pool")] = 5
    passes: Annotated[int, Field(ge=1, description="passes over the local data that calibrate BatchNorm")] = 5
    group: Annotated[Literal["entire", "layer", "block"], Field(description="part of the model that an outer round adjusts")] = "entire"

    def begin(self, setup: Setup) -> State:
        if not self.abns:
            return super().begin(setup)
        pool = torch.stack([self.candidate(setup, index).bits for index in range(self.candidates)])
        weights = self.initial_weights(setup, setup.counts(self.density))  # the same for every candidate
        return State.of(weights, Mask.full(setup.layout.sizes, setup.weights.device)).remember(pool=pool)

    def candidate(self, setup: Setup, index: int) -> Mask:
        """Return a random mask within the budget; its layer densities are the experiment's times 1 ± 0.5."""
        counts, layout, device = setup.counts(self.density), setup.layout, setup.weights.device
        noise = random.uniform(setup.rng(f"candidate {index} densities"), len(counts)).tolist()
        raw = [count / size * (0.5 + u) for count, size, u in zip(counts, layout.sizes, noise, strict=True)]
        scores = random.uniform(setup.rng(f"candidate {index}"), layout.links, device)
        return Mask.top(scores, budget.proportional(layout.sizes, sum(counts), raw), layout.sizes)

    def exchanges(self, round: Round) -> tuple[Exchange, ...]:
        if round.index >= 0 or not self.abns:
            return super().exchanges(round)
        count, normalised = self.candidates, bool(round.layout.buffers)
        down: dict[str, wire.Field] = {"weights": Values(), "pool": Masks("pool", count)}
        statistics = Values("statistics", on="statistics", copies=count)
        losses: dict[str, wire.Field] = {"losses": Values("losses", on="scalars", copies=count)}
        if not normalised:
            return (Exchange(down, (Evaluate("pool"),), losses),)
        calibration = Exchange(down, (Calibrate("pool", passes=self.passes),), {"statistics": statistics})
        return (calibration, Exchange({**down, "statistics": statistics}, (Evaluate("pool", "statistics"),), losses))

    def update(self, state: State, mean: Means, round: Round, rng: Rng) -> State:
        if "statistics" in mean:
            return state.remember(statistics=mean["statistics"])
        if "losses" not in mean:
            return super().update(state, mean, round, rng)
        best = int(mean["losses"].argmin())
        weights = state.weights.clone()
        if "statistics" in state.memory:
            statistics = state["statistics"].view(self.candidates, -1)[best]
            weights[len(weights) - len(statistics) :] = statistics
        return state.moved(weights, Mask(state["pool"][best], state.mask.sizes)).forget("pool", "statistics")

    def quota(self, round: Round) -> tuple[int, ...]:
        if self.group == "entire":
            return round.quota
        groups = [[layer] for layer in range(len(round.quota))] if self.group == "layer" else round.layout.blocks()
        now = groups[-1 - round.outers % len(groups)]
        return tuple(q if layer in now else 0 for layer, q in enumerate(round.quota))
