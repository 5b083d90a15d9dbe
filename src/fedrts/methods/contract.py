"""The contract between methods and everything that runs them: exchanges are data.

A round is a list of exchanges (usually one). An exchange says what travels down, what a client does, what travels up.
Programs never travel: a client builds its exchange from the experiment, the round and the mask it holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from fedrts.sparse import budget
from fedrts.sparse.cost import Book
from fedrts.sparse.layout import Layout
from fedrts.sparse.mask import Mask
from fedrts.sparse.schedule import Schedule
from fedrts.sparse.topk import by_layer
from fedrts.wire.fields import FeedsBack, Field, Indices, OnOwnMask, Values
from fedrts.wire.value_types import ValueType

_FEW = 0.01
"""Share of links that may be 0 in a dense model."""
Rng = Callable[[str], int]
"""The key (see `sparse.random`) of a named purpose in this round."""


@dataclass(frozen=True)
class Round:
    """What the server and every client know about a round before it starts."""

    index: int
    """t, counted from 0; -1 is the set-up before round 0, held with round 0's clients."""
    outer: bool
    """May the topology change?"""
    frozen: bool
    """t ≥ T_end (after its outer round, where it is one): the topology never changes again."""
    counts: tuple[int, ...]
    """K^l: active links in each layer, counted in the mask."""
    quota: tuple[int, ...]
    """Q^l_t: links of each layer up for exchange."""
    layout: Layout
    outers: int = 0
    """Outer rounds before this one."""
    exchange: int = 0
    """Which of the round's exchanges this is."""
    fewer: tuple[int, ...] | None = None
    """Links of each layer in the next mask, where the density falls with this round."""

    @staticmethod
    def of(index: int, schedule: Schedule, mask: Mask, layout: Layout, exchange: int = 0) -> Round:
        targets = schedule.targets(index, mask.counts)
        return Round(
            index=index,
            outer=schedule.is_outer(index),
            frozen=schedule.is_frozen(index),
            counts=mask.counts,
            quota=schedule.quota(index, mask.counts, mask.sizes),
            layout=layout,
            outers=schedule.outers_before(index),
            exchange=exchange,
            fewer=None if targets == mask.counts else targets,
        )

    @property
    def targets(self) -> tuple[int, ...]:
        """Links of each layer in the next mask: K^l, or fewer in an outer round of a falling density (`topology.density_start`)."""
        return self.counts if self.fewer is None else self.fewer

    @property
    def core(self) -> tuple[int, ...]:
        """κ^l, the links of each layer that count as important: K^l − Q^l_t, or the targets minus Q^l_t."""
        return tuple(target - quota for target, quota in zip(self.targets, self.quota, strict=True))

    @property
    def outgoing(self) -> tuple[int, ...]:
        """K^l − κ^l, the links of each layer to drop before Q^l_t are grown: Q^l_t, plus those that do not fit the next mask."""
        return tuple(active - core for active, core in zip(self.counts, self.core, strict=True))


Scalar = Tensor | float
"""One of a client, or a tensor with one of each client."""


class Influence(Protocol):
    """An addition to a client's training besides its loss. Weights may have leading axes for several clients.

    Whatever changes from round to round is in the `marks [N_all]`, so that a program made for an influence serves an equal one.
    """

    def pull(self, weights: Tensor, marks: Tensor) -> Tensor:
        """Return the addition to the gradient: `[..., N_all]` → `[..., N_all]`."""
        ...

    def rate(self, weights: Tensor, marks: Tensor, step: Scalar, steps: Scalar, rate: Scalar, initial: float) -> Scalar:
        """Return a step's learning rate `[...]`, given this round's `rate` and the experiment's `initial` rate."""
        ...


@dataclass(frozen=True)
class Train:
    """Masked local training over the epochs of the experiment, or a part of them; changes the client's `weights`."""

    start: float = 0.0
    stop: float = 1.0
    """Shares of the epochs, rounded down: `Train(stop=0.5)` and `Train(start=0.5)` together are all of them."""
    record: str | None = None
    """Tensor `[P]` that receives the mean over steps of the squared, unmasked gradient."""
    influence: Influence | None = None
    marks: Callable[[Tensor, Mask], Tensor] | None = None
    """What the influence goes by `[N_all]`, of the parameters `[N_all]` as the client received them, and their mask."""

    def marked(self, received: Tensor, mask: Mask) -> Tensor:
        """The marks, or zeros."""
        return self.marks(received, mask) if self.marks else torch.zeros_like(received)

    def flops(self, sparse: float, dense: float) -> float:
        """Return a sample's FLOPs if a forward pass takes `sparse` on the mask and `dense` off it; a backward pass counts as two."""
        return sparse + 2 * dense if self.record else 3 * sparse


@dataclass(frozen=True)
class ProbeGradient:
    """The unmasked gradient `[P]` after training, into the client's tensor `into`.

    Changes nothing else: no step, no BatchNorm statistics, no data order.
    """

    into: str = "gradient"
    batches: Literal["one", "all"] = "one"
    """On one batch, or the mean over all of the client's data."""
    temperature: float = 1.0
    """The model's outputs are divided by this."""

    def flops(self, sparse: float, dense: float) -> float:
        return sparse + 2 * dense


@dataclass(frozen=True)
class ProbeCurvature:
    """The product `[P]` of the links' Hessian with the tensor `along [P]`, averaged over the data of `ProbeGradient(batches="all")`."""

    along: str
    into: str = "curvature"
    temperature: float = 1.0

    def flops(self, sparse: float, dense: float) -> float:
        return 6 * dense  # a gradient, and the gradient of it


@dataclass(frozen=True)
class Calibrate:
    """BatchNorm statistics of each candidate mask: `passes` over the client's data without a step, into `into [C · statistics]`."""

    masks: str
    """Tensor bool `[C, P]`."""
    into: str = "statistics"
    passes: int = 1

    def flops(self, sparse: float, dense: float) -> float:
        """Return the FLOPs per sample and candidate."""
        return sparse


@dataclass(frozen=True)
class Evaluate:
    """Mean loss of each candidate mask on the client's training data, into `into [C]`."""

    masks: str
    statistics: str | None = None
    """Tensor `[C · statistics]` with which BatchNorm normalises; None: with those that the client received."""
    into: str = "losses"

    def flops(self, sparse: float, dense: float) -> float:
        """Return the FLOPs per sample and candidate."""
        return sparse


@dataclass(frozen=True)
class Judge:
    """Metrics of the received model on the client's held-out rows, into `into [metrics]`; trains nothing."""

    metrics: tuple[str, ...]
    """Their names, in the order in which they travel."""
    into: str = "metrics"

    def flops(self, sparse: float, dense: float) -> float:
        return 0.0  # evaluation is not part of what training costs


@dataclass(frozen=True)
class Rewire:
    """The client's own new mask with the round's targets: `choose(tensors, mask)` → (kept, new); weights off `kept` become 0.

    `tensors` are the client's own by name, with the weights as it got them under `received`.
    """

    choose: Callable[[Mapping[str, Tensor], Mask], tuple[Mask, Mask]]

    def flops(self, sparse: float, dense: float) -> float:
        return 0.0


Step = Train | ProbeGradient | ProbeCurvature | Calibrate | Evaluate | Judge | Rewire


@dataclass(frozen=True)
class Exchange:
    """One message down, a client's steps, one message up."""

    down: Mapping[str, Field]
    steps: tuple[Step, ...]
    up: Mapping[str, Field]

    def with_values_as(self, type: ValueType, feedback: bool = False, down_type: ValueType | None = None) -> Exchange:
        """This exchange with the weights in a shorter type, downloads in one of their own, where the method does not say one itself.

        `feedback`: uploads on the common mask that lose something in it have error feedback.
        """

        def typed(entry: Field, type: ValueType) -> Field:
            model = isinstance(entry, OnOwnMask) or (isinstance(entry, Values) and entry.on == "mask")
            free = model and not (isinstance(entry, Values) and entry.fixed)
            if isinstance(entry, Values | OnOwnMask) and free and entry.of == "weights" and entry.lossless:
                return replace(entry, type=type)
            return entry

        down = {name: typed(entry, down_type or type) for name, entry in self.down.items()}
        up = {name: typed(entry, type) for name, entry in self.up.items()}
        if feedback and isinstance(weights := up.get("weights"), Values) and not weights.fixed and not weights.lossless:
            up["weights"] = replace(weights, feedback=True)
        return Exchange(down, self.steps, up)

    def with_whole_uploads(self) -> Exchange:
        """Return this exchange with weights that clients do not round; they are rounded later, see `client.summing`."""

        def whole(entry: Field) -> Field:
            return Values(entry.of, entry.on, entry.copies) if isinstance(entry, Values) else entry

        return Exchange(self.down, self.steps, {name: whole(entry) for name, entry in self.up.items()})

    @property
    def no_sum(self) -> str | None:
        """Return why the uploads are not a sum of bounded numbers on a mask that all share; None if they are."""
        if "weights" not in self.down or "weights" not in self.up:
            return "its clients exchange other numbers than weights"
        if len(self.down) > 1:
            return "its clients are sent more than weights"
        for name, entry in self.up.items():
            if isinstance(entry, Indices):
                if entry.values:
                    return f"its clients upload '{name}' with values, which have no bound"
            elif not isinstance(entry, Values):
                return f"its clients upload '{name}' on masks of their own"
            elif name != "weights" or entry.on != "mask":
                return f"its clients upload '{name}', numbers without a bound"
        return None

    @property
    def fed_back(self) -> FeedsBack | None:
        """Return the upload's weights field if clients remember its rounding error."""
        weights = self.up.get("weights")
        return weights if isinstance(weights, FeedsBack) and weights.feedback else None

    def charged(self, book: Book) -> tuple[float, float]:
        """Return bytes (down, up) by an accounting on paper."""
        down, up = (sum(entry.charged(book) for entry in way.values()) for way in (self.down, self.up))
        return down, up

    def then(self, *steps: Step, **up: Field) -> Exchange:
        """Return this exchange with further steps and further fields in the upload."""
        return Exchange(self.down, self.steps + steps, {**self.up, **up})


class Means(dict[str, Tensor]):
    """Weighted means over the clients of an exchange by name: Σ p_k x_k with p_k = n_k / Σ n_j."""

    def __init__(self, tensors: Mapping[str, Tensor], clients: int = 1, samples: int = 1) -> None:
        super().__init__(tensors)
        self.clients = clients
        """How many replies counted."""
        self.samples = samples
        """Σ n_k of those."""


@dataclass(frozen=True)
class State:
    """Everything that the server keeps between rounds, and that a checkpoint holds."""

    values: Tensor
    """`[A + n - P]`: the weights on the mask and everything that is never pruned."""
    mask: Mask
    memory: Mapping[str, Tensor] = field(default_factory=dict)
    """The method's own tensors by name."""

    @staticmethod
    def of(weights: Tensor, mask: Mask) -> State:
        """Return the state with those of `weights [n]` that are on the mask."""
        return State(mask.compact(weights), mask)

    @cached_property
    def weights(self) -> Tensor:
        """The weights `[n]`, exactly zero outside the mask."""
        return self.mask.expand(self.values)

    def __getitem__(self, name: str) -> Tensor:
        return self.memory[name]

    def remember(self, **tensors: Tensor) -> State:
        return replace(self, memory={**self.memory, **tensors})

    def forget(self, *names: str) -> State:
        return replace(self, memory={name: tensor for name, tensor in self.memory.items() if name not in names})

    def with_values(self, values: Tensor) -> State:
        """Set new weights on the current mask."""
        return replace(self, values=values)

    def with_mask(self, mask: Mask) -> State:
        """Set a new topology: W ← W ⊙ m. A link that becomes active starts at 0."""
        return replace(self, values=mask.compact(self.weights), mask=mask)

    def moved(self, weights: Tensor, mask: Mask) -> State:
        """Set new weights `[n]`, keeping those on a new mask."""
        return replace(self, values=mask.compact(weights), mask=mask)

    def in_layers(self, sizes: Sequence[int]) -> State:
        """Return the state with a mask that knows the arms of its layers, which a file does not store."""
        return replace(self, mask=Mask(self.mask.bits, sizes))

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
    module: nn.Module = field(default_factory=nn.Module)
    """The model with its initial weights; to be copied, never changed."""
    samples: int = 0
    """Σ n_k over the whole federation."""
    budget: str = "all"
    """Does the target density count over `all` parameters or over the `prunable` ones?"""
    layer_density: str = "erk"
    init_mask: str = "random"
    given: Tensor | None = None
    """The mask bool `[P]` that goes with the weights; None: what is not 0 is on it."""
    init_scale: str = "dense"
    density_start: float | None = None
    """Density of the first mask, where it falls from there to the target."""

    def scaled_weights(self, counts: Sequence[int]) -> Tensor:
        """W_0 `[n]` for a model with K^l = `counts[l]` active links: unscaled, or with the links of layer l times √(n^l / K^l).

        A unit then sums as much variance over its K^l / n^l of the links as it would over all of them.
        """
        if self.init_scale == "dense":
            return self.weights
        gains = [math.sqrt(size / max(count, 1)) for size, count in zip(self.layout.sizes, counts, strict=True)]
        spread = torch.tensor(gains, dtype=self.weights.dtype).repeat_interleave(torch.tensor(self.layout.sizes))
        weights = self.weights.clone()
        weights[: self.layout.links] *= spread.to(weights.device)
        return weights

    @property
    def shown(self) -> Tensor:
        """The mask of the weights, bool `[P]`."""
        return self.weights[: self.layout.links] != 0 if self.given is None else self.given

    def shown_counts(self, density: float) -> list[int]:
        """K^l of the weights' mask, scaled to the starting density."""
        shown, sizes = by_layer(self.shown, self.layout.sizes), self.layout.sizes
        kept = budget.links_to_keep(self.layout, self.density_start or density, self.budget)
        if sum(shown) == kept and min(shown) > 0 and not sizes.grouped:
            return list(shown)
        return budget.proportional(sizes, kept, [max(count, 1) / size for count, size in zip(shown, sizes, strict=True)])

    @property
    def shows_mask(self) -> bool:
        """Whether the zeros of the weights look like a mask: more than a few, and no layer of zeros only."""
        shown = by_layer(self.shown, self.layout.sizes)
        return bool(shown) and min(shown) > 0 and sum(shown) < (1 - _FEW) * self.layout.links

    def counts(self, density: float) -> list[int]:
        """K^l: the links that each layer may have at first, for a run to this density."""
        last = budget.layer_counts(self.layout, density, self.budget, self.layer_density)
        if self.density_start is None:
            return last
        first = budget.layer_counts(self.layout, self.density_start, self.budget, self.layer_density)
        return budget.between(first, last, self.layout.sizes, self.layout.sizes)
