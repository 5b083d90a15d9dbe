"""Progress in a terminal: a live line (plain lines without a terminal), and a closing table."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as Bars
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fedrts.errors import note
from fedrts.observe.progress import Progress, megabytes
from fedrts.server.collect import EXCUSED
from fedrts.tasks.metrics import of_run

if TYPE_CHECKING:
    from fedrts.config import Experiment
    from fedrts.server.rounds import Record

_PLAIN_LINES = 10
"""About how many progress lines a run prints where there is no terminal."""
_PLAIN_SECONDS = 30
"""After so long without a line the next round prints one, however many rounds there are."""
_NARROW_BAR, _WIDE_BAR = 10, 24


class Outlasting(Console):
    """A console whose reader may disappear (`| head`) without ending the run."""

    def on_broken_pipe(self) -> None:
        try:
            super().on_broken_pipe()
        except SystemExit:
            note("nobody reads the output any more; the run continues without it")


class ProgressLine:
    """Progress on one line of its console: a bar, and as much text as fits."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        narrow = min(_NARROW_BAR, options.max_width // 4)
        words = " · ".join(self.progress.fitting(options.max_width - narrow - 1))
        bar = ProgressBar(total=1.0, completed=self.progress.share, width=max(narrow, min(_WIDE_BAR, options.max_width - len(words) - 1)))
        line = Table.grid(padding=(0, 1, 0, 0))
        line.add_row(bar, Text(words, no_wrap=True, overflow="ellipsis"))
        yield line


class ConsoleObserver:
    """Shows a run on a terminal."""

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.console = console or Outlasting()
        self.progress = Progress(clock)
        self.live = Live(ProgressLine(self.progress), console=self.console, refresh_per_second=4)
        self.clock = clock
        self.said = clock()
        """When the last plain line was printed."""

    def started(self, experiment: Experiment, facts: dict[str, Any], first_round: int) -> None:
        method, data, model = map(escape, (experiment.method, experiment.data, experiment.model))
        self.console.print(
            f"[bold]{method}[/] · {data} · {model} with {facts['parameters']:,} parameters, "
            f"{facts['active']:,} active (density {facts['density']:.3f}) · {experiment.clients.per_round} of {experiment.clients.total} "
            f"clients a round · {facts['engine']} on {experiment.device}, {experiment.engine.precision} · seed {experiment.seed}",
            highlight=False,
        )
        if experiment.out:
            self.console.print(f"writing to {experiment.out}", highlight=False, soft_wrap=True, markup=False)
        self.progress.start(experiment, facts, first_round)
        self.said = self.clock()
        if self.console.is_terminal:
            self.live.start()

    def played(self, record: Record) -> None:
        self.progress.play(record)
        for entry in record.rejected:
            if entry["reason"] not in EXCUSED:
                words = f"round {record.round}: rejected client {entry['client']}: {entry['reason']}"
                self.console.print(words, highlight=False, soft_wrap=True, markup=False)
        done, rounds = self.progress.done, self.progress.rounds
        if done % max(1, rounds // _PLAIN_LINES) == 0 or done == rounds or self._is_long_ago():
            self._say(f"round {done:>4} of {rounds} · {' · '.join(self.progress.status.values())}")

    def judging(self, done: int, total: int) -> None:
        self.progress.judge(done, total)
        if self._is_long_ago():
            self._say(f"judging the model by class and client · {self.progress.share:.0%} of {total:,} samples · {self.progress.left}")

    def _is_long_ago(self) -> bool:
        return self.clock() - self.said >= _PLAIN_SECONDS

    def _say(self, words: str) -> None:
        """Print a plain line if there is no live one."""
        self.said = self.clock()
        if not self.console.is_terminal:
            self.console.print(words, highlight=False, soft_wrap=True)

    def finished(self, summary: dict[str, Any]) -> None:
        self.progress.finish()
        self.stopped()
        sent = summary["upload_bytes"] + summary["download_bytes"]
        dense = sent / summary["comm_ratio"] if summary["comm_ratio"] else 0
        title = escape(f"{summary['method']} on {summary['data']} after {summary['rounds']} rounds")
        table = Table(title=title, title_justify="left")
        for heading, justify in (("", "left"), ("this run", "right"), ("dense averaging", "right"), ("ratio", "right")):
            table.add_column(heading, justify=justify)  # type: ignore[arg-type]
        table.add_row("active parameters", f"{summary['density']:.1%}", "100.0%", f"{summary['density']:.3f}")
        table.add_row("sent in all", megabytes(sent), megabytes(dense), f"{summary['comm_ratio']:.3f}")
        if "step_ms" in summary:
            step, of_dense = summary["step_ms"], summary["dense_step_ms"]
            table.add_row("time of a client's step", f"{step:.3g} ms", f"{of_dense:.3g} ms", f"{step / of_dense:.3f}")
        for words, value in _results(summary):
            table.add_row(words, value, "", "")
        table.add_row("time", f"{summary['seconds']:.1f} s", "", "")
        table.add_row("samples a second", f"{summary['samples_per_second']:,.0f}", "", "")
        self.console.print(table)

    def stopped(self) -> None:
        self.live.stop()


def _results(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Return the results of a run, line by line: the leading metric, the sites' values, other metrics."""
    first, *others = of_run(summary)
    if summary[first.name] is not None:
        yield f"test {first.label}", first.text(summary[first.name])
    sites = summary.get("federated")
    if sites and (by_site := sites["mean_of_clients"].get(first.name)) is not None:
        weighted = f"at {len(sites['clients'])} sites, {sites['samples']:,} samples"
        yield f"{first.label} {weighted}", first.text(sites["mean"][first.name])
        yield "mean of the sites", first.text(by_site)
    for metric in others:
        if metric.told and summary.get(metric.name) is not None:
            yield metric.label, metric.text(summary[metric.name])
    if (mean := summary.get(f"{first.name}_last10")) is not None:
        yield "mean of the last ten", first.text(mean)
    if (late := summary.get(f"average_{first.name}")) is not None:
        yield "average of late models", first.text(late)


@contextmanager
def downloading() -> Iterator[Callable[[str, int, int | None], None]]:
    """Show downloads: yields the function to call with (what, bytes done, total bytes)."""
    tasks: dict[str, TaskID] = {}
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Bars(*columns, console=console, disable=not console.is_terminal) as progress:

        def report(what: str, done: int, total: int | None) -> None:
            if what not in tasks:
                tasks[what] = progress.add_task(what)
            progress.update(tasks[what], completed=done, total=total)

        yield report
