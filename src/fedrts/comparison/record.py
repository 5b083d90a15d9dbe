"""compare.toml: what a folder compares, complete, so that the same command goes on and another one is refused."""

from __future__ import annotations

import contextlib
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import tomli_w

from fedrts import config
from fedrts.checkpoint import write_atomically
from fedrts.comparison.grid import Cell, Grid
from fedrts.errors import InputError
from fedrts.folder import lock

FILE = "compare.toml"
_REMEDY = "give all its values again (more of them are welcome), or choose another --out"


@contextlib.contextmanager
def held(out: Path, mark: str = FILE, what: str = "comparison") -> Iterator[None]:
    """Make a folder of which the file `mark` says what it is, and keep every other process out of it."""
    with contextlib.ExitStack() as stack:
        try:
            out.mkdir(parents=True, exist_ok=True)
            entries = {entry.name for entry in out.iterdir() if not entry.name.startswith(".")}
            if entries and mark not in entries:
                raise InputError(f"{out} is not empty (it holds '{min(entries)}') and no {what}: choose another --out")
            file = stack.enter_context(open(out / ".lock", "ab"))
        except OSError as error:
            raise InputError(f"cannot write {out}: {error.strerror}; choose another --out") from error
        lock(file, out)
        yield


def record(out: Path, grid: Grid, cells: Sequence[Cell], threads: int) -> int:
    """Write what is compared; refused where the folder holds something else. The threads of a cell are those of the first start."""
    new = described(grid, cells, threads)
    file = out / FILE
    if file.exists():
        try:
            old = tomllib.loads(file.read_text("utf-8"))
            threads = int(old["threads"])
            _check_contained(out, old, new)
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, KeyError, TypeError, ValueError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"{file} is damaged ({error}): restore it, or choose another --out") from error
        new["threads"] = threads
    write_atomically(file, tomli_w.dumps(new).encode())
    return threads


def described(grid: Grid, cells: Sequence[Cell], threads: int) -> dict[str, Any]:
    """The content of compare.toml: the grid, the settings that all cells share, and those of each that differ."""
    settings = {cell.name: _declared(cell, grid) for cell in cells}
    first = next(iter(settings.values()))
    shared = {key: value for key, value in first.items() if all(other.get(key) == value for other in settings.values())}
    tuning = None if grid.tuning is None else {key: value for key, value in asdict(grid.tuning).items() if value is not None}
    return {
        "methods": list(grid.methods),
        "densities": list(grid.densities),
        "seeds": list(grid.seeds),
        "threads": threads,
        "grid": {key: list(values) for key, values in grid.axes.items()},
        **({} if tuning is None else {"tuning": tuning | {"rates": list(tuning["rates"])}}),
        "shared": config.nested(shared),
        "cells": {name: {key: value for key, value in own.items() if key not in shared} for name, own in settings.items()},
    }


def _declared(cell: Cell, grid: Grid) -> dict[str, Any]:
    """A cell's settings, without the rate that is yet to be chosen."""
    return {key: value for key, value in cell.settings().items() if grid.tuning is None or key != "train.lr"}


def _check_contained(out: Path, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Everything that the folder compares must still be compared, in the same way."""
    if old.get("tuning") != new.get("tuning"):
        raise InputError(f"{out} holds another comparison: its learning rates were tuned otherwise; {_REMEDY}")
    for name, own in old["cells"].items():
        if name not in new["cells"]:
            raise InputError(f"{out} holds another comparison: its cell {name} is not in this grid; {_REMEDY}")
        now = config.flat(new["shared"]) | new["cells"][name]
        before = config.with_newer_keys(config.flat(old["shared"]) | own, now)
        for key in sorted(before.keys() | now.keys()):
            if before.get(key) != now.get(key):
                what = f"in its cell {name} {key} is {before.get(key)!r}, not {now.get(key)!r}"
                raise InputError(f"{out} holds another comparison: {what}; {_REMEDY}")
