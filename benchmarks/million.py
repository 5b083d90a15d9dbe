"""Federations of a thousand to a million virtual clients over one array: what a round costs, and what the server remembers.

    python benchmarks/million.py

Every size is a process of its own: three rows a client on average, divided by quantity skew (α = 1, at least one row each), ten clients
a round, three rounds. `first` is the time from nothing to the first round (data, division, model, `clients.json`), `sample` the choice
of a round's clients, `round` the fastest of the three rounds, with it.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import fedrts
from fedrts import data
from fedrts.data.contract import Data
from fedrts.observe import Silent
from fedrts.server.rounds import sampled

SIZES = (1_000, 10_000, 100_000, 1_000_000)
ROWS, WIDTH, CLASSES = 3, 16, 10


@data.register("virtual")
def virtual(clients: int = 1_000) -> Data:
    """Three noisy rows of ten classes for every client."""
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(0, CLASSES, (ROWS * clients + 2_000,), generator=generator)
    x = torch.randn(len(y), WIDTH, generator=generator)
    x[torch.arange(len(y)), y] += 2
    return Data(x[2_000:], y[2_000:], x[:2_000], y[:2_000], classes=CLASSES)


class Clock(Silent):
    """When the first round began, and how long rounds took."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.began = 0.0

    def started(self, *_: Any) -> None:
        self.began = time.perf_counter()

    def played(self, record: Any) -> None:
        self.seconds.append(record.seconds)


def measure(clients: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    clock = Clock()
    before = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        fedrts.run(
            recipe="paper",
            data="virtual",
            data_options={"clients": clients},
            model="mlp",
            model_options={"hidden": [64, 64]},
            method="fedrts",
            density=0.2,
            rounds=3,
            clients={"total": clients, "per_round": 10, "partition": "quantity", "alpha": 1.0, "min_size": 1},
            train={"epochs": 5, "batch_size": 2, "lr": 0.05},
            topology={"interval": 2, "end": 3},
            device="cpu",
            engine="serial",  # the same work whatever the sizes of the clients drawn
            out=str(Path(folder) / "run"),
            observer=clock,
        )
        written = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
    times = []
    for index in range(20):
        started = time.perf_counter()
        sampled(0, index, 0, clients, 10)
        times.append(time.perf_counter() - started)
    return {
        "clients": clients,
        "first_s": clock.began - before,
        "sample_ms": 1e3 * statistics.median(times),
        "round_ms": 1e3 * min(clock.seconds),
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "written_mb": written / 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", type=int, help="measure one size in this process and print it as JSON")
    chosen = parser.parse_args().one
    if chosen:
        print(json.dumps(measure(chosen)))
        return
    print("| clients | first, s | sample, ms | round, ms | round − sample, ms | peak memory, MB | run folder, MB |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for size in SIZES:
        found = json.loads(subprocess.run([sys.executable, __file__, "--one", str(size)], check=True, capture_output=True).stdout)
        rest = found["round_ms"] - found["sample_ms"]
        print(
            f"| {size:,} | {found['first_s']:.1f} | {found['sample_ms']:.2f} | {found['round_ms']:.0f} | {rest:.0f} "
            f"| {found['peak_mb']:.0f} | {found['written_mb']:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
