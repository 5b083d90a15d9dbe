"""Learning rates to try: a few around the experiment's own, and more beyond the best; pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

AUTO = "auto"
"""Rates that nobody named."""
STEP = 3.0
"""The factor from one rate to the next; finer ones would cost more trials."""
MOST = 7
"""Rates tried for one cell; the farthest is 243 times, or a 243rd of, the experiment's own."""

Edge = Literal["smallest", "largest", "only one"]


def around(rate: float) -> tuple[float, ...]:
    """Return the rates to begin with; the experiment's own comes first, so that it wins ties."""
    return rate, _rounded(rate / STEP), _rounded(rate * STEP)


def best(tried: Mapping[float, float | None], lower_is_better: bool = False) -> float | None:
    """Return the rate with the best score, the first of equal ones; None: every trial failed, which ranks below any score."""
    known = {rate: score for rate, score in tried.items() if score is not None}
    choose = min if lower_is_better else max
    return choose(known, key=lambda rate: known[rate]) if known else None


def edge(tried: Mapping[float, float | None], rate: float | None) -> Edge | None:
    """Return the end of the tried rates at which `rate` is; None: it lies between two others."""
    if rate is None or min(tried) < rate < max(tried):
        return None
    return "only one" if len(tried) == 1 else "smallest" if rate == min(tried) else "largest"


def wider(tried: Mapping[float, float | None], lower_is_better: bool = False) -> float | None:
    """Return the rate to try next; None: the best lies between two others, or enough were tried.

    Where nothing could be trained with, it is a smaller one: rates that are too large diverge.
    """
    if len(tried) >= MOST:
        return None
    found = best(tried, lower_is_better)
    if found is None or found == min(tried):
        return _rounded(min(tried) / STEP)
    return _rounded(max(tried) * STEP) if found == max(tried) else None


def _rounded(rate: float) -> float:
    """Round to three digits: 0.3, where floating point gives 0.30000000000000004."""
    return float(f"{rate:.3g}")
