"""How many values should share a scale? Variance against bits, for rounded values of every type.

    python benchmarks/blocks.py

Values from a Gaussian and a Laplacian distribution. `error` is the mean squared error of rounding over the mean square of the values,
`bits` are those of a value with its share of a scale. `error · bits` says what a byte buys where many clients are averaged,
`error · 4^bits` what it buys where the error of one must be small; both are over those of 256.
Prints a table; benchmarks/results/blocks.md is one such run.
"""

from __future__ import annotations

from typing import get_args

import torch

from fedrts.wire.quantise import BLOCK, Quantised
from fedrts.wire.value_types import FORMATS, Rounded, RoundedType

COUNT = 1 << 20
BLOCKS = (32, 64, 128, 256, 512, 1024)


def measured(values: torch.Tensor, type: RoundedType, block: int) -> tuple[float, float]:
    """(error, bits) of `values` that share a scale by `block`."""
    format = FORMATS[type]
    assert isinstance(format, Rounded)
    short = Quantised.of(values, key=1, groups=(block,) * (len(values) // block), top=format.top)
    error = (short.values() - values).square().mean() / values.square().mean()
    return float(error), 8 * format.size(format.tensors(short)) / len(values)


def main() -> None:
    torch.manual_seed(0)
    draws = {"Gaussian": torch.randn(COUNT), "Laplacian": torch.distributions.Laplace(0.0, 1.0).sample((COUNT,))}
    print("| values | type | block | error | bits | error · bits | error · 4^bits |\n| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    for name, values in draws.items():
        for type in get_args(RoundedType):
            at = {block: measured(values, type, block) for block in BLOCKS}
            usual, least = at[BLOCK]
            for block, (error, bits) in at.items():
                linear, rate = error * bits / (usual * least), error / usual * 4 ** (bits - least)
                print(f"| {name} | {type} | {block} | {error:.2g} | {bits:.2f} | {linear:.2f} | {rate:.2f} |")


if __name__ == "__main__":
    main()
