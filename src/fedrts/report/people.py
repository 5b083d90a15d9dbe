"""Figures about classes and clients: who holds which data, and how well the model serves each class and client."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from fedrts.report.model import Axis, Bars, Figure, Heat, Lines, Point, Series
from fedrts.report.quantities import averaged, axis_of, thinned
from fedrts.report.read import Line, Run
from fedrts.report.settings import Problem, Setting
from fedrts.tasks.metrics import Metric

_CLIENTS = 100
"""Clients up to which each has a row."""
_PANELS = 4
"""Partitions that are drawn."""


def client_values(run: Run, metric: Metric, key: str | None = None) -> list[float]:
    """Return a metric of every evaluated client."""
    entries: Sequence[Line] = (run.fairness or {}).get("clients") or _told_by_sites(run)
    return [entry[key or metric.name] for entry in entries if entry.get(key or metric.name) is not None]


def _told_by_sites(run: Run) -> Sequence[Line]:
    """Return the sites' metrics of the final model, each on its held-out rows."""
    told: Sequence[Line] = ((run.summary or {}).get("federated") or {}).get("clients") or []
    return told


def class_values(run: Run) -> dict[int, float]:
    """Return test accuracy by class."""
    entries: Sequence[Line] = (run.fairness or {}).get("classes") or []
    shares = {entry["class"]: entry["accuracy"] for entry in entries}
    return {label: share for label, share in shares.items() if share is not None}


def by_class(problem: Problem, metric: Metric) -> list[Figure]:
    """Return the share of right answers in every class, if right answers are counted."""
    judged = [(setting, [found for run in setting.runs if (found := class_values(run))]) for setting in problem.finished]
    judged = [(setting, found) for setting, found in judged if found]
    classes = sorted({label for _, found in judged for entry in found for label in entry})
    if not classes:
        return []
    values = [[_mean_of([entry[label] for entry in found if label in entry]) for label in classes] for _, found in judged]
    caption = (
        "Share of a class's test samples that the final model gets right; mean over seeds. "
        "A pale column is a class that all settings leave behind, a pale cell one that this setting does."
    )
    columns, rows = [str(label) for label in classes], [setting.label for setting, _ in judged]
    x, y = Axis("class"), Axis("setting")
    return [Heat(f"{problem.id}-classes", "Accuracy by class", caption, x, y, columns, rows, values, "percent", "test accuracy", low=None)]


def by_client(problem: Problem, metric: Metric) -> list[Figure]:
    """Show how well every client is served."""
    series = [
        Series(setting.label, points, setting.hue, setting.dash)
        for setting in problem.finished
        if (points := _sorted_clients(setting, metric))
    ]
    if not series:
        return []
    own = axis_of(metric, [point.y for entry in series for point in entry.points])
    sites = all(_told_by_sites(run) for setting in problem.finished for run in setting.runs)
    rows = "rows that each site holds out" if sites else "data that each client holds"
    caption = (
        f"The final model's {metric.label} on the {rows}, {'sites' if sites else 'clients'} sorted from worst to best in every run; "
        "mean over seeds. A flat line treats all alike."
    )
    x, y = Axis("clients, from worst to best", "percent"), replace(own, title=f"{metric.label} on {'held-out' if sites else 'own'} data")
    return [Lines(f"{problem.id}-clients", f"{metric.title} by client", caption, x, y, series)]


def _sorted_clients(setting: Setting, metric: Metric) -> list[Point]:
    """Return one point per rank, averaged over runs with equally many clients."""
    ordered = [sorted(found, reverse=metric.lower_is_better) for run in setting.runs if (found := client_values(run, metric))]
    count = min(map(len, ordered), default=0)
    return [averaged([((place + 1) / count, run[place]) for run in ordered]) for place in thinned(range(count))]


def holdings(problem: Problem, metric: Metric) -> list[Figure]:
    """Return one picture for every way in which the data was divided; of those that differ by seed, the first."""
    divided: dict[str, tuple[Setting, Run]] = {}
    for setting in problem.settings:
        run = setting.runs[0]
        if run.clients:
            divided.setdefault(_division(run), (setting, run))
    return [_holding(problem, number, *entry, len(divided)) for number, entry in enumerate(list(divided.values())[:_PANELS])]


def _division(run: Run) -> str:
    keys = sorted(key for key in run.settings if key.startswith(("clients.", "data_options.")) and key not in _NO_DIVISION)
    return repr([run.settings[key] for key in keys])


_NO_DIVISION = ("clients.per_round", "clients.dropout")


def _holding(problem: Problem, number: int, setting: Setting, run: Run, there: int) -> Figure:
    shown: Sequence[dict[str, Any]] = run.clients[:_CLIENTS]
    some = f" The first {_CLIENTS} of {len(run.clients)} clients." if len(run.clients) > _CLIENTS else ""
    some += f" Shown for {_PANELS} of {there} partitions." if there > _PANELS else ""
    how = f"{run.settings.get('clients.partition', 'own')} partition, seed {run.seed}"
    names = [str(client["client"]) for client in shown]
    if not shown[0].get("labels"):
        sizes = [float(client["samples"]) for client in shown]
        x = Axis("samples", "integer", zero=True)
        return Bars(
            f"{problem.id}-holds-{number}", "Samples by client", f"Samples of every client: {how}.{some}", x, names, [("samples", sizes)]
        )
    counts = [[float(client["labels"][label]) for client in shown] for label in range(len(shown[0]["labels"]))]
    labels = [str(label) for label in range(len(counts))]
    caption = f"Samples of every class at every client: {how}.{some}"
    x, y = Axis("client"), Axis("class")
    return Heat(f"{problem.id}-holds-{number}", "Samples by client and class", caption, x, y, names, labels, counts, "integer", "samples")


def _mean_of(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None
