"""Run folders as plain structures: what the report is made of."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from fedrts import methods
from fedrts.config import flat
from fedrts.errors import InputError
from fedrts.folder import RunFolder

Line = dict[str, Any]


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

    @property
    def finished(self) -> bool:
        return self.summary is not None

    @property
    def seed(self) -> int:
        return int(self.settings["seed"])

    @property
    def method(self) -> str:
        return str(self.settings["method"])

    @property
    def played(self) -> int:
        """Rounds that are over."""
        return sum(line["round"] >= 0 for line in self.history)

    @property
    def is_language(self) -> bool:
        return any(line.get("perplexity") is not None for line in self.history)


@dataclass(frozen=True)
class Found:
    """What there is in the given folders."""

    runs: Sequence[Run]
    problems: Sequence[str] = field(default_factory=tuple)
    """One line each: folders that could not be read, cells that failed."""


def find(paths: Iterable[Path]) -> Found:
    """All runs in and below `paths`, in the order of their names; what is damaged becomes a line of `problems`."""
    runs: list[Run] = []
    problems: list[str] = []
    folders: dict[Path, None] = {}
    for path in paths:
        if not path.is_dir():
            raise InputError(f"there is no folder {path}")
        below = sorted(file.parent for file in path.rglob("experiment.toml"))
        if not below:
            problems.append(f"{path}: no run folder in it (none has an experiment.toml)")
        folders |= dict.fromkeys(folder for folder in below if not _is_private(folder.relative_to(path)))
        problems += _failed_cells(path)
    for folder in folders:
        try:
            runs.append(read(folder))
        except (InputError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            reason = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error).partition("\n")[0]
            problems.append(f"{folder}: left out, damaged: {reason}")
    return Found(runs, problems)


def read(path: Path) -> Run:
    """The run in a folder, finished or not."""
    folder = RunFolder(path)
    settings = tomllib.loads(folder.experiment_file().read_text("utf-8"))
    versions = settings.pop("versions", {})
    keys = flat(settings)
    summary = folder.summary()
    dense = _is_dense(str(keys["method"]), summary)
    history = folder.history()
    for line in history:
        _check(line, ("round", "outer", "rejected", "accuracy", "upload_bytes", "download_bytes", "flops", "links_changed", "density"))
    if summary is not None:
        _check(summary, ("accuracy_last10", "density", "upload_bytes", "download_bytes", "flops", "seconds"))
    return Run(
        str(path),
        {**keys, "seed": int(keys["seed"]), "density": 1.0 if dense else float(keys["density"]), "data": keys["data"], "model": keys["model"]},
        versions,
        dense,
        history,
        folder.topology(),
        _json(path / "clients.json") or [],
        summary,
        _json(path / "fairness.json"),
        _links(path / "masks.safetensors"),
    )


def _is_dense(method: str, summary: Mapping[str, Any] | None) -> bool:
    """By the catalogue, or, for a method that is not here, by what the run came to."""
    try:
        return methods.get(method).dense
    except InputError:
        return summary is not None and float(summary["density"]) == 1.0


def _check(line: Mapping[str, Any], keys: Iterable[str]) -> None:
    for key in keys:
        line[key]


def _json(file: Path) -> Any:
    return json.loads(file.read_bytes()) if file.exists() else None


def _links(file: Path) -> dict[str, int]:
    """Sizes of the masks; only the file's header is read."""
    if not file.exists():
        return {}
    try:
        with safe_open(file, "numpy") as masks:
            return {name: math.prod(masks.get_slice(name).get_shape()) for name in masks.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise InputError(f"cannot read {file}: {error}") from error


def _is_private(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _failed_cells(path: Path) -> list[str]:
    """What a comparison in this folder says of cells that failed."""
    return []
