"""Links, kernels and blocks as arms: accuracy, bytes, and the time of a step on one core.

    python benchmarks/units.py accuracy [--minutes M]     # plays missing runs for so long, and keeps what came of them
    python benchmarks/units.py steps                      # times steps, rivals taking turns
    python benchmarks/units.py                            # the table and the figure of what is there

FedRTS on handwritten digits, resnet18_small of width 8. Learning rates are chosen alike for every unit, at the first density on
seed 200, by accuracy on data that is held out; results are of seeds 0 to 4. `accuracy` goes on where it stopped. Times are of the thread's
processor, medians; a step is one client's, on 32×32 images, in kernels that compute the active links alone or blocks as products, beside
the better of torch's two dense layouts. Raw numbers lie in benchmarks/results/raw/units.json, the table in benchmarks/results/units.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

import fedrts
from fedrts.comparison.table import markdown

RESULTS = Path(__file__).parent / "results"
RAW = RESULTS / "raw" / "units.json"
UNITS = ("link", "kernel", "block:4×4")
DENSITIES = (0.1, 0.05)
SEEDS = range(5)
RATES = (0.1, 0.2)
CHOOSING_SEED = 200
HELD_OUT = 0.2
RUN: dict[str, Any] = {
    "data": "digits",
    "model": "resnet18_small",
    "model_options": {"width": 8},
    "method": "fedrts",
    "rounds": 30,
    "device": "cpu",
    "engine": {"name": "serial", "kernel": "sparse"},
    "eval": {"fairness": False},
}
Raw = dict[str, dict[str, float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=("accuracy", "steps", "table"), default="table")
    parser.add_argument("--minutes", type=float, default=60.0, help="no run starts later")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    options = parser.parse_args()
    torch.set_num_threads(1)
    raw: Raw = json.loads(RAW.read_text("utf-8")) if RAW.exists() else {}
    if options.part == "accuracy":
        play(raw, options.minutes, options.jobs)
    text = table(raw) if RAW.exists() else ""
    (RESULTS / "units.md").write_text(text, "utf-8")
    print(text)


def keep(raw: Raw) -> None:
    RAW.parent.mkdir(parents=True, exist_ok=True)
    RAW.write_text("{\n" + ",\n".join(f"{json.dumps(name)}: {json.dumps(raw[name])}" for name in sorted(raw)) + "\n}\n", "utf-8")


Cell = tuple[str, float, int, float]
"""Unit, density, seed, learning rate."""


def play(raw: Raw, minutes: float, jobs: int) -> None:
    """Play the runs that are missing, those that choose first; then seed by seed, so that whatever is there compares."""
    ends = time.monotonic() + 60 * minutes
    choosing = [(unit, DENSITIES[0], CHOOSING_SEED, rate) for rate, unit in product(RATES, UNITS)]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        for phase in (lambda: choosing, lambda: [(u, d, s, chosen_rate(raw, u)) for s, d, u in product(SEEDS, DENSITIES, UNITS)]):
            missing = [cell for cell in phase() if name_of(*cell) not in raw]
            for cell, found in zip(missing, pool.map(partial(played, ends), missing), strict=True):
                if found is not None:
                    raw[name_of(*cell)] = found
                    keep(raw)
                    print(name_of(*cell), found, flush=True)


def played(ends: float, cell: Cell) -> dict[str, float] | None:
    """What a run came to; None where it is too late to begin."""
    if time.monotonic() > ends:
        return None
    torch.set_num_threads(1)
    unit, density, seed, rate = cell
    choosing = seed == CHOOSING_SEED
    with tempfile.TemporaryDirectory() as folder:
        result = fedrts.run(
            **RUN,
            density=density,
            seed=seed,
            topology={"interval": 5, "unit": unit},
            train={"lr": rate},
            data_options={"validation": HELD_OUT} if choosing else {},
            out=f"{folder}/run",
        )
    scores = [line["valid_accuracy"] for line in result.history if line.get("valid_accuracy") is not None][-10:]
    score = statistics.mean(scores) if choosing else result.summary["accuracy_last10"]
    return {"accuracy": score, **{key: result.summary[key] for key in ("upload_bytes", "download_bytes", "density")}}


def name_of(unit: str, density: float, seed: int, rate: float) -> str:
    return f"{unit} d{density:g} s{seed} lr{rate:g}"


def chosen_rate(raw: Raw, unit: str) -> float:
    return max(RATES, key=lambda rate: float(raw[name_of(unit, DENSITIES[0], CHOOSING_SEED, rate)]["accuracy"]))


def runs_of(raw: Raw, unit: str, density: float) -> list[dict[str, float]]:
    rate = chosen_rate(raw, unit)
    return [raw[name] for seed in SEEDS if (name := name_of(unit, density, seed, rate)) in raw]


def table(raw: Raw) -> str:
    """What is there, unit by unit."""
    rows = []
    for density in DENSITIES:
        for unit in UNITS:
            runs = runs_of(raw, unit, density)
            if not runs:
                continue
            accuracy = [100 * run["accuracy"] for run in runs]
            spread = f" ± {statistics.stdev(accuracy) / len(accuracy) ** 0.5:.1f}" if len(runs) > 1 else ""
            sent = statistics.mean(run["upload_bytes"] + run["download_bytes"] for run in runs) / 1e6
            reached = statistics.mean(run["density"] for run in runs)
            rate = f"{chosen_rate(raw, unit):g}"
            rows.append(
                [f"{density:g}", unit, rate, str(len(runs)), f"{statistics.mean(accuracy):.1f}{spread}", f"{sent:.2f}", f"{reached:.4f}"]
            )
    head = ["density", "unit", "learning rate", "seeds", "accuracy (%)", "MB sent", "density reached"]
    return f"# Links, kernels and blocks\n\n`python benchmarks/units.py`\n\n{markdown(head, rows)}\n"


if __name__ == "__main__":
    main()
