"""Links, kernels and blocks as arms: accuracy, bytes, and the time of a step on one core.

    python benchmarks/units.py accuracy [--minutes M]     # plays missing runs for so long, and keeps what came of them
    python benchmarks/units.py wide [--minutes M]         # the same with the full resnet18, at one rate
    python benchmarks/units.py steps                      # times steps on one core, rivals taking turns
    python benchmarks/units.py gpu [--minutes M]          # accuracy on CIFAR-10 with resnet18, and steps, both on a GPU
    python benchmarks/units.py                            # the table and the figure of what is there

FedRTS on handwritten digits, resnet18_small of width 8. Learning rates are chosen alike for every unit, at the first density on
seeds 200 and 201, by accuracy on data that is held out; results are of seeds 0 to 4. A run that the guard stops (most updates beyond its
bounds) counts as 0 where it chooses, and is told where it is a result. `accuracy` goes on where it stopped. Times are of the thread's
processor, medians; a step is one client's, on 32×32 images, in kernels that compute the active links alone or blocks as products, beside
the better of torch's two dense layouts. On a GPU a step is torch's, in larger batches, by the clock: dense, or blocks as products; CIFAR-10
is seeds 0 and 1, rates chosen on seed 200. Raw numbers lie in benchmarks/results/raw/units.json, the table in benchmarks/results/units.md.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedrts
import felt
from fedrts import models
from fedrts.comparison.table import markdown
from fedrts.errors import InputError, optional
from fedrts.programs.library import kernels
from fedrts.sparse import budget
from fedrts.sparse.layout import Layout
from fedrts.sparse.mask import Mask

RESULTS = Path(__file__).parent / "results"
RAW = RESULTS / "raw" / "units.json"
HELD_OUT = 0.2


@dataclass(frozen=True)
class Problem:
    """What is trained, and how often."""

    name: str
    title: str
    part: str
    """The word that has it played."""
    units: tuple[str, ...]
    seeds: Sequence[int]
    choosing_seeds: tuple[int, ...]
    """None if there is one rate."""
    densities: tuple[float, ...]
    rates: tuple[float, ...]
    run: dict[str, Any]


DIGITS = Problem(
    "",
    "Digits, resnet18_small of width 8",
    "accuracy",
    ("link", "kernel", "block:2×2", "block:4×4"),
    range(5),
    (200, 201),
    (0.1, 0.05),
    (0.3, 0.6, 1.0),
    {
        "data": "digits",
        "model": "resnet18_small",
        "model_options": {"width": 8},
        "method": "fedrts",
        "rounds": 30,
        "device": "cpu",
        "engine": {"name": "serial", "kernel": "sparse"},
        "eval": {"fairness": False},
    },
)
WIDE = Problem(
    "wide ",
    "Digits, resnet18",
    "wide",
    ("link", "kernel", "block:16×16"),
    range(2),
    (),
    (0.1,),
    (0.3,),
    {**DIGITS.run, "model": "resnet18", "model_options": {"stem": "cifar"}, "rounds": 12},
)
CIFAR10 = Problem(
    "cifar10 ",
    "CIFAR-10, resnet18, on a GPU",
    "gpu",
    ("link", "kernel", "block:16×16"),
    range(2),
    (200,),
    (0.1, 0.05),
    (0.3, 0.6, 1.0),
    {
        "data": "cifar10",
        "model": "resnet18",
        "model_options": {"stem": "cifar"},
        "method": "fedrts",
        "rounds": 200,
        "device": "cuda",
        "engine": {"name": "batched", "precision": "bf16"},
        "eval": {"fairness": False},
    },
)

PROBLEMS = (DIGITS, WIDE, CIFAR10)
Raw = dict[str, dict[str, float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=("accuracy", "wide", "steps", "gpu", "table"), default="table")
    parser.add_argument("--minutes", type=float, default=60.0, help="no run starts later")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    options = parser.parse_args()
    torch.set_num_threads(1)
    raw: Raw = json.loads(RAW.read_text("utf-8")) if RAW.exists() else {}
    if options.part == "accuracy":
        play(raw, DIGITS, options.minutes, options.jobs)
    if options.part == "wide":
        play(raw, WIDE, options.minutes, options.jobs)
    if options.part == "steps":
        measure(raw)
    if options.part == "gpu":
        measure_on(raw, torch.device("cuda"))
        play(raw, CIFAR10, options.minutes, options.jobs)
    text = table(raw)
    plot(raw, RESULTS / "units.svg")
    (RESULTS / "units.md").write_text(text, "utf-8")
    print(text)


def keep(raw: Raw) -> None:
    RAW.parent.mkdir(parents=True, exist_ok=True)
    RAW.write_text("{\n" + ",\n".join(f"{json.dumps(name)}: {json.dumps(found)}" for name, found in raw.items()) + "\n}\n", "utf-8")


Cell = tuple[str, float, int, float]
"""Unit, density, seed, learning rate."""


def play(raw: Raw, problem: Problem, minutes: float, jobs: int) -> None:
    """Play the runs that are missing, those that choose first; then seed by seed, so that whatever is there compares."""
    ends = time.monotonic() + 60 * minutes
    choosing = [
        (unit, problem.densities[0], seed, rate) for rate, seed, unit in product(problem.rates, problem.choosing_seeds, problem.units)
    ]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        for chosen in (False, True):
            later = product(problem.seeds, problem.densities, problem.units) if chosen else ()
            results = [(u, d, s, chosen_rate(raw, problem, u)) for s, d, u in later]
            missing = [cell for cell in results or choosing if name_of(problem, *cell) not in raw]
            for cell, found in zip(missing, pool.map(partial(played, problem, ends), missing), strict=True):
                if found is not None:
                    raw[name_of(problem, *cell)] = found
                    keep(raw)
                    print(name_of(problem, *cell), found, flush=True)


def played(problem: Problem, ends: float, cell: Cell) -> dict[str, float] | None:
    """What a run came to; None where it is too late to begin."""
    if time.monotonic() > ends:
        return None
    torch.set_num_threads(1)
    unit, density, seed, rate = cell
    choosing = seed in problem.choosing_seeds
    with tempfile.TemporaryDirectory() as folder:
        try:
            result = fedrts.run(
                **problem.run,
                density=density,
                seed=seed,
                topology={"interval": 5, "unit": unit},
                train={"lr": rate},
                data_options={"validation": HELD_OUT} if choosing else {},
                out=f"{folder}/run",
            )
        except InputError as error:
            print(name_of(problem, *cell), error, flush=True)
            return {"accuracy": 0.0, "stopped": 1.0}
    scores = [line["valid_accuracy"] for line in result.history if line.get("valid_accuracy") is not None][-10:]
    score = statistics.mean(scores) if choosing else result.summary["accuracy_last10"]
    return {"accuracy": score, **{key: result.summary[key] for key in ("upload_bytes", "download_bytes", "density")}}


STEP_MODEL, STEP_DENSITY, STEP_BATCH, GPU_BATCH = "resnet18", 0.1, 16, 128
GPU_TURNS, GPU_STEPS = 9, 10
STEP_UNITS = ("link", "kernel", "block:4×4", "block:16×16", "block:32×32")
PRODUCTS = ("block:16×16", "block:32×32")
"""Units whose arms are large enough for batched products of torch."""


def measure(raw: Raw) -> None:
    """Time a step of every unit beside dense ones, all in one run."""
    x, y = torch.randn(STEP_BATCH, 3, 32, 32), torch.randint(0, 10, (STEP_BATCH,))
    calls: dict[str, Callable[[], object]] = {}
    for unit in STEP_UNITS:
        module, layout, mask, weights = masked(unit)
        if unit == STEP_UNITS[0]:
            for name, memory in (("dense NCHW", torch.contiguous_format), ("dense channels-last", torch.channels_last)):
                calls[name] = felt.dense(build(), layout, weights, mask, x, y, memory)
        calls[unit] = felt.sparse(module, layout, weights, mask, x, y, kernels().isas[-1])
        if unit in PRODUCTS:
            calls[f"{unit} in products"] = in_products(build(), layout, weights, mask, x, y)
    times = felt.interleaved(calls, 1.0)
    best = min(seconds for name, seconds in times.items() if name.startswith("dense"))
    for name, seconds in times.items():
        raw[f"step {name}"] = {"seconds": seconds, "over dense": best / seconds}
    keep(raw)


def build() -> nn.Module:
    torch.manual_seed(0)
    return models.get(STEP_MODEL)((3, 32, 32), 10, stem="cifar")


def masked(unit: str) -> tuple[nn.Module, Layout, Mask, Tensor]:
    """A model with a random mask of such arms."""
    module = build()
    layout = Layout.of(module, unit=unit)
    mask = Mask.top(torch.rand(layout.links), budget.layer_counts(layout, STEP_DENSITY), layout.sizes)
    weights = layout.flatten(module.state_dict())
    weights[: layout.links] *= mask.bits
    return module, layout, mask, weights


def measure_on(raw: Raw, device: torch.device) -> None:
    """Time torch's steps on a GPU: dense ones on a mask, and blocks as products; by the clock, in turns."""
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("there is no GPU here that torch can use")
    x, y = torch.randn(GPU_BATCH, 3, 32, 32, device=device), torch.randint(0, 10, (GPU_BATCH,), device=device)
    calls: dict[str, Callable[[], object]] = {}
    for unit in ("link", *PRODUCTS):
        _, layout, mask, weights = masked(unit)
        if unit == "link":
            for name, memory in (("dense NCHW", torch.contiguous_format), ("dense channels-last", torch.channels_last)):
                calls[name] = felt.dense(build().to(device), layout, weights.to(device), mask.to(device), x, y, memory)
        else:
            calls[f"{unit} in products"] = in_products(build(), layout, weights, mask, x, y)
    took: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(GPU_TURNS + 1):
        for name, call in calls.items():
            seconds = -_now(device)
            for _ in range(GPU_STEPS):
                call()
            took[name].append((seconds + _now(device)) / GPU_STEPS)
    times = {name: statistics.median(found[1:]) for name, found in took.items()}  # the first turn chooses algorithms
    best = min(seconds for name, seconds in times.items() if name.startswith("dense"))
    for name, seconds in times.items():
        raw[f"gpu {name}"] = {"seconds": seconds, "over dense": best / seconds}
    keep(raw)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def in_products(module: nn.Module, layout: Layout, weights: Tensor, mask: Mask, x: Tensor, y: Tensor) -> Callable[[], object]:
    """A step in torch whose convolutions are batched products of their active blocks."""
    module.load_state_dict(layout.state_dict(weights))
    module.train()
    bits = layout.by_name(mask.bits)
    blocks = {entry.name: entry.block for entry in layout.layers}
    for part in list(module.modules()):
        for name, child in part.named_children():
            own = next((key for key, value in module.named_modules() if value is child), "")
            block = blocks.get(f"{own}.weight")
            if isinstance(child, nn.Conv2d) and block is not None and min(block) >= 16:
                setattr(part, name, BlockConv2d(child, bits[f"{own}.weight"], block))
    module.to(x.device)
    optimizer = torch.optim.SGD(module.parameters(), lr=felt.RATE)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(module(x), y).backward()
        optimizer.step()

    return step


class BlockConv2d(nn.Module):
    """A convolution by its active blocks of R×C channels: columns of the input, gathered, times the blocks, added up by output block."""

    def __init__(self, conv: nn.Conv2d, bits: Tensor, block: tuple[int, int]) -> None:
        super().__init__()
        rows, columns = block
        outputs, inputs, high, wide = conv.weight.shape
        self.side, self.stride, self.padding = high, int(conv.stride[0]), int(conv.padding[0])  # square, as all of a ResNet are
        grid = (outputs // rows, rows, inputs // columns, columns, high * wide)
        to_output, to_input = bits.view(grid)[:, 0, :, 0, 0].nonzero(as_tuple=True)
        self.to_output, self.to_input = nn.Buffer(to_output), nn.Buffer(to_input)
        blocks = conv.weight.detach().view(grid).permute(0, 2, 1, 3, 4)[to_output, to_input]
        self.blocks = nn.Parameter(blocks.reshape(len(blocks), rows, -1))  # [B, R, C·k·k]
        self.out_blocks, self.in_blocks = outputs // rows, inputs // columns

    def forward(self, x: Tensor) -> Tensor:
        columns = F.unfold(x, self.side, padding=self.padding, stride=self.stride)  # [N, I·k·k, L]
        samples, _, places = columns.shape
        gathered = columns.view(samples, self.in_blocks, -1, places).permute(1, 2, 0, 3).flatten(2)[self.to_input]  # [B, C·k·k, N·L]
        found = torch.bmm(self.blocks, gathered)
        out = found.new_zeros(self.out_blocks, *found.shape[1:]).index_add(0, self.to_output, found)
        return out.view(-1, samples, places).transpose(0, 1).reshape(samples, -1, *[math.isqrt(places)] * 2)


def name_of(problem: Problem, unit: str, density: float, seed: int, rate: float) -> str:
    return f"{problem.name}{unit} d{density:g} s{seed} lr{rate:g}"


def trials_of(raw: Raw, problem: Problem, unit: str, rate: float) -> list[float]:
    """Held-out accuracies that choose."""
    names = (name_of(problem, unit, problem.densities[0], seed, rate) for seed in problem.choosing_seeds)
    return [raw[name]["accuracy"] for name in names if name in raw]


def chosen_rate(raw: Raw, problem: Problem, unit: str) -> float:
    return max(problem.rates, key=lambda rate: sum(trials_of(raw, problem, unit, rate)))


def runs_of(raw: Raw, problem: Problem, unit: str, density: float) -> tuple[list[dict[str, float]], int]:
    """The results that are there, at the rate that was chosen, and how many runs were stopped."""
    if any(len(trials_of(raw, problem, unit, rate)) < len(problem.choosing_seeds) for rate in problem.rates):
        return [], 0
    rate = chosen_rate(raw, problem, unit)
    there = [raw[name] for seed in problem.seeds if (name := name_of(problem, unit, density, seed, rate)) in raw]
    over = [run for run in there if "stopped" not in run]
    return over, len(there) - len(over)


def accuracy_of(runs: Sequence[dict[str, float]]) -> tuple[float, float]:
    """Mean and its standard error, in percent."""
    found = [100 * run["accuracy"] for run in runs]
    return statistics.mean(found), statistics.stdev(found) / len(found) ** 0.5 if len(found) > 1 else 0.0


def steps_of(raw: Raw, where: str = "step") -> dict[str, dict[str, float]]:
    return {name.removeprefix(f"{where} "): found for name, found in raw.items() if name.startswith(f"{where} ")}


def accuracies(raw: Raw, problem: Problem) -> str:
    """A problem's results and how its rates were chosen, unit by unit."""
    rows = []
    for density, unit in product(problem.densities, problem.units):
        runs, stopped = runs_of(raw, problem, unit, density)
        if not runs:
            continue
        mean, error = accuracy_of(runs)
        sent = statistics.mean(run["upload_bytes"] + run["download_bytes"] for run in runs) / 1e6
        reached = statistics.mean(run["density"] for run in runs)
        count = f"{len(runs)}, {stopped} stopped" if stopped else str(len(runs))
        shown = f"{mean:.1f} ± {error:.1f}" if error else f"{mean:.1f}"
        rows.append(
            [
                f"{density:g}",
                unit,
                f"{chosen_rate(raw, problem, unit):g}",
                count,
                shown,
                f"{sent:.2f}",
                f"{reached:.4f}",
            ]
        )
    if not rows:
        return f"Not measured yet: `python benchmarks/units.py {problem.part}`."
    trials = [[unit, *(_trial(raw, problem, unit, rate) for rate in problem.rates)] for unit in problem.units]
    head = ["density", "unit", "learning rate", "seeds", "accuracy (%)", "MB sent", "density reached"]
    found = markdown(head, rows)
    if not problem.choosing_seeds:
        return f"{found}\n\nOne rate for all, not chosen."
    return f"""{found}

Rates were chosen at density {problem.densities[0]:g} by held-out accuracy (%) of seeds {" and ".join(map(str, problem.choosing_seeds))}:

{markdown(["unit", *(f"{rate:g}" for rate in problem.rates)], trials)}"""


def stepped(raw: Raw, where: str, part: str) -> str:
    """The times of steps."""
    rows = [[name, f"{1e3 * found['seconds']:.0f}", f"{found['over dense']:.2f}"] for name, found in steps_of(raw, where).items()]
    return markdown(["step", "ms", "dense ÷ it"], rows) if rows else f"Not measured yet: `python benchmarks/units.py {part}`."


def table(raw: Raw) -> str:
    """What is there."""
    trained = "\n\n".join(f"## {problem.title}\n\n{accuracies(raw, problem)}" for problem in PROBLEMS)
    return f"""# Links, kernels and blocks

`python benchmarks/units.py`; what is measured is said at its top. Raw numbers are in `raw/units.json`.

![accuracy by density, and steps beside dense ones](units.svg)

{trained}

## A step of {STEP_MODEL} at density {STEP_DENSITY:g}

Batches of {STEP_BATCH}, one core:

{stepped(raw, "step", "steps")}

Batches of {GPU_BATCH}, a GPU:

{stepped(raw, "gpu", "gpu")}
"""


def _trial(raw: Raw, problem: Problem, unit: str, rate: float) -> str:
    return ", ".join(f"{100 * score:.1f}" for score in trials_of(raw, problem, unit, rate)) or "–"


def plot(raw: Raw, file: Path) -> None:
    """Accuracy by density, and how much faster a step is than a dense one."""
    figure, (left, right) = optional("matplotlib.pyplot", "plot").subplots(1, 2, figsize=(8, 3), layout="constrained")
    for unit in DIGITS.units:
        points = [(density, *accuracy_of(runs)) for density in DIGITS.densities if (runs := runs_of(raw, DIGITS, unit, density)[0])]
        if points:
            across, means, errors = zip(*points, strict=True)
            left.errorbar(across, means, errors, marker=".", capsize=3, label=unit)
            left.legend(frameon=False)
    left.set(xlabel="density", ylabel="accuracy (%)")
    steps = steps_of(raw)
    right.barh(list(steps)[::-1], [found["over dense"] for found in steps.values()][::-1])
    right.axvline(1, color="grey", linewidth=0.8)
    right.set(xlabel="dense step ÷ step")
    figure.savefig(file, metadata={"Date": None})


if __name__ == "__main__":
    main()
