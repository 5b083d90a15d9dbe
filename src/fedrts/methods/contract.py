"""The contract between methods and everything that runs them: exchanges are data.

A round is a list of exchanges (usually one). An exchange says what travels down, what a client does, what travels up.
Programs never travel: a client builds its exchange from the experiment, the round and the mask it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from fedrts.sparse import budget
from fedrts.sparse.layout import Layout
from fedrts.sparse.mask import Mask
from fedrts.sparse.schedule import Schedule
from fedrts.wire.fields import Field, Values
from fedrts.wire.quantise import ValueType

Rng = Callable[[str], int]
"""The key (see `sparse.random`) of a named purpose in this round."""


@dataclass(frozen=True)
class Round:
    """What is known of a round before it starts, on the server and on every client alike."""

    index: int
    """t, counted from 0; -1 is the set-up before round 0, held with round 0's clients."""
    outer: bool
    """May the topology change?"""
    frozen: bool
    """t ≥ T_end: the topology never changes again."""
    counts: tuple[int, ...]
    """K^l: active links in each layer, counted in the mask."""
    quota: tuple[int, ...]
    """Q^l_t: links of each layer up for exchange."""
    exchange: int = 0
    """Which of the round's exchanges this is."""

    @staticmethod
    def of(index: int, schedule: Schedule, mask: Mask, exchange: int = 0) -> Round:
        return Round(
            index=index,
            outer=schedule.is_outer(index),
            frozen=index >= schedule.end,
            counts=mask.counts,
            quota=schedule.quota(index, mask.counts, mask.sizes),
            exchange=exchange,
        )

    @property
    def core(self) -> tuple[int, ...]:
        """κ^l = K^l − Q^l_t: links of each layer that count as important."""
        return tuple(active - quota for active, quota in zip(self.counts, self.quota, strict=True))


@dataclass(frozen=True)
class Train:
    """Masked local training over the epochs of the experiment, or a part of them; changes the client's `weights`."""

    start: float = 0.0
    stop: float = 1.0
    """Shares of the epochs, rounded down: `Train(stop=0.5)` and `Train(start=0.5)` together are all of them."""
    record: str | None = None
    """Tensor `[P]` that receives the mean over steps of the squared, unmasked gradient."""


@dataclass(frozen=True)
class ProbeGradient:
    """The unmasked gradient `[P]` on one batch after training, into the client's tensor `into`.

    Changes nothing else: no step, no BatchNorm statistics, no data order.
    """

    into: str = "gradient"


@dataclass(frozen=True)
class Rewire:
    """A new mask of the client's own, with as many links per layer: `choose(tensors, mask)` → (kept, new); weights off `kept` become 0.

    `tensors` are the client's own by name, with the weights as it got them under `received`.
    """

    choose: Callable[[Mapping[str, Tensor], Mask], tuple[Mask, Mask]]


Step = Train | ProbeGradient | Rewire


@dataclass(frozen=True)
class Exchange:
    """One message down, a client's steps, one message up."""

    down: Mapping[str, Field]
    steps: tuple[Step, ...]
    up: Mapping[str, Field]

    def with_values_as(self, type: ValueType) -> Exchange:
        """This exchange with the weights in another type, both ways."""

        def typed(entry: Field) -> Field:
            return replace(entry, type=type) if isinstance(entry, Values) and entry.of == "weights" and entry.on == "mask" else entry

        down, up = ({name: typed(entry) for name, entry in way.items()} for way in (self.down, self.up))
        return Exchange(down, self.steps, up)

    def then(self, *steps: Step, **up: Field) -> Exchange:
        """This exchange with further steps and further fields in the upload."""
        return Exchange(self.down, self.steps + steps, {**self.up, **up})


@dataclass(frozen=True)
class State:
    """All that the server keeps between rounds; all that a checkpoint holds."""

    values: Tensor
    """`[A + n - P]`: the weights on the mask and everything that is never pruned."""
    mask: Mask
    memory: Mapping[str, Tensor] = field(default_factory=dict)
    """The method's own tensors by name."""

    @staticmethod
    def of(weights: Tensor, mask: Mask) -> State:
        """The state with those of `weights [n]` that are on the mask."""
        return State(mask.compact(weights), mask)

    @cached_property
    def weights(self) -> Tensor:
        """`[n]`, exactly zero outside the mask."""
        return self.mask.expand(self.values)

    def __getitem__(self, name: str) -> Tensor:
        return self.memory[name]

    def remember(self, **tensors: Tensor) -> State:
        return replace(self, memory={**self.memory, **tensors})

    def with_values(self, values: Tensor) -> State:
        """New weights on the current mask."""
        return replace(self, values=values)

    def with_mask(self, mask: Mask) -> State:
        """A new topology: W ← W ⊙ m. A link that becomes active starts at 0."""
        return replace(self, values=mask.compact(self.weights), mask=mask)

    def moved(self, weights: Tensor, mask: Mask) -> State:
        """New weights `[n]`, of which those on a new mask stay."""
        return replace(self, values=mask.compact(weights), mask=mask)

    def to(self, device: torch.device | str) -> State:
        memory = {name: tensor.to(device) for name, tensor in self.memory.items()}
        return State(self.values.to(device), self.mask.to(device), memory)


@dataclass(frozen=True)
class Setup:
    """What a method starts from."""

    layout: Layout
    weights: Tensor
    """W_0 `[n]`, dense."""
    input_shape: tuple[int, ...]
    rng: Rng
    budget: str = "all"
    """Does the target density count over `all` parameters or over the `prunable` ones?"""
    layer_density: str = "erk"
    init_mask: str = "random"

    def counts(self, density: float) -> list[int]:
        """K^l: the links that each layer may keep at this density."""
        kept = budget.links_to_keep(self.layout, density, self.budget)
        return budget.BUDGETS[self.layer_density]([entry.shape for entry in self.layout.layers], kept)
