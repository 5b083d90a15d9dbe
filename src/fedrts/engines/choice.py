"""Which engine runs the clients: a pure function of model, data and device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from fedrts.client import Workbench
from fedrts.engines import Engine
from fedrts.engines.batched import BatchedEngine
from fedrts.engines.kernels import Kernel, Objective, Precision, Streamed, Vectorised, has_counters, has_dropout
from fedrts.engines.serial import SerialEngine
from fedrts.errors import InputError, note

Name = Literal["auto", "serial", "batched"]

WORTH_VECTORISING = 1e8
"""MACs of a batch's forward pass up to which one vectorised program on a GPU beats one program a client."""
MOST_SLOTS = 128
CROWDED = 1e10
"""MACs of a batch's forward pass from which on more than five programs on one GPU get into each other's way."""
HELD_BYTES = {"cpu": 1e9, "cuda": 8e9}
"""Of the weights of clients that are worked with at once."""


def decided(name: Name, bench: Workbench) -> Name:
    """`auto` made up: side by side on a GPU, one after the other on a CPU, whose cores one client keeps busy."""
    if name != "auto":
        return name
    return "batched" if bench.gradient.device.type == "cuda" else "serial"


def make(
    name: Name,
    bench: Workbench,
    rows: Sequence[Tensor],
    eval_batch_size: int,
    precision: Precision,
    slots: int,
    per_round: int,
) -> Engine:
    """The engine of that name; `slots` 0: as many as there are clients in a round, unless they would be in each other's way."""
    device = bench.gradient.device
    if precision != "float32" and device.type != "cuda":
        raise InputError(f"engine.precision = '{precision}' needs a GPU: this run is on {device}; use float32")
    if precision == "bf16" and name == "serial":
        raise InputError("engine.precision = 'bf16' needs the batched engine: set engine.name = 'batched', or use tf32")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision != "float32"
    serial = SerialEngine(bench, [part.to(device) for part in rows], eval_batch_size)
    if name == "serial":
        return serial
    kernel = _kernel(bench, precision)
    if (obstacle := _obstacle(bench, kernel)) is not None:
        how = " and in tf32, not bf16" if precision == "bf16" else ""
        note(f"clients run one after the other, not side by side{how}: {obstacle}")
        return serial
    most = 5 if isinstance(kernel, Streamed) and bench.batch_macs >= CROWDED else MOST_SLOTS
    width = slots or min(per_round, most)
    together = max(width, int(HELD_BYTES[device.type] / (bench.layout.length * bench.gradient.element_size())))
    return BatchedEngine(bench, [part.cpu() for part in rows], kernel, width, together, serial)


def _kernel(bench: Workbench, precision: Precision) -> Vectorised | Streamed:
    objective = Objective(bench.module, bench.data.task, bench.layout, precision)
    device = bench.gradient.device
    vectorised = bench.batch_macs <= WORTH_VECTORISING and precision != "bf16"  # vmap and autocast do not go together
    if device.type == "cuda" and not vectorised:
        return Streamed(objective, device)
    return Vectorised(objective)


def _obstacle(bench: Workbench, kernel: Kernel) -> str | None:
    """Why clients of this model cannot train side by side; None if they can."""
    if has_dropout(bench.module):
        return "the model draws random numbers while it trains (dropout)"
    if has_counters(bench.module, bench.layout):
        return "the model counts in buffers that are no floating-point numbers"
    count = min(2, bench.training.batch_size, len(bench.data.y))
    rows = torch.arange(count, device=bench.gradient.device).expand(2, -1)
    weights = bench.layout.flatten(bench.module.state_dict()).expand(2, -1).clone()
    was_training = bench.module.training
    bench.module.train()
    try:
        kernel(weights, *bench.data.training_batches(rows, torch.zeros_like(rows[:, 0])))
    except (RuntimeError, ValueError, TypeError, NotImplementedError, IndexError) as error:
        return (str(error).strip() or type(error).__name__).partition("\n")[0]
    finally:
        bench.module.train(was_training)
    return None
