"""Significance of differences between settings: the paired tests of `fedrts compare`, over the seeds that two settings share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from fedrts.comparison.statistics import FEW_PAIRS, Difference, holm, paired
from fedrts.comparison.table import SURE
from fedrts.report.format import cell
from fedrts.report.model import CellValue, Column, Mean, ReportTable
from fedrts.report.quantities import last_ten, over
from fedrts.report.settings import Problem, Setting
from fedrts.tasks.metrics import Metric

_MOST = 12
"""Settings of which every pair is tested."""


@dataclass(frozen=True)
class Tested:
    """How one setting differs from another."""

    setting: Setting
    reference: Setting
    difference: Difference
    corrected: float | None
    """p after Holm's correction for all that were tested with it; None without a test."""

    @property
    def sure(self) -> bool:
        return self.corrected is not None and self.corrected < SURE


def ranked(problem: Problem, metric: Metric, dense: bool) -> list[tuple[Setting, Mean]]:
    """Return finished settings, best first, with their means of the last ten rounds."""
    found = [(s, value) for s in problem.finished if s.dense == dense and (value := over(s, lambda run: last_ten(run, metric.name)))]
    return sorted(found, key=lambda pair: pair[1].value, reverse=not metric.lower_is_better)


def tested(pairs: Sequence[tuple[Setting, Setting]], metric: Metric) -> list[Tested]:
    """Return the first minus the second of each pair that shares a seed."""
    values = {id(s): {r.seed: v for r in s.runs if (v := last_ten(r, metric.name)) is not None} for pair in pairs for s in pair}
    found = [(s, other, one) for s, other in pairs if (one := paired(values[id(s)], values[id(other)])) is not None]
    corrected = iter(holm([one.p for *_, one in found if one.p is not None]))
    return [Tested(s, other, one, None if one.p is None else next(corrected)) for s, other, one in found]


def caveat(problem: Problem, metric: Metric) -> str:
    """Say in one sentence whether the best sparse setting is significantly the best; empty without a rival."""
    order = ranked(problem, metric, dense=False)
    if len(order) < 2:
        return ""
    best, *others = order
    tests = tested([(other, best[0]) for other, _ in others], metric)
    seeds = max((test.difference.mean.count for test in tests), default=0)
    if seeds < 2:
        return "One seed is too few to tell which setting is better."
    unsure = [(other, value) for other, value in others if not any(test.setting is other and test.sure for test in tests)]
    if not unsure:
        how = f"paired t-tests over {seeds} seeds, Holm's correction, p < {SURE:g}"
        return f"It is significantly better than all other sparse settings ({how})."
    rival, value = unsure[0]
    more = f" and {len(unsure) - 1} more" if len(unsure) > 1 else ""
    few = f"; {seeds} seeds can hardly show one, {FEW_PAIRS} or more are better" if seeds < FEW_PAIRS else ""
    return f"The difference to {rival.label} ({cell(value, metric.format)}){more} is not significant (paired t-tests over seeds){few}."


def tables(problem: Problem, metric: Metric) -> list[ReportTable]:
    """Return every setting against the best sparse one, and all pairs."""
    order = [setting for dense in (False, True) for setting, _ in ranked(problem, metric, dense)]
    if len(order) < 2 or order[0].dense:
        return []
    best, *others = order
    how = (
        "Differences of the mean of the last ten rounds over equal seeds, ± standard error, by a paired, two-sided t-test, as in fedrts "
        "compare. † p < 0.05, ‡ also after Holm's correction for all tests of the table; one seed allows no test, two to four allow little."
    )
    found = []
    if against := tested([(other, best) for other in others], metric):
        columns = [Column("setting"), *_columns(f"less {best.label}", metric)]
        rows = [[test.setting.label, *_cells(test)] for test in against]
        found.append(ReportTable(f"{problem.id}-differences", f"Differences to {best.label}", how, columns, rows))
    every = tested(list(combinations(order, 2)), metric) if 2 < len(order) <= _MOST else []
    if every:
        columns = [Column("setting"), Column("less"), *_columns("difference", metric)]
        rows = [[test.setting.label, test.reference.label, *_cells(test)] for test in every]
        found.append(ReportTable(f"{problem.id}-pairs", "Differences between all pairs", how, columns, rows, folded=True))
    return found


def _columns(title: str, metric: Metric) -> list[Column]:
    return [
        Column(title, metric.format),
        Column("seeds", "integer", "that both have"),
        Column("p", "number", "of the paired t-test, not corrected"),
        Column("p, corrected", "number", "after Holm's correction"),
        Column("sure", "text"),
    ]


def _cells(test: Tested) -> list[CellValue | Mean]:
    mean, p = test.difference.mean, test.difference.p
    mark = "no test" if p is None else "‡" if test.sure else "†" if p < SURE else "no"
    return [Mean(mean.value, mean.error), mean.count, p, test.corrected, mark]
