"""MLflow and Weights & Biases through their own clients: curves, settings, density by layer, and the final report."""

from __future__ import annotations

import json
import math
import pkgutil
import tempfile
import time
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from fedrts.callbacks import register
from fedrts.callbacks.contract import Callback, EndView, OuterView, RoundView, RunView, density_by_layer
from fedrts.errors import InputError, optional, reason
from fedrts.files import require_plain, write_atomically

_REPORT = "fedrts.report:write"
"""Looked up when a run ends: it lies in a room above this one."""
_FILES = ("experiment.toml", "summary.json", "history.jsonl", "topology.jsonl")
_MODEL = ("model.safetensors", "masks.safetensors")
_AT_ONCE = 100
"""Settings that MLflow takes in one call."""


class Tracker(Callback):
    """Send a run to a tracking service. The run folder keeps its id, so a resumed run continues it and logs no round twice."""

    service: ClassVar[str]

    def __init__(self, model: bool = False) -> None:
        self.files = (*_FILES, *_MODEL) if model else _FILES
        """Those of the run folder that are sent at its end, with the report."""

    @abstractmethod
    def open(self, run: RunView, id: str | None) -> str:
        """Start tracking a run, or continue the one with this id; return its id."""

    @abstractmethod
    def log(self, numbers: Mapping[str, float], step: int) -> None: ...

    @abstractmethod
    def finish(self, summary: Mapping[str, Any], files: Sequence[Path]) -> None:
        """Complete the run with these results and files."""

    @abstractmethod
    def shut(self, complete: bool) -> None: ...

    def on_start(self, run: RunView) -> None:
        self.folder, self._complete, self._opened = run.folder, False, False
        known = self._read()
        self.id = self.open(run, known.get("id"))
        self._opened = True
        self.next = known.get("next", run.first_round)
        self._layers = {} if known else _named(density_by_layer(run.layout.by_name(run.mask.bits)))
        self._write()

    def on_outer(self, outer: OuterView) -> None:
        self._layers = _named(outer.layer_density)

    def on_round(self, round: RoundView) -> None:
        numbers = {
            key: float(value) for key, value in round.line.items() if isinstance(value, int | float) and key not in ("round", "outer")
        }
        numbers = {**numbers, "rejected": float(len(round.line["rejected"])), **self._layers}
        if round.index < 0:
            self.log({f"set-up/{key}": value for key, value in numbers.items() if math.isfinite(value)}, 0)
        elif round.index >= self.next:
            self.log({key: value for key, value in numbers.items() if math.isfinite(value)}, round.index)
            self.next = round.index + 1
            self._write()
        self._layers = {}

    def on_end(self, end: EndView) -> None:
        with tempfile.TemporaryDirectory() as made:
            files = []
            if self.folder is not None:
                files = [self.folder / name for name in self.files if (self.folder / name).exists()]
                files.append(pkgutil.resolve_name(_REPORT)([self.folder], made, pictures=False)[0])
            self.finish(end.summary, files)
        self._complete = True

    def on_close(self) -> None:
        if getattr(self, "_opened", False):
            self.shut(self._complete)
            self._opened = False

    @property
    def _file(self) -> Path | None:
        return None if self.folder is None else self.folder / f"{self.service}.json"

    def _read(self) -> dict[str, Any]:
        """Read what an earlier process noted about the run."""
        if self._file is None or not self._file.exists():
            return {}
        require_plain(self._file)
        try:
            known = json.loads(self._file.read_bytes())
            return {"id": str(known["id"]), "next": int(known["next"])}
        except (OSError, ValueError, TypeError, LookupError) as error:
            raise InputError(f"{self._file} is damaged: {reason(error)}; delete it to track the rest of the run as a new one") from error

    def _write(self) -> None:
        if self._file is not None:
            write_atomically(self._file, json.dumps({"id": self.id, "next": self.next}).encode() + b"\n")


def _named(layers: Mapping[str, float]) -> dict[str, float]:
    return {f"density/{name}": share for name, share in layers.items()}


def _title(run: RunView) -> str:
    return run.folder.name if run.folder is not None else f"{run.experiment.method} on {run.experiment.data}"


def _results(summary: Mapping[str, Any]) -> dict[str, float]:
    return {key: value for key, value in summary.items() if isinstance(value, int | float) and math.isfinite(value)}


@contextmanager
def _explained(service: str, what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # whatever a service's client raises
        raise InputError(f"{service}: {what}: {type(error).__name__}: {reason(error)}") from error


@register("mlflow")
class MLflow(Tracker):
    """Track a run with MLflow: `MLflow(experiment="digits", uri="sqlite:///mlflow.db")`; the default is MLflow's own location."""

    service = "mlflow"

    def __init__(self, experiment: str = "fedrts", uri: str | None = None, model: bool = False) -> None:
        super().__init__(model)
        self.mlflow = optional("mlflow", "mlflow")
        self.experiment, self.uri = experiment, uri

    def open(self, run: RunView, id: str | None) -> str:
        with _explained("MLflow", f"cannot open its store {self.uri or '(MLFLOW_TRACKING_URI, or MLflow’s default)'}"):
            self.client = self.mlflow.MlflowClient(tracking_uri=self.uri)
        if id is not None:
            with _explained("MLflow", f"the store has no run {id}, as which this one began: name the same store, or delete mlflow.json"):
                self.client.update_run(id, status="RUNNING")
            return id
        found = self.client.get_experiment_by_name(self.experiment)
        place = found.experiment_id if found is not None else self.client.create_experiment(self.experiment)
        opened: str = self.client.create_run(place, run_name=_title(run)).info.run_id
        entities = self.mlflow.entities
        settings = [entities.Param(key, str(value)) for key, value in run.settings.items() if value is not None]
        for begin in range(0, len(settings), _AT_ONCE):
            self.client.log_batch(opened, params=settings[begin : begin + _AT_ONCE])
        return opened

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        self.client.log_batch(self.id, metrics=[self.mlflow.entities.Metric(key, value, now, step) for key, value in numbers.items()])

    def finish(self, summary: Mapping[str, Any], files: Sequence[Path]) -> None:
        self.log({f"result/{key}": float(value) for key, value in _results(summary).items()}, int(summary["rounds"]))
        for file in files:
            self.client.log_artifact(self.id, str(file))

    def shut(self, complete: bool) -> None:
        self.client.set_terminated(self.id, "FINISHED" if complete else "KILLED")


@register("wandb")
class WandB(Tracker):
    """Track a run with Weights & Biases: `WandB(project="digits", mode="offline")`; other settings are those of `wandb` itself."""

    service = "wandb"

    def __init__(self, project: str = "fedrts", mode: str | None = None, model: bool = False) -> None:
        super().__init__(model)
        self.wandb = optional("wandb", "wandb")
        self.project, self.mode = project, mode

    def open(self, run: RunView, id: str | None) -> str:
        known = {} if id is None else {"id": id, "resume": "allow"}
        place = {} if run.folder is None else {"dir": str(run.folder)}
        with _explained("Weights & Biases", "cannot begin a run"):
            self.tracked = self.wandb.init(
                project=self.project,
                name=_title(run),
                mode=self.mode,
                config={key: value for key, value in run.settings.items() if value is not None},
                reinit="create_new",  # leaves alone what else this process tracks
                settings=self.wandb.Settings(console="off"),  # the terminal is ours
                **known,
                **place,
            )
        return str(self.tracked.id)

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        self.tracked.log(dict(numbers), step=step)

    def finish(self, summary: Mapping[str, Any], files: Sequence[Path]) -> None:
        self.tracked.summary.update({f"result/{key}": value for key, value in _results(summary).items()})
        if files:
            artefact = self.wandb.Artifact(f"run-{self.id}", type="run")
            for file in files:
                artefact.add_file(str(file))
            self.tracked.log_artifact(artefact)

    def shut(self, complete: bool) -> None:
        self.tracked.finish(exit_code=0 if complete else 1)
