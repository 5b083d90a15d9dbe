"""Figures of the topology: does it settle, where is it dense, what does the server believe of its links."""

from __future__ import annotations

from collections.abc import Sequence

from fedrts.report.model import Axis, Figure, Heat, Lines, Point, Series
from fedrts.report.quantities import curve, mean, thinned
from fedrts.report.read import Line, Run
from fedrts.report.settings import Problem, Setting

_PANELS = 6
"""Settings whose posterior is drawn."""
_COLUMNS = 60
"""Outer rounds that a picture of the posterior shows."""


def figures(problem: Problem) -> list[Figure]:
    return [*_changes(problem), *_layers(problem), *_posteriors(problem)]


def _changes(problem: Problem) -> list[Figure]:
    sparse = [setting for setting in problem.settings if not setting.dense and any(run.topology for run in setting.runs)]
    if not sparse:
        return []
    x = Axis("round", "integer")
    changed = [
        Series(setting.label, curve(setting, lambda line: line["links_changed"] if line["outer"] else None), setting.hue, setting.dash)
        for setting in sparse
    ]
    overlap = [Series(setting.label, _overlap(setting), setting.hue, setting.dash) for setting in sparse]
    return [
        Lines(
            f"{problem.id}-changed", "Links changed", "Share of the active links that were inactive before the outer round. A topology that settles goes to 0.",
            x, Axis("links changed", "percent", zero=True), changed,
        ),
        Lines(
            f"{problem.id}-overlap", "Mask overlap", "Share of the links active before an outer round that are active after it. 100 % is a stable topology.",
            x, Axis("overlap", "percent"), overlap,
        ),
    ]  # fmt: skip


def _overlap(setting: Setting) -> list[Point]:
    at: dict[int, list[float]] = {}
    for run in setting.runs:
        for line in run.topology:
            at.setdefault(line["round"], []).append(line["overlap"])
    points = []
    for index, values in sorted(at.items()):
        made = mean(values)
        assert made is not None
        points.append(Point(index + 1, made.value, made.error, len(values)))
    return thinned(points)


def _layers(problem: Problem) -> list[Figure]:
    """Active links over links, layer by layer, after the last outer round of a setting's first seed."""
    sparse = [setting for setting in problem.finished if not setting.dense and setting.runs[0].topology]
    found = {setting.label: _densities(setting.runs[0]) for setting in sparse}
    names = list(dict.fromkeys(name for densities in found.values() for name in densities))
    if not names:
        return []
    return [
        Heat(
            f"{problem.id}-layers", "Density by layer",
            "Active links over links of every prunable layer, in the order of the model, after the last outer round of the first seed.",
            Axis("setting"), Axis("layer"), list(found), names, [[found[label].get(name) for label in found] for name in names],
            "percent", "density", high=1.0,
        )
    ]  # fmt: skip


def _densities(run: Run) -> dict[str, float]:
    return {name: active / run.links[name] for name, active in run.topology[-1]["active"].items() if run.links.get(name)}


def _posteriors(problem: Problem) -> list[Figure]:
    """Two matrices a setting: bins of the posterior mean × outer rounds, of active and of inactive links."""
    with_belief = [setting for setting in problem.finished or problem.settings if _believed(setting.runs[0].topology)]
    drawn: list[Figure] = []
    for number, setting in enumerate(with_belief[:_PANELS]):
        lines = _believed(setting.runs[0].topology)
        if len(lines) > _COLUMNS:
            lines = [lines[round(place * (len(lines) - 1) / (_COLUMNS - 1))] for place in range(_COLUMNS)]
        for which in ("active", "inactive"):
            drawn.append(_posterior(problem, setting, number, which, lines, len(with_belief)))
    return drawn


def _posterior(problem: Problem, setting: Setting, number: int, which: str, lines: Sequence[Line], there: int) -> Heat:
    shares = [_shares(line[f"belief_{which}"]) for line in lines]
    bins = len(shares[0])
    values = [[column[place] for column in shares] for place in reversed(range(bins))]
    rows = [f"{place / bins:.2f}–{(place + 1) / bins:.2f}" for place in reversed(range(bins))]
    more = f" Shown for {_PANELS} of {there} settings." if there > _PANELS else ""
    return Heat(
        f"{problem.id}-posterior-{number}-{which}",
        f"Posterior of {which} links: {setting.label}",
        f"Share of the {which} links by posterior mean, after each outer round of seed {setting.runs[0].seed}. Certain links move to the ends.{more}",
        Axis("round"),
        Axis("posterior mean"),
        [str(line["round"] + 1) for line in lines],
        rows,
        values,
        "percent",
        f"share of {which} links",
    )


def _believed(topology: Sequence[Line]) -> list[Line]:
    return [line for line in topology if line.get("belief_active") and line.get("belief_inactive")]


def _shares(counts: Sequence[int]) -> list[float]:
    whole = sum(counts)
    return [count / whole if whole else 0.0 for count in counts]


