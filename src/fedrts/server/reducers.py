"""Reducers: what takes the place of the weighted mean where replies are not trusted.

A class registered with `@register("name")`, or named by import path, is all that a new one needs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from fedrts.client.order import Order
from fedrts.errors import InputError
from fedrts.registry import Registry
from fedrts.server.aggregate import Sums
from fedrts.wire.fields import Field, Largest, Values

if TYPE_CHECKING:
    from fedrts.server.guard import Guard


class Reducer(ABC):
    """Makes one vector of the clients' weights: made anew for every exchange, told of one client after the other."""

    mergeable: ClassVar[bool] = False
    """Can what several came to over shares of the clients be merged, so that no place needs every client's weights?"""
    takes_own_masks: ClassVar[bool] = False
    """Can it do with clients whose weights are on masks of their own?"""
    is_sum: ClassVar[bool] = False
    """Is it what sums come to, so that nobody need see a client's weights?"""
    bounds_updates: ClassVar[bool] = False
    """Does it bound updates itself, so that the guard need not reject those above its bound?"""

    @classmethod
    def of(cls, guard: Guard, order: Order) -> Reducer | None:
        """The one for an exchange, whose `order` has what the clients were sent; None: the weighted mean."""
        return cls()

    @abstractmethod
    def add(self, weights: Tensor, weight: int) -> None:
        """One client's weights on the mask, and its number of samples."""

    def merge(self, other: Any) -> None:
        """Take in another one of the same kind, of other clients."""
        raise NotImplementedError(f"{type(self).__name__} says mergeable = {self.mergeable} and has no merge")

    @abstractmethod
    def result(self) -> Tensor:
        """What all of them come to."""


reducers: Registry[type[Reducer]] = Registry("reducer", base=Reducer)
register = reducers.register
names = reducers.names
get = reducers.get


def those(trait: str) -> str:
    """The names of the reducers with a trait, for a remedy: `'mean' or 'clip'`."""
    return " or ".join(repr(name) for name in names() if getattr(get(name), trait))


def check_reducer(guard: Guard, fields: Mapping[str, Field]) -> None:
    """Can the guard's reducer make one model of uploads of these fields?"""
    if not get(guard.reducer).takes_own_masks and "weights" in fields and not isinstance(fields["weights"], Values | Largest):
        raise InputError(
            f"guard.reducer = '{guard.reducer}' needs weights on one mask; this method's clients have masks of their own: "
            f"use {those('takes_own_masks')}"
        )


def reduction(guard: Guard, order: Order) -> Reducer | None:
    """The reducer of the weights that the guard asks for in an exchange; None for the mean."""
    if order.reference is None or order.values is None or "weights" not in order.exchange.up:
        return None
    check_reducer(guard, order.exchange.up)
    return get(guard.reducer).of(guard, order)


@register("mean")
class Weighted(Reducer):
    """The mean weighted by numbers of samples: what sums come to by themselves."""

    mergeable = takes_own_masks = is_sum = True

    @classmethod
    def of(cls, guard: Guard, order: Order) -> None:
        return None


@register("clip")
@dataclass
class Clipped(Reducer):
    """The mean of updates that are scaled down to a norm of at most `bound`: one client moves the model by p_k · bound at most."""

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
    """Per coordinate, the mean of the clients' values without the `trim` share at each end; half of them gives the median."""

    trim: float
    _held: list[Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, guard: Guard, order: Order) -> Sorted:
        return cls(guard.trim)

    def add(self, weights: Tensor, weight: int) -> None:
        self._held.append(weights)

    def result(self) -> Tensor:
        count = len(self._held)
        cut = min(int(self.trim * count), (count - 1) // 2)
        ordered = torch.stack(self._held).sort(0).values[cut : count - cut]
        return ordered.double().mean(0).to(ordered.dtype)


@register("median")
class Median(Sorted):
    """Per coordinate, the median of the clients' values."""

    @classmethod
    def of(cls, guard: Guard, order: Order) -> Median:
        return cls(0.5)
