"""What dividing a round among two Ray actors costs beside the training itself, and what Flower's simulation (Ray too) costs for the same.

    pip install -e ".[ray]"
    python benchmarks/ray_overhead.py [--flower PATH/TO/PYTHON]

The work: FedAvg of a small MLP on the digits in 20 equal parts, 10 clients a round, 5 epochs, one core a client, no evaluation.
`training` is what the round would take if nothing but training happened: with our actors the busiest one's time in its engine, in Flower
the clients' time divided by the cores. `beyond` is the rest of the round, the median over rounds. Start-up is not counted. A second table
has what larger models add to it: the order that all actors get, and the sums that each sends back.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fedrts import config
from fedrts.engines.ray import connected, pack, spread, unpack
from fedrts.engines.settings import EngineSettings
from fedrts.methods.contract import State
from fedrts.runs.build import assemble
from fedrts.server import rounds
from fedrts.server.aggregate import Sums
from fedrts.server.collect import Tally
from fedrts.server.rounds import Plan
from fedrts.sparse.mask import Mask

HERE = Path(__file__).resolve().parent
WARM_UP, ROUNDS, REPEATS, ACTORS = 3, 20, 2, 2


def watched(worker: Any) -> None:
    """Inside an actor: note how long its engine works on each share."""
    run = worker.engine.run
    worker.seconds = []

    def timed(order: Any, clients: Any) -> Any:
        started = time.perf_counter()
        replies = list(run(order, clients))
        worker.seconds.append(time.perf_counter() - started)
        return iter(replies)

    worker.engine.run = timed


def ours(inner: str) -> dict[str, Any]:
    """Rounds of two actors, their clients one after the other (as Flower's) or side by side."""
    settings = {"name": "ray", "actors": ACTORS, "cpus": 1}
    clients = {"total": 20, "per_round": 10, "partition": "iid"}
    run = assemble(
        config.resolve({"recipe": "paper", "method": "fedavg", "clients": clients, "engine": settings, "rounds": WARM_UP + ROUNDS})
    )
    chosen = run.experiment.engine
    if inner == "serial":
        chosen = EngineSettings(name="ray", actors=ACTORS, cpus=1)
    with spread(chosen, run.bench, run.rows, 512) as engine:
        plan: Plan = replace(run.plan, engine=engine, eval_every=10**9, rounds=10**9)
        state, times = run.method.begin(run.setup), []
        for index in range(WARM_UP + ROUNDS):
            if index == WARM_UP:
                engine.ray.get([actor.__ray_call__.remote(watched) for actor in engine.actors])
            started = time.perf_counter()
            state = rounds.play_round(plan, state, index).state
            times.append(time.perf_counter() - started)
        busy = engine.ray.get([actor.__ray_call__.remote(lambda worker: worker.seconds) for actor in engine.actors])
        label = engine.label
    return {"who": f"fedrts, {label}", "times": times[WARM_UP:], "training": [max(pair) for pair in zip(*busy, strict=True)]}


def flower(python: str) -> dict[str, Any]:
    """Flower's rounds, by the driver in rivals/."""
    done = subprocess.run([python, str(HERE / "rivals" / "flower_digits.py")], capture_output=True, text=True, check=False)
    found: dict[str, Any] = json.loads(next(line for line in reversed(done.stdout.splitlines()) if line.startswith("{")))
    if "times" not in found:
        return {"who": "Flower", "missing": str(found)}
    slots = min(ACTORS, found["cores"])
    return {"who": found["who"], "times": found["times"], "training": [seconds / slots for seconds in found["training_seconds"]]}


def fastest(work: Callable[[], Any], repeats: int = 5) -> float:
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)


def sums(links: int, density: float) -> dict[str, float]:
    """What travels for a model of so many links, and what the server spends on it: one order for all, and each actor's sums."""
    bits = torch.rand(links) < density
    active = int(bits.sum())
    one = Sums()
    one.add({"weights": torch.randn(active), "core": torch.rand(active) < 0.7}, 10)
    order = (State(torch.randn(active), Mask(bits, (links,))), torch.randn(active))
    sent, returned = pack(order), pack(Tally(one))
    total = Sums()
    total.merge(unpack(returned, "cpu").sums)
    return {
        "order_mb": sent.nbytes / 1e6,
        "order_ms": 1e3 * fastest(lambda: pack(order)),
        "sums_mb": returned.nbytes / 1e6,
        "sums_ms": 1e3 * fastest(lambda: total.merge(unpack(returned, "cpu").sums)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flower", default=sys.executable, metavar="PYTHON", help="interpreter that has Flower and its Ray")
    python = parser.parse_args().flower
    print(f"{os.cpu_count()} cores\n")
    print("| who | rounds | round, ms | training, ms | beyond, ms |\n| --- | --- | --- | --- | --- |")
    found: dict[str, dict[str, Any]] = {}
    with connected(EngineSettings(name="ray", actors=ACTORS, cpus=1.0), 2**28):
        for _ in range(REPEATS):  # in turns: the machine may have other things to do
            for inner in ("serial", "auto"):
                part = ours(inner)
                row = found.setdefault(part["who"], {"who": part["who"], "times": [], "training": []})
                row["times"] += part["times"]
                row["training"] += part["training"]
    for row in (*found.values(), flower(python)):
        if "missing" in row:
            print(f"| {row['who']} | {row['missing']} | | | |")
            continue
        beyond = [whole - part for whole, part in zip(row["times"], row["training"], strict=True)]
        shown = [f"{1e3 * statistics.median(values):.0f}" for values in (row["times"], row["training"], beyond)]
        print(f"| {row['who']} | {len(beyond)} | {' | '.join(shown)} |", flush=True)
    print("\n| links | density | order, MB | to pack it, ms | sums of an actor, MB | to unpack and add them, ms |")
    print("| --- | --- | --- | --- | --- | --- |")
    for links, density in ((100_000, 0.2), (1_000_000, 0.2), (11_200_000, 0.2), (11_200_000, 1.0)):
        print(f"| {links:,} | {density:g} | " + " | ".join(f"{value:.1f}" for value in sums(links, density).values()) + " |")


if __name__ == "__main__":
    main()
