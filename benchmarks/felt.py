"""Felt sparsity: whole training steps of one client on one core, in kernels that compute the active links alone, beside torch's dense ones.

    python benchmarks/felt.py [--quick] [--model mlp]… [--json FILE] [--out FILE.md]

A step is forward, loss, backward and SGD on a batch that is there. Rivals take turns within one run, times are of the thread's processor,
medians count. Ratios are over the better of torch's two layouts (NCHW and channels-last). `full`: our kernels on full masks, which tells
fusion from sparsity. `recorded`: our CPU engine with ten clients in slots, the time of one of them. `csr`: torch's sparse products, of
linear layers. `--json` writes {model: {density: ratio}}. Exit code 1: less than what docs/benchmarks.md promises.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedrts import models
from fedrts.client.local_step import Learner
from fedrts.client.training import LocalTraining
from fedrts.comparison.table import markdown
from fedrts.data.contract import Data
from fedrts.engines.kernels import Kernel, Objective, OneByOne, Vectorised
from fedrts.engines.recorded import Recorded
from fedrts.programs.library import kernels
from fedrts.programs.plan import Descent
from fedrts.programs.program import Feed, LinkProgram
from fedrts.sparse import budget
from fedrts.sparse.layout import Layout
from fedrts.sparse.mask import Mask
from fedrts.tasks import Classification

RATE = 0.01
CLIENTS = 10
"""Side by side in the recorded engine."""


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    batch: int
    promised: dict[float, float]
    """Ratio over dense by density, at least."""
    over_recorded: dict[float, float]
    vectorised: bool
    quick: bool = True


CASES = {
    "mlp": Case(lambda: models.get("mlp")((1, 8, 8), 10), (1, 8, 8), 64, {0.1: 5.0, 0.05: 8.0}, {0.1: 2.5, 0.05: 3.5}, True),
    "cnn": Case(lambda: models.get("cnn")((3, 32, 32), 10), (3, 32, 32), 64, {0.1: 3.0, 0.05: 3.7}, {}, False),
    "resnet18_small": Case(lambda: models.get("resnet18_small")((3, 32, 32), 10), (3, 32, 32), 64, {0.1: 2.7, 0.05: 3.8}, {}, False),
    "resnet18": Case(lambda: models.get("resnet18")((3, 32, 32), 10, stem="cifar"), (3, 32, 32), 16, {}, {}, False, quick=False),
}
RUN = ["--data", "felt:images", "--model", "resnet18_small", "--density", "0.1", "--rounds", "5", "--clients", "4", "--per-round", "4"]
RUN += ["--epochs", "1", "--device", "cpu", "--quiet", "--set", "engine.workers=1", "--set", "clients.partition=iid", "--recipe", "paper"]
WHOLE = 2.0
"""Least speed-up of `fedrts run`."""
CURVE = (1.0, 0.7, 0.5, 0.3, 0.2, 0.1, 0.05, 0.02)
QUICK = (0.2, 0.1, 0.05)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three densities, small models, fewer repeats")
    parser.add_argument("--model", action="append", choices=list(CASES), help="repeatable; default all")
    parser.add_argument(
        "--isa", choices=kernels().isas, default=kernels().isas[-1], help="instruction set; default: the best of this machine"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write {model: {density: ratio}}")
    parser.add_argument("--out", type=Path, metavar="FILE.md", help="write the tables")
    options = parser.parse_args()
    torch.set_num_threads(1)
    names = options.model or [name for name, case in CASES.items() if case.quick or not options.quick]
    ratios: dict[str, dict[str, float]] = {}
    tables: list[str] = []
    short: list[str] = []

    def write() -> None:
        if options.json:
            options.json.write_text(json.dumps(ratios) + "\n", "utf-8")
        if options.out:
            options.out.write_text(document(options.isa, tables), "utf-8")

    for name in names:
        case, rows, ratios[name] = CASES[name], [], {}
        for density in QUICK if options.quick else CURVE:
            found = measured(case, density, options.isa, options.quick)
            if found is None:
                continue
            ratio, over = min(found["NCHW"], found["channels-last"]) / found["sparse"], found["recorded"] / found["sparse"]
            ratios[name][f"{density:g}"] = round(ratio, 3)
            times = [f"{1e3 * found[way]:.3f}" if way in found else "–" for way in WAYS]
            rows.append([f"{density:g}", *times, f"{ratio:.2f}", f"{over:.2f}"])
            print(name, *rows[-1], flush=True)
            for what, reached, promised in (("dense", ratio, case.promised), ("recorded", over, case.over_recorded)):
                if reached < promised.get(density, 0):
                    short.append(f"{name} at {density:g} over {what}: {reached:.2f} < {promised[density]:g}")
        head = ["density", *(f"{way} (ms)" for way in WAYS), "dense ÷ sparse", "recorded ÷ sparse"]
        tables.append(f"## {name}, batches of {case.batch}\n\n{markdown(head, rows)}\n\n{crossing(ratios[name])}\n")
        print(tables[-1], flush=True)
        write()
    if not options.model:
        whole = end_to_end(1 if options.quick else 3)
        ratios["fedrts run"] = {"0.1": round(whole, 3)}
        told = f"resnet18_small at 0.1, all rounds with server and evaluation, one core: dense ÷ sparse {whole:.2f}."
        tables.append(f"## `fedrts run`\n\n{told}\n")
        print(tables[-1])
        short += [f"fedrts run: {whole:.2f} < {WHOLE:g}"] if whole < WHOLE else []
        write()
    print("\n".join(short) or "all as promised")
    sys.exit(bool(short))


WAYS = ("NCHW", "channels-last", "recorded", "csr", "full", "sparse")


def measured(case: Case, density: float, isa: str, quick: bool) -> dict[str, float] | None:
    """Seconds of a step, by way; None where the model cannot be so sparse."""
    torch.manual_seed(0)
    module = case.build()
    layout = Layout.of(module)
    try:
        counts = budget.erk([entry.shape for entry in layout.layers], budget.links_to_keep(layout, density))
    except ValueError:
        return None
    mask = Mask.top(torch.rand(layout.links), counts, layout.sizes)
    weights = layout.flatten(module.state_dict())
    weights[: layout.links] *= mask.bits
    x, y = torch.randn(case.batch, *case.shape), torch.randint(0, 10, (case.batch,))
    calls: dict[str, Callable[[], object]] = {
        "NCHW": dense(case.build(), layout, weights, mask, x, y, torch.contiguous_format),
        "channels-last": dense(case.build(), layout, weights, mask, x, y, torch.channels_last),
        "recorded": recorded(case, layout, weights, mask, x, y),
        "sparse": sparse(module, layout, weights, mask, x, y, isa),
        "full": sparse(module, layout, weights, Mask.full(layout.sizes), x, y, isa),
    }
    if all(isinstance(part, nn.Sequential | nn.Flatten | nn.Linear | nn.ReLU) for part in module.modules()):
        calls["csr"] = csr(module, layout, weights, mask, x, y)
    times = interleaved(calls, 0.6 if quick else 1.5)
    return times | {"recorded": times["recorded"] / (CLIENTS if case.vectorised else 1)}


def interleaved(calls: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Median thread time of each call, in rounds in which each has about the same time, until each had so many `seconds`."""
    took: dict[str, list[float]] = {name: [] for name in calls}
    repeats: dict[str, int] = {}
    for name, call in calls.items():
        call()
        started = time.thread_time()
        call()
        repeats[name] = max(1, int(0.01 / max(time.thread_time() - started, 1e-6)))
    until = time.perf_counter() + seconds * len(calls)
    while min(map(len, took.values())) < 5 or time.perf_counter() < until:
        for name, call in calls.items():
            call()  # the others were in the cache
            started = time.thread_time()
            for _ in range(repeats[name]):
                call()
            took[name].append((time.thread_time() - started) / repeats[name])
    return {name: statistics.median(found) for name, found in took.items()}


def dense(
    module: nn.Module, layout: Layout, weights: Tensor, mask: Mask, x: Tensor, y: Tensor, memory: torch.memory_format
) -> Callable[[], object]:
    """A step in torch: what a plain loop does, the mask on the gradient."""
    module.load_state_dict(layout.state_dict(weights))
    module.train()
    if x.dim() == 4:
        module, x = module.to(memory_format=memory), x.to(memory_format=memory)  # type: ignore[call-overload]
    named = dict(module.named_parameters())
    bits = {name: part.to(named[name].dtype) for name, part in layout.by_name(mask.bits).items()}
    masks = [(named[name], part.contiguous(memory_format=memory) if part.dim() == 4 else part) for name, part in bits.items()]
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(module(x), y).backward()
        for parameter, part in masks:
            assert parameter.grad is not None
            parameter.grad.mul_(part)
        optimizer.step()

    return step


def recorded(case: Case, layout: Layout, weights: Tensor, mask: Mask, x: Tensor, y: Tensor) -> Callable[[], object]:
    """Steps of several clients in our CPU engine: a recorded program, and the descent of all."""
    objective = Objective(case.build().train(), Classification(), layout)
    kernel: Kernel = Recorded(Vectorised(objective) if case.vectorised else OneByOne(objective))
    clients = CLIENTS if case.vectorised else 1
    stack, n = weights.expand(clients, -1).clone(), layout.parameters
    training, rate = LocalTraining(lr=RATE), torch.tensor(RATE)
    allowed = torch.ones(1, n)
    allowed[0, : layout.links] = mask.bits
    past: dict[str, Tensor] = {}
    taken, planned = torch.zeros(clients), torch.ones(clients)
    learner = Learner(training, training.make_optimizer(), stack[:, :n], weights[:n], allowed, past, taken, planned)
    batches = x.expand(clients, *x.shape).contiguous(), y.expand(clients, *y.shape).contiguous()

    def step() -> None:
        gradient, _, statistics = kernel(stack, *batches)
        stack[:, n:] = statistics
        learner.step(gradient, rate)

    return step


def sparse(module: nn.Module, layout: Layout, weights: Tensor, mask: Mask, x: Tensor, y: Tensor, isa: str) -> Callable[[], object]:
    """A step in our kernels."""
    program = LinkProgram.read(module, layout, Classification(), x[:2], y[:2], isa)
    values, rows = mask.compact(weights), torch.arange(len(x))[None]
    return partial(program.train, values, mask, Feed(x, y, rows), [RATE], Descent())


def csr(module: nn.Module, layout: Layout, weights: Tensor, mask: Mask, x: Tensor, y: Tensor) -> Callable[[], object]:
    """A step with torch's sparse matrices: sparse products forward and for the input, sampled ones for the weights."""
    tensors, bits = layout.state_dict(weights), layout.by_name(mask.bits)
    names = [name.removesuffix(".weight") for name in tensors if name.endswith(".weight")]
    layers = [(tensors[f"{name}.weight"], bits.get(f"{name}.weight"), tensors[f"{name}.bias"]) for name in names]
    matrices = [weight if part is None else (weight * part).to_sparse_csr() for weight, part, _ in layers]
    biases = [bias for *_, bias in layers]
    transposes = [
        matrix.t() if matrix.layout == torch.strided else matrix.to_dense().t().contiguous().to_sparse_csr() for matrix in matrices
    ]
    zeros = [
        None
        if m.layout == torch.strided
        else torch.sparse_csr_tensor(m.crow_indices(), m.col_indices(), torch.zeros_like(m.values()), m.shape)
        for m in matrices
    ]

    def step() -> None:
        values = [x.flatten(1).t().contiguous()]
        for place, (matrix, bias) in enumerate(zip(matrices, biases, strict=True)):
            found = matrix @ values[-1] + bias[:, None]
            values.append(found if place == len(matrices) - 1 else found.relu_())
        logits = values[-1].t().detach().requires_grad_()
        (slope,) = torch.autograd.grad(F.cross_entropy(logits, y), logits)
        slope = slope.t().contiguous()
        for place in reversed(range(len(matrices))):
            before, zero = values[place], zeros[place]
            own = slope @ before.t() if zero is None else torch.sparse.sampled_addmm(zero, slope, before.t().contiguous(), beta=0.0)
            biases[place].sub_(slope.sum(1), alpha=RATE)
            slope = (transposes[place] @ slope) * (before > 0) if place else slope
            if zero is None:
                matrices[place].sub_(own, alpha=RATE)
            else:
                matrices[place].values().sub_(own.values(), alpha=RATE)

    return step


def images() -> Data:
    """Noisy 3×32×32 images of ten classes, for `fedrts run`."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(1600) % 10
    x = torch.randn(1600, 3, 32, 32, generator=generator) + 0.1 * y.view(-1, 1, 1, 1)
    return Data(x[:1280], y[:1280], x[1280:], y[1280:], classes=10)


def end_to_end(repeat: int) -> float:
    """Seconds of all rounds of `fedrts run` in dense kernels over those in sparse ones; processes of their own take turns."""
    took: dict[str, list[float]] = {"0": [], "1": []}
    for _ in range(repeat):
        for switch, seconds in took.items():
            here = {**os.environ, "FEDRTS_KERNELS": switch, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
            with tempfile.TemporaryDirectory() as folder:
                words = [*RUN, "--out", f"{folder}/run"]
                subprocess.run([sys.executable, "-m", "fedrts", "run", *words], env=here, check=True)
                seconds.append(float(json.loads(Path(folder, "run", "summary.json").read_text("utf-8"))["seconds"]))
    return statistics.median(took["0"]) / statistics.median(took["1"])


def crossing(ratios: dict[str, float]) -> str:
    """Where dense becomes the faster one."""
    slower = [float(density) for density, ratio in ratios.items() if ratio < 1]
    return f"Dense is faster from density {min(slower):g} on." if slower else "Sparse is faster at every density measured."


def document(isa: str, tables: list[str]) -> str:
    return f"""# Felt sparsity

`python benchmarks/felt.py {shlex.join(sys.argv[1:])}`
on one core ({platform.machine()}, {isa}), torch {version("torch")}. Milliseconds of a whole step: forward, loss, backward, SGD.
Rivals take turns; medians of the thread's processor time. Masks have the ERK budget.

""" + "\n".join(tables)


if __name__ == "__main__":
    main()
