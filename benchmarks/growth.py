"""How time grows: a round with clients per round, model size and density; the server's work with links and clients.

    python benchmarks/growth.py [--device cuda] [--only clients]… [--out benchmarks/results/growth.md]
    python benchmarks/growth.py --render --out benchmarks/results/growth.md     # tables and plots again, of the raw results

Rounds are whole ones of `fedrts.run` on random images, without evaluation and without checkpoints; medians after warm-up. The server's work
is that of the default method on ready-made messages: contributions, sums and update, of an inner and an outer round. On a CPU the work is
smaller. Tables lie in growth.md with raw/growth_DEVICE.json beside it, and plots where matplotlib is installed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fedrts import config, methods
from fedrts.data.contract import Data
from fedrts.errors import InputError, optional
from fedrts.methods.contract import Round, Setup, State
from fedrts.sparse import random
from fedrts.sparse.layout import Entry, Layout
from fedrts.sparse.schedule import Schedule
from fedrts.wire.fields import Message, Selection
from rivals.laps import Laps
from server import play_round
from speed import HERE, QUIET, Row, hardware, ours

Points = list[dict[str, Any]]
SAMPLES, CLIENTS = 40, 500
"""Samples of every client; of the federation."""


def noise(channels: int = 1, side: int = 8) -> Data:
    """Random images of ten classes, 40 for each of 500 clients."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES * CLIENTS, channels, side, side, generator=generator)
    y = torch.randint(0, 10, (len(x),), generator=generator)
    return Data(x, y, x[:100], y[:100], classes=10)


def federated(device: str, images: bool, **keywords: Any) -> config.Tree:
    """A federation of 500 clients with batches of 10: on a GPU with images and the CNN of pfl's benchmark, else with an MLP."""
    base = {
        **QUIET,
        "data": "growth:noise",
        "data_options": {"channels": 3, "side": 32} if device != "cpu" and images else {},
        "clients": {"total": CLIENTS, "partition": "iid"},
        "train": {"epochs": 1, "batch_size": 10},
    }
    return config.merged(base, keywords)


def timed(device: str, engine: str, method: str, settings: config.Tree) -> float:
    """Median seconds of a round."""
    result = ours(Row(engine, method), settings, Laps(device, warm_up=2, least=3, seconds=0.5, most=50))
    return float(result["round_seconds"])


def clients(device: str) -> Points:
    """Seconds a round against clients per round."""
    model = {"model": "mlp", "model_options": {"hidden": [64]}} if device == "cpu" else {"model": "rivals.nets:two_conv"}
    points = []
    for number in (1, 2, 5, 10, 20, 50, 100, 200, 500):
        settings = federated(device, True, clients={"per_round": number}, **model)
        points.append({"clients a round": number, **{name: timed(device, name, "fedavg", settings) for name in ("serial", "batched")}})
    return points


def size(device: str) -> Points:
    """Seconds a round of ten clients against the model's parameters."""
    points = []
    for width in (64, 128, 256, 512, 1024) if device == "cpu" else (64, 256, 512, 1024, 2048, 4096):
        settings = federated(device, False, clients={"per_round": 10}, model="mlp", model_options={"hidden": [width, width]})
        parameters = 65 * width + (width + 1) * width + (width + 1) * 10
        points.append({"parameters": parameters, **{name: timed(device, name, "fedavg", settings) for name in ("serial", "batched")}})
    return points


def density(device: str) -> Points:
    """Seconds a round of ten clients against the density of a model of a million parameters: the arithmetic is dense."""
    points = []
    for share in (0.05, 0.1, 0.2, 0.5, 1.0):
        settings = federated(device, False, clients={"per_round": 10}, model="mlp", model_options={"hidden": [960, 960]}, density=share)
        points.append({"density": share, **{name: timed(device, name, methods.DEFAULT, settings) for name in ("serial", "batched")}})
    return points


def links(device: str) -> Points:
    """Seconds of the server's work for ten clients against links."""
    numbers = [10**5, 10**6, 10**7, *([] if device == "cpu" else [10**8])]
    return [{"links": number, **served(device, number, 10)} for number in numbers]


def servers(device: str) -> Points:
    """Seconds of the server's work at a million links against clients."""
    return [{"clients": number, **served(device, 10**6, number)} for number in (1, 10, 100, *([] if device == "cpu" else [500]))]


def served(device: str, number: int, clients: int) -> dict[str, float]:
    """Seconds that the server spends on an inner and on an outer round."""
    layout = Layout(tuple(Entry((f"layer{index}",), (number // 4,)) for index in range(4)), (), ())
    weights = torch.randn(number, device=device)
    method = methods.get(methods.DEFAULT)(density=0.2)
    state = method.begin(Setup(layout, weights, (number,), rng=lambda purpose: random.key(0, purpose)))
    found = {}
    for index, name in ((1, "inner round"), (0, "outer round")):
        current = Round.of(index, Schedule(), state.mask, layout)
        messages = [message(state, current)] * clients
        found[name] = median(device, partial(play_round, method, state, current, messages))
    return found


def message(state: State, current: Round) -> Message:
    """An upload: values everywhere and, in outer rounds, as many votes as asked for."""
    found: Message = {"weights": torch.randn_like(state.values)}
    if current.outer:
        inactive, asked = state.mask.inactive, sum(current.quota)
        found["votes"] = Selection(inactive[torch.arange(asked, device=inactive.device) * (len(inactive) // asked)], len(state.mask.bits))
    return found


def median(device: str, work: Callable[[], object]) -> float:
    """Seconds of `work`: the median of three times after one."""
    times = []
    for _ in range(4):
        started = time.perf_counter()
        work()
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


CURVES = {"clients": clients, "size": size, "density": density, "links": links, "servers": servers}


def written_out(curve: str, points: Points) -> list[str]:
    """A curve as a table, in milliseconds."""
    names = list(points[0])
    lines = ["", f"### {(CURVES[curve].__doc__ or '').replace('Seconds', 'Milliseconds').rstrip('.')}", ""]
    lines += ["| " + " | ".join(names) + " |", "| " + " | ".join("---:" for _ in names) + " |"]
    for point in points:
        first, *times = point.values()
        lines.append(f"| {first:,} | " + " | ".join(f"{value * 1e3:,.1f}" for value in times) + " |")
    return lines


def plot(curves: dict[str, Points], file: Path) -> None:
    """All curves of a device, side by side."""
    figure, axes = optional("matplotlib.pyplot", "plot").subplots(1, len(curves), figsize=(3.2 * len(curves), 3), layout="constrained")
    for axis, points in zip([axes] if len(curves) == 1 else axes, curves.values(), strict=True):
        across, *names = points[0]
        for name in names:
            axis.loglog([point[across] for point in points], [point[name] for point in points], marker=".", label=name)
        axis.set(xlabel=across, ylabel="seconds")
        axis.legend(frameon=False)
    figure.savefig(file, metadata={"Date": None})


def render(out: Path) -> None:
    """Tables of all raw results beside `out`, and their plots."""
    lines = ["# Growth", "", "`python benchmarks/growth.py`; what is measured is said at its top. Medians; raw numbers are in `raw/`."]
    for file in sorted((out.parent / "raw").glob("growth_*.json")):
        result = json.loads(file.read_text())
        lines += ["", f"## On {result['hardware']}", "", f"torch {result['torch']}; `{result['command']}`"]
        try:
            plot(result["curves"], out.parent / f"{file.stem}.svg")
            lines += ["", f"![the curves below]({file.stem}.svg)"]
        except InputError as error:
            print(f"no plots: {error}", file=sys.stderr)
        for curve, points in result["curves"].items():
            lines += written_out(curve, points)
    out.write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", action="append", choices=CURVES, help="a curve; may be repeated")
    parser.add_argument("--out", type=Path, help="Markdown file to write; raw results go to raw/ beside it")
    parser.add_argument("--render", action="store_true", help="measure nothing, write tables and plots of the raw results again")
    options = parser.parse_args()
    if not options.render:
        with tempfile.TemporaryDirectory() as scratch:
            file = (options.out.parent if options.out else Path(scratch)) / "raw" / f"growth_{options.device.partition(':')[0]}.json"
            measure(file, options)
    if options.out or options.render:
        render(options.out or HERE / "results" / "growth.md")


def measure(file: Path, options: argparse.Namespace) -> None:
    """The curves asked for, into `file`, which keeps the others."""
    curves: dict[str, Points] = json.loads(file.read_text())["curves"] if file.exists() else {}
    for name in options.only or CURVES:
        curves[name] = CURVES[name](options.device)
        print("\n".join(written_out(name, curves[name])), flush=True)
        result = {"hardware": hardware(options.device), "torch": torch.__version__}
        result["command"] = f"python benchmarks/growth.py --device {options.device}"
        file.parent.mkdir(parents=True, exist_ok=True)
        ordered = {curve: curves[curve] for curve in CURVES if curve in curves}
        file.write_text(json.dumps({**result, "curves": ordered}, indent=1) + "\n")


if __name__ == "__main__":
    main()
