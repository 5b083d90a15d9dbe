"""results.md of a reproduction: a table per metric and part, with published numbers beside ours if both mean the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedrts import config, costs
from fedrts.comparison.keys import summary_key
from fedrts.comparison.results import Compared, setting_of
from fedrts.comparison.statistics import mean_of
from fedrts.comparison.table import ABSENT, ColumnKey, Results, column_of, markdown, means_table, text_of
from fedrts.comparison.target import Milestone, cost_to_target
from fedrts.reproduction.preset import Preset, PresetPart, Scale, ScaleName
from fedrts.runs.folder import RunFolder


@dataclass(frozen=True)
class PartOutcome:
    """A part of a preset and its results."""

    part: PresetPart
    data: str
    state: str
    """How its data differ from the release, or that they are missing; empty if they are complete."""
    compared: Compared | None
    """None: its data are missing."""


@dataclass(frozen=True)
class Document:
    """The content of a reproduction's document."""

    name: str
    preset: Preset
    size: ScaleName
    outcomes: Sequence[PartOutcome]
    data_dir: Path | None

    @property
    def scale(self) -> Scale:
        return self.preset.scale(self.size)

    def markdown(self) -> str:
        parts = [f"# {self.preset.title}", self._preamble()]
        parts += [block for outcome in self.outcomes for block in self._part(outcome)]
        if self.preset.claims:
            parts += ["## What the paper says", "\n".join(f"- {claim}" for claim in self.preset.claims)]
        return "\n\n".join(parts) + "\n"

    def _preamble(self) -> str:
        seeds = self.scale.seeds
        words = [
            f"`fedrts reproduce {self.name} --scale {self.size}`, {'seed' if len(seeds) == 1 else 'seeds'} {', '.join(map(str, seeds))}."
        ]
        words += ["Mean ± standard error over seeds; **best** and *second best* of each column."]
        if self.size == "small":
            words += ["Small scale: it shows that everything works, and is not comparable with published numbers."]
        if self.preset.remark:
            words += [self.preset.remark]
        return " ".join(words)

    def _part(self, outcome: PartOutcome) -> list[str]:
        blocks = [f"## {outcome.part.name}"]
        remarks = [outcome.part.remark] if outcome.part.remark else []
        if outcome.compared is None:
            return [*blocks, f"**Not run: {outcome.state}.**"]
        if outcome.state:
            remarks.insert(0, f"**The data are not the released ones: {outcome.state}. No published number stands beside these.**")
        blocks += [" ".join([f"{setting_of(outcome.compared.cells)}.", *remarks])]
        if not outcome.compared.rows:
            return [*blocks, "No run is finished.", *self._failures(outcome.compared)]
        for metric in self.preset.metrics:
            means = self._means(outcome, metric) if outcome.compared.has(metric) else "No run has a value of it."
            words = summary_key(metric).words
            blocks += [f"{words[0].upper()}{words[1:]} (`{metric}`):", means]
        if self.preset.ratio_to is not None:
            blocks += [f"Bytes of an outer round, relative to {self.preset.ratio_to}'s, in the paper's accounting:", self._ratios(outcome)]
        if self.preset.costs:
            blocks += ["One client in an outer round, in the paper's accounting:", self._costs(outcome)]
        if self.preset.target is not None:
            blocks += [self._target_words(), self._targets(outcome)]
        return [*blocks, *self._failures(outcome.compared)]

    def _failures(self, compared: Compared) -> list[str]:
        lines = [f"- {name}: {news.text}" for name, news in compared.failures.items()]
        return ["Not finished:", "\n".join(lines)] if lines else []

    def published(self, outcome: PartOutcome, key: str, **where: Any) -> float | None:
        """Return a published number that may stand beside ours: only at paper scale and with complete data."""
        if self.size != "paper" or outcome.state:
            return None
        return self.preset.published_for(key, {"part": outcome.part.name, **where})

    def _means(self, outcome: PartOutcome, metric: str) -> str:
        assert outcome.compared is not None
        results = outcome.compared.results(metric)

        def beside(method: str, column: ColumnKey) -> str:
            found = self.published(outcome, metric, method=method, **_where(results, column))
            return "" if found is None else f" (published {results.text(found)})"

        return means_table(results, len(self.scale.seeds), beside)

    def _ratios(self, outcome: PartOutcome) -> str:
        """Return `paper_comm_mb` of every method and column, divided by that of the preset's `ratio_to`."""
        assert outcome.compared is not None
        results = outcome.compared.results("paper_comm_mb")
        ratios = {}
        for (method, column), values in results.values.items():
            reference = self._in_the_place_of(str(self.preset.ratio_to), results, column)
            shared = {seed: value / reference[seed] for seed, value in values.items() if seed in reference}
            if shared:
                ratios[method, column] = shared
        return means_table(Results("comm_ratio", results.axes, ratios), len(self.scale.seeds))

    # -- costs on paper ---------------------------------------------------------------------------------------------

    def _costs(self, outcome: PartOutcome) -> str:
        assert outcome.compared is not None
        first = outcome.compared.cells[0].experiment
        of = self.scale.costs_of or {"model": first.model, "model_options": first.model_options, "data": outcome.data}
        results = outcome.compared.results()
        body = []
        for method, column in sorted(results.values, key=lambda entry: -entry[1][-1]):
            where = {"method": method, **_where(results, column)}
            own = {"method": method} | ({} if config.method_class(method).dense else {"density": column[-1]})
            row = costs.of_settings([of, own], data_dir=self.data_dir).row("paper", "outer")
            cells = [("megabytes", row.megabytes, "{:.2f}"), ("flops", row.flops, "{:.3g}"), ("memory", row.memory_bytes / 1e6, "{:.2f}")]
            body.append([method, f"{column[-1]:g}", *(self._with_published(outcome, key, v, form, **where) for key, v, form in cells)])
        return markdown(["method", "density", "MB sent", "FLOPs", "memory MB"], body)

    def _with_published(self, outcome: PartOutcome, key: str, value: float, form: str, **where: Any) -> str:
        found = self.published(outcome, key, **where)
        return form.format(value) + ("" if found is None else f" (published {form.format(found)})")

    # -- cost to target ---------------------------------------------------------------------------------------------

    def _target_words(self) -> str:
        return (
            f"Until the mean accuracy of ten rounds first reaches {self.preset.target}'s of the last ten (at the same density, else at its "
            "highest), seed by seed; means over the seeds that reach it, bytes and FLOPs of all clients as measured:"
        )

    def _targets(self, outcome: PartOutcome) -> str:
        assert outcome.compared is not None
        results = outcome.compared.results("accuracy_last10")
        runs = {(row["method"], column_of(row, results.axes), row["seed"]): row["cell"] for row in outcome.compared.rows}
        body = []
        for method, column in results.values:
            if method == self.preset.target:
                continue
            goals = self._goals(results, column)
            cells = {seed: runs[method, column, seed] for seed in results.values[method, column] if seed in goals}
            found = [reached(outcome.compared.out / "runs" / cell, goals[seed]) for seed, cell in cells.items()]
            costs = self._reached(outcome, [point for point in found if point], len(found), method=method, **_where(results, column))
            body.append([method, *map(text_of, column), *costs])
        names = [key.rpartition(".")[2] for key in results.axes]
        return markdown(["method", *names, "density", "seeds that reach it", "rounds", "FLOPs", "GB sent"], body)

    def _goals(self, results: Results, column: ColumnKey) -> Mapping[int, float]:
        """Return the target's accuracy for a column, by seed."""
        return self._in_the_place_of(str(self.preset.target), results, column)

    def _in_the_place_of(self, method: str, results: Results, column: ColumnKey) -> Mapping[int, float]:
        """Return a method's values at a column's density, or else at its highest, by seed."""
        densities = [other[-1] for name, other in results.values if name == method and other[:-1] == column[:-1]]
        density = column[-1] if column[-1] in densities else max(densities, default=None)
        return results.values.get((method, (*column[:-1], density)), {})

    def _reached(self, outcome: PartOutcome, points: Sequence[Milestone], seeds: int, **where: Any) -> list[str]:
        if not points:
            return ["not reached", ABSENT, ABSENT, ABSENT]
        averages = {
            "flops": (mean_of([point.flops for point in points]).value, "{:.3g}"),
            "gigabytes": (mean_of([point.bytes / 1e9 for point in points]).value, "{:.3g}"),
        }
        costs = [self._with_published(outcome, key, value, form, **where) for key, (value, form) in averages.items()]
        return [f"{len(points)} of {seeds}", f"{mean_of([point.round + 1.0 for point in points]).value:.0f}", *costs]


def _where(results: Results, column: ColumnKey) -> dict[str, Any]:
    """Describe a column by the names that published numbers have."""
    return dict(zip(results.axes, column, strict=False)) | {"density": column[-1]}


def reached(folder: Path, target: float) -> Milestone | None:
    """Return where a run reaches an accuracy."""
    return cost_to_target(RunFolder(folder).history(), target)
