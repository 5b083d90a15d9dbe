"""A user outside the package: a file of code beside the experiment, and the command line."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fedrts import cli

Beside = Callable[[str, str], None]
"""Write a module of this name and text beside the experiment."""

TINY = ["--data", "digits", "--rounds", "2", "--clients", "5", "--per-round", "4", "--epochs", "1", "--device", "cpu"]
TINY += ["--engine", "serial", "--set", "density=0.5", "--set", "model_options.hidden=[8]", "--quiet"]


def command(*words: str) -> tuple[int, str]:
    """The exit code of a command, and what it said."""
    said = io.StringIO()
    before, sys.argv = sys.argv, ["fedrts", *words]
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), pytest.raises(SystemExit) as ended:
            cli.main()
    finally:
        sys.argv = before
    return int(str(ended.value.code)), said.getvalue()


def assert_compared_and_reported(key: str, usual: str, own: str) -> None:
    """One's own entry of a list beside a usual one: it runs, does something else, is compared, reported, and asked for when evaluated."""
    grid = ["--methods", "random", "--grid", f"{key}={usual},{own}", "--out", "compared", "--jobs", "1"]
    code, said = command("compare", *grid, *TINY, "--set=rounds=4")
    assert code == 0, said
    table = Path("compared/results.csv").read_text("utf-8")
    assert usual in table
    assert own in table
    cells = sorted(path.parent for path in Path("compared").rglob("summary.json"))
    assert len({(cell / "model.safetensors").read_bytes() for cell in cells}) == 2, "one's own does something else"
    code, said = command("report", "compared", "--no-png")
    assert code == 0, said
    assert own in Path("compared/report.html").read_text("utf-8")
    mine = next(cell for cell in cells if own in (cell / "experiment.toml").read_text("utf-8"))
    assert command("evaluate", str(mine))[0] == 2, "a folder's code runs only where it is allowed"
    assert command("evaluate", str(mine), "--allow", own)[0] == 0
