"""Finished and stopped runs to be damaged, and commands called as a user would."""

from __future__ import annotations

import contextlib
import io
import shutil
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import fedrts
from fedrts import cli

SMALL: dict[str, Any] = {
    "data": "digits",
    "rounds": 4,
    "clients": {"total": 4, "per_round": 2},
    "train": {"epochs": 1},
    "model_options": {"hidden": [8]},
    "topology": {"interval": 2, "end": 4},
    "device": "cpu",
    "engine": {"name": "serial"},
    "checkpoint": {"every": 1},
}


@dataclass(frozen=True)
class Ended:
    code: int
    err: str


@pytest.fixture(scope="session")
def command() -> Callable[..., Ended]:
    """`command("evaluate", folder)` in this process; anything but an exit code is a defect."""

    def call(*arguments: object) -> Ended:
        err = io.StringIO()
        before, sys.argv = sys.argv, ["fedrts", *map(str, arguments)]
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err), warnings.catch_warnings():
                warnings.simplefilter("default")
                warnings.simplefilter("ignore", ResourceWarning)  # files of earlier tests may be collected at any moment
                with pytest.raises(SystemExit) as ended:
                    cli.main()
        finally:
            sys.argv = before
        return Ended(int(ended.value.code or 0), err.getvalue())

    return call


@pytest.fixture(scope="session")
def _finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    fedrts.run(**SMALL, out=folder)
    return folder


@pytest.fixture
def finished(_finished: Path, tmp_path: Path) -> Path:
    """A finished run of its own for every test."""
    return Path(shutil.copytree(_finished, tmp_path / "finished"))


@pytest.fixture
def stopped(finished: Path) -> Path:
    """A run that was stopped after its last checkpoint: it has no result yet."""
    for name in ("summary.json", "model.safetensors", "masks.safetensors"):
        (finished / name).unlink()
    return finished
