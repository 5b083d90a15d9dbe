"""The content of a report, composed from the runs found."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

from fedrts.config import nested
from fedrts.report import differences, tables
from fedrts.report.charts import drawn
from fedrts.report.format import cell, text
from fedrts.report.model import Chapter, Report, ReportTable, Section
from fedrts.report.quantities import metrics_of, over
from fedrts.report.read import Found, Run
from fedrts.report.settings import Problem, grouped
from fedrts.runs.folder import resume_command
from fedrts.runs.lost_units import lost_units
from fedrts.server.collect import DROPPED, EXCUSED, UNASKED
from fedrts.tasks.metrics import Metric

_NAMED, _SPANS = 10, 8
"""Missing clients, and spans of rounds of each, that are named one by one."""


def compose(found: Found) -> Report:
    """Compose the whole report."""
    problems, repeats = grouped(found.runs)
    chapters = [_chapter(problem) for problem in problems]
    settings = sum(len(problem.settings) for problem in problems)
    title = problems[0].title if len(problems) == 1 else f"{len(problems)} pairs of data and model"
    text = f"{_count(sum(len(problem.runs) for problem in problems), 'run')}, {_count(settings, 'setting')}"
    return Report(title, text, [*found.problems, *repeats, *failures(found.runs)], chapters)


def failures(runs: Iterable[Run]) -> list[str]:
    """Return a line for every unfinished run and for every reason why replies were rejected."""
    found = []
    for run in runs:
        if not run.finished:
            again = "" if run.running else f"; {resume_command(run.path, nested(run.settings))}"
            found.append(f"{run.path}: {run.state} after {run.played} of {run.settings['rounds']} rounds{again}")
        reasons = Counter(str(entry["reason"]) for line in run.history for entry in line["rejected"])
        rejected = {reason: count for reason, count in reasons.items() if reason not in EXCUSED}
        if rejected:
            what = "; ".join(f"{count} × {reason}" for reason, count in sorted(rejected.items(), key=lambda entry: -entry[1])[:3])
            found.append(f"{run.path}: {_count(sum(rejected.values()), 'rejected reply', 'rejected replies')}: {what}")
        found += [f"{run.path}: {words}" for words in (*absences(run), *lost_units(run.topology, run.history))]
    return found


def absences(run: Run) -> list[str]:
    """Return a line for every client that was missing in rounds, and why; those that missed most come first."""
    rounds: defaultdict[tuple[int, str], list[int]] = defaultdict(list)
    for line in run.history:
        for client, reason in {(entry["client"], entry["reason"]) for entry in line["rejected"]}:
            if reason in EXCUSED and reason not in (DROPPED, UNASKED) and client not in line["clients"]:
                rounds[client, reason].append(line["round"])
    ranked = sorted(rounds.items(), key=lambda item: (-len(item[1]), item[0]))
    words = [f"client {client} {reason} in {_spans(which)}" for (client, reason), which in ranked[:_NAMED]]
    return words + [f"{_count(len(ranked) - _NAMED, 'more client')} missing in some rounds"] * (len(ranked) > _NAMED)


def _spans(rounds: list[int]) -> str:
    """Format [3, 4, 5, 9] as `rounds 3-5, 9`."""
    spans: list[list[int]] = []
    for number in rounds:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    words = [str(first) if first == last else f"{first}-{last}" for first, last in spans[:_SPANS]]
    return f"round{'s' * (len(rounds) > 1)} {', '.join(words)}{' …' * (len(spans) > _SPANS)}"


def _chapter(problem: Problem) -> Chapter:
    metric = metrics_of(problem)[0]
    return Chapter(problem.id, problem.title, headline(problem, metric), _sections(problem, metric))


def headline(problem: Problem, metric: Metric) -> str:
    """Name the best sparse and the best dense setting, and say how significant the difference is."""
    words = []
    for dense, kind in ((False, "Best sparse setting"), (True, "best dense one")):
        for setting, value in differences.ranked(problem, metric, dense)[:1]:
            ratio = over(setting, lambda run: run.summary["comm_ratio"] if run.summary else None)
            sent = f", sending {text(ratio.value, 'percent')} of dense averaging's bytes" if ratio and not dense else ""
            words.append(f"{kind}: {setting.label} with {metric.label} {cell(value, metric.format)}{sent}")
    if not words:
        return ""
    said = "; ".join(words)
    return f"{said[0].upper()}{said[1:]} (mean of the last ten rounds). {differences.caveat(problem, metric)}".rstrip()


def _sections(problem: Problem, metric: Metric) -> list[Section]:
    parts: list[tuple[str, str, str, list[ReportTable | None]]] = [
        ("results", "Results", "", [tables.results(problem, metric) if problem.finished else None, *differences.tables(problem, metric)]),
        (
            "cost",
            "Cost",
            "Bytes are the lengths of encoded messages. FLOPs are counted from densities; dense kernels still do the full work.",
            [tables.cost(problem) if problem.finished else None, tables.to_target(problem, metric)],
        ),
        ("topology", "Topology", "Is the topology stable, which layers are dense, and how does the server rate the links?", []),
        (
            "fairness",
            "Classes and clients",
            "Pruning can cost minorities more than others. How well does the final model serve each class and client?",
            [tables.fairness(problem, metric)],
        ),
        ("configuration", "Configuration", "", [*tables.configuration(problem), tables.runs(problem, metric)]),
    ]
    sections = []
    for name, title, words, first in parts:
        items = [*(table for table in first if table is not None), *drawn(name, problem, metric)]
        if items:
            sections.append(Section(f"{problem.id}-section-{name}", title, words, items))
    return sections


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"
