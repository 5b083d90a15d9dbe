"""Real processes that die at a chosen moment.

Importing torch takes seconds, so processes are forked from a server that has imported everything (`forkserver`); each
is a process of its own that runs `fedrts.cli.main` and can be killed without a chance to tidy up.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import multiprocessing
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import pytest

PRELOAD = ["fedrts.api", "fedrts.cli", "fedrts.observe.console", "fedrts.data.digits", "sklearn.datasets", "torch._dynamo", "pytest"]
"""What a run imports."""

CHILD = "a command in a process of its own"
"""The name of this file where it runs as a child's program; `conftest` alone would be ambiguous there."""


@dataclasses.dataclass(frozen=True)
class Moment:
    """When a process falls, by its own hand: at the n-th … matching `name`; `by` says how (SIGKILL, or SIGSTOP to freeze)."""

    what: str
    """`before` or `after` the rename that puts a file in its place, or `torn`: half of a log line is written."""
    name: str
    """A pattern for the name of the file."""
    nth: int = 1
    by: int = signal.SIGKILL


def command(arguments: list[str], out: str, err: str, moment: tuple[Any, ...] | None) -> None:
    """What a child process does."""
    for target, stream in ((out, sys.stdout), (err, sys.stderr)):
        stream.flush()
        os.dup2(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream.fileno())
    if moment is not None:
        arrange(Moment(*moment))
    from fedrts.cli import main

    sys.argv = ["fedrts", *arguments]
    main()


def arrange(moment: Moment) -> None:
    """Let this process fall at that moment."""
    left = [moment.nth]

    def is_it(path: object) -> bool:
        if fnmatch.fnmatch(os.path.basename(str(path)), moment.name):
            left[0] -= 1
            return left[0] == 0
        return False

    def fall() -> None:
        os.kill(os.getpid(), moment.by)

    if moment.what == "torn":
        from fedrts.runs import folder

        real_append = folder.RunFolder.append

        def append(self: folder.RunFolder, log: str, line: Mapping[str, Any]) -> None:
            if is_it(log):
                file: IO[bytes] = self._logs[log]
                file.write(json.dumps(line).encode()[:40])
                file.flush()
                fall()
            real_append(self, log, line)

        folder.RunFolder.append = append  # type: ignore[method-assign]
        return
    real_replace = os.replace

    def replace(source: Any, target: Any) -> None:
        now = is_it(target)
        if now and moment.what == "before":
            fall()
        real_replace(source, target)
        if now and moment.what == "after":
            fall()

    os.replace = replace  # type: ignore[assignment]


class Running:
    """A command in a process of its own."""

    def __init__(self, context: multiprocessing.context.ForkServerContext, arguments: list[str], logs: Path, moment: Moment | None) -> None:
        self._files = [logs / f"{time.monotonic_ns()}.{kind}" for kind in ("out", "err")]
        task = {"TASK": (arguments, *map(str, self._files), moment and dataclasses.astuple(moment))}
        self.process = context.Process(target=runpy.run_path, args=(__file__, task, CHILD), daemon=True)
        self.process.start()

    @property
    def err(self) -> str:
        return self._files[1].read_text("utf-8") if self._files[1].exists() else ""

    def ended(self, timeout: float = 60) -> int:
        """The exit code, negative for a signal."""
        self.process.join(timeout)
        assert self.process.exitcode is not None, f"still running after {timeout} s: {self.err}"
        return self.process.exitcode

    def until(self, condition: Callable[[], bool], timeout: float = 60) -> None:
        """Wait for something that the process does."""
        deadline = time.monotonic() + timeout
        while not condition():
            assert self.process.exitcode is None, f"ended with {self.process.exitcode} before that: {self.err}"
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)


@pytest.fixture(scope="session")
def _server() -> Iterator[multiprocessing.context.ForkServerContext]:
    """Where processes are forked from. One thread each: then forking is safe, and a busy machine does not crawl."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    patch = pytest.MonkeyPatch()
    patch.setenv("OMP_NUM_THREADS", "1")
    patch.setenv("OPENBLAS_NUM_THREADS", "1")
    yield context
    patch.undo()


@pytest.fixture(scope="module")
def start(_server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Running]]:
    """`start("run", …, moment=…)` → the running process. Whatever is left at the end is killed."""
    logs = tmp_path_factory.mktemp("streams")
    started: list[Running] = []

    def begin(*arguments: object, moment: Moment | None = None) -> Running:
        started.append(Running(_server, [str(argument) for argument in arguments], logs, moment))
        return started[-1]

    yield begin
    for running in started:
        running.process.kill()
        running.process.join(30)


@pytest.fixture(scope="session")
def moment() -> type[Moment]:
    return Moment


if __name__ == CHILD:
    command(*globals()["TASK"])  # given by `Running`
