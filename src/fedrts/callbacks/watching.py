"""Observers as callbacks: progress on a terminal or in a notebook, TensorBoard."""

from __future__ import annotations

import pkgutil
from typing import Any, cast

from fedrts.callbacks import register
from fedrts.callbacks.contract import Callback, EndView, RoundView, RunView

_NOTEBOOK, _CONSOLE = "fedrts.observe.notebook", "fedrts.observe.console"
_TENSORBOARD = "fedrts.observe.tensorboard"
"""Looked up when they are asked for: they lie in a room above this one."""


class Observing(Callback):
    """Forwards events to an observer."""

    def __init__(self, observer: Any) -> None:
        self.observer = observer
        self._judging = getattr(observer, "judging", None)

    def on_start(self, run: RunView) -> None:
        self.observer.started(run.experiment, dict(run.facts), run.first_round)

    def on_round(self, round: RoundView) -> None:
        self.observer.played(round.record)

    def on_judging(self, done: int, total: int) -> None:
        if self._judging is not None:
            self._judging(done, total)

    def on_end(self, end: EndView) -> None:
        self.observer.finished(end.summary)

    def on_close(self) -> None:
        self.observer.stopped()


@register("progress")
class ProgressBar(Observing):
    """Show progress: a live line in a terminal, a bar in a notebook."""

    def __init__(self) -> None:
        if cast(bool, pkgutil.resolve_name(f"{_NOTEBOOK}:in_notebook")()):
            super().__init__(pkgutil.resolve_name(f"{_NOTEBOOK}:NotebookObserver")())
        else:
            super().__init__(pkgutil.resolve_name(f"{_CONSOLE}:ConsoleObserver")())


@register("tensorboard")
class TensorBoard(Observing):
    """Write event files to the folder `tensorboard` of the run folder."""

    def __init__(self) -> None:
        super().__init__(pkgutil.resolve_name(f"{_TENSORBOARD}:TensorBoardObserver")())
