"""Bytes per round and client, both ways, for resnet18's shapes: as they would travel, and in the paper's accounting.

    python benchmarks/traffic.py

Masks are random with ERK budgets; lengths are those of the codec (`codec.size`, tested to be the length of every encoded message).
Prints a table; benchmarks/results/traffic.md is one such run.
"""

from __future__ import annotations

import argparse
import platform

import numpy as np
import torch

from fedrts import __version__, methods
from fedrts.client.order import Order
from fedrts.methods.contract import Round, Setup
from fedrts.sparse import random
from fedrts.sparse.cost import Book
from fedrts.sparse.mask import Mask
from fedrts.sparse.schedule import Schedule
from fedrts.wire import codec
from fedrts.wire.codec import Kind
from fedrts.wire.value_types import ValueType
from server import resnet18_layout

DENSITIES = (0.5, 0.3, 0.2, 0.1)
OUTER, INNER = 0, 1
FRESH = None
"""A client that holds no mask."""


def lengths(order: Order, tensors: dict[str, torch.Tensor], held: Mask | None) -> tuple[int, int]:
    """Bytes (down, up) between the server and a client that holds `held`."""
    exchange, frame = order.exchange, order.upload_frame(1)
    message = {name: entry.take(tensors, frame) for name, entry in exchange.up.items()}
    down = codec.size(Kind.DOWNLOAD, exchange.down, order.sent, order.frame, held)
    return down, codec.size(Kind.UPLOAD, exchange.up, message, frame)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.manual_seed(0)
    layout = resnet18_layout()
    tensors = {"weights": torch.randn(layout.length), "gradient": torch.randn(layout.links)}
    setup = Setup(layout, tensors["weights"], (3, 32, 32), rng=lambda purpose: random.key(0, purpose))

    def order_of(name: str, density: float, index: int = INNER, type: ValueType = "float32") -> Order:
        method = methods.get(name)(density=density)
        state = method.begin(setup)
        current = Round.of(index, Schedule(), state.mask, layout)
        return Order.of(method.exchanges(current)[0].with_values_as(type), current, layout, state, key=0)

    def both_ways(order: Order, held: Mask | None) -> float:
        return sum(lengths(order, tensors, held)) / 1e6

    print(
        f"fedrts {__version__}, torch {torch.__version__}, numpy {np.__version__}, Python {platform.python_version()}, "
        f"{platform.machine()}, two cores of a shared virtual machine; {layout.links:,} links, {layout.length:,} values\n"
    )
    titles = ["density", "dense FedAvg", "paper, 2·O_s", "holds the mask", "fresh client", "FedRTS at t = 0", "float16", "int8"]
    print("| " + " | ".join(titles) + " |\n|" + " ---: |" * len(titles))
    full = order_of("fedavg", 1.0)
    dense = both_ways(full, full.frame.mask)
    for density in DENSITIES:
        order = order_of("random", density)
        mask = order.frame.mask
        shorter = [both_ways(order_of("random", density, type=type), mask) for type in ("float16", "int8")]
        figures = [
            dense,
            2 * Book.paper(layout, density, 0.0).sparse() / 1e6,
            both_ways(order, mask),
            both_ways(order, FRESH),
            both_ways(order_of("fedrts", density, OUTER), FRESH),
            *shorter,
        ]
        print(f"| {density} | " + " | ".join(f"{figure:.2f}" for figure in figures) + " |")


if __name__ == "__main__":
    main()
