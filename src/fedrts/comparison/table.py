"""The results of a comparison as Markdown: means over seeds, the best marked, and tests of differences."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fedrts.comparison.keys import SummaryKey, summary_key
from fedrts.comparison.statistics import FEW_PAIRS, Difference, SampleMean, holm, mean_of, paired
from fedrts.tasks.metrics import Metric

ABSENT = "–"
SURE = 0.05
"""p-values below this are marked."""

RunRow = Mapping[str, Any]
"""A line of results.csv."""
ColumnKey = tuple[Any, ...]
"""The values of the grid's other keys (lists as text), and last the density."""


@dataclass(frozen=True)
class Results:
    """One metric of finished cells by method, column and seed."""

    metric: str
    axes: tuple[str, ...]
    values: Mapping[tuple[str, ColumnKey], Mapping[int, float]]
    declared: Sequence[Metric] = ()
    """Metrics of the runs that may have no name here."""

    @classmethod
    def of(cls, rows: Sequence[RunRow], axes: Sequence[str], metric: str, declared: Sequence[Metric] = ()) -> Results:
        summary_key(metric, declared)
        values: dict[tuple[str, ColumnKey], dict[int, float]] = {}
        for row in rows:
            if row.get(metric) is not None:
                values.setdefault((row["method"], column_of(row, axes)), {})[row["seed"]] = row[metric]
        return cls(metric, tuple(axes), values, declared)

    @cached_property
    def key(self) -> SummaryKey:
        """The metric and its direction."""
        return summary_key(self.metric, self.declared)

    @property
    def methods(self) -> list[str]:
        return list(dict.fromkeys(method for method, _ in self.values))

    @property
    def columns(self) -> list[ColumnKey]:
        """Columns, with densities of one place side by side, highest first."""
        columns = dict.fromkeys(column for _, column in self.values)
        places = list(dict.fromkeys(column[:-1] for column in columns))
        return sorted(columns, key=lambda column: (places.index(column[:-1]), -column[-1]))

    def mean(self, method: str, column: ColumnKey) -> SampleMean | None:
        values = self.values.get((method, column))
        return mean_of([values[seed] for seed in sorted(values)]) if values else None

    def best(self, column: ColumnKey) -> list[float]:
        """Return the best and the second-best mean of a column, if there are several methods."""
        means = [mean.value for method in self.methods if (mean := self.mean(method, column)) is not None]
        return sorted(set(means), reverse=not self.key.lower_is_better)[:2] if len(means) > 1 else []

    def against(self, method: str, reference: str, column: ColumnKey) -> Difference | None:
        """Return the difference of `method` to `reference` in a column; a method without density is compared at every density."""
        ours, theirs = self._beside(method, column), self._beside(reference, column)
        return paired(ours, theirs) if ours and theirs else None

    def together(self, method: str, reference: str, columns: Sequence[ColumnKey]) -> Difference | None:
        """Return the difference of the means over `columns`, for seeds that both have in all of them."""
        ours, theirs = ({column: self._beside(name, column) or {} for column in columns} for name in (method, reference))
        common = set.intersection(*(ours[column].keys() & theirs[column].keys() for column in columns))
        return paired(*({seed: mean_of([own[column][seed] for column in columns]).value for seed in common} for own in (ours, theirs)))

    def _beside(self, method: str, column: ColumnKey) -> Mapping[int, float] | None:
        """Return the values by seed that a method has for a column."""
        return self.values.get((method, column)) or self._dense(method, column)

    def _dense(self, method: str, column: ColumnKey) -> Mapping[int, float] | None:
        """Return the values of a method that only appears in the column of density 1."""
        own = {other[-1] for name, other in self.values if name == method}
        return self.values.get((method, (*column[:-1], 1.0))) if own == {1.0} else None

    def heading(self, column: ColumnKey) -> str:
        named = [f"{key.rpartition('.')[2]} {text_of(value)}" for key, value in zip(self.axes, column, strict=False)]
        return ", ".join([*named, f"density {column[-1]:g}"])

    def text(self, value: float, signed: bool = False) -> str:
        """Format a value with digits that suit the metric."""
        return self.key.text(value, signed)


def text_of(value: Any) -> str:
    """Return a value of the grid as a word; floats as short as is unambiguous."""
    if not isinstance(value, float):
        return str(value)
    return brief if float(brief := f"{value:g}") == value else str(value)


def column_of(row: RunRow, axes: Sequence[str]) -> ColumnKey:
    """Return the column of a row."""
    return (*map(key_of, (row[key] for key in axes)), float(row["density_target"]))


def key_of(value: Any) -> Hashable:
    """Return a value of the grid as part of a column's key."""
    return value if isinstance(value, Hashable) else str(value)


def with_error(results: Results, mean: SampleMean, signed: bool = False) -> str:
    """`0.9407 ± 0.0012`."""
    value = results.text(mean.value, signed)
    return value if mean.error is None else f"{value} ± {results.text(mean.error)}"


def means_table(results: Results, seeds: int, beside: Callable[[str, ColumnKey], str] = lambda method, column: "") -> str:
    """Return the table of methods by columns: mean ± standard error, best **bold**, second *slanted*; `beside` adds to a cell."""

    def cell(method: str, column: ColumnKey) -> str:
        mean = results.mean(method, column)
        if mean is None:
            return ABSENT
        text = with_error(results, mean)
        best = results.best(column)
        if mean.value in best:
            mark = "**" if mean.value == best[0] else "*"
            text = f"{mark}{text}{mark}"
        missing = f" ({mean.count} of {seeds} seeds)" if mean.count < seeds else ""
        return text + missing + beside(method, column)

    return markdown(["method", *map(results.heading, results.columns)], _body(results, cell))


def differences_table(results: Results, reference: str) -> str:
    """Return every other method minus the reference, per column and together: mean ± standard error of paired differences, p."""
    columns = _compared_columns(results, reference)
    others = [method for method in results.methods if method != reference]

    def cells(found: Sequence[Difference | None]) -> list[str]:
        corrected = iter(holm([one.p for one in found if one is not None and one.p is not None]))
        return [cell(one, corrected) for one in found]

    def cell(found: Difference | None, corrected: Iterator[float]) -> str:
        if found is None:
            return ABSENT
        text = with_error(results, found.mean, signed=True)
        if found.p is None:
            return f"{text} (no test)"
        p = f"p = {found.p:.3f}" if found.p >= 0.0005 else "p < 0.001"
        return f"{text} ({p}){_mark(found.p, next(corrected))}"

    found = [[results.against(method, reference, column) for method in others] for column in columns]
    headings = list(map(results.heading, columns))
    if len(columns) > 1:
        found.append([results.together(method, reference, columns) for method in others])
        headings.append("together")
    return markdown([f"less {reference}", *headings], list(zip(others, *map(cells, found), strict=True)))


def _mark(p: float, corrected: float) -> str:
    if corrected < SURE:
        return " ‡"
    return " †" if p < SURE else ""


def _compared_columns(results: Results, reference: str) -> list[ColumnKey]:
    others = [method for method in results.methods if method != reference]
    return [column for column in results.columns if any(results.against(method, reference, column) for method in others)]


def words_on_test(results: Results, reference: str) -> str:
    """Describe the test, and say plainly how much it can show."""
    found = [results.against(m, reference, c) for m in results.methods if m != reference for c in results.columns]
    pairs = [difference.mean.count for difference in found if difference is not None]
    words = (
        f"Differences to {reference} over equal seeds, tested by a paired, two-sided t-test; † marks p < {SURE:g}, ‡ where it "
        "stays so after Holm's correction for the comparisons of a column. A method without a density stands beside every density."
    )
    if len(_compared_columns(results, reference)) > 1:
        words += " Together: of every seed the mean over the columns, where a method has them all."
    if not pairs or max(pairs) < 2:
        return f"{words} **One seed is too few for a test**: give more --seeds."
    if max(pairs) < FEW_PAIRS:
        words += f" With {max(pairs)} seeds only large and steady differences can show: {FEW_PAIRS} or more are better."
    return words


def costs_table(rows: Sequence[RunRow], axes: Sequence[str]) -> str:
    """Return the table of bytes sent and FLOPs, mean over seeds; with rounds if these differ."""
    timed = "rounds" not in axes and len({row.get("rounds") for row in rows}) > 1
    groups: dict[tuple[str, ColumnKey], list[RunRow]] = {}
    for row in rows:
        groups.setdefault((row["method"], column_of(row, axes)), []).append(row)
    body = []
    for (method, column), runs in groups.items():
        sent, ratio, flops = (
            mean_of(values).value
            for values in (
                [run["upload_bytes"] + run["download_bytes"] for run in runs],
                [run["comm_ratio"] for run in runs],
                [run["flops"] for run in runs],
            )
        )
        rounds = [f"{mean_of([run['rounds'] for run in runs]).value:g}"] if timed else []
        body.append([method, *(text_of(value) for value in column), *rounds, f"{sent / 1e6:,.2f}", f"{ratio:.3f}", f"{flops:.3g}"])
    names = [key.rpartition(".")[2] for key in axes]
    return markdown(["method", *names, "density", *["rounds"] * timed, "MB sent", "relative to dense", "FLOPs"], body)


def _body(results: Results, cell: Callable[[str, ColumnKey], str]) -> list[list[str]]:
    return [[method, *(cell(method, column) for column in results.columns)] for method in results.methods]


def markdown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [list(headings), ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(text.replace("|", "\\|") for text in line) + " |" for line in lines)
