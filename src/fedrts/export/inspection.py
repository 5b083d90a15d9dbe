"""Looking at a run folder: what it holds, how good its model is, and the model for use elsewhere."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from fedrts import api, config, data
from fedrts.errors import InputError
from fedrts.export.onnx import onnx_bytes
from fedrts.export.sparse import archived, tensors_alone
from fedrts.files import write_atomically
from fedrts.programs.archive import StoredType
from fedrts.runs import checkpoint
from fedrts.runs.build import assemble, with_metrics
from fedrts.runs.folder import RunFolder, Trust, check_saved, resume_command
from fedrts.runs.lost_units import lost_units
from fedrts.tasks import Metrics
from fedrts.tasks.metrics import of_run
from fedrts.wire import value_types

_CHECKED = 16
"""Test samples on which an ONNX file must agree with the model."""


def inspect_run(path: Path) -> dict[str, Any]:
    """Progress, results and layer densities of a finished or unfinished run."""
    folder = RunFolder(path)
    settings = config.from_file(folder.experiment_file())
    experiment = config.validated(config.Experiment, settings)
    folder.verify()
    history, summary = folder.history(), folder.summary()
    names = ("method", "data", "model", "seed", "rounds")
    content: dict[str, Any] = {name: getattr(experiment, name) for name in names}
    unfinished = "running" if folder.is_running else f"unfinished; continue with: {resume_command(path, settings)}"
    content["state"] = "finished" if summary else unfinished
    content["rounds_played"] = sum(line["round"] >= 0 for line in history)
    metrics = of_run(summary, history)
    source = summary or next((line for line in reversed(history) if line.get(metrics[0].name) is not None), {})
    shown = [key for metric in metrics if metric.told or metric is metrics[0] for key in (metric.name, f"{metric.name}_last10")]
    for name in ("density", *shown, "comm_ratio"):
        if source.get(name) is not None:
            content[name] = source[name]
    for way in ("upload_bytes", "download_bytes"):
        content[way] = sum(line[way] for line in history)
    if warnings := lost_units(folder.topology(), history):
        content["warnings"] = warnings
    content["layers"] = [
        {"layer": name, "links": size, "active": active, "density": active / size} for name, size, active in _layers(folder)
    ]
    return content


def _layers(folder: RunFolder) -> list[tuple[str, int, int]]:
    """(name, links, active) of every prunable layer, from the newest checkpoint."""
    saved = checkpoint.load(folder.path / "checkpoint", check=check_saved)
    if saved is None:
        return []
    return list(zip(saved.facts["identity"]["layers"], saved.state.mask.sizes, saved.state.mask.counts, strict=True))


def evaluate_run(
    path: Path, data_name: str | None = None, data_dir: Path | None = None, trust: Trust = False, average: bool = False
) -> Metrics:
    """Metrics of a run's model, or of the average of its late ones, on the test set of its data or of another data set of its shapes."""
    model = api.load(path, data_dir=data_dir, average=average, trust=trust)
    with RunFolder(path).trusted(trust):
        experiment = config.resolve(config.from_file(RunFolder(path).experiment_file()), api.ANYWHERE)
        held = None if data_name else with_metrics(data.load(experiment.data, experiment.data_options, data_dir), experiment)
    if held is None:  # the user's own word
        held = data.load(str(data_name), {}, data_dir)
    if not len(held.test_y):
        raise InputError(f"'{data_name or experiment.data}' has no test data here: name a data set that has with --data")
    try:
        return held.evaluate(model.cpu(), experiment.eval.batch_size)
    except (RuntimeError, IndexError) as error:
        raise InputError(f"the model of {path} cannot read the data set '{data_name}': {str(error).splitlines()[0]}") from error


@dataclass(frozen=True)
class Asked:
    """What a user wants of a run's model."""

    run: Path
    data_dir: Path | None
    trust: Trust
    average: bool
    """The average of its late models instead of the last one."""
    value_type: StoredType

    @property
    def experiment(self) -> config.Experiment:
        return config.resolve(config.from_file(RunFolder(self.run).experiment_file()), api.ANYWHERE)

    @property
    def module(self) -> nn.Module:
        return api.load(self.run, data_dir=self.data_dir, average=self.average, trust=self.trust)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """By name; those of a finished run need no model, and no code of whoever made it."""
        folder = RunFolder(self.run)
        tensors = folder.final_tensors(self.average)
        if tensors is None:
            tensors = api.state_dict(folder, assemble(self.experiment, self.data_dir).module, average=self.average)
        return tensors


@dataclass(frozen=True)
class ExportKind:
    """A format of exported files."""

    suffix: str
    write: Callable[[Asked], bytes]
    shortens: bool = False
    """Can it hold values in fewer bits?"""


def export_run(
    path: Path,
    format: str,
    out: Path | None,
    data_dir: Path | None = None,
    trust: Trust = False,
    average: bool = False,
    value_type: StoredType = "float32",
) -> Path:
    """Write a run's model, or the `average` of its late ones, exact zeros outside the mask; EXPORTS says in which ways."""
    folder, kind = RunFolder(path), EXPORTS[format]
    folder.experiment_file()  # is it a run folder?
    if not (kind.shortens or value_types.FORMATS[value_type].lossless):
        raise InputError(f"--value-type {value_type} is for --format sparse: {format} holds values as they are")
    target = out or path / f"export.{kind.suffix}"
    if target.is_dir():
        raise InputError(f"cannot write {target}: it is a folder; name a file in it, such as {target / f'model.{kind.suffix}'}")
    if folder.owns(target):
        raise InputError(f"cannot write {target}: it is the run's own; choose another --out")
    if not target.parent.is_dir():
        raise InputError(f"cannot write {target}: there is no folder {target.parent}")
    with folder.trusted(trust):
        content = kind.write(Asked(path, data_dir, trust, average, value_type))
    write_atomically(target, content)
    return target


def _dense(asked: Asked) -> bytes:
    buffer = io.BytesIO()
    torch.save(asked.tensors, buffer)
    return buffer.getvalue()


def _onnx(asked: Asked) -> bytes:
    """The model as ONNX, checked on the first test samples of the run's data."""
    model, experiment = asked.module, asked.experiment
    if experiment.data == config.CUSTOM:
        raise InputError(f"the run in {asked.run} was trained on data given in Python: there are no inputs to check an ONNX file with")
    held = data.load(experiment.data, experiment.data_options, asked.data_dir)
    return onnx_bytes(model, held.inputs(held.test_x[:_CHECKED]))


def _sparse(asked: Asked) -> bytes:
    """The model as an archive; of one that was given in Python its tensors alone."""
    experiment = asked.experiment
    if config.CUSTOM in (experiment.model, experiment.data):
        return tensors_alone(asked.tensors, asked.value_type)
    held = data.load(experiment.data, experiment.data_options, asked.data_dir)
    return archived(asked.module, experiment, held, asked.value_type)


EXPORTS: dict[str, ExportKind] = {
    "safetensors": ExportKind("safetensors", lambda asked: safetensors.torch.save(asked.tensors)),
    "dense": ExportKind("pt", _dense),
    "onnx": ExportKind("onnx", _onnx),
    "sparse": ExportKind("frts", _sparse, shortens=True),
}
