"""Models of finished and interrupted runs, and of exported archives, read back."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedrts import config, data
from fedrts.data.own import columns_of
from fedrts.data.tables import Standardised
from fedrts.data.tabular import read
from fedrts.errors import InputError
from fedrts.files import check_expansion
from fedrts.programs import archive
from fedrts.registry import only_allowing
from fedrts.runs import checkpoint
from fedrts.runs.build import assemble, build_model, layout_of
from fedrts.runs.folder import RunFolder, Trust, check_finite, check_saved, resume_command
from fedrts.server.averaging import average_of
from fedrts.sparse.layout import Prunable
from fedrts.wire.errors import WireError

ANYWHERE: dict[str, Any] = {"device": "cpu", "init": None, "origin": None, "callbacks": []}
"""A model can be looked at on a machine that lacks the device it was trained on, what it started from, and who watched it."""
ARCHIVED = ("model", "model_options", "method", "method_options", "density")
"""Keys by which an archive says how its module is built."""


def load(
    path: str | Path,
    model: nn.Module | None = None,
    prunable: Prunable | None = None,
    data_dir: str | Path | None = None,
    *,
    average: bool = False,
    trust: Trust = False,
) -> nn.Module:
    """Load the model of a run folder (the result, or an interrupted run's newest checkpoint) or of an exported archive.

    `average` loads the average of the late models (`train.average`) instead of the last one. If the model (or a rule for what may be
    pruned) was given in Python, give it again. Code that the folder names by import path runs only if you `trust` it: True, or a list of
    paths such as `["my_package.nets:net"]`.
    """
    folder = RunFolder(path)
    if _is_archive(folder.path):
        return _from_archive(folder.path, model, trust)
    with folder.trusted(trust):
        return loaded(folder, model, prunable, data_dir, average)


def inputs(path: str | Path, table: Any) -> Tensor:
    """Return the model's inputs `[rows, columns]` for new rows of the kind of table that a run was trained on.

    model = fedrts.load("runs/a")
    scores = model(fedrts.inputs("runs/a", "new.csv"))    # or a pandas frame, or a dictionary of arrays

    Words and numbers are encoded and standardised as the run did, by the file that it was trained on. A target or client column is
    not needed, and further columns are ignored.
    """
    folder = RunFolder(path)
    resolved = config.resolve(config.from_file(folder.experiment_file()), ANYWHERE)
    if resolved.data.partition(":")[0] not in ("csv", "parquet"):
        raise InputError(f"the run in {folder.path} was trained on '{resolved.data}', no table: prepare its inputs as you did for training")
    rows = read(Path(table)) if isinstance(table, str | Path) else columns_of(table, "table")
    view = data.load(resolved.data, resolved.data_options).view
    assert isinstance(view, Standardised)
    return view.of(rows)


def _is_archive(path: Path) -> bool:
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        return file.read(len(archive.MAGIC)) == archive.MAGIC


def _from_archive(path: Path, model: nn.Module | None, trust: Trust) -> nn.Module:
    """Load the module of `fedrts export --format sparse`; it is built by name unless it is given."""
    try:
        opened = archive.OpenedArchive.of(path.read_bytes())
        if model is None:
            model = _module_of(opened, path, trust)
        tensors = opened.tensors(model.state_dict())
    except WireError as error:
        raise InputError(f"cannot read {path}: {error}") from error
    check_finite(tensors, str(path))
    model.load_state_dict(tensors, strict=True)
    return model.eval()


def _module_of(opened: archive.OpenedArchive, path: Path, trust: Trust) -> nn.Module:
    """Build the module that an archive describes; it is never larger than the archive's contents show."""
    about = opened.about
    if about.get("model") == config.CUSTOM:
        raise InputError(f"{path} holds a model given in Python: pass it as fedrts.load(path, model=…)")
    given = [trust] if isinstance(trust, str) else None if trust is True else trust or ()
    shape, classes = about.get("input_shape"), about.get("classes")
    if not isinstance(shape, list) or not all(isinstance(side, int) for side in shape) or not isinstance(classes, int):
        raise InputError(f"cannot read {path}: it does not say what its model reads and gives")

    def remedy(named: str) -> str:
        return f"if you trust whoever made {path}, add trust=[{named!r}]"

    with contextlib.nullcontext() if given is None else only_allowing(given, remedy):
        settings = {key: about[key] for key in ARCHIVED if key in about} | {"data": config.CUSTOM}
        experiment = config.resolve(settings, ANYWHERE)
        method = config.make_method(experiment)
        if ":" not in experiment.model:
            with torch.device("meta"):  # shapes without numbers: they may be any that somebody wrote
                likeness = method.prepare(build_model(experiment, tuple(shape), classes)).state_dict()
            expanded = sum(tensor.numel() * tensor.element_size() for tensor in likeness.values())
            check_expansion(path, path.stat().st_size, expanded, "export it again")
            opened.tensors(likeness)
        return method.prepare(build_model(experiment, tuple(shape), classes))


def loaded(folder: RunFolder, model: nn.Module | None, prunable: Prunable | None, data_dir: str | Path | None, average: bool) -> nn.Module:
    """Return the model of a run folder, running only code that is trusted."""
    resolved = config.resolve(config.from_file(folder.experiment_file()), ANYWHERE)
    if model is not None and not isinstance(model, nn.Module):
        raise InputError(f"model is {model!r}: give the torch.nn.Module that was trained, or none where it has a name")
    if model is not None:
        model = config.make_method(resolved).prepare(model)  # as it was trained: a method may have replaced parts of it
    elif resolved.model == config.CUSTOM:
        raise InputError(f"the run in {folder.path} trained a model given in Python: pass it as fedrts.load(path, model=…)")
    else:
        model = assemble(resolved, data_dir).module
    try:
        model.load_state_dict(state_dict(folder, model, prunable, average), strict=True)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise InputError(f"the run in {folder.path} has another model: {reason[:200]}") from error
    return model.eval()


def state_dict(folder: RunFolder, module: nn.Module, prunable: Prunable | None = None, average: bool = False) -> dict[str, Tensor]:
    """Return the named tensors of a run: model.safetensors (average.safetensors), or the newest checkpoint's."""
    if (final := folder.final_tensors(average)) is not None:
        return final
    saved = checkpoint.load(folder.path / "checkpoint", check=check_saved)
    if saved is None:
        first = resume_command(folder.path, config.from_file(folder.experiment_file()))
        raise InputError(f"{folder.path} has neither a model nor a checkpoint yet: run `{first}` first")
    resolved = config.resolve(config.from_file(folder.experiment_file()), ANYWHERE)
    layout = layout_of(resolved, module, prunable)
    if layout.fingerprint != saved.facts["identity"]["model"]:
        raise InputError(f"the run in {folder.path} has another model, or another rule of what may be pruned: give the same ones")
    if (saved.state.mask.sizes, len(saved.state.weights)) != (layout.sizes, layout.length):
        raise InputError(f"the newest checkpoint in {folder.path} is damaged: its tensors are not the model's; delete it")
    state = average_of(saved.state) if average else saved.state
    if state is None:
        raise InputError(f"{folder.path} has no average of models (yet): take its model, or set train.average in a new run")
    tensors = layout.state_dict(state.weights)
    check_finite(tensors, f"the newest checkpoint in {folder.path}")
    return tensors
