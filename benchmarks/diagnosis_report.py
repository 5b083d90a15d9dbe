"""What `diagnosis.py` found, as tables and plots."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from fedrts.errors import InputError, optional

Raw = dict[str, Any]
"""The raw numbers of a run, or a part of them."""


def render(out: Path) -> None:
    """Tables of all raw numbers, and plots where matplotlib is installed."""
    results = {file.stem.removeprefix("run_"): json.loads(file.read_text()) for file in sorted((out / "raw").glob("run_*.json"))}
    if not results:
        raise InputError(f"{out}/raw has no runs: run without --render first")
    (out / "diagnosis.md").write_text("\n".join(tables(results)) + "\n")
    print((out / "diagnosis.md").read_text())
    try:
        plots(results, out)
    except InputError as error:
        print(f"no plots: {error}", file=sys.stderr)


def number(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def averaged(values: Sequence[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return fmean(there) if there else None


def survival_of(result: Raw, after: int) -> float | None:
    """Share of all grown links that lived through `after` further outer rounds, of the cohorts that could."""
    sizes, alive = result["survival"]["sizes"], result["survival"]["alive"]
    there = [(size, curve[after]) for size, curve in zip(sizes, alive, strict=True) if len(curve) > after]
    total = sum(size for size, _ in there)
    return sum(size * share for size, share in there) / total if total else None


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [" | ".join(head), " | ".join(["---", *["---:"] * (len(head) - 1)]), *(" | ".join(row) for row in rows)]
    return ["", *(f"| {line} |" for line in lines)]


def tables(results: Mapping[str, Raw]) -> list[str]:
    lines = ["# Diagnosis", "", "`python benchmarks/diagnosis.py`; what is measured is said at its top. Means over outer rounds."]
    shown = next(iter(results.values()))["settings"]
    lines += ["", "Settings: " + ", ".join(f"{key} = {value}" for key, value in shown.items() if not key.startswith("method"))]
    lines += ["", "## Links"]
    rows = []
    for label, result in results.items():
        outers, history = result["outers"], result["history"]
        scored = [line["accuracy"] for line in history if line["accuracy"] is not None][-10:]
        changed = [line["links_changed"] for line in history if line["round"] in {outer["round"] for outer in outers}]
        half = len(changed) // 2
        final = result["final"].get("dense", {})
        lived = (survival_of(result, k) for k in (1, 3))
        just = (averaged([outer[key] for outer in outers[1:]]) for key in ("dropped_just_grown", "active_just_grown", "grown_again"))
        units = (outers[-1]["units"][key] if outers else None for key in ("outputs", "inputs"))
        turnover = averaged(changed[:half]), averaged(changed[half:])
        row = (averaged(scored), *turnover, *lived, *just, final.get("share"), final.get("chance"), *units)
        rows.append([label, number(row[0], 3), *(number(value) for value in row[1:])])
    head = ["method", "accuracy, last 10", "changed, first half", "changed, second", "alive after 1", "after 3"]
    lines += table(
        [*head, "dropped: just grown", "active: just grown", "grown again", "in dense top K", "chance", "outputs used", "inputs used"], rows
    )
    voting = {label: result for label, result in results.items() if any("votes" in outer for outer in result["outers"])}
    if voting:
        lines += ["", "## Votes", *vote_table(voting)]
    for label, result in results.items():
        drawn = [outer for outer in result["outers"] if "posterior" in outer]
        if drawn:
            lines += ["", f"## Posteriors of {label}", *posterior_table(drawn)]
    return lines


def vote_table(results: Mapping[str, Raw]) -> list[str]:
    rows = []
    for label, result in results.items():
        votes = [outer["votes"] for outer in result["outers"] if "votes" in outer]
        shares = [[count / sum(vote["links_by_votes"]) for count in vote["links_by_votes"]] for vote in votes]
        none, one = (averaged([share[k] for share in shares]) for k in (0, 1))
        more = averaged([sum(share[2:]) for share in shares])
        chance = averaged([sum(vote["chance"][2:]) / sum(vote["chance"]) for vote in votes])
        overlaps = [averaged([vote["overlap"][key] for vote in votes]) for key in ("share", "chance")]
        successive = [averaged([vote["successive"][key] for vote in votes if vote["successive"]]) for key in ("share", "chance")]
        grown = [averaged([vote["grown_by_votes"][k] for vote in votes]) for k in range(4)]
        rows.append([label, *(number(value) for value in (none, one, more, chance, *overlaps, *successive, *grown))])
    head = ["method", "no vote", "1", "2+", "chance of 2+", "overlap of clients", "chance", "of successive rounds", "chance"]
    return table([*head, *(f"grown: {text}" for text in ("no vote", "1", "2", "3+"))], rows)


def posterior_table(drawn: Sequence[Raw]) -> list[str]:
    """The first, the middle and the last draw."""
    rows = []
    for outer in [drawn[index] for index in sorted({0, min(1, len(drawn) - 1), len(drawn) // 2, len(drawn) - 1})]:
        found = outer["posterior"]
        for name, group in found["groups"].items():
            apart = number(found["told_apart"]) if name == "1 vote" else ""
            rows.append([str(outer["round"]), name, f"{group['links']:,}", number(group["mean"], 3), number(group["spread"], 3), apart])
    return table(["round", "links", "number", "mean", "spread", "P(draw above one of no vote)"], rows)


def plots(results: Mapping[str, Raw], out: Path) -> None:
    figure, axes = optional("matplotlib.pyplot", "plot").subplots(2, 3, figsize=(15, 8), layout="constrained")
    accuracy, changed, dense, alive, votes, spread = axes.flat
    for label, result in results.items():
        history, outers = result["history"], result["outers"]
        at = [outer["round"] for outer in outers]
        scored = [(line["round"], line["accuracy"]) for line in history if line["accuracy"] is not None]
        accuracy.plot(*zip(*scored, strict=True), label=label)
        changed.plot(at, [history[t]["links_changed"] for t in at], label=label, marker=".")
        if outers and "dense" in outers[0]:
            dense.plot(at, [outer["dense"]["share"] for outer in outers], label=label, marker=".")
        curve = [survival_of(result, k) for k in range(len(outers))]
        if any(result["survival"]["sizes"]):
            alive.plot([value for value in curve if value is not None], label=label, marker=".")
        if any("votes" in outer for outer in outers):
            votes.plot(at, [outer["votes"]["overlap"]["share"] for outer in outers], label=label, marker=".")
            votes.plot(at, [outer["votes"]["overlap"]["chance"] for outer in outers], color="grey", linestyle=":")
        if any("posterior" in outer for outer in outers):
            told = [outer["posterior"]["told_apart"] for outer in outers]
            spread.plot(at, [0.5 if value is None else value for value in told], label=label, marker=".")
    titles = {
        accuracy: ("round", "accuracy"),
        changed: ("round", "links changed"),
        dense: ("round", "active links in a dense model's top K"),
        alive: ("further outer rounds", "grown links still active"),
        votes: ("round", "overlap of two clients' votes (dotted: chance)"),
        spread: ("round", "P(draw: named once > by nobody)"),
    }
    for axis, (across, up) in titles.items():
        axis.set(xlabel=across, ylabel=up)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(frameon=False, fontsize=8)
    figure.savefig(out / "diagnosis.svg", metadata={"Date": None})
    figure.savefig(out / "diagnosis.png", dpi=110)
