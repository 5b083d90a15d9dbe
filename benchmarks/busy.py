"""A busy machine: what a run costs beside one busy loop per core, on every engine of a CPU and in `compare --jobs`.

    python benchmarks/busy.py [--model mlp]… [--way serial]… [--repeat N] [--json FILE] [--out FILE.md]

A scheduler that is fair halves every core, so twice the time is the fair share; 1.5 times that is allowed. Every run is a process of its
own, alone and beside the loops in turn, and the median of its repeats counts. The time is that of all rounds; of a
comparison, that of its slowest cell. Needs a machine that does nothing else. Exit code 1: a run takes too long.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

MODELS = {
    "mlp": ["--model", "mlp", "--rounds", "21"],
    "cnn": ["--model", "cnn", "--rounds", "6"],
    "resnet18_small": ["--model", "resnet18_small", "--set", "model_options.width=8", "--rounds", "5"],
}
"""Experiments with the digits: seconds each."""
NEEDS = {"ray": "ray", "flower": "flwr", "sparse, a thread a core": "fedrts_kernels"}
"""The packages of ways that are optional extras."""
WAYS = {
    "serial": ["run", "--recipe", "paper", "--engine", "serial"],
    "batched": ["run", "--recipe", "paper", "--engine", "batched"],
    "batched, 2 workers": ["run", "--recipe", "paper", "--engine", "batched", "--set", "engine.workers=2"],
    "sparse, a thread a core": ["run", "--recipe", "paper", "--engine", "batched", "--set", "engine.kernel=sparse"],
    "ray": ["run", "--recipe", "paper", "--engine", "ray"],
    "flower": ["run", "--recipe", "paper", "--engine", "flower"],
    "compare --jobs 2": ["compare", "--recipe", "paper", "--methods", "fedrts,random", "--jobs", "2"],
}
ALLOWED = 1.5
"""Allowed multiple of the fair share."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=list(MODELS), help="repeatable; default all")
    parser.add_argument("--way", action="append", choices=list(WAYS), help="repeatable; default all that are installed")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write {model: slowdown}, of each model's slowest way")
    parser.add_argument("--out", type=Path, metavar="FILE.md", help="write the table")
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    fair = 2.0  # a loop on every core takes half of it
    ways = options.way or [way for way in WAYS if way not in NEEDS or find_spec(NEEDS[way])]
    lines = ["| model | way | alone (s) | beside loops (s) | slowdown | ÷ fair share | |", "| --- | --- | --- | --- | --- | --- | --- |"]
    print("\n".join(lines))
    slowdowns: dict[str, float] = {}
    for model in options.model or MODELS:
        for way in ways:
            alone, beside = measured([*WAYS[way], *MODELS[model]], cores, options.repeat)
            slowdown = beside / alone
            slowdowns[model] = max(slowdowns.get(model, 0.0), slowdown)
            verdict = "ok" if slowdown <= ALLOWED * fair else "too slow"
            lines.append(f"| {model} | {way} | {alone:.2f} | {beside:.2f} | {slowdown:.2f} | {slowdown / fair:.2f} | {verdict} |")
            print(lines[-1], flush=True)
    print(f"\nfair share {fair:g}, at most {ALLOWED * fair:g}: " + ", ".join(f"{model} {worst:.2f}" for model, worst in slowdowns.items()))
    if options.json:
        options.json.write_text(json.dumps({model: round(worst, 3) for model, worst in slowdowns.items()}) + "\n", "utf-8")
    if options.out:
        options.out.write_text(document(options.repeat, cores, lines), "utf-8")
    sys.exit(any(worst > ALLOWED * fair for worst in slowdowns.values()))


def measured(arguments: list[str], cores: int, repeat: int) -> tuple[float, float]:
    """Median seconds alone, and beside a busy loop per core."""
    alone, beside = [], []
    for _ in range(repeat):
        alone.append(seconds(arguments))
        with busy(cores):
            beside.append(seconds(arguments))
    return statistics.median(alone), statistics.median(beside)


@contextlib.contextmanager
def busy(loops: int) -> Iterator[None]:
    """So many processes that never rest."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(loops)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def seconds(arguments: list[str]) -> float:
    """Return the seconds of a command's rounds; for several runs at once, those of the slowest."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "fedrts", *arguments, "--device", "cpu", "--quiet", "--out", f"{folder}/out"]
        subprocess.run(command, check=True)
        return max(float(json.loads(file.read_text("utf-8"))["seconds"]) for file in Path(folder).rglob("summary.json"))


def document(repeat: int, cores: int, lines: list[str]) -> str:
    return f"""# A busy machine

`python benchmarks/busy.py {shlex.join(sys.argv[1:])}`
on {cores} cores ({platform.machine()}, {platform.system()}), torch {version("torch")}.
Seconds of all rounds, medians of {repeat} runs, alone and beside {cores} busy loops in turn.
A fair scheduler doubles the time; 1.5 times that is allowed.

""" + "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
