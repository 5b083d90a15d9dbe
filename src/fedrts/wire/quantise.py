"""Values in fewer bits: float16, and 8 bits with stochastic rounding, which is unbiased (QSGD, FedPAQ)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from fedrts.sparse import random

ValueType = Literal["float32", "float16", "int8"]

LEVELS = 127
"""Positive levels of an 8-bit value; the sign is the eighth bit."""

BLOCK = 256
"""Values that share one scale."""


@dataclass(frozen=True)
class Quantised:
    """`levels [m]` int8 in −127 … 127 with one float32 scale per block of 256: value i is levels[i] · scales[i // 256] / 127."""

    levels: Tensor
    scales: Tensor

    @staticmethod
    def of(values: Tensor, key: int) -> Quantised:
        """Round `values [m]` to a level at random, so that each is right on average; `key` decides the rounding.

        The scale is the largest magnitude of a block: |Q(x) − x| ≤ scale / 127, and a block of zeros stays zero.
        """
        blocks = _blocks(values.float())
        scales = blocks.abs().amax(1)
        units = blocks / torch.where(scales > 0, scales, torch.ones_like(scales))[:, None] * LEVELS  # in this order: no overflow
        dither = random.uniform(key, units.numel(), values.device).view_as(units)
        levels = torch.floor(units + dither).clamp_(-LEVELS, LEVELS).to(torch.int8)
        return Quantised(levels.flatten()[: len(values)].clone(), scales)

    def values(self) -> Tensor:
        """The float32 values `[m]` that were meant."""
        scaled = _blocks(self.levels.float() / LEVELS) * self.scales[:, None]
        return scaled.flatten()[: len(self.levels)]


def blocks_of(count: int) -> int:
    """Scales of `count` values."""
    return -(-count // BLOCK)


def _blocks(values: Tensor) -> Tensor:
    """`[m]` → `[⌈m / 256⌉, 256]`, padded with zeros."""
    return F.pad(values, (0, blocks_of(len(values)) * BLOCK - len(values))).view(-1, BLOCK)
