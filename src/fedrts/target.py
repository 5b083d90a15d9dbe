"""Cost to target: the first round from which on a run is as good as a dense one came to be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

WINDOW = 10
"""Rounds of the running mean."""


@dataclass(frozen=True)
class Cost:
    """What a run had spent when it reached its target."""

    rounds: int
    bytes: int
    flops: float


def running_means(history: Sequence[Mapping[str, Any]], key: str = "accuracy") -> list[tuple[int, float]]:
    """(round, mean of the evaluations in it and the nine rounds before), for every evaluated round from the tenth on."""
    values = {line["round"]: line[key] for line in history if line["round"] >= 0 and line.get(key) is not None}
    windows = ((index, [values[past] for past in range(index - WINDOW + 1, index + 1) if past in values]) for index in values)
    return [(index, fmean(window)) for index, window in windows if index >= WINDOW - 1]


def target_of(history: Sequence[Mapping[str, Any]], key: str = "accuracy") -> float | None:
    """What others have to reach: the running mean in the last round; of fewer than ten rounds, the mean of all."""
    last = [line[key] for line in history[-WINDOW:] if line["round"] >= 0 and line.get(key) is not None]
    return fmean(last) if last else None


def cost_to(history: Sequence[Mapping[str, Any]], target: float, key: str = "accuracy", lower_is_better: bool = False) -> Cost | None:
    """Rounds, bytes (both ways, the set-up included) and FLOPs until the running mean reaches `target`; None: not reached."""
    for index, value in running_means(history, key):
        if value <= target if lower_is_better else value >= target:
            spent = [line for line in history if line["round"] <= index]
            sent = sum(line["upload_bytes"] + line["download_bytes"] for line in spent)
            return Cost(index + 1, sent, sum(line["flops"] for line in spent))
    return None
