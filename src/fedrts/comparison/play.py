"""Running cells: each is an ordinary run in its own folder, started, continued, or found finished."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TextIO

import torch

from fedrts import api, config
from fedrts.config import Experiment
from fedrts.errors import InputError, Note, reason
from fedrts.runs.folder import RunFolder
from fedrts.server.rounds import Record
from fedrts.tasks.metrics import ACCURACY

_MAY_DIFFER = ("out", "recipe", "engine.", "device")
"""Beginnings of keys of a run that were decided, or chosen elsewhere, when it began."""


@dataclass(frozen=True)
class CellTask:
    """A cell to run; everything that a process, here or elsewhere, needs to know."""

    name: str
    folder: Path
    experiment: Experiment
    data_dir: Path | None = None
    threads: int = 0
    """Threads of torch while it runs; 0: unchanged."""

    @property
    def is_finished(self) -> bool:
        return RunFolder(self.folder).summary() is not None


@dataclass(frozen=True)
class News:
    """An event of a cell: it `started`, `played` a round, `finished` or `failed`, or has a `note` for the user."""

    cell: str
    kind: Literal["started", "played", "finished", "failed", "note"]
    done: int = 0
    """Rounds played."""
    rounds: int = 0
    score: str = ""
    """What the run is judged by and how good it is, as `accuracy 0.934`."""
    text: str = ""
    """Why it failed, or what is noted, in one line."""
    traceback: str = ""
    """Traceback of an internal failure."""


Tell = Callable[[News], None]


class Reporter:
    """An observer that reports the events that a comparison needs."""

    def __init__(self, cell: str, tell: Tell) -> None:
        self.cell, self.tell = cell, tell
        self.rounds = 0
        self.metric = ACCURACY
        self.value: float | None = None

    def started(self, experiment: Experiment, facts: dict[str, Any], first_round: int) -> None:
        self.rounds, self.metric = experiment.rounds, facts["metric"]
        self.tell(News(self.cell, "started", first_round, self.rounds))

    def played(self, record: Record) -> None:
        value = record.value(self.metric)
        self.value = self.value if value is None else value
        self.tell(News(self.cell, "played", record.round + 1, self.rounds, self.score(3)))

    def finished(self, summary: dict[str, Any]) -> None:
        self.value = summary[self.metric.name]

    def stopped(self) -> None: ...

    def score(self, decimals: int | None = None) -> str:
        return "" if self.value is None else f"{self.metric.name} {self.metric.text(self.value, decimals=decimals)}"


def play(task: CellTask, tell: Tell) -> bool:
    """Run a cell to its end and report it. False: the process should not run another one after this."""
    reporter = Reporter(task.name, tell)
    try:
        with _threads(task.threads), _notes(task.name, tell):
            _play(task, reporter)
    except InputError as error:
        tell(News(task.name, "failed", text=str(error)))
        return True
    except Exception as error:
        tell(News(task.name, "failed", text=f"{type(error).__name__}: {reason(error)}", traceback=traceback.format_exc()))
        return False
    tell(News(task.name, "finished", task.experiment.rounds, task.experiment.rounds, reporter.score()))
    return True


def _play(task: CellTask, reporter: Reporter) -> None:
    if task.is_finished:
        return
    if not (task.folder / "experiment.toml").exists():
        api.start(task.experiment.model_copy(update={"out": str(task.folder)}), reporter, task.data_dir)
        return
    wanted = {key: value for key, value in config.flat(task.experiment.model_dump(mode="json")).items() if value is not None}
    there = config.with_newer_keys(config.flat(config.from_file(task.folder / "experiment.toml")), wanted)
    if "init_mask" not in task.experiment.topology.model_fields_set:  # decided by the weights to start from
        wanted["topology.init_mask"] = there.get("topology.init_mask", "random")
    for key in sorted(there.keys() | wanted.keys()):
        if not key.startswith(_MAY_DIFFER) and there.get(key) != wanted.get(key):
            what = f"{key} is {there.get(key)!r}, not {wanted.get(key)!r}"
            raise InputError(f"{task.folder} holds another run ({what}): remove it, or choose another --out")
    api.resume(task.folder, data_dir=task.data_dir, observer=reporter, trust=config.foreign(wanted))


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _notes(cell: str, tell: Tell) -> Iterator[None]:
    """Turn notes into news; other warnings pass through."""
    with warnings.catch_warnings():
        otherwise = warnings.showwarning

        def show(
            message: Warning | str, category: type[Warning], filename: str, lineno: int, file: TextIO | None = None, line: str | None = None
        ) -> None:
            if issubclass(category, Note):
                tell(News(cell, "note", text=str(message)))
            else:
                otherwise(message, category, filename, lineno, file, line)

        warnings.simplefilter("always", Note)
        warnings.showwarning = show
        yield
