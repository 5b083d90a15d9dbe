"""Accuracy and bytes on handwritten digits under drop-out and with shorter value types.

    python benchmarks/digits.py dropout     # 0, 10, 30 and 50 % of the clients vanish in every round
    python benchmarks/digits.py values      # values travel in every type

FedRTS at density 0.2 with the default recipe, three seeds each. Prints a Markdown table; benchmarks/results holds one run of each.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any, get_args

import torch

import fedrts
from fedrts.server import collect
from fedrts.wire.value_types import ValueType

SEEDS = (0, 1, 2)


def runs(**keywords: Any) -> list[fedrts.Result]:
    with tempfile.TemporaryDirectory() as folder:
        settings = {"recipe": "paper", **keywords}
        return [fedrts.run(seed=seed, out=Path(folder, str(seed)).as_posix(), **settings) for seed in SEEDS]


def mean_and_error(values: list[float]) -> str:
    return f"{statistics.mean(values):.4f} ± {statistics.stdev(values) / len(values) ** 0.5:.4f}"


def dropout() -> None:
    print("| drop-out | accuracy, mean of the last ten rounds | replies missing per round | rounds repeated | MB sent |")
    print("| ---: | ---: | ---: | ---: | ---: |")
    for share in (0.0, 0.1, 0.3, 0.5):
        results = runs(rounds=40, clients={"dropout": share})
        lines = [line for result in results for line in result.history]
        missing = sum(entry["reason"] == collect.DROPPED for line in lines for entry in line["rejected"]) / len(lines)
        repeated = sum(len(line["clients"]) + len(line["rejected"]) > 10 for line in lines) / len(results)
        sent = statistics.mean(result.summary["upload_bytes"] + result.summary["download_bytes"] for result in results) / 1e6
        accuracy = mean_and_error([result.summary["accuracy_last10"] for result in results])
        print(f"| {share:.0%} | {accuracy} | {missing:.1f} of 10 | {repeated:.1f} of 40 | {sent:.1f} |")


def values() -> None:
    print("| values | accuracy, mean of the last ten rounds | MB sent | share of dense averaging |")
    print("| --- | ---: | ---: | ---: |")
    for kind in get_args(ValueType):
        results = runs(value_type=kind)
        sent = statistics.mean(result.summary["upload_bytes"] + result.summary["download_bytes"] for result in results) / 1e6
        accuracy = mean_and_error([result.summary["accuracy_last10"] for result in results])
        print(f"| {kind} | {accuracy} | {sent:.1f} | {statistics.mean(r.summary['comm_ratio'] for r in results):.3f} |")


def main() -> None:
    tables = {"dropout": dropout, "values": values}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=tables)
    table = parser.parse_args().table
    print(f"fedrts {fedrts.__version__}, torch {torch.__version__}; seeds {', '.join(map(str, SEEDS))}\n")
    tables[table]()


if __name__ == "__main__":
    main()
