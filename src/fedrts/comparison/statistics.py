"""Means over seeds and their uncertainty."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

FEW_PAIRS = 5
"""Pairs below which a test can hardly find anything."""
_NOISE = 1e-12
"""Relative spread that is rounding and no spread."""


@dataclass(frozen=True)
class SampleMean:
    """A mean over seeds; `error` is its standard error, None for a single value."""

    value: float
    error: float | None
    count: int


@dataclass(frozen=True)
class Difference:
    """The mean of paired differences; `p` is None without a test: one pair, or differences without spread."""

    mean: SampleMean
    p: float | None


def mean_of(values: Sequence[float]) -> SampleMean:
    """Return mean and standard error, s / √n with s² over n − 1."""
    count = len(values)
    _, exponent = math.frexp(max(map(abs, values)))
    scaled = [math.ldexp(value, -exponent) for value in values]  # by a power of 2: exact, and no square of a perplexity overflows
    mean = math.fsum(scaled) / count
    if count < 2:
        return SampleMean(math.ldexp(mean, exponent), None, count)
    variance = math.fsum((value - mean) ** 2 for value in scaled) / (count - 1)
    return SampleMean(math.ldexp(mean, exponent), math.ldexp(math.sqrt(variance / count), exponent), count)


def paired(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Difference | None:
    """Paired two-sided t-test of `ours − theirs` over the common seeds; None without any."""
    seeds = sorted(ours.keys() & theirs.keys())
    if not seeds:
        return None
    mean = mean_of([ours[seed] - theirs[seed] for seed in seeds])
    if mean.error is None or mean.error <= _NOISE * abs(mean.value):
        return Difference(mean, None)
    return Difference(mean, student_p(mean.value / mean.error, mean.count - 1))


def holm(values: Sequence[float]) -> list[float]:
    """Holm's correction for several tests: the k-th smallest of m p-values times m − k + 1, at most 1 and not below the one before."""
    corrected, largest = [0.0] * len(values), 0.0
    for rank, place in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        largest = max(largest, min(1.0, (len(values) - rank) * values[place]))
        corrected[place] = largest
    return corrected


def student_p(t: float, freedom: int) -> float:
    """Return P(|T| ≥ |t|) of Student's t with this many degrees of freedom."""
    from scipy.special import stdtr

    return float(2 * stdtr(freedom, -abs(t)))
