"""Progress of a comparison in a terminal: running and finished cells, and the table so far; plain lines without a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from fedrts.comparison.play import CellTask, News
from fedrts.comparison.statistics import mean_of
from fedrts.observe.console import Outlasting
from fedrts.runs.folder import RunFolder
from fedrts.tasks.metrics import ACCURACY, of_run

_MOST_LINES = 30
"""Rows of a live table; a longer one does not fit a screen."""


class LiveWatcher:
    """Shows a comparison on a terminal."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Outlasting()
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(), TextColumn("{task.fields[status]}"))
        self.progress = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=self.console)
        self.all: TaskID | None = None
        self.running: dict[str, TaskID] = {}
        self.tasks: dict[str, CellTask] = {}
        self.metric = ACCURACY
        """What the cells are judged by."""
        self.means: dict[tuple[str, str], list[float]] = {}
        self.done = self.failed = 0
        self.noted: set[str] = set()
        self.live = Live(console=self.console, refresh_per_second=4, get_renderable=self._picture)

    def __enter__(self) -> LiveWatcher:
        if self.console.is_terminal:
            self.live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.live.stop()

    def expect(self, tasks: Sequence[CellTask], what: str) -> None:
        self.tasks = {task.name: task for task in tasks}
        self.means.clear()
        finished = [task for task in tasks if task.is_finished]
        self.done, self.failed = len(finished), 0
        for task in finished:
            self._count(task)
        if self.all is not None:
            self.progress.remove_task(self.all)
        self.all = self.progress.add_task(f"[bold]{what}", total=len(tasks), completed=self.done, status="")
        there = f", {self.done} of them finished already" if self.done else ""
        self.console.print(f"{what}: {len(tasks)}{there}", highlight=False)

    def tell(self, news: News) -> None:
        if news.kind == "note":
            if news.text not in self.noted:
                self.noted.add(news.text)
                self.console.print(f"note: {news.text} ({news.cell})", highlight=False, soft_wrap=True, markup=False)
        elif news.kind in ("started", "played"):
            if news.cell not in self.running:
                self.running[news.cell] = self.progress.add_task(
                    escape(news.cell), total=news.rounds, completed=news.done, status=news.score
                )
            self.progress.update(self.running[news.cell], completed=news.done, status=news.score)
        else:
            self._ended(news)

    def _ended(self, news: News) -> None:
        if news.cell in self.running:
            self.progress.remove_task(self.running.pop(news.cell))
        if news.kind == "failed":
            self.failed += 1
            words = f"failed: {news.text}"
        else:
            self.done += 1
            self._count(self.tasks[news.cell])
            words = news.score or "finished"
        number = f"{self.done + self.failed} of {len(self.tasks)}"
        self.console.print(f"{number} · {news.cell} · {words}", highlight=False, soft_wrap=True, markup=False)
        if self.all is not None:
            self.progress.update(self.all, completed=self.done + self.failed, status=f"{self.failed} failed" if self.failed else "")

    def _count(self, task: CellTask) -> None:
        """Add a finished cell to the table so far, by method and by the rest of its name except the seed."""
        summary = RunFolder(task.folder).summary() or {}
        method = task.experiment.method
        rest = task.name.replace(f"{method}-", "", 1).rpartition("-")[0] or "-"
        metric = of_run(summary)[0]
        if (mean := summary.get(f"{metric.name}_last10")) is not None:
            self.metric = metric
            self.means.setdefault((method, rest), []).append(mean)

    def _picture(self) -> Group:
        methods = list(dict.fromkeys(method for method, _ in self.means))
        columns = list(dict.fromkeys(rest for _, rest in self.means))
        if not columns or len(columns) > 8 or len(methods) > _MOST_LINES:
            return Group(self.progress)
        table = Table(f"{self.metric.name} so far", *columns)
        for method in methods:
            found = [self.means.get((method, column)) for column in columns]
            table.add_row(method, *(f"{self.metric.text(mean_of(values).value)} ({len(values)})" if values else "" for values in found))
        return Group(table, self.progress)
