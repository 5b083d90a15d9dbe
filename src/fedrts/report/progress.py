"""Figures of accuracy over training, and of its cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fedrts.report.model import Axis, Bars, Figure, Lines, Point, Series
from fedrts.report.quantities import Along, axis_of, by_bytes, by_flops, by_round, curve, last_ten, metrics_of, over
from fedrts.report.settings import Problem, Setting
from fedrts.tasks.metrics import Metric

_THINNED = "Curves of more than 200 evaluated rounds are thinned evenly."


def against_rounds(problem: Problem, metric: Metric) -> list[Figure]:
    """Accuracy against rounds."""
    band = " The band is ± one standard error over seeds." if any(len(setting.runs) > 1 for setting in problem.settings) else ""
    caption = f"On the test set, after each evaluated round.{band} {_THINNED}"
    return [_against(problem, metric, "rounds", Axis("rounds", "integer"), by_round, caption)]


def against_bytes(problem: Problem, metric: Metric) -> list[Figure]:
    """Accuracy against bytes."""
    caption = "All messages of all clients so far, up and down, as encoded, including the set-up. Further left is cheaper."
    return [_against(problem, metric, "bytes", Axis("bytes sent", "bytes"), by_bytes, caption)]


def against_flops(problem: Problem, metric: Metric) -> list[Figure]:
    """Accuracy against FLOPs."""
    caption = "Training FLOPs of all clients so far, counted from layer densities: dense kernels do more. Further left is cheaper."
    return [_against(problem, metric, "flops", Axis("FLOPs", "flops"), by_flops, caption)]


def other_metrics(problem: Problem, metric: Metric) -> list[Figure]:
    """The other metrics against rounds."""
    if metric.leads_reports:
        return []
    others = [other for other in metrics_of(problem) if other.told and other.followed and other.name != metric.name]
    return [figure for other in others for figure in against_rounds(problem, other)]


def _against(problem: Problem, metric: Metric, name: str, x: Axis, along: Along, caption: str) -> Lines:
    """Draw curves over `along`; costs that differ much are on a logarithmic axis, where equal distances are equal ratios."""
    series = [
        Series(setting.label, curve(setting, lambda line: line.get(metric.name), along), setting.hue, setting.dash)
        for setting in problem.settings
    ]
    values = [point.y for entry in series for point in entry.points]
    ends = [entry.points[-1].x for entry in series if entry.points]
    if x.format != "integer" and ends and min(ends) > 0 and max(ends) > 3 * min(ends):
        x = replace(x, scale="log")
    return Lines(f"{problem.id}-{metric.name}-{name}", f"{metric.title} against {x.title}", caption, x, axis_of(metric, values), series)


def against_density(problem: Problem, metric: Metric) -> list[Figure]:
    """Draw one series per method (and other differing keys), one point per density; dense methods as horizontal lines."""
    by_name: dict[str, list[Setting]] = {}
    for setting in problem.finished:
        by_name.setdefault(setting.without_density, []).append(setting)
    series, references = [], []
    for name, settings in by_name.items():
        points = [point for setting in settings if (point := _final(setting, metric)) is not None]
        if points and settings[0].dense:
            references.append((name, points[0].y))
        elif points:
            series.append(Series(name, sorted(points, key=lambda point: point.x), settings[0].hue))
    densities = [point.x for entry in series for point in entry.points]
    if len({round(density, 3) for density in densities}) < 2:
        return []
    title = f"{metric.title} against density"
    caption = (
        "Mean of the last ten rounds; whiskers are ± one standard error over seeds; horizontal lines are dense methods. "
        "Density: active and dense parameters over all."
    )
    values = [point.y for entry in series for point in entry.points] + [y for _, y in references]
    x = Axis("density", "percent", "log" if max(densities) > 3 * min(densities) else "linear")
    return [Lines(f"{problem.id}-{metric.name}-density", title, caption, x, axis_of(metric, values), series, references, whiskers=True)]


def _final(setting: Setting, metric: Metric) -> Point | None:
    value = over(setting, lambda run: last_ten(run, metric.name))
    density = over(setting, lambda run: run.summary["density"] if run.summary else None)
    if value is None or density is None:
        return None
    return Point(density.value, value.value, value.error, len(setting.runs))


def sent(problem: Problem, metric: Metric) -> list[Figure]:
    """Return the bytes of whole runs."""
    finished = problem.finished
    if not finished:
        return []
    parts = [(way, _totals(finished, f"{way}_bytes")) for way in ("upload", "download")]
    caption = "Bytes of all clients over the whole run, as really encoded; mean over seeds."
    x = Axis("sent in all", "bytes", zero=True)
    return [Bars(f"{problem.id}-sent", "Bytes sent", caption, x, [setting.label for setting in finished], parts)]


def _totals(settings: Sequence[Setting], key: str) -> list[float]:
    means = (over(setting, lambda run: run.summary[key] if run.summary else None) for setting in settings)
    return [found.value if found else 0.0 for found in means]
