"""A client's step on this machine: how long it takes, and the memory that it adds, in dense and in sparse kernels."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import torch

from fedrts.client.order import Order
from fedrts.client.workbench import Workbench
from fedrts.costs.measured import CLIENT
from fedrts.costs.table import TimedStep
from fedrts.engines import sparse_kernel
from fedrts.engines.threads import threads_for
from fedrts.programs.library import NoKernelsError
from fedrts.programs.program import LinkProgram

REPEATS = 5


def timed_steps(bench: Workbench, order: Order) -> tuple[TimedStep, ...]:
    """One step of a client on a whole batch, in torch's dense kernels, and in sparse ones where they are here and know the model."""
    found = [_timed("dense", bench, order, None)]
    with suppress(NoKernelsError):
        isa = sparse_kernel.best_isa()
        if sparse_kernel.reason_against(bench, isa) is None:
            found.append(_timed(f"sparse, {isa}", bench, order, sparse_kernel.read(bench, isa)))
    return tuple(found)


def _timed(kernel: str, bench: Workbench, order: Order, program: LinkProgram | None) -> TimedStep:
    batch = bench.training.batch_size
    rows = torch.arange(batch) % len(bench.data.y)
    at_work = replace(bench, training=bench.training.but(epochs=1), program=program)
    times = []

    def step() -> None:
        started = time.perf_counter()
        with threads_for(bench.batch_macs):
            at_work.work(order, CLIENT, rows)
        times.append(time.perf_counter() - started)

    peak = added_bytes(step)
    for _ in range(REPEATS):
        step()
    return TimedStep(kernel, 1e3 * min(times[1:]), peak)


def added_bytes(call: Callable[[], None]) -> int | None:
    """By how much a call raises the resident memory of this process at most; None where the system does not say (Linux does)."""
    try:
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)  # so that memory that is free already does not hide what is taken
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # the peak starts anew
        before = _resident("VmRSS")
        call()
        return max(0, _resident("VmHWM") - before)
    except (OSError, KeyError):
        call()
        return None


def _resident(name: str) -> int:
    """Bytes, of a line of /proc/self/status."""
    with open("/proc/self/status") as file:
        lines = dict(line.split(":", 1) for line in file)
    return int(lines[name].split()[0]) * 1024
