"""compare.toml: the complete declaration of a comparison. The same command continues it; a different one is refused."""

from __future__ import annotations

import contextlib
import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import tomli_w

from fedrts import config, data
from fedrts.comparison.grid import Cell, Grid
from fedrts.comparison.tuning import Chosen
from fedrts.config import Experiment
from fedrts.errors import InputError
from fedrts.files import write_atomically
from fedrts.runs.folder import lock

FILE = "compare.toml"
TRIED = "tried"
_FINGERPRINTS = ("fingerprints", "digests")
"""What names the data of cells: a sample of it, which is all that earlier versions noted, and all of it."""
_REMEDY = "give all its values again (more of them are welcome), or choose another --out"


@contextlib.contextmanager
def held(out: Path, mark: str = FILE, what: str = "comparison") -> Iterator[None]:
    """Create a folder marked by the file `mark`, and lock it against other processes."""
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


def record(out: Path, grid: Grid, cells: Sequence[Cell], threads: int, data_dir: Path | None = None, name: str = FILE) -> int:
    """Record the comparison; refuse a folder with another one. Cells keep the threads of the first start."""
    new = described(grid, cells, threads) | fingerprints(cells, data_dir)
    file = out / name
    if file.exists():
        try:
            old = tomllib.loads(file.read_text("utf-8"))
            threads = int(old["threads"])
            _check_contained(out, old, new)
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, AttributeError, KeyError, TypeError, ValueError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"{file} is damaged ({error}): restore it, or choose another --out") from error
        new |= {"threads": threads} | {kind: old.get(kind, {}) | new[kind] for kind in _FINGERPRINTS}
        new |= {key: old[key] for key in (TRIED,) if key in old}
    write_atomically(file, tomli_w.dumps(new).encode())
    return threads


def note_tried(file: Path, chosen: Iterable[Chosen]) -> None:
    """Add the result of each learning rate on the validation split."""
    content = tomllib.loads(file.read_text("utf-8"))
    tried = {
        entry.name: {f"{rate:g}": "failed" if score is None else score for rate, score in sorted(entry.scores.items())} for entry in chosen
    }
    write_atomically(file, tomli_w.dumps(content | {TRIED: tried}).encode())


def fingerprints(cells: Sequence[Cell], data_dir: Path | None) -> dict[str, dict[str, str]]:
    """Return fingerprints of the cells' data; data that cannot be loaded has none, because its cells report why."""
    loaded: dict[str, tuple[str, str] | None] = {}
    for experiment in (cell.experiment for cell in cells):
        options = json.dumps(experiment.data_options, sort_keys=True, default=repr)
        name = f"{experiment.data} {options}" if experiment.data_options else experiment.data
        if name not in loaded:
            loaded[name] = _fingerprint(experiment, data_dir)
    return {kind: {name: found[place] for name, found in loaded.items() if found} for place, kind in enumerate(_FINGERPRINTS)}


def _fingerprint(experiment: Experiment, data_dir: Path | None) -> tuple[str, str] | None:
    try:
        held = data.load(experiment.data, experiment.data_options, data_dir)
        return held.sampled_fingerprint, held.fingerprint
    except Exception:  # whatever a data set of one's own raises
        return None


def described(grid: Grid, cells: Sequence[Cell], threads: int) -> dict[str, Any]:
    """Return the content of compare.toml: the grid, the shared settings of all cells, and those of each that differ."""
    settings = {cell.name: _declared(cell, grid) for cell in cells}
    first = next(iter(settings.values()))
    shared = {key: value for key, value in first.items() if all(other.get(key) == value for other in settings.values())}
    tuning = None if grid.tuning is None else {key: value for key, value in asdict(grid.tuning).items() if value is not None}
    return {
        "methods": list(grid.methods),
        "densities": list(grid.densities),
        "seeds": list(grid.seeds),
        "threads": threads,
        **({} if grid.budget is None else {"budget": grid.budget}),
        "grid": {key: list(values) for key, values in grid.axes.items()},
        **({} if tuning is None else {"tuning": tuning | {"rates": _plain(tuning["rates"])}}),
        "shared": config.nested(shared),
        "cells": {name: {key: value for key, value in own.items() if key not in shared} for name, own in settings.items()},
    }


def _joined(old: list[float] | str, new: list[float] | str) -> bool:
    """Whether these rates include those named before."""
    return not isinstance(old, str) and not isinstance(new, str) and set(old) <= set(new)


def _plain(rates: Sequence[float] | str) -> list[float] | str:
    return rates if isinstance(rates, str) else list(rates)


def _declared(cell: Cell, grid: Grid) -> dict[str, Any]:
    """Return a cell's settings, without the rate that is not chosen yet, unless the trials start from it."""
    chosen_among_named = grid.tuning is not None and not grid.tuning.auto
    return {key: value for key, value in cell.settings().items() if key != "train.lr" or not chosen_among_named}


def _check_contained(out: Path, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Check that everything in the folder is still compared in the same way."""
    _check_tuning(out, old.get("tuning"), new.get("tuning"))
    for kind in _FINGERPRINTS:
        for name, before in old.get(kind, {}).items():
            if new[kind].get(name, before) != before:
                raise InputError(f"{out} was begun with other data under the name {name}: restore them, or choose another --out")
    for name, own in old["cells"].items():
        if name not in new["cells"]:
            raise InputError(f"{out} holds another comparison: its cell {name} is not in this grid; {_REMEDY}")
        now = config.flat(new["shared"]) | new["cells"][name]
        before = config.with_newer_keys(config.flat(old["shared"]) | own, now)
        for key in sorted(before.keys() | now.keys()):
            if key != "recipe" and before.get(key) != now.get(key):  # which says nothing that the other keys do not say
                what = f"in its cell {name} {key} is {before.get(key)!r}, not {now.get(key)!r}"
                older = "" if "recipe" in old["shared"] else "it is older than recipes: add --recipe paper, "
                raise InputError(f"{out} holds another comparison: {what}; {older}{_REMEDY}")


def _check_tuning(out: Path, old: Mapping[str, Any] | None, new: Mapping[str, Any] | None) -> None:
    """Check that the trials are the same; more rates may be added until a run of the table has begun."""
    if old == new:
        return
    if old is None or new is None or {**old, "rates": new["rates"]} != new or not _joined(old["rates"], new["rates"]):
        raise InputError(f"{out} holds another comparison: its learning rates were tuned otherwise; {_REMEDY}")
    if any((out / "runs").glob("*")):
        before = ",".join(map(str, old["rates"]))
        raise InputError(f"{out}: runs began with the best of the learning rates {before}; give these again, or choose another --out")
