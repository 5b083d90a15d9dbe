"""The finished run that another starts from: its model, its mask, and what its method learned about links."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedrts.config import Tree, from_file, merged, method_class
from fedrts.errors import InputError
from fedrts.methods.base import Method, given_mask
from fedrts.methods.contract import Round, Setup, State
from fedrts.runs import checkpoint
from fedrts.runs.folder import RunFolder, check_saved
from fedrts.runs.initial_weights import take_weights
from fedrts.sparse.layout import Layout
from fedrts.sparse.mask import Mask
from fedrts.sparse.schedule import Schedule

_OWN = ("out", "init", "origin", "tags", "callbacks", "device", "engine", "checkpoint", "stop")
"""Keys that a run does not hand on."""
_OF_ITS_ROUNDS = {
    "topology": ("end", "init_mask", "density_start", "outer_at_end"),
    "train": ("schedule_rounds",),
    "secure": ("threshold",),
}


def settings_from(folder: RunFolder, given: Tree, keep_mask: bool = False) -> dict[str, Any]:
    """Return the settings of a new run that starts from a finished one: that run's, overridden by what is `given`.

    `keep_mask`: without outer rounds.
    """
    if folder.summary() is None:
        folder.experiment_file()
        raise InputError(f"the run in {folder.path} is not finished: resume it first, or start from its weights with init")
    kept: dict[str, Any] = {"origin": str(folder.path)}
    there = from_file(folder.experiment_file())
    for key, value in there.items():
        left_out = _OF_ITS_ROUNDS.get(key, ())
        if key not in _OWN:
            kept[key] = {name: entry for name, entry in value.items() if name not in left_out} if isinstance(value, Mapping) else value
    for key in ("data", "method"):
        if given.get(key, there[key]) != there[key]:
            kept.pop(f"{key}_options", None)  # are the other one's
    if any(method_class(name).dense for name in (there["method"], given.get("method", there["method"]))):
        kept.pop("density", None)  # of a dense run it says nothing of a sparse one
    asked = given.get("clients", {})
    if isinstance(asked, Mapping) and isinstance(total := asked.get("total"), int):
        kept["clients"]["per_round"] = min(kept["clients"]["per_round"], max(total, 1))
    settings = merged(kept, given)
    if keep_mask:
        interval = settings["topology"]["interval"]
        settings["topology"] |= {"first_outer": interval, "end": 1, "outer_at_end": False}
    return settings


@dataclass(frozen=True)
class Origin:
    """What a finished run passes on to the next one."""

    path: Path
    weights: Mapping[str, Tensor]
    masks: Mapping[str, Tensor]
    memory: Mapping[str, Tensor]
    method: str

    @staticmethod
    def read(path: str | Path) -> Origin:
        folder = RunFolder(path)
        method = str(from_file(folder.experiment_file()).get("method"))
        weights = folder.final_tensors()
        if weights is None or folder.summary() is None:
            raise InputError(f"the run in {path} is not finished: resume it first, or start from its weights with init")
        saved = checkpoint.load(folder.path / "checkpoint", check=check_saved)
        return Origin(folder.path, weights, folder.read_tensors("masks.safetensors"), saved.state.memory if saved else {}, method)

    def load(self, module: nn.Module) -> None:
        """Load its weights into a model of the same kind."""
        take_weights(module, self.weights, self.path / "model.safetensors")

    def given(self, layout: Layout) -> Tensor:
        """Return its mask, bool `[P]`, in the order of the layout; for a dense run, all links."""
        names = [entry.name for entry in layout.layers]
        if names != [name for name in names if name in self.masks] or len(self.masks) != len(names):
            raise InputError(f"the run in {self.path} prunes other parameters than this one: give the same rule of what may be pruned")
        bits = [self.masks[name].reshape(-1) for name in names]
        return torch.cat(bits).bool() if bits else torch.zeros(0, dtype=torch.bool)

    def begun(self, method: Method, name: str, setup: Setup) -> State:
        """Return the state from which the named method continues: the given weights on the given mask, without a set-up.

        The same method keeps what it has learned, too.
        """
        state = method.begin(setup)
        if not method.dense:
            mask = given_mask(setup, method.density)
            before = Round.of(-1, Schedule(), Mask.full(setup.layout.sizes), setup.layout)
            state = replace(State.of(setup.weights, mask), memory={} if method.exchanges(before) else state.memory)
        known = {key: self.memory[key] for key in method.learned if key in state.memory and key in self.memory and name == self.method}
        fitting = {key: learned for key, learned in known.items() if (learned.shape, learned.dtype) == _form(state.memory[key])}
        return state.remember(**{key: learned.to(state.values.device) for key, learned in fitting.items()})


def _form(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype
