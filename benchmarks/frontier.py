"""The most accuracy for a byte: contestants at equal bytes, each with the configuration that is best for it.

    python benchmarks/frontier.py                       # benchmarks/results/frontier.md and its figures, of the raw results that are there
    python benchmarks/frontier.py status                # what is done, and what the rest costs
    python benchmarks/frontier.py play --minutes 9      # plays missing runs for so long, and leaves one file
    python benchmarks/frontier.py collect FILE          # adds the finished runs of such a file to the raw results
    python benchmarks/frontier.py command NAME          # the `fedrts run` commands of a frontier, as far as they are known

What is compared is declared in `frontiers.py`. A run that was cut off goes on next time, as in `evidence.py`. Raw results lie in
benchmarks/results/raw/frontier: of every run its summary, and its rounds' bytes.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cells
from evidence import as_lines, interruptible, versions_of
from fedrts.comparison.pool import default_jobs
from fedrts.comparison.table import ABSENT, markdown
from fedrts.errors import InputError
from frontiers import FRONTIERS, LATER, MB, Choice, Frontier, round_of
from studies import Scores

RESULTS = Path(__file__).parent / "results"
RAW = RESULTS / "raw" / "frontier"
TITLES = {
    "fedrts": "FedRTS",
    "fedpaq8": "FedPAQ, 8 bits",
    "fedpaq4": "FedPAQ, 4 bits",
    "fedtopk": "top-k of the update",
    "small": "small dense",
    "feddst": "FedDST",
    "random": "random mask",
    "dense": "dense averaging, float32",
}


class Known(cells.Known):
    """Finished runs of a frontier; trials have a score, and bytes a round."""

    @property
    def scores(self) -> Scores:
        found: dict[str, float | None] = {}
        for name, entry in self.trials.items():
            first = {name + round_of(index): sent for index, sent in enumerate(entry.get("first", []))}
            found |= {name: entry["score"], name + LATER: entry.get("later"), **first}
        return found

    def result(self, cell: str) -> str:
        if cell in self.runs:
            return f"on test data {self.runs[cell]['result']:.4f}"
        score = self.scores.get(cell)
        return "diverged" if score is None else f"{score:.4f}"


def known_of(name: str) -> Known:
    """What the raw results have of a frontier."""
    file = RAW / f"{name}.json"
    return Known.of(json.loads(file.read_text("utf-8")) if file.exists() else {})


def read_cell(home: Path, known: cells.Known) -> None:
    """Add what the run folder of a finished cell says to what is known."""
    frontier = FRONTIERS[home.parent.parent.name]
    settings = tomllib.loads((home / "experiment.toml").read_text("utf-8"))
    own = {"cell": home.name, "played": cells.played_of(home), "versions": settings.get("versions", {})}
    if not (home / "summary.json").exists():
        reason = json.loads((home / "diverged.json").read_text("utf-8"))["reason"]
        if "data_options" in settings and "validation" in settings["data_options"]:
            known.trials[home.name] = {**own, "score": None, "reason": reason}
        else:
            known.diverged[home.name] = {**own, "reason": reason}
        return
    summary = json.loads((home / "summary.json").read_text("utf-8"))
    lines = [json.loads(line) for line in (home / "history.jsonl").read_text("utf-8").splitlines()]
    sent = [line["upload_bytes"] + line["download_bytes"] for line in lines]
    if home.name.endswith("-price"):
        known.trials[home.name] = {**own, "score": statistics.mean(sent[-10:]), "first": sent}
    elif "validation" in settings.get("data_options", {}):
        known.trials[home.name] = {
            **own,
            "score": summary["average_valid_accuracy"],
            "sent": sum(sent),
            "rounds": len(sent),
            "later": statistics.mean(sent[len(sent) // 2 :]),
        }
    else:
        known.runs[home.name] = {**own, "result": summary[f"average_{frontier.metric}"], "sent": sum(sent), "summary": summary}


def collect(file: Path) -> list[Path]:
    """Add the finished runs of a file that `play` wrote to the raw results of their frontiers."""
    written = []
    with cells.unpacked(file) as place:
        for name in FRONTIERS:
            homes = [home for home in sorted((place / name / "runs").glob("*")) if cells.is_over(home)]
            if not homes:
                continue
            known = known_of(name)
            for home in homes:
                read_cell(home, known)
            raw = {"command": f"python benchmarks/frontier.py play --minutes 9 {name}"}
            kinds = {kind: [own[cell] for cell in sorted(own)] for kind, own in vars(known).items()}
            RAW.mkdir(parents=True, exist_ok=True)
            (RAW / f"{name}.json").write_text(as_lines(raw | kinds), "utf-8")
            written.append(RAW / f"{name}.json")
    return written


def play(names: Sequence[str], minutes: float, jobs: int | None, folder: Path, data_dir: Path | None, given: Path | None) -> Path:
    """Play missing runs of frontiers for so long; the file with what came of it."""
    ends = time.monotonic() + 60 * minutes
    chosen = {name: FRONTIERS[name] for name in names or FRONTIERS}
    if given is not None:
        cells.restore(given, folder, FRONTIERS)
    on_gpu = any(frontier.shared.get("device") == "cuda" for frontier in chosen.values())
    jobs = jobs or (cells.JOBS_ON_GPU if on_gpu else default_jobs("cpu", 1000))
    file = folder.with_name(folder.name + ".tar.gz")
    try:
        with interruptible(), cells.shared_machine(jobs, on_gpu):
            known: dict[str, cells.Known] = {name: known_of(name) for name in chosen}
            sitting = cells.Sitting(chosen, known, folder, jobs, read_cell, data_dir)
            print(f"{sitting.play(ends - time.monotonic())} runs finished, {len(sitting.failed)} failed")
    finally:
        count = cells.pack(folder, file, {name: known_of(name) for name in FRONTIERS})
        print(f"{file}: {count} runs, {file.stat().st_size / 1e6:.1f} MB")
    return file


def status() -> str:
    """What is done of each frontier, and what the rest of what is known to be needed costs."""
    lines = []
    everything = {name: known_of(name) for name in FRONTIERS}
    costs = cells.Costs(list(everything.values()))
    for name, frontier in FRONTIERS.items():
        known = everything[name]
        needed = list(frontier.cells(name, known.scores))
        missing = [cell for cell in needed if cell.name not in known]
        choices = frontier.choices(known.scores)
        over = frontier.is_over(choices)
        minutes = sum(costs.of(cell) for cell in missing) / 60
        lines.append(f"{name}: {len(needed) - len(missing)} of {len(needed)} runs that are known to be needed, {minutes:.0f} minutes to go")
        for choice in choices:
            best = choice.best.name if choice.best else ABSENT
            edge = ", at the edge" if choice.is_at_edge and choice.is_complete else ""
            lines.append(f"  {choice.contestant.name}: {len(choice.scores)} of {len(choice.tried)} tried, best {best}{edge}")
        lines += [] if over else ["  the choice is not over"]
    return "\n".join(lines)


@dataclass(frozen=True)
class Point:
    """A contestant at a budget: means over seeds."""

    contestant: str
    budget: float
    sent: float
    """Megabytes."""
    rounds: int
    values: tuple[float, ...]
    """Accuracy of the average of the late models, by seed."""
    last: tuple[float, ...]
    """Accuracy of the last model."""

    @property
    def mean(self) -> float:
        return statistics.mean(self.values)

    @property
    def error(self) -> float:
        return statistics.stdev(self.values) / len(self.values) ** 0.5 if len(self.values) > 1 else 0.0


def points(name: str, frontier: Frontier, known: Known) -> list[Point]:
    """Return the points of the finished runs at chosen configurations."""
    choices = frontier.choices(known.scores)
    if not frontier.is_over(choices):
        return []
    found = []
    for choice in choices:
        for budget in frontier.budgets_of(choice.contestant):
            wanted = [frontier.run(name, choice, budget, seed, known.scores) for seed in frontier.seeds]
            own = [known.runs[cell.name] for cell in wanted if cell.name in known.runs]
            if own:
                values, last = tuple(run["result"] for run in own), tuple(run["summary"][frontier.metric] for run in own)
                sent = statistics.mean(run["sent"] for run in own) / MB
                found.append(Point(choice.contestant.name, budget, sent, own[0]["summary"]["rounds"], values, last))
    return found


def render(name: str, frontier: Frontier, known: Known) -> list[str]:
    """A frontier's heading, tables and figure."""
    unit = frontier.metric + (", lower is better" if frontier.lower_is_better else "")
    parts = [
        f"## {frontier.title}",
        f"`python benchmarks/frontier.py play --minutes 9 {name}`; {versions_of([*known.trials.values(), *known.runs.values()])}.",
    ]
    choices = frontier.choices(known.scores)
    found = points(name, frontier, known)
    if found:
        parts += [
            f"{unit.capitalize()} of the average of the late models on the test data, mean ± standard error over {len(frontier.seeds)} "
            f"seeds (in brackets the last model); megabytes that were really sent, and rounds. At most {frontier.most_rounds} rounds.",
            _results(frontier, choices, found),
            f"![{frontier.metric} against bytes](frontier_{name}.svg)",
        ]
    else:
        parts += ["No result is finished yet: configurations are being chosen."]
    return [*parts, *_chosen(frontier, choices, known)]


def _results(frontier: Frontier, choices: Sequence[Choice], found: Sequence[Point]) -> str:
    heads = ["", "chosen", *(f"{budget:g} MB" for budget in frontier.budgets)]
    at = {(point.contestant, point.budget): point for point in found}
    pick = min if frontier.lower_is_better else max
    bounded = [point for point in found if frontier.budgets_of(_contestant(frontier, point.contestant)) == frontier.budgets]
    best = {budget: pick((one.mean for one in bounded if one.budget == budget), default=None) for budget in frontier.budgets}
    body = []
    for choice in choices:
        name, row = choice.contestant.name, []
        for budget in frontier.budgets:
            point = at.get((name, budget))
            row.append(ABSENT if point is None else _words(point, frontier, point.mean == best[budget]))
        body.append([TITLES[name], choice.best.name if choice.best else ABSENT, *row])
    return markdown(heads, body)


def _contestant(frontier: Frontier, name: str) -> Any:
    return next(one for one in frontier.contestants if one.name == name)


def _words(point: Point, frontier: Frontier, is_best: bool) -> str:
    digits = 2 if frontier.lower_is_better else 4
    text = f"{point.mean:.{digits}f}" + (f" ± {point.error:.{digits}f}" if len(point.values) > 1 else "")
    text = f"**{text}**" if is_best else text
    few = "" if len(point.values) == len(frontier.seeds) else f"; {len(point.values)} of {len(frontier.seeds)} seeds"
    return f"{text} ({statistics.mean(point.last):.{digits}f}; {point.sent:.1f} MB, {point.rounds} rounds{few})"


def _chosen(frontier: Frontier, choices: Sequence[Choice], known: Known) -> list[str]:
    body = []
    for choice in choices:
        for one in choice.tried:
            score = choice.scores.get(one.name, ABSENT)
            told = ABSENT if isinstance(score, str) else "diverged" if score is None else f"{score:.4f}"
            first = known.trials.get(f"{choice.contestant.name}-{one.name}-s{frontier.choosing_seeds[0]}", {})
            sent = f"{first['sent'] / MB:.1f}, {first['rounds']}" if "sent" in first else ABSENT
            told = f"**{told}**" if one == choice.best else told
            body.append([TITLES[choice.contestant.name], one.shape.name, f"{one.rate:g}", told, sent])
    seeds = ", ".join(map(str, frontier.choosing_seeds))
    words = (
        f"Configurations, chosen at {frontier.chosen_at:g} MB: accuracy of the average of the late models on "
        f"{frontier.validation:.0%} of the training data that the run did not train on (seed {seeds}); **best**."
    )
    return [words, markdown(["", "shape", "learning rate", "accuracy, validation", "MB, rounds"], body)]


def draw(name: str, frontier: Frontier, found: Sequence[Point]) -> None:
    """The figure: what each contestant makes of how many bytes. Points that lack seeds are hollow."""
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "frontier"
    figure, axes = plt.subplots(figsize=(8, 4.2))
    for contestant in frontier.contestants:
        own = sorted((point for point in found if point.contestant == contestant.name), key=lambda point: point.sent)
        if not own:
            continue
        x, y, error = [point.sent for point in own], [point.mean for point in own], [point.error for point in own]
        width = 2.5 if contestant.name == "fedrts" else 1.3
        line, *_ = axes.errorbar(x, y, error, capsize=2, label=TITLES[contestant.name], linewidth=width)
        for point in own:
            fill = line.get_color() if len(point.values) == len(frontier.seeds) else "white"
            axes.plot(point.sent, point.mean, "o", markersize=5, color=line.get_color(), markerfacecolor=fill, zorder=3)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_ylim(*frontier.drawn)
    if frontier.lower_is_better:
        axes.set_yscale("log")
        axes.invert_yaxis()
    axes.set_title(f"{frontier.title}, {len(frontier.seeds)} seeds", fontsize=10)
    axes.set_xlabel("megabytes, sent and received by all clients over the whole run")
    axes.set_ylabel(f"{frontier.metric} on test data")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.tight_layout()
    figure.savefig(RESULTS / f"frontier_{name}.svg", metadata={"Date": None})
    plt.close(figure)


def document() -> str:
    """benchmarks/results/frontier.md."""
    parts = [
        "# The most accuracy for a byte",
        "Made by `python benchmarks/frontier.py` of the raw results in `raw/frontier`. Every contestant has the same bytes, counted both "
        "ways over all clients and rounds, and as many configurations to choose from: its shapes at one learning rate, then other rates at "
        "the best shape, one more for all where a best rate lies at an edge. Rounds are as many as the bytes pay for, and the schedule of "
        "the learning rate runs over them. All have the tuned recipe (cosine, average of the late models, first weights that suit the "
        "density). Dense averaging in float32 has no budget: it is what the others try to reach.",
    ]
    for name, frontier in FRONTIERS.items():
        if (RAW / f"{name}.json").exists():
            parts += render(name, frontier, known_of(name))
    return "\n\n".join(parts) + "\n"


def commands(name: str) -> Iterator[str]:
    frontier, known = FRONTIERS[name], known_of(name)
    return (shlex.join(["fedrts", *cells.command(cell, cell.name)]) for cell in frontier.cells(name, known.scores))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind")
    kinds.add_parser("status", help="what is done, and what the rest costs")
    kinds.add_parser("command", help="the commands of a frontier's runs").add_argument("name", choices=list(FRONTIERS))
    kinds.add_parser("collect", help="the file that `play` wrote").add_argument("file", type=Path)
    playing = kinds.add_parser("play", help="play missing runs for a given time")
    playing.add_argument("names", metavar="NAME", nargs="*", help="frontiers; default: all")
    playing.add_argument("--minutes", type=float, required=True, help="it ends before they are over")
    playing.add_argument("--jobs", type=int, help=f"runs at once; default: {cells.JOBS_ON_GPU} on a GPU, else one a core")
    playing.add_argument("--folder", type=Path, default=Path("runs/frontier"), help="of the runs; the file is written beside it")
    playing.add_argument("--data-dir", type=Path, help="folder of the data sets' files")
    playing.add_argument("--from", type=Path, dest="given", metavar="FILE", help="an earlier file, whose runs go on")
    options = parser.parse_args()
    try:
        follow(options)
    except InputError as error:
        sys.exit(f"frontier.py: {error}")


def follow(options: argparse.Namespace) -> None:
    """Do what the command line says."""
    if options.kind == "status":
        print(status())
    elif options.kind == "command":
        print(*commands(options.name), sep="\n")
    elif options.kind == "collect":
        print(*collect(options.file), sep="\n")
    elif options.kind == "play":
        for name in (name for name in options.names if name not in FRONTIERS):
            raise InputError(f"there is no frontier '{name}': {', '.join(FRONTIERS)}")
        play(options.names, options.minutes, options.jobs, options.folder, options.data_dir, options.given)
    else:
        (RESULTS / "frontier.md").write_text(document(), "utf-8")
        for name, frontier in FRONTIERS.items():
            if found := points(name, frontier, known_of(name)):
                draw(name, frontier, found)
        print(RESULTS / "frontier.md")


if __name__ == "__main__":
    main()
