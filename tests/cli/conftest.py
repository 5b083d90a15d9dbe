"""Commands called in this process (cheap) or in one of their own (torch takes seconds to import), and small finished runs."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from fedrts import cli

TINY = ["--rounds", "3", "--set", "train.epochs=1", "--clients", "6", "--per-round", "3"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}  # threads that wait for each other make a busy machine crawl


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def fedrts():
    """`fedrts("run", …)` in this process, as the console script would call it."""

    def call(*arguments: object) -> Ended:
        out, err = io.StringIO(), io.StringIO()
        before, handler = sys.argv, signal.getsignal(signal.SIGTERM)
        sys.argv = ["fedrts", *map(str, arguments)]
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
                warnings.simplefilter("default")  # as outside pytest
                warnings.simplefilter("ignore", ResourceWarning)  # likewise: files of earlier tests may be collected at any moment
                try:
                    cli.main()
                    code = None
                except SystemExit as end:
                    code = end.code
        finally:
            sys.argv = before
            signal.signal(signal.SIGTERM, handler)
        assert isinstance(code, int)
        return Ended(code, out.getvalue(), err.getvalue())

    return call


@pytest.fixture
def process():
    """`process("run", …)` as a process of its own: the installed console script. Whatever still runs afterwards is killed."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: object) -> subprocess.Popen[str]:
        command = [str(Path(sys.executable).with_name("fedrts")), *map(str, arguments)]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT))
        return started[-1]

    yield start
    for child in started:
        child.kill()
        child.communicate(timeout=30)


@pytest.fixture(scope="session")
def tiny() -> list[str]:
    """Flags of a run that takes a fraction of a second."""
    return list(TINY)


@pytest.fixture(scope="session")
def run_dir(fedrts, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished tiny run on digits; tests only look at it."""
    path = tmp_path_factory.mktemp("finished") / "run"
    ended = fedrts("run", *TINY, "--seed", "3", "--out", path)
    assert (ended.code, ended.err) == (0, "")
    return path
