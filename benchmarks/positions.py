"""What the positions of a layer's active links cost: bytes against the entropy, time against `torch.save` of the layer.

    python benchmarks/positions.py [--repeat 9]

One layer of 11.2 million links, random positions. The rival, in the same run and turn by turn: `torch.save` of the dense
float32 tensor into memory.
"""

from __future__ import annotations

import argparse
import io
import math
import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from fedrts.wire.positions import decode, encode

SHAPE = (512, 21875)
DENSITIES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8)


def seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def entropy(p: float) -> float:
    return -p * math.log2(p) - (1 - p) * math.log2(1 - p)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=9)
    repetitions = parser.parse_args().repeat
    links = math.prod(SHAPE)
    layer = torch.randn(SHAPE)
    rng = np.random.default_rng(0)
    print(f"{links:,} links; milliseconds are medians of {repetitions}, in brackets the ratio to torch.save\n")
    print("| density | coding | bytes | of the entropy | encode | decode | torch.save |")
    print("|--------:|--------|------:|---------------:|-------:|-------:|-----------:|")
    for density in DENSITIES:
        bits = rng.random(links) < density
        coding, payload = encode(bits, SHAPE)
        bound = links * entropy(float(bits.mean())) / 8
        contestants: list[Callable[[], object]] = [
            partial(encode, bits, SHAPE),
            partial(decode, coding, payload, SHAPE),
            lambda: torch.save(layer, io.BytesIO()),
        ]
        rounds = [[seconds(work) for work in contestants] for _ in range(repetitions + 1)][1:]  # the first one warms up
        encoding, decoding, saving = (1000 * statistics.median(times) for times in zip(*rounds, strict=True))
        print(
            f"| {density} | {coding.name} | {len(payload):,} | {len(payload) / bound:.3f} "
            f"| {encoding:.1f} ({encoding / saving:.2f}×) | {decoding:.1f} ({decoding / saving:.2f}×) | {saving:.1f} |"
        )


if __name__ == "__main__":
    main()
