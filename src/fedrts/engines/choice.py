"""The choice of engine and its settings: a pure function of model, data and device (its kind, cores and free memory)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, assert_never

import torch
from torch import Tensor

from fedrts.client.workbench import Workbench
from fedrts.engines import sparse_kernel
from fedrts.engines.batched import BatchedEngine
from fedrts.engines.kernels import Kernel, Objective, OneByOne, Streamed, Vectorised
from fedrts.engines.kinds import EngineKind, kind
from fedrts.engines.memory import Need, free_bytes
from fedrts.engines.obstacles import obstacle, sample, vectorises
from fedrts.engines.recorded import Recorded
from fedrts.engines.serial import SerialEngine
from fedrts.engines.settings import EngineSettings, KernelName
from fedrts.errors import InputError, note
from fedrts.server.engine import Engine
from fedrts.sparse.mode import training

if TYPE_CHECKING:
    from fedrts.config import Experiment

WORTH_VECTORISING = {"cpu": 2e7, "cuda": 1e8}
"""MACs of a batch's forward pass up to which one vectorised program beats one program a client."""
LIGHT_ON_CPU = 500_000
"""Parameters up to which clients side by side gain on a CPU: beyond, moving their weights takes the time."""
MOST_SLOTS = 128
CROWDED = 1e10
"""MACs of a batch's forward pass from which on more than five programs on one GPU get into each other's way."""


def chosen(experiment: Experiment, bench: Workbench) -> EngineSettings:
    """Return the table `[engine]` of an experiment, fully decided; an `InputError` if no engine can run it."""
    asked = kind(experiment.engine.name).suited(experiment)
    if (reason := kind(asked.name).refuses(experiment)) is not None:
        raise InputError(reason)
    return decided(sparse_kernel.resolved(asked, experiment, bench), bench, experiment.clients.per_round)


def decided(asked: EngineSettings, bench: Workbench, per_round: int) -> EngineSettings:
    """Return `asked`, fully decided."""
    return kind(asked.name).decided(asked, bench, per_round)


def make(settings: EngineSettings, bench: Workbench, rows: Sequence[Tensor], eval_batch_size: int) -> Engine:
    """Make the engine of decided settings."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = settings.precision != "float32"
    bench.program = sparse_kernel.program_of(settings, bench)
    return kind(settings.name).make(settings, bench, rows, eval_batch_size)


class Batched(EngineKind):
    """Clients side by side; one at a time if model or task prevent it."""

    side_by_side = True

    def suited(self, experiment: Experiment) -> EngineSettings:
        if not experiment.guard.deadline:
            return experiment.engine
        note("clients run one after the other, not side by side: guard.deadline tells early replies from late ones")
        return experiment.engine.but(name="serial")

    def decided(self, asked: EngineSettings, bench: Workbench, per_round: int) -> EngineSettings:
        device = bench.device
        objective = Objective(bench.module, bench.data.task, bench.layout, asked.precision)
        vectorised = _is_small(bench) and asked.precision != "bf16" and vectorises(bench, objective)  # vmap and autocast go not together
        kernel: KernelName = asked.kernel if asked.kernel != "auto" else "vectorised" if vectorised else "streamed"
        if (reason := obstacle(bench, objective, _kernel(kernel, objective, device))) is not None:
            how = " and in tf32, not bf16" if asked.precision == "bf16" else ""
            note(f"clients run one after the other, not side by side{how}: {reason}")
            return asked.but(name="serial", precision="tf32" if asked.precision == "bf16" else asked.precision)
        workers = asked.workers or (min(sparse_kernel.cores(), per_round) if kernel == "sparse" else 1)
        slots = asked.slots or min(per_round, _most(kernel, workers, bench), _need(bench, objective).slots(free_bytes(device)))
        return asked.but(name="batched", kernel=kernel, slots=slots, workers=min(workers, slots))

    def make(self, settings: EngineSettings, bench: Workbench, rows: Sequence[Tensor], eval_batch_size: int) -> BatchedEngine:
        device, serial = bench.device, SerialEngine(bench, rows, eval_batch_size)
        objective = Objective(bench.module, bench.data.task, bench.layout, settings.precision)
        kernel = _kernel(settings.kernel, objective, device)
        together = _need(bench, objective).together(free_bytes(device), settings.slots)
        return BatchedEngine(bench, rows, kernel, settings.slots, together, serial, settings.workers)

    def candidates(self, asked: EngineSettings, bench: Workbench, per_round: int) -> list[EngineSettings]:
        """Return both dense kernels, each with all or half of the slots, and the sparse one if it is available."""
        asked = sparse_kernel.required(asked, bench) if asked.kernel == "sparse" else asked
        usual = Batched.decided(self, asked, bench, per_round)
        if not kind(usual.name).side_by_side:
            return [usual]
        kernels: tuple[KernelName, ...] = ("vectorised", "streamed") if asked.kernel == "auto" else (asked.kernel,)
        found = []
        for kernel in kernels:
            if kernel == "vectorised" and asked.precision == "bf16":
                continue
            whole = usual if kernel == usual.kernel else Batched.decided(self, asked.but(kernel=kernel), bench, per_round)
            half = whole.but(slots=max(whole.slots // 2, whole.workers))
            found += [some for some in (whole, half) if kind(some.name).side_by_side and (some == whole or not asked.slots)]
        if asked.kernel == "auto" and (isa := sparse_kernel.possible(bench)) is not None:
            found.append(Batched.decided(self, asked.but(kernel="sparse", isa=isa), bench, per_round))
        return list(dict.fromkeys(found))


class Auto(Batched):
    """Choose the faster way: side by side or, on a CPU, large models one at a time, and sparse kernels where they pay."""

    chooses = True

    def suited(self, experiment: Experiment) -> EngineSettings:
        return experiment.engine.but(name="serial") if experiment.guard.deadline else experiment.engine

    def decided(self, asked: EngineSettings, bench: Workbench, per_round: int) -> EngineSettings:
        if bench.device.type == "cpu" and not _is_small(bench) and asked.kernel != "sparse":
            return asked.but(name="serial")
        return super().decided(asked, bench, per_round)

    def candidates(self, asked: EngineSettings, bench: Workbench, per_round: int) -> list[EngineSettings]:
        found = super().candidates(asked, bench, per_round)
        only = asked.precision == "bf16" or not kind(found[0].name).side_by_side
        return found if only else [asked.but(name="serial"), *found]


def _is_small(bench: Workbench) -> bool:
    """Whether one program for several clients beats one program per client."""
    device = bench.device.type
    return bench.batch_macs <= WORTH_VECTORISING[device] and (device != "cpu" or bench.layout.parameters <= LIGHT_ON_CPU)


def _most(kernel: KernelName, workers: int, bench: Workbench) -> int:
    """Return the number of slots beyond which clients would only slow each other down."""
    if kernel == "vectorised":
        return MOST_SLOTS
    if bench.device.type == "cpu":
        return workers
    return 5 if bench.batch_macs >= CROWDED else MOST_SLOTS


def _kernel(name: KernelName, objective: Objective, device: torch.device) -> Kernel:
    """Return the kernel of a decided name; on a CPU its program is recorded once."""
    on_cpu = device.type == "cpu"
    match name:
        case "vectorised":
            return Recorded(Vectorised(objective)) if on_cpu else Vectorised(objective)
        case "streamed" | "sparse":  # gradients of all links, which the sparse kernel has not
            return Recorded(OneByOne(objective)) if on_cpu else Streamed(objective, device)
        case "auto":
            raise ValueError("engine.kernel = 'auto' is not decided yet")
        case _:
            assert_never(name)


def _need(bench: Workbench, objective: Objective) -> Need:
    with training(bench.module):
        return Need.of(objective, bench.training, *sample(bench))
