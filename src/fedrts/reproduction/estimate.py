"""The duration of a preset: its training samples divided by the samples per second of a plain training step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch

from fedrts import data
from fedrts.comparison.grid import Cell
from fedrts.config import Experiment
from fedrts.data.contract import Data
from fedrts.runs.build import build_model

_STEPS = 3


def samples_of(experiment: Experiment, rows: int) -> float:
    """Return the training samples of a run on a data set of this many rows."""
    clients = experiment.clients
    return experiment.rounds * clients.per_round * experiment.train.epochs * rows / clients.total


def known_rows(name: str) -> int | None:
    """Return the training rows of a data set as released, if known."""
    source = data.source(name)
    return source.official.train if source is not None and source.official is not None else None


def seconds(cells: Sequence[Cell], data_dir: Path | None) -> float:
    """Estimate cells that share data and model, in sequence, by timing steps of the first; side by side takes less."""
    experiment = cells[0].experiment
    held = data.load(experiment.data, experiment.data_options, data_dir)
    rate = samples_per_second(experiment, held)
    return sum(samples_of(cell.experiment, held.samples) for cell in cells) / rate


def samples_per_second(experiment: Experiment, held: Data) -> float:
    """Time forward and backward passes on whole batches, after one warm-up."""
    device = torch.device(experiment.device)
    module = build_model(experiment, held.input_shape, held.classes).to(device).train()
    size = min(experiment.train.batch_size, held.samples)
    x, y = held.training_batch(torch.arange(size), key=0)
    x, y = x.to(device), y.to(device)

    def step() -> None:
        module.zero_grad()
        held.task.loss(module, x, y).backward()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    step()
    started = time.perf_counter()
    for _ in range(_STEPS):
        step()
    return size * _STEPS / (time.perf_counter() - started)


def in_words(duration: float) -> str:
    """Format as `about 3.5 hours`."""
    for unit, length in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if duration >= 1.5 * length:
            return f"about {duration / length:.3g} {unit}"
    return f"about {duration:.0f} seconds"
