"""Cells as Ray tasks, on this machine or on a cluster whose machines share the folders."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fedrts.comparison.play import CellTask, News, Tell, play
from fedrts.engines.ray import connected, find_modules
from fedrts.engines.settings import EngineSettings
from fedrts.errors import reason

_PATIENCE = 0.2
"""Seconds between two looks for news."""


@dataclass
class Cluster:
    """Run at most `jobs` tasks at once, each in its own process, which chooses its engine."""

    jobs: int
    settings: EngineSettings
    """Address and resources: those of an actor are those of a cell."""

    def play(self, tasks: Sequence[CellTask], tell: Tell) -> None:
        if not tasks:
            return
        cpus = self.settings.cpus or 1.0
        with connected(self.settings.but(actors=self.jobs, cpus=cpus)) as ray:
            from ray.util.queue import Queue

            news = Queue(actor_options={"num_cpus": 0})
            remote = ray.remote(num_cpus=cpus, num_gpus=self.settings.gpus, max_retries=0, max_calls=1)(_play)
            waiting, running = deque(tasks), dict[Any, CellTask]()
            while waiting or running:
                while waiting and len(running) < self.jobs:
                    task = waiting.popleft()
                    running[remote.remote(_elsewhere(task), news, list(sys.path))] = task
                over, _ = ray.wait(list(running), timeout=_PATIENCE)
                for told in news.get_nowait_batch(news.qsize()):
                    tell(told)
                for reference in over:
                    _check(ray, reference, running.pop(reference), tell)


def _elsewhere(task: CellTask) -> CellTask:
    """Return a task that works in another process: absolute paths, and its own engine instead of Ray's."""
    engine = task.experiment.engine.but(name="auto")
    data_dir = task.data_dir and task.data_dir.absolute()
    return replace(task, folder=task.folder.absolute(), data_dir=data_dir, experiment=task.experiment.model_copy(update={"engine": engine}))


def _play(task: CellTask, news: Any, paths: list[str]) -> None:
    find_modules(paths)
    play(task, news.put)


def _check(ray: Any, reference: Any, task: CellTask, tell: Tell) -> None:
    """Check a task: if it ended without a message, it failed."""
    try:
        ray.get(reference)
    except ray.exceptions.RayError as error:
        tell(News(task.name, "failed", text=f"its process died: {reason(error)}"))
