"""Time and memory of a client's step on this machine, in dense and sparse kernels."""

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
from fedrts.engines.kinds import kind
from fedrts.engines.threads import threads_for
from fedrts.methods.contract import State
from fedrts.programs.library import NoKernelsError
from fedrts.programs.program import LinkProgram
from fedrts.runs.build import Assembled

REPEATS = 5
MANY, QUICK = 50, 0.1
"""Steps of which the mean counts, at most, and in this many seconds."""


def timed_steps(bench: Workbench, order: Order) -> tuple[TimedStep, ...]:
    """Time one step of a client on a whole batch, in torch's dense kernels and, if available for the model, in sparse ones."""
    found = [_timed("dense", bench, order, None)]
    with suppress(NoKernelsError):
        isa = sparse_kernel.best_isa()
        if sparse_kernel.reason_against(bench, isa) is None:
            found.append(_timed(f"sparse, {isa}", bench, order, sparse_kernel.read(bench, isa)))
    return tuple(found)


def felt(run: Assembled, state: State) -> dict[str, float]:
    """Return the milliseconds of a client's step in sparse kernels and as a dense one; only for runs in sparse kernels."""
    if run.bench.program is None or not kind(run.experiment.engine.name).in_process:
        return {}
    plan = run.plan
    inner = next(index for index in range(plan.schedule.end + 2) if not plan.schedule.is_outer(index))
    current = plan.round(inner, state.mask)
    order = Order.of(plan.exchanges(current)[0], current, plan.layout, state, 0)
    sparse, dense = (_timed("", run.bench, order, program, repeats=2).milliseconds for program in (run.bench.program, None))
    return {"step_ms": sparse, "dense_step_ms": dense}


def _timed(kernel: str, bench: Workbench, order: Order, program: LinkProgram | None, repeats: int = REPEATS) -> TimedStep:
    batch = bench.training.batch_size
    at_work = replace(bench, training=bench.training.but(epochs=1), program=program)

    def seconds(steps: int) -> float:
        rows = torch.arange(steps * batch) % bench.data.samples
        started = time.perf_counter()
        with threads_for(bench.batch_macs):
            at_work.work(order, CLIENT, rows)
        return (time.perf_counter() - started) / steps

    peak = added_bytes(lambda: seconds(1))
    steps = max(1, int(min(MANY, QUICK / seconds(1))))
    return TimedStep(kernel, 1e3 * min(seconds(steps) for _ in range(repeats)), peak)


def added_bytes(call: Callable[[], object]) -> int | None:
    """Measure how much a call raises this process's resident memory at most; None if the system does not report it (Linux does)."""
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
    """Parse the bytes in a line of /proc/self/status."""
    with open("/proc/self/status") as file:
        lines = dict(line.split(":", 1) for line in file)
    return int(lines[name].split()[0]) * 1024
