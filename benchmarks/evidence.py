"""What holds: comparisons at paper scale (on one GPU) and on small data, their raw results, and the tables made of them.

    python benchmarks/evidence.py                         # benchmarks/results/evidence.md of the raw results that are there
    python benchmarks/evidence.py command NAME            # the `fedrts compare` command of a comparison, the `fedrts run` ones of a study
    python benchmarks/evidence.py collect NAME FOLDER     # adds the finished runs of a folder that the command, or a part of it, wrote
    python benchmarks/evidence.py last 100 NAME           # its tables, with accuracies that are means over the last 100 rounds, not ten
    python benchmarks/evidence.py status                  # what is done of the studies, and what the rest costs
    python benchmarks/evidence.py play --minutes 9        # plays missing cells of the studies for so long, and leaves one file
    python benchmarks/evidence.py collect FILE            # adds the finished cells of such a file

A study (`studies.py`) chooses learning rates first and takes results at them; its cells are played by `play`, in declared order. A cell
that was cut off goes on next time, in the same --folder or with the file given back (`--from FILE`).

A comparison goes on where it stopped, so it can be played in pieces, and pieces played in folders of their own (some of its methods, seeds
or values) are collected one after the other. Raw results lie in benchmarks/results/raw/evidence: of every run its
summary, its evaluations with the bytes sent until then, and how each outer round changed the topology.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import signal
import statistics
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import cells
from comparisons import COMPARISONS, PAPER, SHORT, STUDIES, VARIED
from fedrts import config
from fedrts.comparison.pool import default_jobs
from fedrts.comparison.statistics import mean_of
from fedrts.comparison.table import Results, costs_table, differences_table, markdown, means_table, words_on_test
from fedrts.comparison.target import cost_to_target
from fedrts.errors import InputError
from studies import FIRST_CHOOSING_SEED, rate_of
from study_report import choosing, differences, runs_of, what_seeds_tell

RESULTS = Path(__file__).parent / "results"
RAW = RESULTS / "raw" / "evidence"
REFERENCES = ("fedrts", "feddst")
"""Methods that the others are tested against."""
TARGETS = (0.6, 0.7, 0.9)
"""Accuracies whose price is shown."""


def command(name: str) -> str:
    """The command of a comparison; of a study one for each cell that is known to be needed."""
    if name in STUDIES:
        needed = STUDIES[name].cells(name, known_of(name).scores)
        return "\n".join(shlex.join(["fedrts", *cells.command(cell, cell.name)]) for cell in needed)
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


def collect_file(file: Path) -> list[Path]:
    """Add the finished cells of a file that `play` wrote to the raw results of their studies."""
    written = []
    with cells.unpacked(file) as place:
        for name in STUDIES:
            known, homes = known_of(name), [home for home in sorted((place / name / "runs").glob("*")) if cells.is_over(home)]
            if not homes:
                continue
            for home in homes:
                read_cell(home, known)
            raw = {"command": f"python benchmarks/evidence.py play --minutes 9 {name}"}
            kinds = {kind: [own[cell] for cell in sorted(own)] for kind, own in vars(known).items()}
            RAW.mkdir(parents=True, exist_ok=True)
            (RAW / f"{name}.json").write_text(as_lines(raw | kinds), "utf-8")
            written.append(RAW / f"{name}.json")
    return written


def known_of(name: str) -> cells.Known:
    """What the raw results have of a study."""
    file = RAW / f"{name}.json"
    return cells.Known.of(json.loads(file.read_text("utf-8")) if file.exists() else {})


def read_cell(home: Path, known: cells.Known) -> None:
    """Add what the run folder of a finished cell says to what is known."""
    settings = tomllib.loads((home / "experiment.toml").read_text("utf-8"))
    own = {"played": cells.played_of(home), "versions": settings.get("versions", {})}
    if settings["seed"] >= FIRST_CHOOSING_SEED:
        score = trial_of(home) if (home / "summary.json").exists() else {"cell": home.name, "valid_accuracy": None}
        known.trials[home.name] = {**score, **own}
    elif (home / "summary.json").exists():
        known.runs[home.name] = {**run_of(home), **own}
    else:
        known.diverged[home.name] = {"cell": home.name, **json.loads((home / "diverged.json").read_text("utf-8")), **own}


def play(names: Sequence[str], minutes: float, jobs: int | None, folder: Path, data_dir: Path | None, given: Path | None) -> Path:
    """Play missing cells of studies for so long; the file with what came of it."""
    ends = time.monotonic() + 60 * minutes
    chosen = {name: STUDIES[name] for name in names or STUDIES}
    if given is not None:
        cells.restore(given, folder, STUDIES)
    on_gpu = any(study.shared.get("device") == "cuda" for study in chosen.values())
    jobs = jobs or (cells.JOBS_ON_GPU if on_gpu else default_jobs("cpu", 1000))
    file = folder.with_name(folder.name + ".tar.gz")
    try:
        with interruptible(), cells.shared_machine(jobs, on_gpu):
            sitting = cells.Sitting(chosen, {name: known_of(name) for name in chosen}, folder, jobs, read_cell, data_dir)
            finished = sitting.play(ends - time.monotonic())
            print(f"{finished} cells finished, {len(sitting.failed)} failed")
    finally:
        count = cells.pack(folder, file, {name: known_of(name) for name in STUDIES})
        print(f"{file}: {count} cells, {file.stat().st_size / 1e6:.1f} MB")
    return file


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let SIGTERM and Ctrl-C stop what runs, and then go on."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        print("interrupted")
    finally:
        signal.signal(signal.SIGTERM, before)


def status() -> str:
    """What is done of each study, and what the rest costs."""
    known = {name: known_of(name) for name in STUDIES}
    costs = cells.Costs(list(known.values()))
    lines, total = [], 0.0
    for name, study in STUDIES.items():
        lines += [f"{name}: {study.title}"]
        for part, density in ((part, density) for part in study.parts for density in study.densities):
            choice = study.choice(name, part, density, known[name].scores)
            trials, runs = (list(own(name, part, density, choice)) for own in (study.trials, study.runs))
            rest = [[cell for cell in own if cell.name not in known[name]] for own in (trials, runs)]
            minutes = sum(costs.of(cell) for own in rest for cell in own) / 60
            total += minutes
            rates = ", ".join(f"{one.name} {rate_of(one, choice) or '–'}{'' if choice.is_over else '?'}" for one in part.entrants)
            done = (f"{len(own) - len(left)} of {len(own)}" for own, left in zip((trials, runs), rest, strict=True))
            more = "" if choice.is_over else ", more if rates widen"
            lines += [f"  density {density:g}: {next(done)} trials, {next(done)} runs, {minutes:.0f} GPU minutes to go{more}"]
            lines += [f"    best rates: {rates}"]
    return "\n".join([*lines, f"in all: {total:.0f} GPU minutes to go"])


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
    studied = [part for name in STUDIES if (RAW / f"{name}.json").exists() for part in study_section(name)]
    return "\n\n".join([*parts, *studied, *(part for name in known for part in section(name, known))]) + "\n"


def all_raw() -> dict[str, dict[str, Any]]:
    """Raw results by comparison, in the order in which they are declared."""
    return {name: json.loads((RAW / f"{name}.json").read_text("utf-8")) for name in COMPARISONS if (RAW / f"{name}.json").exists()}


def study_section(name: str) -> list[str]:
    """A study's heading and tables."""
    study, raw = STUDIES[name], json.loads((RAW / f"{name}.json").read_text("utf-8"))
    scores = cells.Known.of(raw).scores
    runs = runs_of(name, study, raw, scores)
    parts = [f"## {study.title}", f"`{raw['command']}`", f"{versions_of([*raw['trials'], *raw['runs']])}.", *choosing(name, study, scores)]
    if not runs:
        return [*parts, "No run at a chosen rate is finished yet."]
    rows = [{"cell": run["cell"], **run["summary"]} for run in runs]
    results = Results.of(rows, [], "accuracy_last10")
    seeds = max(len(part.seeds) for part in study.parts)
    words = (
        "Test accuracy, mean of the last ten rounds, ± standard error over seeds; the runs train on all training data at the chosen rates."
    )
    parts += [words, means_table(results, seeds), *differences(results, study.reference)]
    parts += [what_seeds_tell(results, study.reference, len(study.parts[0].entrants) - 1)]
    lost = [f"{entry['cell']} ({entry['reason']})" for entry in raw["diverged"]]
    parts += [f"**Diverged**, and left out: {'; '.join(lost)}."] if lost else []
    if (stale := len(raw["runs"]) - len(runs)) > 0:
        parts += [f"{stale} runs at rates that are not the chosen ones are left out."]
    return [*parts, "Topology and price:", prices(runs, []), costs_table(rows, [])]


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
    kinds.add_parser("command").add_argument("name", choices=[*COMPARISONS, *STUDIES])
    collecting = kinds.add_parser("collect", help="the file that `play` wrote; or a comparison's name and its folder")
    collecting.add_argument("source", metavar="FILE | NAME FOLDER", nargs="+")
    lasting = kinds.add_parser("last")
    lasting.add_argument("rounds", type=int)
    lasting.add_argument("name", choices=list(COMPARISONS))
    kinds.add_parser("status", help="what is done of the studies, and what the rest costs")
    playing = kinds.add_parser("play", help="play missing cells of the studies for a given time")
    playing.add_argument("names", metavar="NAME", nargs="*", help="studies; default: all")
    playing.add_argument("--minutes", type=float, required=True, help="it ends before they are over")
    playing.add_argument("--jobs", type=int, help=f"cells at once; default: {cells.JOBS_ON_GPU} on a GPU, else one a core")
    playing.add_argument("--folder", type=Path, default=Path("runs/evidence"), help="of the runs; the file is written beside it")
    playing.add_argument("--data-dir", type=Path, help="folder of the data sets' files")
    playing.add_argument("--from", type=Path, dest="given", metavar="FILE", help="an earlier file, whose cells go on")
    options = parser.parse_args()
    try:
        follow(options)
    except InputError as error:
        sys.exit(f"evidence.py: {error}")


def follow(options: argparse.Namespace) -> None:
    """Do what the command line says."""
    if options.kind == "last":
        print("\n\n".join(section(options.name, {name: of_last(raw, options.rounds) for name, raw in all_raw().items()})))
    elif options.kind == "command":
        print(command(options.name))
    elif options.kind == "collect":
        print(*collected(options.source), sep="\n")
    elif options.kind == "status":
        print(status())
    elif options.kind == "play":
        for name in (name for name in options.names if name not in STUDIES):
            raise InputError(f"there is no study '{name}': {', '.join(STUDIES)}")
        play(options.names, options.minutes, options.jobs, options.folder, options.data_dir, options.given)
    else:
        (RESULTS / "evidence.md").write_text(render(), "utf-8")
        print(RESULTS / "evidence.md")


def collected(source: Sequence[str]) -> list[Path]:
    """The raw results to which the runs of a file, or of a comparison's folder, were added."""
    if len(source) == 1:
        return collect_file(Path(source[0]))
    if len(source) > 2 or source[0] not in COMPARISONS:
        raise InputError("collect takes a file that `play` wrote, or the name of a comparison and its folder")
    return [collect(source[0], Path(source[1]))]


if __name__ == "__main__":
    main()
