"""What bounds a step: gradients of many clients at once, beside one program whose batch is as large as all of theirs together.

    python benchmarks/kernels.py [--device cuda] [--only resnet18] [--out benchmarks/results/kernels.md]

Times are of gradients alone (on CUDA as a captured graph), random inputs, median of the replays. No engine can be faster than its kernels:
one program with a large batch says what they can do.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedrts import models
from fedrts.comparison.table import markdown
from fedrts.engines.kernels import Kernel, Objective, OneByOne, Streamed, Vectorised
from fedrts.engines.recorded import Recorded
from fedrts.engines.training import captured
from fedrts.sparse.layout import Layout
from fedrts.tasks import Classification
from rivals.nets import two_conv

REPLAYS = 20
WARM_UP = 4


@dataclass(frozen=True)
class Case:
    """Clients with a model and batches of one size."""

    build: Callable[[], torch.nn.Module]
    clients: int
    batch: int
    precisions: tuple[str, ...]
    streams: tuple[int, ...]


SHAPE, CLASSES = (3, 32, 32), 10
CASES = {
    "pfl's CNN": Case(lambda: two_conv(SHAPE, CLASSES), 50, 10, ("float32", "tf32", "bf16"), (10, 25, 50)),
    "resnet18_small": Case(lambda: models.get("resnet18_small")(SHAPE, CLASSES), 10, 64, ("float32", "tf32", "bf16"), (1, 5, 10)),
    "resnet18": Case(lambda: models.get("resnet18")(SHAPE, CLASSES, stem="cifar"), 5, 64, ("bf16",), (1, 5)),
}


def milliseconds(call: Callable[[], Any], device: torch.device) -> float:
    """Median time of a call."""
    for _ in range(WARM_UP):
        call()
    if device.type == "cuda":
        call = captured(call, None).replay
    times = []
    for _ in range(REPLAYS):
        _finish(device)
        started = time.perf_counter()
        call()
        _finish(device)
        times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def kernels(case: Case, objective: Objective, device: torch.device) -> Iterator[tuple[str, int, int, Kernel]]:
    """What is timed: a name, how many clients, the size of their batches, and the kernel."""
    if device.type == "cpu":
        yield "client after client", case.clients, case.batch, Recorded(OneByOne(objective))
        yield "vectorised", case.clients, case.batch, Recorded(Vectorised(objective))
        yield "one program, all samples", 1, case.clients * case.batch, Recorded(OneByOne(objective))
        return
    for streams in case.streams:
        name = "streams" if streams > 1 else "stream"
        yield f"a program a client, {streams} {name}", case.clients, case.batch, Streamed(objective, device, streams)
    if objective.precision != "bf16":
        yield "vectorised", case.clients, case.batch, Vectorised(objective)
    yield "one program, all samples", 1, case.clients * case.batch, Streamed(objective, device, 1)
    yield "one program, four times as many", 1, 4 * case.clients * case.batch, Streamed(objective, device, 1)


def rows(name: str, device: torch.device) -> Iterator[list[str]]:
    """The table's lines of a case."""
    case = CASES[name]
    module = case.build().to(device).train()
    layout = Layout.of(module)
    vector = layout.flatten(module.state_dict())
    for precision in case.precisions if device.type == "cuda" else ("float32",):
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision != "float32"
        objective = Objective(module, Classification(), layout, precision)  # type: ignore[arg-type]
        for label, clients, batch, kernel in kernels(case, objective, device):
            inputs = _inputs(vector, clients, batch, device)
            took = milliseconds(partial(kernel, *inputs), device)
            yield [name, precision, label, f"{clients} × {batch}", f"{took:.2f}", f"{1e3 * clients * batch / took:,.0f}"]


def _inputs(vector: Tensor, clients: int, batch: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(clients, batch, *SHAPE, device=device)
    return vector.expand(clients, -1).clone(), x, torch.randint(CLASSES, (clients, batch), device=device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", action="append", choices=list(CASES), help="may be repeated")
    parser.add_argument("--out", type=Path, help="Markdown file to write")
    options = parser.parse_args()
    device = torch.device(options.device)
    body = []
    for name in options.only or CASES:
        for row in rows(name, device):
            print(" · ".join(row), flush=True)
            body.append(row)
    hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    table = markdown(["model", "precision", "how", "clients × batch", "ms a step", "samples/s"], body)
    words = f"# Kernels\n\n`python benchmarks/kernels.py`, {hardware}, torch {torch.__version__}.\n\n"
    if options.out:
        options.out.write_text(f"{words}{table}\n", "utf-8")


if __name__ == "__main__":
    main()
