"""Which method at which density: accuracy and traffic on handwritten digits, for docs/choosing.md.

    python benchmarks/choosing.py               # three seeds
    python benchmarks/choosing.py --seeds 0     # one

The paper's recipe (20 clients, 10 a round, Dirichlet 0.5, 50 rounds). Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile

import fedrts

METHODS = ("fedrts", "random")
DENSITIES = (0.2, 0.1, 0.05)


def cell(method: str, density: float, seeds: list[int]) -> tuple[str, float]:
    """Accuracy (mean of the last ten rounds) ± standard error over seeds, and bytes over dense FedAvg's."""
    with tempfile.TemporaryDirectory() as folder:
        found = [fedrts.run(recipe="paper", method=method, density=density, seed=seed, out=f"{folder}/{seed}").summary for seed in seeds]
    accuracy = [100 * summary["accuracy_last10"] for summary in found]
    error = f" ± {statistics.stdev(accuracy) / len(accuracy) ** 0.5:.1f}" if len(seeds) > 1 else ""
    return f"{statistics.mean(accuracy):.1f}{error}", statistics.mean(summary["comm_ratio"] for summary in found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=lambda text: [int(part) for part in text.split(",")], default=[0, 1, 2])
    seeds = parser.parse_args().seeds
    print(f"| density | bytes of dense | {' | '.join(METHODS)} |")
    print("| --- " * (2 + len(METHODS)) + "|")
    dense, ratio = cell("fedavg", 1.0, seeds)
    print(f"| 1 | {ratio:.2f} | fedavg: {dense} | |", flush=True)
    for density in DENSITIES:
        cells = [cell(method, density, seeds) for method in METHODS]
        print(f"| {density:g} | {cells[0][1]:.2f} | {' | '.join(accuracy for accuracy, _ in cells)} |", flush=True)


if __name__ == "__main__":
    main()
