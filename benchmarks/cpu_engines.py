"""The engines on a CPU: the same experiments one after the other, end to end, with clients one by one and side by side.

`python benchmarks/cpu_engines.py [NAME…] [--repeat N] [--out FILE.md]`; names as in EXPERIMENTS; data that is not there is left out.
Engines alternate, every run is a process of its own, figures are medians. On a machine that does other work only ratios mean something.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

EXPERIMENTS = {
    "digits mlp (the default)": [],
    "digits cnn": ["--model", "cnn", "--rounds", "20"],
    "fashion_mnist cnn": ["--data", "fashion_mnist", "--model", "cnn", "--rounds", "2", "--epochs", "1", "--clients", "100"],
    "cifar10 resnet18_small": ["--data", "cifar10", "--model", "resnet18_small", "--rounds", "1", "--epochs", "1", "--clients", "200"],
    "tinystories tiny_gpt": ["--data", "tinystories", "--model", "tiny_gpt", "--rounds", "1", "--epochs", "1", "--clients", "500"],
}
ENGINES = ("serial", "batched", "auto")


Times = tuple[float, float, float]


def timed(arguments: list[str], engine: str) -> tuple[Times, str] | None:
    """Seconds of the whole process, of its rounds and of processor time, and the engine that ran; None if it cannot run here."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [
            sys.executable,
            "-m",
            "fedrts",
            "run",
            "--recipe",
            "paper",
            "--quiet",
            "--device",
            "cpu",
            "--engine",
            engine,
            "--out",
            str(run),
            *arguments,
        ]
        before, started = os.times(), time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        seconds, after = time.perf_counter() - started, os.times()
        if done.returncode:
            print(f"left out: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
            return None
        summary = json.loads((run / "summary.json").read_text("utf-8"))
        took = tomllib.loads((run / "experiment.toml").read_text("utf-8"))["engine"]
    processor = after.children_user + after.children_system - before.children_user - before.children_system
    how = f"{took['kernel']}, {took['slots']} slots, {took['workers']} threads" if took["name"] == "batched" else ""
    return (seconds, summary["seconds"], processor), f"{took['name']} {how}".strip()


def compare(name: str, repeat: int) -> list[str]:
    """A line of the table for every engine."""
    times: dict[str, list[Times]] = {engine: [] for engine in ENGINES}
    took: dict[str, str] = {}
    for _ in range(repeat):
        for engine in ENGINES:
            found = timed(EXPERIMENTS[name], engine)
            if found is None:
                return []
            times[engine].append(found[0])
            took[engine] = found[1]
    lines = []
    for engine in ENGINES:
        whole, rounds, processor = (statistics.median(entry[place] for entry in times[engine]) for place in (0, 1, 2))
        pairs = list(zip(times["serial"], times[engine], strict=True))
        ratios = [[serial[place] / this[place] for serial, this in pairs] for place in (0, 1, 2)]
        against = " | ".join(f"{statistics.median(ratio):.2f}" for ratio in ratios)
        lines.append(f"| {name} | {engine} | {took[engine]} | {whole:.1f} | {rounds:.1f} | {processor:.1f} | {against} |")
        print(lines[-1], flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(EXPERIMENTS))
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    head = [
        "| experiment | asked | ran | process (s) | rounds (s) | processor (s) | serial ÷ this: process | rounds | processor |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    print("\n".join(head))
    chosen = [name for name in EXPERIMENTS if not arguments.names or any(part in name for part in arguments.names)]
    lines = [line for name in chosen for line in compare(name, arguments.repeat)]
    if arguments.out:
        load = os.getloadavg()[1]
        text = f"""# Engines on a CPU

`python benchmarks/cpu_engines.py {" ".join(arguments.names)} --repeat {arguments.repeat}`
on {os.cpu_count()} cores with a load average of {load:.1f} at the end.
Medians; the ratios are medians of pairs of neighbouring runs. Above 1 is faster than serial.

"""
        arguments.out.write_text(text + "\n".join([*head, *lines]) + "\n", "utf-8")


if __name__ == "__main__":
    main()
