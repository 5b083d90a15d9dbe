"""Progress in a terminal: a live line, or plain lines where the output is no terminal, and a closing table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from fedrts.errors import note
from fedrts.tally import EXCUSED

if TYPE_CHECKING:
    from fedrts.config import Experiment
    from fedrts.rounds import Record

_PLAIN_LINES = 10
"""About how many progress lines a run prints where there is no terminal."""


class Outlasting(Console):
    """A console whose reader may go away (`| head`): a run goes on without one."""

    def on_broken_pipe(self) -> None:
        try:
            super().on_broken_pipe()
        except SystemExit:
            note("nobody reads the output any more; the run goes on without it")


class ConsoleObserver:
    """Shows a run to a person."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Outlasting()
        self.progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self.bytes = 0
        self.accuracy: float | None = None
        self.changed = 0.0
        self.rejected = 0

    def started(self, experiment: Experiment, facts: dict[str, Any], first_round: int) -> None:
        self.rounds = experiment.rounds
        method, data, model = map(escape, (experiment.method, experiment.data, experiment.model))
        self.console.print(
            f"[bold]{method}[/] · {data} · {model} with {facts['parameters']:,} parameters, "
            f"{facts['active']:,} active (density {facts['density']:.3f}) · {experiment.clients.per_round} of {experiment.clients.total} "
            f"clients a round · {facts['engine']} on {experiment.device}, {experiment.engine.precision} · seed {experiment.seed}",
            highlight=False,
        )
        if experiment.out:
            self.console.print(f"writing to {experiment.out}", highlight=False, soft_wrap=True, markup=False)
        self.bytes, self.rejected = facts["bytes"], facts["missing"]
        self.task = self.progress.add_task("training", total=experiment.rounds, completed=first_round, status="")
        self.progress.start()

    def played(self, record: Record) -> None:
        self.bytes += record.upload_bytes + record.download_bytes
        self.accuracy = record.accuracy if record.accuracy is not None else self.accuracy
        self.changed = record.links_changed if record.outer else self.changed
        self.rejected += len(record.rejected)
        for entry in record.rejected:
            if entry["reason"] not in EXCUSED:
                words = f"round {record.round}: rejected client {entry['client']}: {entry['reason']}"
                self.console.print(words, highlight=False, soft_wrap=True, markup=False)
        done = record.round + 1
        status = " · ".join(
            [
                f"accuracy {self.accuracy:.3f}" if self.accuracy is not None else "accuracy -",
                f"density {record.density:.3f}",
                f"{self.changed:.1%} links changed",
                f"{megabytes(self.bytes)} sent",
                *([f"{self.rejected} replies missing"] if self.rejected else []),
            ]
        )
        self.progress.update(self.task, completed=done, status=status)
        if not self.console.is_terminal and (done % max(1, self.rounds // _PLAIN_LINES) == 0 or done == self.rounds):
            self.console.print(f"round {done:>4} of {self.rounds} · {status}", highlight=False, soft_wrap=True)

    def finished(self, summary: dict[str, Any]) -> None:
        self.stopped()
        sent = summary["upload_bytes"] + summary["download_bytes"]
        dense = sent / summary["comm_ratio"] if summary["comm_ratio"] else 0
        title = escape(f"{summary['method']} on {summary['data']} after {summary['rounds']} rounds")
        table = Table(title=title, title_justify="left")
        for heading, justify in (("", "left"), ("this run", "right"), ("dense averaging", "right"), ("ratio", "right")):
            table.add_column(heading, justify=justify)  # type: ignore[arg-type]
        table.add_row("active parameters", f"{summary['density']:.1%}", "100.0%", f"{summary['density']:.3f}")
        table.add_row("sent in all", megabytes(sent), megabytes(dense), f"{summary['comm_ratio']:.3f}")
        sites = summary.get("federated")
        if summary["accuracy"] is not None:
            table.add_row("test accuracy", f"{summary['accuracy']:.4f}", "", "")
        if sites and (by_site := sites["mean_of_clients"].get("accuracy")) is not None:
            weighted = f"at {len(sites['clients'])} sites, {sites['samples']:,} samples"
            table.add_row(f"accuracy {weighted}", f"{sites['mean']['accuracy']:.4f}", "", "")
            table.add_row("mean of the sites", f"{by_site:.4f}", "", "")
        if summary["perplexity"] is not None:
            table.add_row("perplexity", f"{summary['perplexity']:.2f}", "", "")
        if summary["accuracy_last10"] is not None:
            table.add_row("mean of the last ten", f"{summary['accuracy_last10']:.4f}", "", "")
        table.add_row("time", f"{summary['seconds']:.1f} s", "", "")
        table.add_row("samples a second", f"{summary['samples_per_second']:,.0f}", "", "")
        self.console.print(table)

    def stopped(self) -> None:
        self.progress.stop()


@contextmanager
def downloading() -> Iterator[Callable[[str, int, int | None], None]]:
    """Show downloads: gives the function that is told (what, bytes done, bytes in all)."""
    tasks: dict[str, TaskID] = {}
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:

        def report(what: str, done: int, total: int | None) -> None:
            if what not in tasks:
                tasks[what] = progress.add_task(what)
            progress.update(tasks[what], completed=done, total=total)

        yield report


def megabytes(count: float) -> str:
    """Bytes for people: MB = 10^6."""
    return f"{count / 1e6:,.2f} MB" if count < 1e9 else f"{count / 1e9:,.2f} GB"
