"""Progress in a notebook, on one line."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TextIO

from fedrts.observe import Observer, Silent
from fedrts.observe.progress import Progress

if TYPE_CHECKING:
    from fedrts.config import Experiment
    from fedrts.server.rounds import Record

_WIDTH = 100
_BAR = 20
_BETWEEN = 0.2
"""Seconds from one change of the line to the next: every one is a message to the browser."""


def in_notebook() -> bool:
    """Whether a Jupyter kernel (or a similar one) runs this process."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None


def default_observer() -> Observer:
    """Return the default observer: a bar in a notebook, nothing elsewhere."""
    return NotebookObserver() if in_notebook() else Silent()


class Bar:
    """A bar and a few words on one line of a notebook's output."""

    room = _WIDTH - _BAR - 1
    """Columns for the words."""

    def __init__(self, file: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.file, self.clock = file or sys.stdout, clock
        self.length = 0
        self.shown = 0.0

    def show(self, share: float, words: Callable[[], str], at_once: bool = True) -> None:
        """Show the current line; unless it must change `at_once`, not too soon after the last change."""
        now = self.clock()
        if not at_once and now - self.shown < _BETWEEN:
            return
        self.shown = now
        full = int(_BAR * share)
        line = f"{'█' * full}{'░' * (_BAR - full)} {words()}"
        print(f"\r{line:<{self.length}}", end="", file=self.file, flush=True)  # blanks over what was longer before
        self.length = len(line)

    def end(self) -> None:
        """End the line, so that later output starts on its own line."""
        if self.length:
            print(file=self.file, flush=True)
            self.length = 0


class NotebookObserver:
    """Shows a run as a bar and a few words in a notebook's output."""

    def __init__(self, file: TextIO | None = None) -> None:
        self.progress = Progress()
        self.bar = Bar(file)

    def started(self, experiment: Experiment, facts: dict[str, Any], first_round: int) -> None:
        self.progress.start(experiment, facts, first_round)
        self._show()

    def played(self, record: Record) -> None:
        self.progress.play(record)
        self._show(self.progress.done == self.progress.rounds)

    def judging(self, done: int, total: int) -> None:
        self.progress.judge(done, total)
        self._show(done == total)

    def finished(self, summary: dict[str, Any]) -> None:
        self.progress.finish()
        self._show()

    def stopped(self) -> None:
        self.bar.end()

    def _show(self, at_once: bool = True) -> None:
        self.bar.show(self.progress.share, lambda: " · ".join(self.progress.fitting(self.bar.room)), at_once)
