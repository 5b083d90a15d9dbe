"""Progress of a comparison in a notebook, on one line."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TextIO

from fedrts.comparison.play import CellTask, News
from fedrts.observe.notebook import Bar
from fedrts.observe.progress import duration


class NotebookWatcher:
    """Show the number of finished cells, the running ones, and the time left."""

    def __init__(self, file: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.bar, self.clock = Bar(file, clock), clock
        self.what = "cells"
        self.total = self.ended = self.failed = 0
        self.running: dict[str, News] = {}
        self.began = self.before = 0.0
        """When it began, and the cells' worth of work that was done before."""

    def expect(self, tasks: Sequence[CellTask], what: str) -> None:
        self.what, self.total, self.failed = what, len(tasks), 0
        self.ended = sum(task.is_finished for task in tasks)
        self.running.clear()
        self.began, self.before = self.clock(), float(self.ended)
        self._show()

    def tell(self, news: News) -> None:
        if news.kind == "note":
            return
        if news.kind in ("finished", "failed"):
            self.running.pop(news.cell, None)
            self.ended += 1
            self.failed += news.kind == "failed"
        else:
            self.before += _share(news) if news.cell not in self.running else 0.0
            self.running[news.cell] = news
        self._show(news.kind != "played")

    def stopped(self) -> None:
        self.bar.end()

    @property
    def done(self) -> float:
        """Count finished cells plus the shares of running ones."""
        return self.ended + sum(map(_share, self.running.values()))

    @property
    def words(self) -> str:
        """Return `3/12 cells · 1 failed · fedrts-0.2-1 4/50 and 1 more · 0:03:20 left`; long names are cut."""
        first = [f"{self.ended}/{self.total} {self.what}", *([f"{self.failed} failed"] if self.failed else [])]
        runs = self._runs(self.bar.room - len(" · ".join([*first, "", self._left])))
        return " · ".join([*first, *([runs] if runs else []), self._left])

    def _runs(self, room: int) -> str:
        if not self.running:
            return ""
        news = next(iter(self.running.values()))
        more = f" and {len(self.running) - 1} more" if len(self.running) > 1 else ""
        rest = f" {news.done}/{news.rounds}{more}"
        short = max(room - len(rest), 2)
        return (news.cell if len(news.cell) <= short else f"{news.cell[: short - 1]}…") + rest

    @property
    def _left(self) -> str:
        """Return the remaining time at the pace so far or, at the end, the time taken."""
        passed, played = self.clock() - self.began, self.done - self.before
        if self.ended == self.total:
            return f"{duration(passed)} in all"
        return f"{duration(passed * (self.total - self.done) / played if played > 0 else None)} left"

    def _show(self, at_once: bool = True) -> None:
        self.bar.show(self.done / max(self.total, 1), lambda: self.words, at_once)


def _share(news: News) -> float:
    """Return the share of finished rounds of a cell; a set-up does not count."""
    return max(news.done, 0) / max(news.rounds, 1)
