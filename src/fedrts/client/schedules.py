"""Learning-rate schedules: the share of `train.lr` that a round trains with.

A schedule is a function of (progress, end): from 1 at progress 0, the first round, to `end` at progress 1, the last. A function
registered with `@register("name")`, or named by import path, is all that a new one needs:

    def linear(progress, end):
        return 1 + (end - 1) * progress
"""

from __future__ import annotations

import math
from collections.abc import Callable

from fedrts.errors import InputError, reason
from fedrts.registry import Registry

Falling = Callable[[float, float], float]

schedules: Registry[Falling] = Registry("schedule")
register = schedules.register
names = schedules.names
get = schedules.get


@register("constant")
def constant(progress: float, end: float) -> float:
    """Keep the full rate."""
    return 1.0


@register("cosine")
def cosine(progress: float, end: float) -> float:
    """Fall along half a cosine."""
    return end + (1 - end) * (1 + math.cos(math.pi * progress)) / 2


@register("step")
def step(progress: float, end: float) -> float:
    """Drop twice by the same factor, after half and after three quarters of the rounds."""
    drops = (progress >= 0.5) + (progress >= 0.75)
    return math.pow(end, drops / 2)


@register("exponential")
def exponential(progress: float, end: float) -> float:
    """Fall by the same factor in every round."""
    return math.pow(end, progress)


def share(schedule: str, index: int, rounds: int, end: float) -> float:
    """Return the share in round `index` of 0 … rounds − 1; later rounds keep the last one's, and the set-up (−1) counts as round 0."""
    progress = min(max(index, 0) / max(rounds - 1, 1), 1.0)
    try:
        found = float(get(schedule)(progress, end))
    except (TypeError, ValueError, ArithmeticError) as error:  # a user's own
        raise InputError(f"train.schedule = '{schedule}' gives no number for ({progress:g}, {end:g}): {reason(error)}") from error
    if not 0 <= found < math.inf:
        raise InputError(f"train.schedule = '{schedule}' gives {found} for ({progress:g}, {end:g}): a share of the rate is at least 0")
    return found
