"""Export formats of a run's model. A new one needs only an `ExportFormat` registered in a file of this package."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedrts import config, data, trees
from fedrts.api import loading
from fedrts.data.contract import Data
from fedrts.errors import InputError
from fedrts.files import write_atomically
from fedrts.programs.archive import StoredType
from fedrts.registry import Registry
from fedrts.runs.build import assemble, with_metrics
from fedrts.runs.folder import RunFolder, Trust

CHECKED = 16
"""Test samples on which a program must agree with the model."""


@dataclass(frozen=True)
class TrainedModel:
    """The model of a run and its training data, as formats need them."""

    path: Path
    data_dir: Path | None = None
    trust: Trust = False
    average: bool = False
    """The average of its late models instead of the last one?"""
    value_type: StoredType = "float32"
    """In what weights are written."""

    @property
    def folder(self) -> RunFolder:
        return RunFolder(self.path)

    @cached_property
    def experiment(self) -> config.Experiment:
        return config.resolve(config.from_file(self.folder.experiment_file()), loading.ANYWHERE)

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name, with exact zeros outside the mask; for a finished run this loads no model and no foreign code."""
        found = self.folder.final_tensors(self.average)
        return found if found is not None else loading.state_dict(self.folder, self._built(), average=self.average)

    def _built(self) -> nn.Module:
        return assemble(self.experiment, self.data_dir).module

    @cached_property
    def model(self) -> nn.Module:
        """The module, in evaluation mode."""
        return loading.load(self.path, data_dir=self.data_dir, average=self.average, trust=self.trust).cpu()

    @cached_property
    def held(self) -> Data:
        """The data, with all metrics of the experiment."""
        e = self.experiment
        if e.data == config.CUSTOM:
            raise InputError(f"the run in {self.path} was trained on data given in Python: there are no inputs to check this format with")
        return with_metrics(data.load(e.data, e.data_options, self.data_dir), e)

    @cached_property
    def inputs(self) -> Tensor:
        """A few test samples as the model reads them."""
        found = self.held.inputs(trees.at(self.held.test_x, slice(0, CHECKED)))
        if not isinstance(found, Tensor) or not len(found):
            raise InputError(f"'{self.experiment.data}' has no test samples of one tensor each to check this format with")
        return found


@dataclass(frozen=True)
class ExportFormat:
    """One export format."""

    words: str
    """For --help."""
    suffix: str
    """Suffix of the file, with its dot; "" for a folder."""
    write: Callable[[TrainedModel, Path], None]
    """Makes the file or the (new, empty) folder."""
    value_types: Sequence[StoredType] = ("float32",)
    """In which it can hold weights."""


formats: Registry[ExportFormat] = Registry("format", __package__, type=ExportFormat)
register = formats.register
names = formats.names
get = formats.get


def export_run(
    path: Path,
    format: str,
    out: Path | None,
    data_dir: Path | None = None,
    trust: Trust = False,
    average: bool = False,
    value_type: StoredType = "float32",
) -> Path:
    """Write a run's model, with exact zeros outside the mask, in a format."""
    kind = get(format)
    source = TrainedModel(path, data_dir, trust, average, value_type)
    if value_type not in kind.value_types:
        fitting = " or ".join(name for name in names() if value_type in get(name).value_types)
        raise InputError(f"--value-type {value_type} is for --format {fitting} (got {format})")
    source.folder.experiment_file()  # is it a run folder?
    target = out or path / (f"export{kind.suffix}" if kind.suffix else format)
    _check_target(source.folder, target, kind)
    with source.folder.trusted(trust):
        if kind.suffix:
            kind.write(source, target)
        else:
            _write_folder(kind, source, target)
    return target


def as_bytes(make: Callable[[TrainedModel], bytes]) -> Callable[[TrainedModel, Path], None]:
    """Wrap a single-file format so that the file is written completely or not at all."""
    return lambda source, target: write_atomically(target, make(source))


def _check_target(folder: RunFolder, target: Path, kind: ExportFormat) -> None:
    """Check that writing there does no harm."""
    if kind.suffix and target.is_dir():
        raise InputError(f"cannot write {target}: it is a folder; name a file in it, such as {target / f'model{kind.suffix}'}")
    if not kind.suffix and target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InputError(f"cannot write {target}: it is there already; name a new folder with --out")
    if folder.owns(target):
        raise InputError(f"cannot write {target}: it is the run's own; choose another --out")
    if not target.parent.is_dir():
        raise InputError(f"cannot write {target}: there is no folder {target.parent}")


def _write_folder(kind: ExportFormat, source: TrainedModel, target: Path) -> None:
    """Move a folder to its final name when it is complete."""
    building = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(building, ignore_errors=True)
    try:
        building.mkdir()
        kind.write(source, building)
        if target.exists():
            target.rmdir()
        building.rename(target)
    except OSError as error:
        raise InputError(f"cannot write {target}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(building, ignore_errors=True)


class Answering(nn.Module):
    """A model with one output tensor: its own output, or its logits."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        """Map inputs `[batch, …]` to outputs `[batch, …]`."""
        output: Tensor = trees.answer(self.module(x))
        return output


def answering(module: nn.Module, inputs: Tensor) -> nn.Module:
    """Return the module itself if it returns a tensor; in evaluation mode."""
    with torch.no_grad():
        output: Any = module.cpu().eval()(inputs[:1])
    if isinstance(output, Tensor):
        return module
    if not isinstance(trees.answer(output), Tensor):
        raise InputError(f"the model gives a {type(output).__name__}, not one tensor or one called logits: use --format safetensors")
    return Answering(module).eval()


def checked_batches(inputs: Tensor, language: bool) -> list[Tensor]:
    """Return inputs for comparing an export with its model: several rows, one row and, for language, half the length."""
    return [inputs, inputs[:1], *([inputs[:, : max(1, inputs.shape[1] // 2)]] if language else [])]


def is_language(module: nn.Module, inputs: Tensor) -> bool:
    """Whether there are logits `[batch, length, vocabulary]` for every token. Other whole numbers are categories, all of them needed."""
    if inputs.is_floating_point():
        return False
    with torch.no_grad():
        output: Tensor = module(inputs)
    return output.dim() == 3 and output.shape[:2] == inputs.shape
