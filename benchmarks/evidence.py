"""What holds: comparisons at paper scale (on one GPU) and on small data, their raw results, and the tables made of them.

    python benchmarks/evidence.py                         # benchmarks/results/evidence.md of the raw results that are there
    python benchmarks/evidence.py command NAME            # the `fedrts compare` command of a comparison
    python benchmarks/evidence.py collect NAME FOLDER     # adds the finished runs of a folder that the command, or a part of it, wrote
    python benchmarks/evidence.py last 100 NAME           # its tables, with accuracies that are means over the last 100 rounds, not ten

A comparison goes on where it stopped, so it can be played in pieces, and pieces played in folders of their own (some of its methods, seeds
or values) are collected one after the other. Raw results lie in benchmarks/results/raw/evidence: of every run its
summary, its evaluations with the bytes sent until then, and how each outer round changed the topology.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from comparisons import COMPARISONS, PAPER, SHORT, VARIED
from fedrts import config
from fedrts.comparison.statistics import mean_of
from fedrts.comparison.table import Results, costs_table, differences_table, markdown, means_table, words_on_test
from fedrts.comparison.target import cost_to_target

RESULTS = Path(__file__).parent / "results"
RAW = RESULTS / "raw" / "evidence"
REFERENCES = ("fedrts", "feddst")
"""Methods that the others are tested against."""
TARGETS = (0.6, 0.7, 0.9)
"""Accuracies whose price is shown."""


def command(name: str) -> str:
    return f"fedrts compare {COMPARISONS[name].arguments} --out {name}"


def collect(name: str, folder: Path) -> Path:
    """Add a folder's finished runs to the raw results of a comparison; of a cell that is there already they take the place."""
    file = RAW / f"{name}.json"
    known = json.loads(file.read_text("utf-8")) if file.exists() else {"runs": [], "trials": []}
    declared = tomllib.loads((folder / "compare.toml").read_text("utf-8"))
    runs = [run_of(path.parent) for path in folder.glob("runs/*/summary.json")]
    trials = [trial_of(path.parent) for path in folder.glob("tuning/*/summary.json")]
    raw = {
        "command": command(name),
        "axes": sorted(declared["grid"]),
        "runs": _by_cell(known["runs"], runs),
        "trials": _by_cell(known["trials"], trials),
    }
    RAW.mkdir(parents=True, exist_ok=True)
    file.write_text(as_lines(raw), "utf-8")
    return file


def _by_cell(known: Sequence[dict[str, Any]], found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    cells = {entry["cell"]: entry for entry in (*known, *found)}
    return [cells[name] for name in sorted(cells)]


def as_lines(raw: Mapping[str, Any]) -> str:
    """Raw results as JSON with a line for every run."""
    return "{\n" + ",\n".join(f'"{key}": {_lines(value)}' for key, value in raw.items()) + "\n}\n"


def _lines(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n" + ",\n".join(json.dumps(entry) for entry in value) + "\n]"
    return json.dumps(value)


def run_of(folder: Path) -> dict[str, Any]:
    """A finished run, in short, with its values of the keys that are varied somewhere."""
    settings = tomllib.loads((folder / "experiment.toml").read_text("utf-8"))
    evaluations, sent, since = [], 0, []
    for line in _json_lines(folder / "history.jsonl"):
        sent += line["upload_bytes"] + line["download_bytes"]
        since.append(line["links_changed"])
        if line["accuracy"] is not None:
            evaluations.append([line["round"], line["accuracy"], sent])
    topology = [[line["round"], round(line["overlap"], 4)] for line in _json_lines(folder / "topology.jsonl")]
    return {
        "cell": folder.name,
        "summary": json.loads((folder / "summary.json").read_text("utf-8")),
        "lr": settings["train"]["lr"],
        "method_options": settings.get("method_options", {}),
        "settings": {key: value for key, value in config.flat(settings).items() if key in VARIED},
        "versions": settings.get("versions", {}),
        "evaluations": evaluations,
        "overlap": topology,
        "changed": [[index, round(share, 4)] for index, share in enumerate(since) if share],
    }


def trial_of(folder: Path) -> dict[str, Any]:
    """A trial of a learning rate: its mean accuracy on the validation split over the last ten rounds."""
    scores = [line.get("valid_accuracy") for line in _json_lines(folder / "history.jsonl")][-10:]
    known = [score for score in scores if score is not None]
    return {"cell": folder.name, "valid_accuracy": statistics.mean(known) if known else None}


def _json_lines(file: Path) -> Iterator[dict[str, Any]]:
    return (json.loads(line) for line in file.read_text("utf-8").splitlines()) if file.exists() else iter(())


def render() -> str:
    """All tables."""
    parts = [
        "# Evidence",
        "Made by `python benchmarks/evidence.py` of the raw results in `raw/evidence`. Mean ± standard error over seeds. CIFAR-10 is one "
        "re-compressed as JPEG (accuracies compare with each other, not to the last point with published ones), with resnet18_small "
        "(175,258 parameters), 500 rounds, 10 of 100 clients a round, Dirichlet 0.5, 5 epochs, batches of 64, ΔT = 10, T_end = 300. The "
        "digits: an MLP where no model is named, 100 rounds, 10 of 20 clients, Dirichlet 0.5, 5 epochs, batches of 16, ΔT = 5, T_end = 60.",
    ]
    known = all_raw()
    return "\n\n".join([*parts, *(part for name in known for part in section(name, known))]) + "\n"


def all_raw() -> dict[str, dict[str, Any]]:
    """Raw results by comparison, in the order in which they are declared."""
    return {name: json.loads((RAW / f"{name}.json").read_text("utf-8")) for name in COMPARISONS if (RAW / f"{name}.json").exists()}


def section(name: str, known: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A comparison's heading and tables."""
    comparison = COMPARISONS[name]
    borrowed = [run for run in known[comparison.lender]["runs"] if run["summary"]["method"] in comparison.borrowed]
    raw = _labelled(known[name], comparison.label)
    usual = PAPER[raw["axes"][0]] if comparison.lender == SHORT else None
    return [f"## {comparison.title}", *tables(raw, borrowed, comparison.metric, usual)]


def _labelled(raw: Mapping[str, Any], label: str) -> dict[str, Any]:
    """Raw results whose runs go by another name than their method's."""
    runs = [{**run, "summary": {**run["summary"], "method": label or run["summary"]["method"]}} for run in raw["runs"]]
    return {**raw, "runs": runs}


def of_last(raw: Mapping[str, Any], rounds: int) -> dict[str, Any]:
    """Raw results whose accuracies are means over evaluations, one every fifth round, of so many last rounds."""

    def mean(run: Mapping[str, Any]) -> float:
        stop = run["evaluations"][-1][0]
        return mean_of([accuracy for index, accuracy, _ in run["evaluations"] if index > stop - rounds and (stop - index) % 5 == 0]).value

    runs = [{**run, "summary": {**run["summary"], "accuracy_last10": mean(run)}} for run in raw["runs"]]
    return {**raw, "runs": runs}


def tables(
    raw: Mapping[str, Any], borrowed: Sequence[Mapping[str, Any]] = (), metric: str = "accuracy_last10", usual: float | None = None
) -> list[str]:
    """The tables of one comparison, with the runs that it borrows; `usual` is the value of its key that the others are held against."""
    if not raw["runs"]:
        return [f"`{raw['command']}`", "No run is finished yet.", *_tuning(raw)]
    runs = sorted([*raw["runs"], *borrowed], key=lambda run: tuple(_axes(run, raw["axes"]).values()))
    rows = [{"cell": run["cell"], **_axes(run, raw["axes"]), **run["summary"]} for run in runs]
    results = Results.of(rows, raw["axes"], metric)
    seeds = len({row["seed"] for row in rows})
    words = f"{versions_of(runs)}." + (" With runs of another comparison, which need not be played again." if borrowed else "")
    parts = [f"`{raw['command']}`", words, means_table(results, seeds)]
    for reference in REFERENCES:
        if reference in results.methods and len(results.methods) > 1:
            parts += [words_on_test(results, reference), differences_table(results, reference)]
    if usual is not None:
        parts += along(rows, raw["axes"][0], usual, metric)
    parts += ["Topology and price:", prices(runs, raw["axes"]), costs_table(rows, raw["axes"])]
    return [*parts, *_tuning(raw)]


def along(rows: Sequence[Mapping[str, Any]], axis: str, usual: float, metric: str) -> list[str]:
    """What other values of a key do to each method: values take the place of methods, and methods that of a key."""
    name = axis.rpartition(".")[2]
    turned = Results.of([{**row, "method": f"{name} {row[axis]:g}", "of": row["method"]} for row in rows], ["of"], metric)
    return [f"What {name} does to each method:", differences_table(turned, f"{name} {usual:g}")]


def versions_of(runs: Sequence[Mapping[str, Any]]) -> str:
    """On what they were played."""
    return "; ".join(sorted({f"{run['versions'].get('device')}, torch {run['versions'].get('torch')}" for run in runs}))


def _tuning(raw: Mapping[str, Any]) -> list[str]:
    if not raw["trials"]:
        return []
    words = "Learning rates: mean accuracy on the validation split over the last ten rounds of a trial, one with each rate, seed 1000."
    return [words, rates(raw["trials"])]


def prices(runs: Sequence[Mapping[str, Any]], axes: Sequence[str]) -> str:
    """How steady the topology is, and what an accuracy (mean over ten rounds) costs; means over seeds."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for run in runs:
        groups.setdefault((run["summary"]["method"], *_axes(run, axes).values(), run["summary"]["density_target"]), []).append(run)
    body = []
    for group, own in groups.items():
        overlaps = [[value for _, value in run["overlap"]] for run in own]
        steady = [_percent([part[place] for part in overlaps if part]) for place in (0, -1)]
        mean = _percent([statistics.mean(part) for part in overlaps if part])
        body.append([*map(str, group), steady[0], steady[1], mean, *(_price(own, target) for target in TARGETS)])
    names = [key.rpartition(".")[2] for key in axes]
    heads = ["links kept, first outer round", "last", "mean", *(f"MB (rounds) to {target:g}" for target in TARGETS)]
    return markdown(["method", *names, "density", *heads], body)


def _percent(values: Sequence[float]) -> str:
    return f"{100 * statistics.mean(values):.1f} %" if values else "–"


def _price(runs: Sequence[Mapping[str, Any]], target: float) -> str:
    """Megabytes and rounds until the accuracy is reached, where every seed reaches it."""
    points = [cost_to_target(list(_history(run)), target) for run in runs]
    reached = [point for point in points if point is not None]
    if len(reached) < len(points):
        return f"{len(reached)} of {len(points)} reach it" if reached else "–"
    return f"{mean_of([p.bytes / 1e6 for p in reached]).value:,.0f} ({mean_of([p.round + 1 for p in reached]).value:.0f})"


def _history(run: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The evaluated rounds as lines of a history."""
    before = 0
    for index, accuracy, sent in run["evaluations"]:
        yield {"round": index, "accuracy": accuracy, "upload_bytes": sent - before, "download_bytes": 0, "flops": 0.0}
        before = sent


def rates(trials: Sequence[Mapping[str, Any]]) -> str:
    """Groups by rates."""
    scores: dict[str, dict[str, float | None]] = {}
    for trial in trials:
        group, _, rate = trial["cell"].rpartition("-")
        scores.setdefault(group, {})[rate.removeprefix("lr")] = trial["valid_accuracy"]
    heads = sorted({rate for own in scores.values() for rate in own})
    body = [[group, *("–" if own.get(rate) is None else f"{own[rate]:.4f}" for rate in heads)] for group, own in scores.items()]
    return markdown(["", *heads], body)


def _axes(run: Mapping[str, Any], axes: Sequence[str]) -> dict[str, Any]:
    """A run's values of the keys that were varied."""
    return {key: run["settings"].get(key) for key in axes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind")
    kinds.add_parser("command").add_argument("name", choices=list(COMPARISONS))
    collecting = kinds.add_parser("collect")
    collecting.add_argument("name", choices=list(COMPARISONS))
    collecting.add_argument("folder", type=Path)
    lasting = kinds.add_parser("last")
    lasting.add_argument("rounds", type=int)
    lasting.add_argument("name", choices=list(COMPARISONS))
    options = parser.parse_args()
    if options.kind == "last":
        print("\n\n".join(section(options.name, {name: of_last(raw, options.rounds) for name, raw in all_raw().items()})))
    elif options.kind == "command":
        print(command(options.name))
    elif options.kind == "collect":
        print(collect(options.name, options.folder))
    else:
        (RESULTS / "evidence.md").write_text(render(), "utf-8")
        print(RESULTS / "evidence.md")


if __name__ == "__main__":
    main()
