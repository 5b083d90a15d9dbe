"""The best model of a run so far, kept in its folder."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import safetensors
import safetensors.torch
import torch

from fedrts.callbacks import register
from fedrts.callbacks.contract import Callback, Candidate, RoundView, RunView
from fedrts.errors import InputError
from fedrts.files import require_plain, write_atomically
from fedrts.methods.contract import State
from fedrts.sparse.mask import Mask
from fedrts.tasks.metrics import may_be_named


@register("best")
class BestModel(Callback):
    """Keep the model of the round with the best metric as `best.safetensors` and `best_masks.safetensors` in the run folder.

    The best round is read from the history, so a resumed run knows it. The default metric is the leading one, on the validation split if
    there is one. A round is better if it improves by more than `min_delta`.
    """

    def __init__(self, metric: str | None = None, min_delta: float = 0.0, name: str = "best") -> None:
        if not min_delta >= 0:
            raise InputError(f"min_delta must be a number ≥ 0 (got {min_delta!r})")
        if not may_be_named(name):
            raise InputError(f"name must be a word of letters, digits and _ (got {name!r}): the file is NAME.safetensors")
        self.asked, self.min_delta = metric, float(min_delta)
        self.keeps: str | None = name
        self._kept: Candidate | None = None

    def on_start(self, run: RunView) -> None:
        self.run = run
        self.key, self.metric = run.metric(self.asked)
        self.round, self.value = -1, math.nan
        self._kept = None
        for line in run.history:
            self._better(line)

    def on_round(self, round: RoundView) -> None:
        if self._better(round.line):
            self._kept = Candidate(self.round, State(round.state.values, round.state.mask), self.key, self.value)
            self._write(round)

    def best(self) -> Candidate | None:
        """The best model so far; None if no round was evaluated."""
        if self._kept is None and self.round >= 0:
            self._kept = Candidate(self.round, self._read(), self.key, self.value)
        return self._kept

    def _better(self, line: Mapping[str, Any]) -> bool:
        """Add a line of history; return whether its round is the best so far."""
        value = line.get(self.key)
        if value is None or not math.isfinite(value):
            return False
        gain = (self.value - value) if self.metric.lower_is_better else (value - self.value)
        if self.round >= 0 and not gain > self.min_delta:
            return False
        self.round, self.value = line["round"], value
        return True

    def _write(self, round: RoundView) -> None:
        if self.run.folder is None:
            return
        about = {"fedrts": json.dumps({"round": round.index})}
        for name, tensors in ((f"{self.keeps}_masks", round.masks), (self.keeps, round.weights)):
            write_atomically(self.run.folder / f"{name}.safetensors", safetensors.torch.save(tensors, metadata=about))

    def _read(self) -> State:
        """Read the model that an earlier process wrote."""
        folder, layout = self.run.folder, self.run.layout
        if folder is None:
            raise InputError(f"the model of round {self.round} is not there: a run without a folder keeps it in memory")
        found = []
        for name in (self.keeps, f"{self.keeps}_masks"):
            file = folder / f"{name}.safetensors"
            require_plain(file)
            try:
                with safetensors.safe_open(file, "pt") as content:
                    written = json.loads((content.metadata() or {}).get("fedrts", "{}")).get("round")
                    found.append({key: content.get_tensor(key) for key in content.keys()})  # noqa: SIM118
            except (OSError, ValueError, AttributeError, safetensors.SafetensorError) as error:
                raise InputError(
                    f"cannot read {file}, the best model so far: {error}; restore it, or resume without its callback"
                ) from error
            if written != self.round:
                raise InputError(
                    f"{file} is of round {written}, and the best one is {self.round}: resume with the metric that it was kept by"
                )
        weights, masks = found
        device = self.run.mask.bits.device
        if masks.keys() != self.run.layers.keys():
            raise InputError(f"{self.keeps}_masks.safetensors in {folder} is another model's: restore it from a backup")
        bits = [masks[entry.name].reshape(-1) for entry in layout.layers]
        mask = Mask((torch.cat(bits) if bits else torch.zeros(0)).bool().to(device), layout.sizes)
        return State.of(layout.flatten(weights).to(device), mask)
