"""Tables: results, cost, cost to target, fairness, configuration, runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean

from fedrts.comparison.target import Milestone, cost_to_target
from fedrts.report.model import CellValue, Column, Folder, Mean, ReportTable
from fedrts.report.people import class_values, client_values
from fedrts.report.quantities import last_ten, mean, metrics_of, over, spread, worst_decile
from fedrts.report.read import Run
from fedrts.report.settings import Problem, Setting, common, differing, shown, unlikeness
from fedrts.server.collect import EXCUSED
from fedrts.tasks.metrics import LOSS, Metric

TableRow = list[CellValue | Mean]
_FOLDED = 12
"""Runs from which on their table is folded."""


def results(problem: Problem, metric: Metric) -> ReportTable:
    """Return how good every setting became."""
    shown = _shown(problem, metric)
    judge = _judge(shown)
    late = f"average_{metric.name}"
    averaged = any(run.summary and run.summary.get(late) is not None for setting in problem.finished for run in setting.runs)
    columns = [
        Column("setting"),
        Column("runs", "integer", "seeds"),
        Column("density", "percent", "active and dense parameters over all"),
        *(Column(entry.label, entry.format, f"{'on the test set, ' * entry.followed}mean of the last ten rounds") for entry in shown),
        Column("best", judge.format, "best evaluation; chosen on the validation split where there is one"),
        *([Column("average", metric.format, "of the average of late models, `train.average`")] if averaged else []),
        *([] if LOSS in shown else [Column("loss", "number", "of the final model on the test set")]),
    ]
    rows = []
    for setting in problem.finished:
        row: TableRow = [setting.label, len(setting.runs), _without_error(over(setting, _summed("density")))]
        row += [over(setting, _mean_of(entry)) for entry in shown]
        row.append(over(setting, _summed(f"best_{judge.name}")))
        row += [over(setting, _summed(late))] if averaged else []
        rows.append(row if LOSS in shown else [*row, over(setting, _summed(LOSS.name))])
    return ReportTable(
        f"{problem.id}-results", "Quality of the models", "On the test set; mean ± standard error over seeds.", columns, rows
    )


def _shown(problem: Problem, metric: Metric) -> list[Metric]:
    """Return the metrics that tables show: the leading one, and others."""
    return [metric, *(other for other in metrics_of(problem) if other.told and other.name != metric.name)]


def _judge(shown: Sequence[Metric]) -> Metric:
    """Return the first metric for which runs keep the best round."""
    return next((metric for metric in shown if metric.followed), shown[0])


def _mean_of(metric: Metric) -> Callable[[Run], float | None]:
    """Return the mean of the last ten rounds, from the summary if it states it."""
    key = f"{metric.name}_last10"
    return lambda run: run.summary[key] if run.summary and key in run.summary else last_ten(run, metric.name)


def cost(problem: Problem) -> ReportTable:
    """Return what every setting spent."""
    columns = [
        Column("setting"),
        Column("up", "bytes", "sent by all clients over the run, as encoded"),
        Column("down", "bytes", "sent to all clients over the run, as encoded"),
        Column("of dense", "percent", "bytes over those of dense averaging with the same messages"),
        Column("paper, outer round", "bytes", "the paper's accounting: one client, one outer round, both ways"),
        Column("FLOPs", "flops", "of training, all clients, counted from layer densities"),
        Column("time", "seconds", "of the simulation"),
        Column("samples/s", "integer", "trained on, in the simulation"),
    ]
    keys = ("upload_bytes", "download_bytes", "comm_ratio", "paper_comm_mb", "flops", "seconds", "samples_per_second")
    rows: list[TableRow] = []
    for setting in problem.finished:
        cells = [over(setting, _summed(key)) for key in keys]
        cells[3] = cells[3] and Mean(cells[3].value * 1e6)
        rows.append([setting.label, *cells])
    return ReportTable(f"{problem.id}-cost", "Cost of whole runs", "Mean ± standard error over seeds.", columns, rows)


def to_target(problem: Problem, metric: Metric) -> ReportTable | None:
    """Return the cost of reaching dense averaging's accuracy, run by run against the dense run of the same seed."""
    dense = [run for setting in problem.finished if setting.dense for run in setting.runs]
    if not dense:
        return None
    columns = [
        Column("setting"),
        Column("target", metric.format, "the dense run's mean of its last ten rounds"),
        Column("reached", "text", "runs that reach it, of those with a dense run of their seed"),
        Column("rounds", "number", "until the 10-round mean reaches it"),
        Column("sent until then", "bytes", "by and to all clients"),
        Column("FLOPs until then", "flops", "of training, all clients"),
    ]
    rows: list[TableRow] = []
    for setting in problem.finished:
        paired = [(run, target) for run in setting.runs if (target := _target(run, dense, metric)) is not None]
        if not paired:
            continue
        costs = [cost_to_target(run.history, target, key=metric.name, lower_is_better=metric.lower_is_better) for run, target in paired]
        there = [entry for entry in costs if entry is not None]
        reached = f"{len(there)} of {len(paired)}" if there else "not reached"
        spent: list[Callable[[Milestone], float]] = [lambda entry: entry.round + 1, lambda entry: entry.bytes, lambda entry: entry.flops]
        rows.append(
            [setting.label, mean([target for _, target in paired]), reached, *(mean([of(entry) for entry in there]) for of in spent)]
        )
    caption = (
        "Until the mean over ten rounds is as good as that of dense averaging with the same data, model and seed at its end. "
        "Means are over the runs that reach it."
    )
    return ReportTable(f"{problem.id}-target", "Cost to target", caption, columns, rows)


def _target(run: Run, dense: Sequence[Run], metric: Metric) -> float | None:
    """Return dense averaging's accuracy with this run's seed: of the most similar dense runs, the one that sends most."""
    peers = [other for other in dense if other.seed == run.seed]
    if not peers:
        return None
    best = min(peers, key=lambda other: (unlikeness(run, other), -float((other.summary or {})["comm_ratio"])))
    return last_ten(best, metric.name)


def fairness(problem: Problem, metric: Metric) -> ReportTable | None:
    """Return how unequally a model serves classes and clients."""
    judged = [setting for setting in problem.finished if any(client_values(run, metric) for run in setting.runs)]
    if not judged:
        return None
    by_class = any(class_values(run) for setting in judged for run in setting.runs)
    columns = [
        Column("setting"),
        Column("clients' mean", metric.format, "of every client's value on its own data, unweighted"),
        Column("worst decile", metric.format, "mean over the worst-served tenth of the clients"),
        Column("spread", metric.format, "standard deviation over clients"),
    ]
    if by_class:
        columns += [
            Column("worst decile, expected", "percent", "the same of test accuracy weighted by each client's labels"),
            Column("spread, expected", "percent", "its standard deviation over clients"),
            Column("worst class", "percent", "test accuracy of the worst-served class"),
            Column("which", "text", "that class, by seed"),
            Column("spread over classes", "percent", "standard deviation of test accuracy over classes"),
        ]
    rows = [_fairness_row(setting, metric, by_class) for setting in judged]
    return ReportTable(f"{problem.id}-fairness", "Fairness", "For the final model; mean ± standard error over seeds.", columns, rows)


def _fairness_row(setting: Setting, metric: Metric, by_class: bool) -> TableRow:
    def of(statistic: Callable[[Sequence[float]], float], key: str | None = None) -> Mean | None:
        return over(setting, lambda run: statistic(values) if (values := client_values(run, metric, key)) else None)

    row: TableRow = [setting.label, of(fmean), of(lambda values: worst_decile(values, metric.lower_is_better)), of(spread)]
    if by_class:
        classes = [found for run in setting.runs if (found := class_values(run))]
        worst = ", ".join(str(min(found, key=lambda label: found[label])) for found in classes)
        row += [of(worst_decile, "expected_accuracy"), of(spread, "expected_accuracy")]
        row += [mean([min(found.values()) for found in classes]), worst, mean([spread(list(found.values())) for found in classes])]
    return row


def configuration(problem: Problem) -> list[ReportTable]:
    """Return what differs between the settings, and what they share."""
    keys = differing(problem.runs)
    found = []
    if keys and len(problem.settings) > 1:
        rows: list[TableRow] = [
            [setting.label, *(shown(setting.runs[0].settings.get(key, "–")) for key in keys)] for setting in problem.settings
        ]
        caption = "The keys in which the settings differ; – where a method has no such option."
        found.append(
            ReportTable(f"{problem.id}-differs", "Settings that differ", caption, [Column("setting"), *(Column(key) for key in keys)], rows)
        )
    same: list[TableRow] = [[key, shown(value)] for key, value in common(problem.runs).items() if key not in ("seed", "out")]
    found.append(
        ReportTable(
            f"{problem.id}-common",
            "Settings in common",
            "The keys that all runs share.",
            [Column("key"), Column("value")],
            same,
            folded=True,
        )
    )
    return found


def runs(problem: Problem, metric: Metric) -> ReportTable:
    """Return every run folder."""
    judge = _judge(_shown(problem, metric))
    tagged = any(run.settings.get("tags") for run in problem.runs)
    columns = [
        Column("folder", "text", "its name, linked"),
        Column("setting"),
        Column("seed", "integer"),
        *([Column("tags", "text", "the run's own words, `tags` of the experiment")] if tagged else []),
        Column("state"),
        Column(judge.label, judge.format, "mean of the last ten rounds so far"),
        Column("rejected", "integer", "replies that did not count, drop-outs and late ones aside"),
        Column("missing", "integer", "replies that dropped out or came late"),
        Column("version", "text", "of fedrts, torch"),
    ]
    rows: list[TableRow] = []
    for setting in problem.settings:
        for run in setting.runs:
            state = "finished" if run.finished else f"{'running, ' * run.running}round {run.played} of {run.settings['rounds']}"
            reasons = [entry["reason"] for line in run.history for entry in line["rejected"]]
            excused = sum(reason in EXCUSED for reason in reasons)
            version = ", ".join(str(run.versions[name]) for name in ("fedrts", "torch") if name in run.versions)
            rows.append(
                [
                    Folder(run.path),
                    setting.label,
                    run.seed,
                    *([shown(run.settings["tags"])] if tagged else []),
                    state,
                    last_ten(run, judge.name),
                    len(reasons) - excused,
                    excused,
                    version,
                ]
            )
    return ReportTable(f"{problem.id}-runs", "Runs", "One line per run folder.", columns, rows, folded=len(rows) > _FOLDED)


def _without_error(found: Mean | None) -> float | None:
    return found.value if found else None


def _summed(key: str) -> Callable[[Run], float | None]:
    return lambda run: run.summary.get(key) if run.summary else None
