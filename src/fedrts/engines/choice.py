"""Which engine runs the clients, and how: a pure function of model, data and device (its kind, cores and free memory)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor

from fedrts.client.workbench import Workbench
from fedrts.engines.batched import BatchedEngine
from fedrts.engines.kernels import Kernel, Objective, OneByOne, Precision, Streamed, Vectorised
from fedrts.engines.memory import Need, free_bytes
from fedrts.engines.obstacles import obstacle, sample, vectorises
from fedrts.engines.recorded import Recorded
from fedrts.engines.serial import SerialEngine
from fedrts.errors import InputError, note
from fedrts.server.engine import Engine
from fedrts.sparse.mode import training

Name = Literal["auto", "serial", "batched", "flower", "ray"]
KernelName = Literal["auto", "vectorised", "streamed"]

WORTH_VECTORISING = {"cpu": 2e7, "cuda": 1e8}
"""MACs of a batch's forward pass up to which one vectorised program beats one program a client."""
LIGHT_ON_CPU = 500_000
"""Parameters up to which clients side by side gain on a CPU: beyond, moving their weights takes the time."""
MOST_SLOTS = 128
ACTORS_ON_CPU = 2
CROWDED = 1e10
"""MACs of a batch's forward pass from which on more than five programs on one GPU get into each other's way."""


@dataclass(frozen=True)
class Settings:
    """What the table `[engine]` of an experiment says of this machine's engines."""

    name: Name = "auto"
    kernel: KernelName = "auto"
    slots: int = 0
    workers: int = 0
    precision: Precision = "float32"
    actors: int = 0
    cpus: float = 0.0
    gpus: float = 0.0
    address: str = "local"

    @staticmethod
    def of(table: Mapping[str, Any]) -> Settings:
        """Of a table that may hold other engines' keys too."""
        return Settings(**{entry.name: table[entry.name] for entry in fields(Settings)})


def decided(asked: Settings, bench: Workbench, per_round: int) -> Settings:
    """`asked` with nothing left open."""
    device = bench.gradient.device
    if asked.precision != "float32" and device.type != "cuda":
        raise InputError(f"engine.precision = '{asked.precision}' needs a GPU: this run is on {device}; use float32")
    if asked.precision == "bf16" and asked.name in ("serial", "flower"):
        raise InputError("engine.precision = 'bf16' needs the batched engine: set engine.name = 'batched', or use tf32")
    if asked.name == "flower":  # the server itself only evaluates
        return asked
    small = bench.batch_macs <= WORTH_VECTORISING[device.type] and (device.type != "cpu" or bench.layout.parameters <= LIGHT_ON_CPU)
    if asked.name == "ray":
        return _spread(asked, bench, per_round)
    if asked.name == "serial" or (asked.name == "auto" and device.type == "cpu" and not small):
        return replace(asked, name="serial")
    objective = Objective(bench.module, bench.data.task, bench.layout, asked.precision)
    vectorised = small and asked.precision != "bf16" and vectorises(bench, objective)  # vmap and autocast do not go together
    kernel: KernelName = asked.kernel if asked.kernel != "auto" else "vectorised" if vectorised else "streamed"
    if (reason := obstacle(bench, objective, _kernel(kernel, objective, device))) is not None:
        how = " and in tf32, not bf16" if asked.precision == "bf16" else ""
        note(f"clients run one after the other, not side by side{how}: {reason}")
        return replace(asked, name="serial", precision="tf32" if asked.precision == "bf16" else asked.precision)
    workers = asked.workers or 1
    slots = asked.slots or min(per_round, _most(kernel, workers, bench), _need(bench, objective).slots(free_bytes(device)))
    return replace(asked, name="batched", kernel=kernel, slots=slots, workers=min(workers, slots))


def _spread(asked: Settings, bench: Workbench, per_round: int) -> Settings:
    """Actors with an engine each, of which `slots` says whether its clients run side by side (0: one after the other)."""
    on_gpu = bench.gradient.device.type == "cuda"
    if asked.gpus and not on_gpu:
        raise InputError(f"engine.gpus = {asked.gpus:g} needs clients that train on a GPU: set device = 'cuda', or engine.gpus = 0")
    gpus = (asked.gpus or 1.0) if on_gpu else 0.0
    actors = asked.actors or (max(1, int(torch.cuda.device_count() / gpus)) if on_gpu else ACTORS_ON_CPU)
    cpus = asked.cpus or max(1, (os.cpu_count() or 1) // actors)
    inner = decided(replace(asked, name="auto"), bench, -(-per_round // actors))
    if inner.name == "serial":
        inner = replace(inner, kernel="auto", slots=0, workers=0)
    return replace(inner, name="ray", actors=actors, cpus=cpus, gpus=gpus)


def _most(kernel: KernelName, workers: int, bench: Workbench) -> int:
    """Slots beyond which clients would only be in each other's way."""
    if kernel == "vectorised":
        return MOST_SLOTS
    if bench.gradient.device.type == "cpu":
        return workers
    return 5 if bench.batch_macs >= CROWDED else MOST_SLOTS


def make(settings: Settings, bench: Workbench, rows: Sequence[Tensor], eval_batch_size: int) -> Engine:
    """The engine of settings that are decided."""
    device = bench.gradient.device
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = settings.precision != "float32"
    serial = SerialEngine(bench, rows, eval_batch_size)
    if settings.name in ("serial", "flower", "ray"):  # over Flower and Ray, the server itself only evaluates
        return serial
    objective = Objective(bench.module, bench.data.task, bench.layout, settings.precision)
    kernel = _kernel(settings.kernel, objective, device)
    together = _need(bench, objective).together(free_bytes(device), settings.slots)
    return BatchedEngine(bench, rows, kernel, settings.slots, together, serial, settings.workers)


def _kernel(name: KernelName, objective: Objective, device: torch.device) -> Kernel:
    if device.type == "cpu":
        return Recorded(Vectorised(objective) if name == "vectorised" else OneByOne(objective))
    if name == "vectorised":
        return Vectorised(objective)
    return Streamed(objective, device)


def _need(bench: Workbench, objective: Objective) -> Need:
    with training(bench.module):
        return Need.of(objective, bench.training, *sample(bench))
