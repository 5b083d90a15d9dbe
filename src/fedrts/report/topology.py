"""Figures of the topology: whether it settles, which layers are dense, and the posteriors of links."""

from __future__ import annotations

from collections.abc import Sequence

from fedrts.report.model import Axis, Figure, Heat, Lines, Point, Series
from fedrts.report.quantities import averaged, curve, thinned
from fedrts.report.read import Line, Run
from fedrts.report.settings import Problem, Setting
from fedrts.tasks.metrics import Metric

_PANELS = 6
"""Settings whose posterior is drawn."""
_COLUMNS = 60
"""Outer rounds that a picture of the posterior shows."""


def changes(problem: Problem, metric: Metric) -> list[Figure]:
    """Show what an outer round changes and keeps."""
    sparse = [setting for setting in problem.settings if not setting.dense and any(run.topology for run in setting.runs)]
    if not sparse:
        return []
    changed = [
        Series(setting.label, curve(setting, lambda line: line["links_changed"] if line["outer"] else None), setting.hue, setting.dash)
        for setting in sparse
    ]
    overlap = [Series(setting.label, _overlap(setting), setting.hue, setting.dash) for setting in sparse]
    what = "Share of the active links that were inactive before the outer round. A topology that settles goes to 0."
    kept = "Share of the links active before an outer round that are active after it. 100 % is a stable topology."
    x, share = Axis("round", "integer"), Axis("links changed", "percent", zero=True)
    return [
        Lines(f"{problem.id}-changed", "Links changed", what, x, share, changed),
        Lines(f"{problem.id}-overlap", "Mask overlap", kept, x, Axis("overlap", "percent"), overlap),
    ]


def _overlap(setting: Setting) -> list[Point]:
    at: dict[int, list[tuple[float, float]]] = {}
    for run in setting.runs:
        for line in run.topology:
            at.setdefault(line["round"], []).append((line["round"] + 1, line["overlap"]))
    return [averaged(at[index]) for index in thinned(sorted(at))]


def layers(problem: Problem, metric: Metric) -> list[Figure]:
    """Active links over links, layer by layer, after the last outer round of a setting's first seed."""
    sparse = [setting for setting in problem.finished if not setting.dense and setting.runs[0].topology]
    found = {setting.label: _densities(setting.runs[0]) for setting in sparse}
    names = list(dict.fromkeys(name for densities in found.values() for name in densities))
    if not names:
        return []
    caption = "Active links over links of every prunable layer, in the order of the model, after the last outer round of the first seed."
    values = [[found[label].get(name) for label in found] for name in names]
    x, y = Axis("setting"), Axis("layer")
    return [Heat(f"{problem.id}-layers", "Density by layer", caption, x, y, list(found), names, values, "percent", "density", high=1.0)]


def _densities(run: Run) -> dict[str, float]:
    return {name: active / run.links[name] for name, active in run.topology[-1]["active"].items() if run.links.get(name)}


def posteriors(problem: Problem, metric: Metric) -> list[Figure]:
    """Two matrices a setting: bins of the posterior mean × outer rounds, of active and of inactive links."""
    with_belief = [setting for setting in problem.finished or problem.settings if _believed(setting.runs[0].topology)]
    drawn: list[Figure] = []
    for number, setting in enumerate(with_belief[:_PANELS]):
        lines = thinned(_believed(setting.runs[0].topology), _COLUMNS)
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
        f"Share of the {which} links by posterior mean, after each outer round of seed {setting.runs[0].seed}. "
        f"Links that are certain move to the ends.{more}",
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
