"""The charts of a report, in order: a new one needs a function and an entry here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fedrts.report import frontier, people, progress, topology
from fedrts.report.model import Figure
from fedrts.report.settings import Problem
from fedrts.tasks.metrics import Metric


@dataclass(frozen=True)
class Chart:
    """Figures of one kind under a heading of every chapter; none if a problem has nothing to show."""

    section: str
    figures: Callable[[Problem, Metric], list[Figure]]
    """Makes the figures of a problem's runs, by the leading metric."""


CHARTS = (
    Chart("results", frontier.figures),
    Chart("results", progress.against_rounds),
    Chart("results", progress.against_bytes),
    Chart("results", progress.against_flops),
    Chart("results", progress.against_density),
    Chart("results", progress.other_metrics),
    Chart("results", progress.sent),
    Chart("topology", topology.changes),
    Chart("topology", topology.layers),
    Chart("topology", topology.posteriors),
    Chart("fairness", people.by_class),
    Chart("fairness", people.by_client),
    Chart("fairness", people.holdings),
)


def drawn(section: str, problem: Problem, metric: Metric) -> list[Figure]:
    """Return the figures under a heading."""
    return [figure for chart in CHARTS if chart.section == section for figure in chart.figures(problem, metric)]
