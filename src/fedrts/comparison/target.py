"""The cost of reaching an accuracy: the first round whose mean over ten rounds reaches it, and everything spent until then."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

WINDOW = 10
"""Rounds over which an accuracy is averaged."""

History = Sequence[Mapping[str, Any]]
"""The lines of history.jsonl."""


@dataclass(frozen=True)
class Milestone:
    """A run up to a round: mean accuracy of the last rounds, and bytes (both ways) and FLOPs so far, over all clients."""

    round: int
    accuracy: float
    """Or another metric, where that was asked for."""
    bytes: int
    flops: float


def smoothed(history: History, window: int = WINDOW, key: str = "accuracy") -> list[Milestone]:
    """Return a point for every evaluated round from the `window`-th on: the mean of the evaluations in the last `window` rounds.

    The cost of a set-up (round −1) is part of every point's. `key` is another measure in place of the accuracy.
    """
    points = []
    sent, flops = 0, 0.0
    for number, line in enumerate(history):
        sent += line["upload_bytes"] + line["download_bytes"]
        flops += line["flops"]
        if line.get(key) is None or line["round"] + 1 < window:
            continue
        recent = (earlier for earlier in history[max(0, number - window + 1) : number + 1] if earlier["round"] > line["round"] - window)
        values = [earlier[key] for earlier in recent if earlier.get(key) is not None]
        points.append(Milestone(line["round"], average(values), sent, flops))
    return points


def average(values: Sequence[float]) -> float:
    """Return a mean summed in the same order as in summary.json: another order could make a run miss its own accuracy."""
    return sum(values) / len(values)


def cost_to_target(
    history: History, target: float, window: int = WINDOW, key: str = "accuracy", lower_is_better: bool = False
) -> Milestone | None:
    """Return the first point that reaches `target`; None if none does."""
    sign = -1 if lower_is_better else 1
    return next((point for point in smoothed(history, window, key) if sign * point.accuracy >= sign * target), None)
