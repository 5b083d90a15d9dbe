"""A user outside the package: a file of code beside the experiment, and the command line."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable

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
