"""A run's model as an archive: its description, and the operations that a device needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from fedrts import config, trees
from fedrts.api import loading
from fedrts.config import Experiment
from fedrts.data.contract import Data
from fedrts.data.pixels import Pixels
from fedrts.errors import InputError, note
from fedrts.export.formats import ExportFormat, TrainedModel, as_bytes, register
from fedrts.programs.archive import ArchiveContent, ArchivedTensor, StoredType, write
from fedrts.programs.parts import UnknownPartError, read
from fedrts.programs.stages import Stage, fused
from fedrts.runs.build import layout_of


def archived(module: nn.Module, experiment: Experiment, held: Data, value_type: StoredType) -> bytes:
    """Return a model with its operations or, for a module with parts that the kernels do not support, without them and with a note."""
    layout, tensors = layout_of(experiment, module), module.state_dict()
    parts = [ArchivedTensor(entry.names, tensors[entry.name], entry.block) for entry in layout.entries]
    parts += [ArchivedTensor((name,), tensors[name]) for name in layout.constants]
    about = {
        **{key: value for key, value in experiment.model_dump(mode="json").items() if key in loading.ARCHIVED},
        "input_shape": held.input_shape,
        "classes": held.classes,
    }
    inputs = held.inputs(trees.at(held.x, slice(0, 2)))
    shape, outputs = tuple[int, ...](), 0
    stages: Sequence[Stage] = ()
    try:
        stages = _stages(module, inputs)
        shape, outputs = tuple(inputs.shape[1:]), stages[-1].shape[0]
    except UnknownPartError as error:
        note(f"only fedrts.load can read the archive, the program fedrts-kernels/run cannot: the kernels do not know {error}")
    scales = held.view
    normalisation = (scales.scale.flatten().tolist(), scales.shift.flatten().tolist()) if stages and isinstance(scales, Pixels) else None
    return _written(ArchiveContent(about, shape, outputs, normalisation, parts, stages), value_type)


def tensors_alone(tensors: Mapping[str, Tensor], value_type: StoredType) -> bytes:
    """Return the tensors of a model that was given in Python, for `fedrts.load(FILE, model=…)`."""
    note("only fedrts.load(FILE, model=…) can read the archive: the run trained a model, or on data, given in Python")
    parts = [ArchivedTensor((name,), tensor) for name, tensor in tensors.items()]
    return _written(ArchiveContent({"model": config.CUSTOM}, (), 0, None, parts, ()), value_type)


def _stages(module: nn.Module, inputs: object) -> Sequence[Stage]:
    if not isinstance(inputs, Tensor) or inputs.dtype != torch.float32:
        raise UnknownPartError("inputs that are not one tensor of float32")
    if wrong := next((name for name, tensor in module.named_parameters() if tensor.dtype != torch.float32), None):
        raise UnknownPartError(f"'{wrong}', which is not float32")
    stages = fused(read(module, inputs))
    if not stages[-1].wide:
        raise UnknownPartError(f"outputs of shape {list(stages[-1].shape)}")
    return stages


def _written(content: ArchiveContent, value_type: StoredType) -> bytes:
    try:
        return write(content, value_type)
    except OverflowError as error:
        raise InputError(f"{error}: use --value-type float32") from error


def _exported(source: TrainedModel) -> bytes:
    """Export the model as an archive; only its tensors if it was given in Python."""
    if config.CUSTOM in (source.experiment.model, source.experiment.data):
        return tensors_alone(source.tensors, source.value_type)
    return archived(source.model, source.experiment, source.held, source.value_type)


register("sparse")(
    ExportFormat("an archive as small as the density, also for devices", ".frts", as_bytes(_exported), ("float32", "float16", "int8"))
)
