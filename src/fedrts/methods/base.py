"""What all methods share: dense federated averaging, and the same on a sparse mask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor, nn

from fedrts.errors import InputError
from fedrts.methods.contract import Exchange, Means, Rng, Round, Setup, State, Train
from fedrts.sparse import random
from fedrts.sparse.mask import Mask
from fedrts.tables import explained
from fedrts.wire.fields import Message, Values


class Method(BaseModel):
    """Federated averaging of all weights. A method overrides what it does differently; its options are its fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    dense: ClassVar[bool] = True
    """True: every link stays active and `density` is ignored."""
    topology: ClassVar[str] = "every link, always"
    """By which rule links are active, in a few words."""
    learned: ClassVar[tuple[str, ...]] = ()
    """What of its memory is about links, and of use to a run that goes on from this one: posteriors, say."""

    density: Annotated[float, Field(gt=0, le=1, description="share of all parameters that stay active")] = 0.2

    def __init__(self, **options: Any) -> None:
        try:
            super().__init__(**options)
        except ValidationError as error:
            raise InputError(f"{type(self).__name__}: {explained(error, type(self))}") from error

    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]  # settings are validated without it, and name their table

    def steady(self) -> str | None:
        """Return why the density of its masks cannot fall over the rounds; None if new masks have `round.targets` links."""
        return "it keeps every link"

    def prepare(self, module: nn.Module) -> nn.Module:
        """Replace parts of the model before anything else happens."""
        return module

    def begin(self, setup: Setup) -> State:
        """Return the server's state before round 0."""
        mask = self.initial_mask(setup)
        return State.of(self.initial_weights(setup, mask.counts), mask)

    def initial_weights(self, setup: Setup, counts: Sequence[int]) -> Tensor:
        """Return W_0 `[n]` of a model with this many active links in each layer."""
        return setup.weights

    def initial_mask(self, setup: Setup) -> Mask:
        return Mask.full(setup.layout.sizes, setup.weights.device)

    def exchanges(self, round: Round) -> tuple[Exchange, ...]:
        """Return the exchanges of this round; by default the set-up round (-1) has none."""
        if round.index < 0:
            return ()
        return (Exchange(down={"weights": Values()}, steps=(self.training(round),), up={"weights": Values()}),)

    def training(self, round: Round) -> Train:
        """Return how clients train in this round."""
        return Train()

    def contribution(self, message: Message, state: State, round: Round) -> Message:
        """Return what one client adds to the sums, or each of several: their tensors then have the clients as leading axis.

        What is computed of a client is computed along the last axis. `state` has the weights and the mask that clients were sent, without
        the method's memory: this may run where clients are.
        """
        return message

    def update(self, state: State, mean: Means, round: Round, rng: Rng) -> State:
        """Return the next state from the means over clients, weighted by p_k = n_k / Σ n_j."""
        return state.with_values(mean["weights"])

    def published(self, exchange: Exchange) -> Exchange:
        """Return the exchange as the paper's formula for this method charges it, if that differs from what is sent."""
        return exchange

    def overhead(self, round: Round, active: float, activations: float) -> float:
        """Return F_o, the paper's overhead per forward pass of a batch, for this many `active` parameters and stored `activations`."""
        return 0.0

    def belief(self, state: State) -> Tensor | None:
        """Return how good the method thinks each link `[P]` or arm `[U]` is, in [0, 1], if it has an opinion."""
        return None

    def remarks(self, before: State, after: State, round: Round) -> Mapping[str, float]:
        """Return further numbers about an outer round, for topology.jsonl."""
        return {}


class Sparse(Method):
    """Federated averaging on a mask of the target density, drawn at random with exactly K^l links per layer."""

    dense: ClassVar[bool] = False
    topology: ClassVar[str] = "random, never changes"

    def steady(self) -> str | None:
        return "its mask never changes"

    def initial_weights(self, setup: Setup, counts: Sequence[int]) -> Tensor:
        return setup.scaled_weights(counts)

    def initial_mask(self, setup: Setup) -> Mask:
        layout, device = setup.layout, setup.weights.device
        if setup.init_mask == "given":
            return given_mask(setup, self.density)
        if setup.init_mask == "magnitude":
            return Mask.top(setup.weights[: layout.links].abs(), setup.counts(self.density), layout.sizes)
        return Mask.top(random.uniform(setup.rng("initial mask"), layout.arms, device), setup.counts(self.density), layout.sizes)


def given_mask(setup: Setup, density: float) -> Mask:
    """Return the mask of the initial weights: the largest links if there are too many; all, and random others, if too few."""
    layout, sizes = setup.layout, setup.layout.sizes
    drawn = random.uniform(setup.rng("initial mask"), layout.arms, setup.weights.device)
    shown = sizes.picked(sizes.touched(setup.shown))
    strength = torch.where(shown, sizes.scored(setup.weights[: layout.links].abs()), drawn - 1)
    return Mask.top(strength, setup.shown_counts(density), sizes)


class Redrawn(Sparse):
    """Federated averaging on a mask that outer rounds redraw with `round.targets` links per layer."""

    def steady(self) -> str | None:
        return None


class Scored(Redrawn):
    """New masks contain the links with the best scores."""

    scope: Annotated[
        Literal["layer", "global"],
        Field(description="links compete within their layer, which keeps its number, or across all layers"),
    ] = "layer"

    def best(self, scores: Tensor, round: Round, sizes: tuple[int, ...]) -> Mask:
        """Return the mask of the largest `scores [P]`, or of arms `[U]`, with as many links as the next mask needs."""
        if self.scope == "global":
            return Mask.top_of_all(scores, sum(round.targets), sizes)
        return Mask.top(scores, round.targets, sizes)
