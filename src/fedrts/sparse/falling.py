"""A density that falls over the outer rounds of a run, from that of the first mask to the target.

A curve is a function of progress: what is left of the way, from 1 at progress 0, the first outer round, to 0 at progress 1, the last one
before T_end. A function registered with `@register("name")`, or named by import path, is all that a new one needs:

    def square(progress):
        return (1 - progress) ** 2
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from fedrts.errors import InputError, reason
from fedrts.registry import Registry
from fedrts.sparse import budget
from fedrts.sparse.layout import Layout

DensityCurve = Callable[[float], float]

curves: Registry[DensityCurve] = Registry("density schedule")
register = curves.register
names = curves.names
get = curves.get


@register("cubic")
def cubic(progress: float) -> float:
    """Fall fast at first and slowly at the end (Zhu and Gupta, 2018; GraNet, Liu et al., 2021)."""
    return (1 - progress) ** 3


@register("cosine")
def cosine(progress: float) -> float:
    """Fall along half a cosine."""
    return (1 + math.cos(math.pi * progress)) / 2


@register("linear")
def linear(progress: float) -> float:
    """Fall by the same step in every outer round."""
    return 1 - progress


def left(curve: str, progress: float) -> float:
    """Return the remaining share of the way; 0 once progress is 1."""
    if progress >= 1:
        return 0.0
    try:
        found = float(get(curve)(progress))
    except (TypeError, ValueError, ArithmeticError) as error:  # a user's own
        raise InputError(f"topology.density_schedule = '{curve}' gives no number for {progress:g}: {reason(error)}") from error
    if not 0 <= found <= 1:
        raise InputError(f"topology.density_schedule = '{curve}' gives {found} for {progress:g}: what is left of the way is 0 to 1")
    return found


@dataclass(frozen=True)
class Fall:
    """The fall from density `start` to `end` along a curve, with layers of `layout` in the proportions of a budget."""

    start: float
    end: float
    curve: str
    layout: Layout
    budget: str = "all"
    layer_density: str = "erk"

    def density(self, progress: float) -> float:
        """d = d_end + (d_start − d_end) · left, written so that both ends are exact."""
        share = left(self.curve, progress)
        return share * self.start + (1 - share) * self.end

    def targets(self, progress: float, counts: Sequence[int]) -> tuple[int, ...]:
        """Links of each layer in the next mask, where it has `counts` now: what the budget gives at this density.

        No layer gains links, and none falls below what it has in the end. A mask whose layers are not those of the budget (it was chosen
        from a pool, or links compete over all layers) gets as near as that allows, and to the same number of links in all.
        """
        least = [min(count, last) for count, last in zip(counts, self._last, strict=True)]
        return tuple(budget.between(self._counts(self.density(progress)), least, counts, self.layout.sizes))

    @cached_property
    def _last(self) -> list[int]:
        return self._counts(self.end)

    def _counts(self, density: float) -> list[int]:
        return budget.layer_counts(self.layout, density, self.budget, self.layer_density)
