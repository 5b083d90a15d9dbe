"""Reducers replace the weighted mean when replies are not trusted. Add one with `@register("name")` or by import path.

A class registered with `@register("name")`, or named by import path, is all that a new one needs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from fedrts.client.order import Order
from fedrts.errors import InputError
from fedrts.registry import Registry
from fedrts.server.aggregate import Sums
from fedrts.sparse import random
from fedrts.wire.fields import Field, Largest, Values

if TYPE_CHECKING:
    from fedrts.server.guard import Guard


class Reducer(ABC):
    """Combine the clients' weights into one vector. Every exchange has a new reducer, which receives one client after the other."""

    mergeable: ClassVar[bool] = False
    """Whether results over parts of the clients can be merged, so that no process needs all clients' weights."""
    takes_own_masks: ClassVar[bool] = False
    """Whether clients may send weights on masks of their own."""
    is_sum: ClassVar[bool] = False
    """Whether sums over clients are enough for it, so that nobody need see one client's weights."""
    bounds_updates: ClassVar[bool] = False
    """Whether it bounds updates itself, so that the guard rejects none for their size."""
    remembers: ClassVar[bool] = False
    """Whether it needs to know how the last round moved the weights (`Order.drift`)."""

    @classmethod
    def of(cls, guard: Guard, order: Order) -> Reducer | None:
        """Make the reducer of an exchange, whose `order` has what the clients received; None: the weighted mean."""
        return cls()

    @abstractmethod
    def add(self, weights: Tensor, weight: int) -> None:
        """Add one client's weights on the mask, and its number of samples."""

    def merge(self, other: Any) -> None:
        """Merge another one of the same kind, over other clients."""
        raise NotImplementedError(f"{type(self).__name__} says mergeable = {self.mergeable} and has no merge")

    @abstractmethod
    def result(self) -> Tensor:
        """Return the combined weights."""


reducers: Registry[type[Reducer]] = Registry("reducer", base=Reducer)
register = reducers.register
names = reducers.names
get = reducers.get


Mixing = Callable[[Tensor, int, "Guard", int], Tensor]
"""Weights `[k, n]` of clients as fewer, or less different ones `[k', n]`.

The first number says how many of the n are parameters, the rest being statistics; the last is a key for whatever is random.
"""

mixings: Registry[Mixing] = Registry("mixing")


@mixings.register("none")
def unmixed(weights: Tensor, parameters: int, guard: Guard, key: int) -> Tensor:
    """Leave the weights as they are."""
    return weights


def few(trim: float, clients: int) -> int:
    """Return the number of clients in a share `trim`, rounded down: 0.29 of 100 is 29, despite floating point."""
    return int(trim * clients + 1e-9)


def those(trait: str) -> str:
    """Return the names of the reducers with a trait, for a remedy: `'mean' or 'clip'`."""
    return " or ".join(repr(name) for name in names() if getattr(get(name), trait))


def unlike(guard: Guard, trait: str) -> str | None:
    """Return the guard's setting that rules out a trait, as a user writes it; None if its reducer has the trait."""
    if mixings.get(guard.mixing) is not unmixed:
        return f"guard.mixing = '{guard.mixing}'"
    return None if getattr(get(guard.reducer), trait) else f"guard.reducer = '{guard.reducer}'"


def check_reducer(guard: Guard, fields: Mapping[str, Field]) -> None:
    """Refuse a guard whose reducer cannot combine uploads of these fields."""
    setting = unlike(guard, "takes_own_masks")
    if setting is not None and "weights" in fields and not isinstance(fields["weights"], Values | Largest):
        raise InputError(
            f"{setting} needs weights on one mask; this method's clients have masks of their own: use {those('takes_own_masks')}"
            + (", and guard.mixing = 'none'" if "mixing" in setting else "")
        )


def reduction(guard: Guard, order: Order) -> Reducer | None:
    """Return the reducer of the weights for an exchange; None for the mean."""
    if order.reference is None or order.values is None or "weights" not in order.exchange.up:
        return None
    check_reducer(guard, order.exchange.up)
    mixing, reducer = mixings.get(guard.mixing), get(guard.reducer).of(guard, order)
    return reducer if mixing is unmixed else Mixed(mixing, len(order.values) - order.frame.statistics, guard, order.frame.key, reducer)


@register("mean")
class Weighted(Reducer):
    """The mean weighted by sample counts."""

    mergeable = takes_own_masks = is_sum = True

    @classmethod
    def of(cls, guard: Guard, order: Order) -> None:
        return None


@register("clip")
@dataclass
class Clipped(Reducer):
    """The mean of updates clipped to a norm of `bound`: one client moves the model by at most p_k · bound."""

    mergeable = bounds_updates = True

    reference: Tensor
    parameters: int
    bound: float
    _sums: Sums = field(default_factory=Sums)

    @classmethod
    def of(cls, guard: Guard, order: Order) -> Clipped:
        assert order.values is not None
        return cls(order.values, len(order.values) - order.frame.statistics, guard.bound(order.reference_norm))

    def add(self, weights: Tensor, weight: int) -> None:
        update = weights.double() - self.reference
        update *= (self.bound / torch.linalg.vector_norm(update[: self.parameters])).clamp_(max=1.0)
        self._sums.add({"update": update}, weight)

    def merge(self, other: Clipped) -> None:
        self._sums.merge(other._sums)

    def result(self) -> Tensor:
        return (self.reference + self._sums.mean()["update"]).to(self.reference.dtype)


@register("trimmed_mean")
@dataclass
class Sorted(Reducer):
    """The coordinate-wise mean without the `trim` share at each end; half of them gives the median."""

    trim: float
    _held: list[Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, guard: Guard, order: Order) -> Sorted:
        return cls(guard.trim)

    def add(self, weights: Tensor, weight: int) -> None:
        self._held.append(weights)

    def result(self) -> Tensor:
        count = len(self._held)
        cut = min(few(self.trim, count), (count - 1) // 2)
        ordered = torch.stack(self._held).sort(0).values[cut : count - cut]
        return ordered.double().mean(0).to(ordered.dtype)


@register("median")
class Median(Sorted):
    """The coordinate-wise median."""

    @classmethod
    def of(cls, guard: Guard, order: Order) -> Median:
        return cls(0.5)


@dataclass
class Together(Reducer):
    """Combine all clients' updates into one; statistics are coordinate-wise medians."""

    reference: Tensor
    parameters: int
    trim: float
    drift: Tensor | None
    _held: list[Tensor] = field(default_factory=list)
    _weights: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, guard: Guard, order: Order) -> Together:
        assert order.values is not None
        return cls(order.values, len(order.values) - order.frame.statistics, guard.trim, order.drift)

    def add(self, weights: Tensor, weight: int) -> None:
        self._held.append(weights)
        self._weights.append(weight)

    def result(self) -> Tensor:
        held = torch.stack(self._held).double()
        shares = torch.tensor(self._weights, dtype=held.dtype, device=held.device) / sum(self._weights)
        n, reference = self.parameters, self.reference.double()
        update = self.reduced(held[:, :n] - reference[:n], shares)
        statistics = held[:, n:].quantile(0.5, dim=0) if held.shape[1] > n else held[0, n:]
        return torch.cat([reference[:n] + update, statistics]).to(self.reference.dtype)

    @abstractmethod
    def reduced(self, updates: Tensor, shares: Tensor) -> Tensor:
        """Reduce the clients' updates `[k, N]`, float64, to one `[N]`; `shares [k]` of their samples add up to 1."""


_STEPS = 32
"""Iterations of Weiszfeld's algorithm, which converges geometrically."""


def geometric_median(updates: Tensor, shares: Tensor) -> Tensor:
    """Return the point `[N]` with the smallest sum of distances to `updates [k, N]`, by smoothed Weiszfeld steps; `shares [k]` weigh
    them.
    """
    centre = shares @ updates
    least = 1e-6 * torch.linalg.vector_norm(updates, dim=1).median().clamp(min=1e-12)
    for _ in range(_STEPS):
        pull = shares / torch.linalg.vector_norm(updates - centre, dim=1).clamp(min=least)
        centre = (pull / pull.sum()) @ updates
    return centre


@register("geometric_median")
class GeometricMedian(Together):
    """The update with the smallest sum of distances to all others (RFA: Pillutla et al., 2022)."""

    def reduced(self, updates: Tensor, shares: Tensor) -> Tensor:
        return geometric_median(updates, shares)


@register("aligned")
class Aligned(Together):
    """The mean of updates without those of the `trim` share that point against the geometric median.

    The longest are cut to what the others do: at the quantile 1 − trim of norms. Every client counts the same. Where nobody points
    against the others, nobody is left out.
    """

    def reduced(self, updates: Tensor, shares: Tensor) -> Tensor:
        norms = torch.linalg.vector_norm(updates, dim=1, keepdim=True).clamp(min=1e-12)
        cut = updates * (norms.quantile(1 - self.trim) / norms).clamp(max=1.0)
        along = (updates / norms) @ geometric_median(cut, torch.full_like(shares, 1 / len(shares)))
        against = torch.zeros_like(along, dtype=torch.bool)
        against[along.topk(few(self.trim, len(along)), largest=False).indices] = True
        kept: Tensor = cut[(along >= 0) | ~against]
        return kept.mean(0)


@register("centred_clip")
class CentredClip(Together):
    """The mean of updates clipped to the median distance from the last round's (Karimireddy, He and Jaggi, 2021)."""

    remembers = True

    def reduced(self, updates: Tensor, shares: Tensor) -> Tensor:
        centre = torch.zeros_like(updates[0]) if self.drift is None else self.drift[: self.parameters].double()
        for _ in range(3):
            apart = updates - centre
            distances = torch.linalg.vector_norm(apart, dim=1).clamp(min=1e-12)
            centre = centre + (shares * (distances.median() / distances).clamp(max=1.0)) @ apart
        return centre


@register("multi_krum")
class MultiKrum(Together):
    """The mean of the updates with the nearest neighbours, without the `trim` share (Blanchard et al., 2017)."""

    def reduced(self, updates: Tensor, shares: Tensor) -> Tensor:
        chosen = self.lonely(updates).topk(self.kept(len(updates)), largest=False).indices
        return updates[chosen].mean(0)

    def lonely(self, updates: Tensor) -> Tensor:
        """Return Krum's score of every update: the sum of its squared distances to the k − f − 2 nearest others."""
        near = max(1, len(updates) - few(self.trim, len(updates)) - 2)
        distances = torch.cdist(updates, updates).square()
        distances.fill_diagonal_(torch.inf)
        return distances.topk(min(near, max(len(updates) - 1, 1)), largest=False).values.sum(1)

    def kept(self, clients: int) -> int:
        return clients - few(self.trim, clients)


@register("krum")
class Krum(MultiKrum):
    """The one update with the nearest neighbours (Blanchard et al., 2017)."""

    def kept(self, clients: int) -> int:
        return 1


@dataclass
class Mixed(Reducer):
    """Mix weights with each other before another reducer, or the mean, combines them."""

    mixing: Mixing
    parameters: int
    guard: Guard
    key: int
    reducer: Reducer | None
    _held: list[Tensor] = field(default_factory=list)

    def add(self, weights: Tensor, weight: int) -> None:
        self._held.append(weights)

    def result(self) -> Tensor:
        mixed = self.mixing(torch.stack(self._held), self.parameters, self.guard, self.key)
        if self.reducer is None:
            return mixed.double().mean(0).to(mixed.dtype)
        for row in mixed:
            self.reducer.add(row, 1)
        return self.reducer.result()


@mixings.register("bucketing")
def bucketing(weights: Tensor, parameters: int, guard: Guard, key: int) -> Tensor:
    """Means of random pairs: half as different, and at most twice the share of hostile ones (Karimireddy, He and Jaggi, 2022)."""
    order = random.permutation(random.key(key, "buckets"), len(weights)).to(weights.device)
    return torch.stack([weights[pair].double().mean(0).to(weights.dtype) for pair in order.split(2)])


@mixings.register("nearest")
def nearest(weights: Tensor, parameters: int, guard: Guard, key: int) -> Tensor:
    """For each client, the mean of it and its nearest neighbours, all but the `trim` share of clients (NNM: Allouah et al., 2023).

    Parameters tell who is near: statistics may be of any size.
    """
    places, kept = weights[:, :parameters].double(), len(weights) - few(guard.trim, len(weights))
    neighbours = torch.cdist(places, places).topk(kept, largest=False).indices
    return torch.stack([weights[some].double().mean(0).to(weights.dtype) for some in neighbours])
