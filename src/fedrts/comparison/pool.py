"""Pools that run cells: in this process, or in several others.

A pool knows nothing of grids: it takes tasks and tells news. Cells played elsewhere (on other machines, say) are another class with
the same method.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Protocol

import torch

from fedrts.comparison.play import CellTask, News, Tell, play

JOBS_ON_GPU = 2
"""Cells that share a GPU: one computes while the other's server is at work."""


class Pool(Protocol):
    """Runs tasks."""

    def play(self, tasks: Sequence[CellTask], tell: Tell) -> None:
        """Run all tasks, each to its end or failure; an interruption leaves nothing running."""
        ...


class Here:
    """Run one task after the other in this process."""

    def play(self, tasks: Sequence[CellTask], tell: Tell) -> None:
        for task in tasks:
            play(task, tell)


class Processes:
    """Run several tasks at once. Each worker is a fresh process that runs one task after the other and ends with this process."""

    def __init__(self, jobs: int) -> None:
        self.jobs = jobs

    def play(self, tasks: Sequence[CellTask], tell: Tell) -> None:
        waiting = deque(tasks)
        workers: list[_Worker] = []
        try:
            while waiting or workers:
                while waiting and len(workers) < self.jobs:
                    workers.append(_Worker.start(waiting.popleft()))
                for pipe in wait([worker.pipe for worker in workers]):
                    worker = next(worker for worker in workers if worker.pipe is pipe)
                    if not worker.listen(waiting, tell):
                        workers.remove(worker)
                        worker.end()
        finally:
            for worker in workers:
                worker.end()


@dataclass
class _Worker:
    process: SpawnProcess
    pipe: Connection
    task: CellTask

    @classmethod
    def start(cls, task: CellTask) -> _Worker:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(theirs,), daemon=True)
        with _deaf():
            process.start()
        theirs.close()
        ours.send(task)
        return cls(process, ours, task)

    def listen(self, waiting: deque[CellTask], tell: Tell) -> bool:
        """Receive one message: news, or that the task is over. False: this worker is done."""
        try:
            message: News | bool = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join()
            tell(News(self.task.name, "failed", text=f"its process {_ending(self.process.exitcode)}"))
            return False
        if isinstance(message, News):
            tell(message)
            return True
        if not message or not waiting:
            return False
        self.task = waiting.popleft()
        self.pipe.send(self.task)
        return True

    def end(self) -> None:
        self.pipe.close()
        self.process.kill()
        self.process.join()


@contextlib.contextmanager
def _deaf() -> Iterator[None]:
    """Start processes that ignore Ctrl-C, which reaches the whole group: the parent handles it."""
    if not hasattr(signal, "pthread_sigmask"):  # not on Windows
        yield
        return
    resource_tracker.ensure_running()  # which lets Ctrl-C through again when it starts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _work(pipe: Connection) -> None:
    """Run tasks in a worker until it receives the order to end or its parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        pipe.send(play(task, pipe.send))


def _end_with_parent() -> None:
    """End this process when its parent dies. After SIGKILL of the parent, no worker process keeps writing."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        hint = " (out of memory?)" if -code == signal.SIGKILL else ""
        return f"was ended by {signal.Signals(-code).name}{hint}"
    return f"ended with code {code}"


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_jobs(device: str, cells: int) -> int:
    """Return the number of cells at once: one per core on CPUs, two on a GPU."""
    return max(1, min(cells, cores() if device == "cpu" else JOBS_ON_GPU))


def default_threads(jobs: int) -> int:
    """Return each cell's share of torch's threads."""
    return max(1, torch.get_num_threads() // jobs)


def make(jobs: int) -> Pool:
    """Make the pool for this many cells at once."""
    return Here() if jobs == 1 else Processes(jobs)
