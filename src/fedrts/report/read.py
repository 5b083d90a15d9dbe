"""Run folders as plain structures, from which the report is made."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError, safe_open

from fedrts import methods
from fedrts.comparison.record import FILE as COMPARISON
from fedrts.config import Experiment, flat
from fedrts.errors import InputError
from fedrts.files import require_plain
from fedrts.runs import file_schema
from fedrts.runs.folder import TUNING, TUNING_FILE, RunFolder
from fedrts.tasks.metrics import ACCURACY, Metric, of_run

Line = dict[str, Any]

_DEFAULTS = {
    key: value for key, value in flat(Experiment().model_dump(mode="json")).items() if ("." in key or key == "tags") and value is not None
}
"""Values of the keys that an earlier version did not know and so did not write."""


@dataclass(frozen=True)
class Run:
    """One run folder."""

    path: str
    settings: Mapping[str, Any]
    """The experiment, flat: `table.key` → value; the density of a dense method is 1."""
    versions: Mapping[str, Any]
    dense: bool
    history: Sequence[Line]
    topology: Sequence[Line] = ()
    clients: Sequence[Line] = ()
    summary: Mapping[str, Any] | None = None
    """None: unfinished."""
    fairness: Mapping[str, Any] | None = None
    links: Mapping[str, int] = field(default_factory=dict)
    """Links of every prunable layer, active or not; of a finished run."""
    running: bool = False
    """Was a process writing to it when it was read?"""
    metrics: Sequence[Metric] = (ACCURACY,)
    """What its model is judged by, the one that leads first."""

    @property
    def finished(self) -> bool:
        return self.summary is not None

    @property
    def state(self) -> Literal["finished", "running", "unfinished"]:
        return "finished" if self.finished else "running" if self.running else "unfinished"

    @property
    def seed(self) -> int:
        return int(self.settings["seed"])

    @property
    def method(self) -> str:
        return str(self.settings["method"])

    @property
    def played(self) -> int:
        """Number of finished rounds."""
        return sum(line["round"] >= 0 for line in self.history)


@dataclass(frozen=True)
class Found:
    """What the given folders contain."""

    runs: Sequence[Run]
    problems: Sequence[str] = field(default_factory=tuple)
    """One line each: folders that could not be read, cells that failed."""


def find(paths: Iterable[Path]) -> Found:
    """Find all runs in and below `paths`, in the order of their names; damage becomes a line of `problems`."""
    runs: list[Run] = []
    problems: list[str] = []
    folders: dict[Path, None] = {}
    for path in paths:
        if not path.is_dir():
            raise InputError(f"there is no folder {path}")
        below = sorted(file.parent for file in path.rglob("experiment.toml"))
        if not below:
            problems.append(f"{path}: no run folder in it (none has an experiment.toml)")
        folders |= dict.fromkeys(folder for folder in below if not _is_private(folder.relative_to(path)) and not _is_trial(folder))
        try:
            problems += _failed_cells(path)
        except InputError as error:
            problems.append(str(error))
    for folder in folders:
        try:
            runs.append(read(folder))
        except (InputError, OSError) as error:
            problems.append(f"{folder}: left out: {' '.join(str(error).split())}")
    return Found(runs, problems)


def read(path: Path) -> Run:
    """Read the run in a folder, finished or not."""
    folder = RunFolder(path)
    try:
        settings = tomllib.loads(folder.experiment_file().read_text("utf-8-sig"))
    except ValueError as error:
        raise InputError(f"experiment.toml is damaged: {error}") from error
    versions = settings.pop("versions", {})
    if not isinstance(versions, dict):
        raise InputError("experiment.toml is damaged: versions is no table")
    file_schema.check(file_schema.ExperimentFacts, settings, "experiment.toml")
    running = folder.is_running  # asked first: a run that ends meanwhile is then a finished one
    summary, history, topology = folder.summary(), folder.history(), folder.topology()
    clients, fairness = _json(path / "clients.json"), _json(path / "fairness.json")
    file_schema.check(list[file_schema.Client] | None, clients, "clients.json")
    if len({None if entry.get("labels") is None else len(entry["labels"]) for entry in clients or []}) > 1:
        raise InputError("clients.json is damaged: its clients do not have the same labels")
    file_schema.check(file_schema.Fairness | None, fairness, "fairness.json")
    dense = _is_dense(settings["method"], summary)
    keys = {**_DEFAULTS, **flat(settings), "density": 1.0 if dense else settings["density"]}
    metrics = of_run(summary, history)
    served = {
        "history.jsonl": history,
        "fairness.json": (fairness or {}).get("clients"),
        "summary.json": ((summary or {}).get("federated") or {}).get("clients"),
    }
    for name, lines in served.items():
        file_schema.check_metrics([metric.name for metric in metrics], lines or [], name)
    return Run(str(path), keys, versions, dense, history, topology, clients or [], summary, fairness, _links(folder), running, metrics)


def _is_dense(method: str, summary: Mapping[str, Any] | None) -> bool:
    """Whether the method is dense: by the catalogue or, for foreign methods, by the run's results, without running any code."""
    if method in methods.names():
        return methods.get(method).dense
    return summary is not None and float(summary["density"]) == 1.0


def _json(file: Path) -> Any:
    require_plain(file)
    try:
        return json.loads(file.read_bytes()) if file.exists() else None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file.name} is damaged: {error}") from error


def _links(folder: RunFolder) -> dict[str, int]:
    """Return the sizes of the masks."""
    file = folder.path / "masks.safetensors"
    if not file.exists():
        return {}
    folder.checked(file.name)
    try:
        with safe_open(file, "numpy") as masks:
            return {name: math.prod(masks.get_slice(name).get_shape()) for name in masks.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise InputError(f"{file.name} is damaged: {error}") from error


def _is_private(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _is_trial(folder: Path) -> bool:
    """Whether this run served to choose a learning rate for a comparison or a run."""
    return any(
        parent.name == TUNING and any((parent.parent / file).exists() for file in (COMPARISON, TUNING_FILE)) for parent in folder.parents
    )


def _failed_cells(path: Path) -> list[str]:
    """Return what comparisons in and below this folder say about failed cells."""
    found = []
    for file in sorted(path.rglob("failures.json")):
        if (file.parent / COMPARISON).exists():
            cells = _json(file)
            file_schema.check(dict[str, file_schema.CellFailure], cells, str(file))
            found += [f"{file.parent}: cell {name} failed: {' '.join(entry['reason'].split())}" for name, entry in cells.items()]
    return found
