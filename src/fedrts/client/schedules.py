"""Learning rates over the rounds of a run: what share of `train.lr` a round trains with.

A schedule is a function of (progress, end): from 1 at progress 0, the first round, to `end` at progress 1, the last.
"""

from __future__ import annotations

import math
from collections.abc import Callable


def constant(progress: float, end: float) -> float:
    """Always the whole rate."""
    return 1.0


def cosine(progress: float, end: float) -> float:
    """Half a cosine."""
    return end + (1 - end) * (1 + math.cos(math.pi * progress)) / 2


def step(progress: float, end: float) -> float:
    """Two drops by the same factor, after a half and after three quarters of the rounds."""
    drops = (progress >= 0.5) + (progress >= 0.75)
    return math.pow(end, drops / 2)


def exponential(progress: float, end: float) -> float:
    """The same factor in every round."""
    return math.pow(end, progress)


SCHEDULES: dict[str, Callable[[float, float], float]] = {f.__name__: f for f in (constant, cosine, step, exponential)}


def share(schedule: str, index: int, rounds: int, end: float) -> float:
    """The share of the rate in round `index` of 0 … rounds − 1, and the last one's in later rounds; the set-up (−1) counts as round 0."""
    return SCHEDULES[schedule](min(max(index, 0) / max(rounds - 1, 1), 1.0), end)
