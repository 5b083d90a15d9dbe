"""The first figure: accuracy against bytes."""

from __future__ import annotations

from collections.abc import Sequence

from fedrts.report.model import Axis, Figure, Lines, Point, Series
from fedrts.report.quantities import axis_of, last_ten, over
from fedrts.report.settings import Problem, Setting
from fedrts.tasks.metrics import Metric

_CAPTION = (
    "One point a setting: the mean of its last ten rounds against all bytes that its clients sent and received; whiskers are ± one "
    "standard error over seeds. The line joins the settings that no other one beats with as few bytes."
)


def figures(problem: Problem, metric: Metric) -> list[Figure]:
    """Return every finished setting as a point, and the frontier; empty if there is nothing to compare."""
    found = [(setting, point) for setting in problem.finished if (point := _final(setting, metric)) is not None]
    if len(found) < 2:
        return []
    points = [point for _, point in found]
    series = [Series(setting.label, [point], setting.hue, setting.dash) for setting, point in found]
    best = undominated(points, metric.lower_is_better)
    if len(best) > 1:
        series.insert(0, Series("frontier", best, 1 + max(setting.hue for setting, _ in found), dash=1))
    sent = [point.x for point in points]
    x = Axis("bytes sent", "bytes", "log" if min(sent) > 0 and max(sent) > 3 * min(sent) else "linear")
    title = f"{metric.title} for bytes sent"
    axis = axis_of(metric, [point.y for point in points])
    return [Lines(f"{problem.id}-{metric.name}-frontier", title, _CAPTION, x, axis, series, whiskers=True)]


def undominated(points: Sequence[Point], lower_is_better: bool = False) -> list[Point]:
    """Return the points that beat all points to their left, without errors, from left to right."""
    sign = -1 if lower_is_better else 1
    kept: list[Point] = []
    for point in sorted(points, key=lambda point: (point.x, -sign * point.y)):
        if not kept or sign * point.y > sign * kept[-1].y:
            kept.append(Point(point.x, point.y, runs=point.runs))
    return kept


def _final(setting: Setting, metric: Metric) -> Point | None:
    value = over(setting, lambda run: last_ten(run, metric.name))
    sent = over(setting, lambda run: run.summary["upload_bytes"] + run.summary["download_bytes"] if run.summary else None)
    if value is None or sent is None:
        return None
    return Point(sent.value, value.value, value.error, len(setting.runs))
