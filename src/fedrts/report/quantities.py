"""Numbers from runs: means over seeds, curves against cost, the last ten rounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean, pstdev, stdev
from typing import TypeVar

from fedrts.comparison.target import average
from fedrts.report.model import Axis, Mean, Point
from fedrts.report.read import Line, Run
from fedrts.report.settings import Problem, Setting
from fedrts.tasks.metrics import Metric

T = TypeVar("T")

MOST_POINTS = 200
"""Most points of a curve; longer ones are thinned evenly, keeping the first and last point."""
LAST = 10


def metrics_of(problem: Problem) -> list[Metric]:
    """Return the metrics of a problem's models, the leading one first; finished runs state them best."""
    found: dict[str, Metric] = {}
    for run in sorted(problem.runs, key=lambda run: not run.finished):
        for metric in run.metrics:
            found.setdefault(metric.name, metric)
    return sorted(found.values(), key=lambda metric: not metric.leads_reports)


def axis_of(metric: Metric, values: Sequence[float] = ()) -> Axis:
    """Return the axis of a metric; errors that differ tenfold are on a logarithmic one."""
    wide = metric.lower_is_better and bool(values) and min(values) > 0 and max(values) > 10 * min(values)
    return Axis(f"test {metric.label}", metric.format, "log" if wide else "linear")


def mean(values: Sequence[float]) -> Mean | None:
    """Return mean and standard error (no error for one value)."""
    if not values:
        return None
    return Mean(fmean(values), stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None)


def over(setting: Setting, of: Callable[[Run], float | None]) -> Mean | None:
    """Return a quantity's mean over the runs of a setting that have it."""
    return mean([value for run in setting.runs if (value := of(run)) is not None])


def last_ten(run: Run, key: str) -> float | None:
    """Return the mean over the evaluations of the last ten rounds."""
    values = [line[key] for line in run.history[-LAST:] if line.get(key) is not None]
    return average(values) if values else None


def by_round(line: Line, sums: dict[str, float]) -> float:
    """Rounds played."""
    return float(line["round"] + 1)


def by_bytes(line: Line, sums: dict[str, float]) -> float:
    """Bytes sent so far."""
    return sums["bytes"]


def by_flops(line: Line, sums: dict[str, float]) -> float:
    """FLOPs spent so far."""
    return sums["flops"]


Along = Callable[[Line, dict[str, float]], float]


def curve(setting: Setting, value: Callable[[Line], float | None], along: Along = by_round) -> list[Point]:
    """Return means over a setting's runs at every round in which one of them has a value; x is a mean, too."""
    at: dict[int, list[tuple[float, float]]] = {}
    for run in setting.runs:
        sums = {"bytes": 0.0, "flops": 0.0}
        for line in run.history:
            sums["bytes"] += line["upload_bytes"] + line["download_bytes"]
            sums["flops"] += line["flops"]
            y = value(line)
            if y is not None and line["round"] >= 0:
                at.setdefault(line["round"], []).append((along(line, sums), float(y)))
    return [averaged(at[index]) for index in thinned(sorted(at))]


def averaged(pairs: Sequence[tuple[float, float]]) -> Point:
    """Return the point at the mean of (x, y) over runs."""
    made = mean([y for _, y in pairs])
    assert made is not None, "there is at least one run"
    return Point(sum(x for x, _ in pairs) / len(pairs), made.value, made.error, len(pairs))


def thinned(entries: Sequence[T], most: int = MOST_POINTS) -> list[T]:
    """Return at most this many entries, evenly spaced, including the first and the last."""
    if len(entries) <= most:
        return list(entries)
    return [entries[round(place * (len(entries) - 1) / (most - 1))] for place in range(most)]


def worst_decile(values: Sequence[float], lower_is_better: bool = False) -> float:
    """Return the mean of the worst tenth (rounded up) of the values."""
    ordered = sorted(values, reverse=lower_is_better)
    return fmean(ordered[: math.ceil(len(ordered) / 10)])


def spread(values: Sequence[float]) -> float:
    """Return the population standard deviation of the values."""
    return pstdev(values)
