"""The files of a comparison: results.csv, results.md and failures.json."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedrts.comparison import ladder, table
from fedrts.comparison.grid import Cell, Grid
from fedrts.comparison.keys import summary_key
from fedrts.comparison.play import News
from fedrts.comparison.table import Results, markdown
from fedrts.comparison.tuning import Chosen
from fedrts.errors import InputError, optional
from fedrts.files import csv_text, explained, write_atomically
from fedrts.planning.units import shown_size
from fedrts.tasks.metrics import Metric

DEFAULT_METRIC = "accuracy_last10"


@dataclass(frozen=True)
class Compared:
    """The results of a comparison."""

    out: Path
    grid: Grid
    cells: Sequence[Cell]
    rows: list[dict[str, Any]]
    """For every finished cell its name, its values of the grid's keys, and its summary: the lines of results.csv."""
    failures: Mapping[str, News]
    """Cells that did not finish."""
    chosen: Sequence[Chosen] = ()
    """Learning rates, where they were tuned."""
    metrics: Sequence[Metric] = ()
    """Metrics of the finished cells, the leading one first."""

    def __repr__(self) -> str:
        """Return one line for a notebook; `markdown()` returns the table."""
        of = f"{len(self.grid.methods)} methods, seeds {', '.join(map(str, self.grid.seeds))}"
        failed = f", {len(self.failures)} failed" if self.failures else ""
        return f"<fedrts.Compared: {len(self.rows)} of {len(self.cells)} cells finished{failed} in {self.out}: {of}>"

    def frame(self) -> Any:
        """Return the rows as a pandas DataFrame, one row per finished cell."""
        return optional("pandas", "pandas").DataFrame(self.rows)

    def has(self, metric: str) -> bool:
        """Whether some run has a value of it."""
        return any(row.get(metric) is not None for row in self.rows)

    @property
    def default_metric(self) -> str:
        """Return the mean of the last ten rounds of accuracy, or of the leading metric if the runs have no accuracy."""
        if not self.metrics or self.has(DEFAULT_METRIC):
            return DEFAULT_METRIC
        return f"{self.metrics[0].name}_last10"

    def results(self, metric: str | None = None) -> Results:
        metric = metric or self.default_metric
        found = Results.of(self.rows, list(self.grid.axes), metric, self.metrics)
        if self.rows and not found.values:
            raise InputError(f"the metric '{metric}' has no value in these runs: choose another --metric")
        return found

    def markdown(self, metric: str | None = None, reference: str | None = None) -> str:
        """Return the text of results.md."""
        words = summary_key(metric or self.default_metric, self.metrics).words
        parts = [f"# {words[:1].upper()}{words[1:]}", self._caption(), *self.tables(metric, reference)]
        if self.failures:
            lines = [f"- {name}: {news.text}" for name, news in self.failures.items()]
            parts += ["## Not finished", "\n".join(lines)]
        return "\n\n".join(parts) + "\n"

    def tables(self, metric: str | None, reference: str | None) -> list[str]:
        """Return the tables of results.md with their headings."""
        if not self.rows:
            return ["No cell is finished."]
        results = self.results(metric)
        parts = [table.means_table(results, len(self.grid.seeds))]
        if reference is not None:
            parts += [f"## Against {reference}", table.words_on_test(results, reference), table.differences_table(results, reference)]
        parts += ["## What it costs", "All rounds and clients of a run together.", table.costs_table(self.rows, list(self.grid.axes))]
        if self.chosen:
            parts += ["## Learning rates", self._tuning_words(), self._rates()]
            parts += ["\n".join(f"- {remark}" for remark in remarks)] if (remarks := self.remarks()) else []
        return parts

    def _caption(self) -> str:
        seeds = self.grid.seeds
        words = [setting_of(self.cells), f"{'seed' if len(seeds) == 1 else 'seeds'} {', '.join(map(str, seeds))}"]
        marks = "Mean ± standard error over seeds." if len(seeds) > 1 else "One seed: no standard error."
        if self.grid.budget is not None:
            words.append(f"at most {shown_size(self.grid.budget)} sent by each run")
        rates = " Learning rates were chosen on the validation split, see below." if self.chosen else ""
        return f"{' · '.join(words)}. {marks} **Best** and *second best* of each column.{rates}"

    def remarks(self) -> list[str]:
        """Return lines on cells whose best learning rate is at an end of those tried."""
        return [entry.remark for entry in self.chosen if entry.remark is not None]

    @property
    def _tuned_by(self) -> Metric:
        return self.chosen[0].metric

    def _tuning_words(self) -> str:
        tuning = self.grid.tuning
        assert tuning is not None
        rounds = "" if tuning.rounds is None else f" of {tuning.rounds} rounds"
        label = self._tuned_by.label
        whence = (
            f"Every cell began with its own rate, and {ladder.STEP:g} times less and more, and tried further ones in such steps until its "
            f"best lay between two others, at most {ladder.MOST}:"
            if tuning.auto
            else "Every method had the same rates to choose from,"
        )
        return (
            f"{whence} one run{rounds} each with seed {tuning.seed}, judged by the mean {label} of "
            "the last ten rounds on the validation split. The runs above leave that split out of their training data too."
        )

    def _rates(self) -> str:
        assert self.grid.tuning is not None
        rates = list(dict.fromkeys(rate for entry in self.chosen for rate in entry.scores))
        rates = sorted(rates) if self.grid.tuning.auto else rates
        body = [[entry.name, _rate(entry), *(_score(entry, rate) for rate in rates)] for entry in self.chosen]
        return markdown(["cell", "chosen", *(f"valid. {self._tuned_by.label} at {rate:g}" for rate in rates)], body)

    def write(self, metric: str | None = None, reference: str | None = None) -> None:
        """Write all files, each completely or not at all."""
        write_atomically(self.out / "results.csv", csv_of(self.rows).encode())
        write_atomically(self.out / "results.md", self.markdown(metric, reference).encode())
        write_failures(self.out, self.failures)


def csv_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as CSV, with the keys of all of them."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    return csv_text([keys, *([row.get(key) for key in keys] for row in rows)])


def write_failures(out: Path, failures: Mapping[str, News]) -> None:
    """Write failures.json with the reason for each unfinished cell; no file if all are finished."""
    file = out / "failures.json"
    if not failures:
        with explained(file):
            file.unlink(missing_ok=True)
        return
    content = {name: {"reason": news.text, **({"traceback": news.traceback} if news.traceback else {})} for name, news in failures.items()}
    write_atomically(file, json.dumps(content, indent=2).encode() + b"\n")


def setting_of(cells: Sequence[Cell]) -> str:
    """Describe in a few words what all cells have in common."""

    def common(name: str, words: str) -> list[str]:
        values = {cell.settings().get(name) for cell in cells}
        return [words.format(values.pop())] if len(values) == 1 else []

    words = common("data", "{}") + common("model", "{}") + common("rounds", "{} rounds")
    return " · ".join(words + common("clients.total", "{} clients") + common("clients.per_round", "{} a round"))


def _rate(entry: Chosen) -> str:
    if entry.rate is None:
        return "none"
    return f"{entry.rate:g}" if entry.is_best else f"{entry.rate:g} (runs began with it)"


def _score(entry: Chosen, rate: float) -> str:
    if rate not in entry.scores:
        return ""
    value = entry.scores[rate]
    return "failed" if value is None else entry.metric.text(value)
