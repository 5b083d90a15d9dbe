"""Figures of a reproduction: one panel per part, lines by method (and keys that are not axes), readable without colour."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedrts.comparison.results import DEFAULT_METRIC
from fedrts.comparison.statistics import SampleMean, mean_of
from fedrts.comparison.table import ColumnKey, Results, column_of, text_of
from fedrts.comparison.target import smoothed
from fedrts.errors import InputError, optional
from fedrts.reproduction.document import Document, PartOutcome
from fedrts.runs.folder import RunFolder

MARKERS = "osD^vP*X<>"
DASHES = ("-", "--", "-.", ":")


def draw(document: Document, file: Path) -> None:
    """Draw the preset's figure to a file; parts without results have no panel."""
    metric = document.preset.metrics[0] if document.preset.figure == "lines" else DEFAULT_METRIC
    outcomes = [outcome for outcome in document.outcomes if outcome.compared is not None and outcome.compared.has(metric)]
    if not outcomes:
        return
    if document.preset.figure == "lines":
        figure, panels = _panels(len(outcomes), 1)
        for outcome, (axes,) in zip(outcomes, panels, strict=True):
            _lines(axes, outcome, document.preset.x, metric)
    else:
        figure, panels = _panels(len(outcomes), 2)
        for outcome, (left, right) in zip(outcomes, panels, strict=True):
            _curves(left, outcome, "bytes", "MB sent", 1e6)
            _curves(right, outcome, "flops", "FLOPs", 1.0)
    figure.suptitle(f"{document.preset.title} ({document.size} scale)")
    try:
        figure.savefig(file, dpi=120)
    except OSError as error:
        raise InputError(f"cannot write {file}: {error.strerror}") from error


def _panels(rows: int, columns: int) -> tuple[Any, list[list[Any]]]:
    figure = optional("matplotlib.figure", "plot").Figure(figsize=(6.4 * columns, 4.0 * rows + 0.4), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False).tolist()


def _style(number: int) -> dict[str, str]:
    return {"marker": MARKERS[number % len(MARKERS)], "linestyle": DASHES[number % len(DASHES)], "color": f"C{number % 10}"}


def _lines(axes: Any, outcome: PartOutcome, x: str, metric: str) -> None:
    """Draw a metric by `x` with bars of one standard error; methods without density are horizontal lines."""
    assert outcome.compared is not None
    results = outcome.compared.results(metric)
    places = sorted({_place(results, column, x) for _, column in results.values})
    lines: dict[str, list[tuple[float, SampleMean]]] = {}
    for method in results.methods:
        for column in results.columns:
            if (mean := results.mean(method, column)) is not None:
                lines.setdefault(_label(results, method, column, x), []).append((_place(results, column, x), mean))
    for number, (label, points) in enumerate(lines.items()):
        points.sort(key=lambda point: point[0])
        if x == "density" and len(points) == 1 and points[0][0] == 1.0:
            axes.axhline(points[0][1].value, label=label, color="0.3", linestyle=DASHES[number % len(DASHES)])
            continue
        means = [mean for _, mean in points]
        at = [places.index(place) for place, _ in points]
        errors = [mean.error or 0.0 for mean in means]
        axes.errorbar(at, [mean.value for mean in means], yerr=errors, label=label, capsize=3, **_style(number))
    shown = [place for place in places if x != "density" or place != 1.0 or len(places) == 1]
    axes.set_xticks([places.index(place) for place in shown], [f"{place:g}" for place in shown])
    axes.set(title=outcome.part.name, xlabel=x.rpartition(".")[2], ylabel=results.key.words)
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)


def _label(results: Results, method: str, column: ColumnKey, x: str = "") -> str:
    """Return the label of a method's line, with keys, apart from `x`, of which it has several values."""
    names = [*results.axes, "density"]
    own = [other for name, other in results.values if name == method]
    told = [place for place, key in enumerate(names) if key != x and len({other[place] for other in own}) > 1]
    return " ".join([method, *(f"{names[place].rpartition('.')[2]} {text_of(column[place])}" for place in told)])


def _place(results: Results, column: Sequence[Any], x: str) -> float:
    return float(column[-1] if x == "density" else column[results.axes.index(x)])


def _curves(axes: Any, outcome: PartOutcome, cost: str, label: str, unit: float) -> None:
    """Draw means over ten rounds and over seeds against cost so far; the band is one standard error."""
    assert outcome.compared is not None
    results = outcome.compared.results()
    runs: dict[str, list[str]] = {}
    for row in outcome.compared.rows:
        runs.setdefault(_label(results, row["method"], column_of(row, results.axes)), []).append(row["cell"])
    for number, (line, cells) in enumerate(runs.items()):
        curves = [smoothed(RunFolder(outcome.compared.out / "runs" / cell).history()) for cell in cells]
        together = list(zip(*curves, strict=False))  # seeds evaluate in the same rounds
        means = [mean_of([point.accuracy for point in points]) for points in together]
        spent = [mean_of([getattr(point, cost) / unit for point in points]).value for points in together]
        style = _style(number) | {"markevery": max(1, len(spent) // 8)}
        axes.plot(spent, [mean.value for mean in means], label=line, **style)
        low, high = ([mean.value + sign * (mean.error or 0.0) for mean in means] for sign in (-1, 1))
        axes.fill_between(spent, low, high, alpha=0.15, color=style["color"])
    axes.set(title=outcome.part.name, xlabel=f"{label}, all clients together", ylabel="test accuracy, mean of ten rounds")
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)
