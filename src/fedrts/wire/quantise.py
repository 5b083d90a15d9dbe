"""Values rounded to a few levels at random, which is unbiased (QSGD, FedPAQ)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from fedrts.sparse import random

LEVELS = 127
"""Positive levels of an 8-bit value; the sign is the eighth bit."""

BLOCK = 256
"""Values that share one scale, whatever the type. Smaller blocks have less variance and more bytes; 256 is where neither another bit
nor another client is the better buy (benchmarks/results/blocks.md)."""


Norm = Literal["linf", "l2"]

_SHARES = (1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25)
"""Scales to choose from, as shares of a group's norm: at few bits a large one sends the large values alone."""


@dataclass(frozen=True)
class Quantised:
    """`levels [..., m]` int8 in −top … top, of which groups share one float32 scale: value i is levels[i] · scale / top.

    Groups are blocks of 256 unless `groups` gives their lengths. A leading axis is of several clients.
    """

    levels: Tensor
    scales: Tensor
    groups: tuple[int, ...] | None = None
    top: int = LEVELS

    @staticmethod
    def of(
        values: Tensor,
        key: int | Tensor,
        groups: Sequence[int] | None = None,
        norm: Norm = "linf",
        top: int = LEVELS,
        uniform: Callable[[int | Tensor, int, torch.device], Tensor] = random.uniform,
    ) -> Quantised:
        """Round `values [m]` to a level at random, so that each is right on average; the numbers that `uniform` gives for `key` decide.
        Those of several clients are `[k, m]`, with the keys `[k]`.

        The scale is the largest magnitude of a group, or its Euclidean norm (QSGD): |Q(x) − x| ≤ scale / top, and a group of
        zeros stays zero.
        """
        single = values.float()
        scales = _norms(single, groups, norm)
        units = single / _spread(torch.where(scales > 0, scales, torch.ones_like(scales)), values.shape[-1], groups) * top
        dither = uniform(key, values.shape[-1], values.device)
        levels = torch.floor(units + dither).clamp_(-top, top).to(torch.int8)
        return Quantised(levels, scales, None if groups is None else tuple(groups), top)

    @staticmethod
    def nearest(values: Tensor, groups: Sequence[int] | None = None, norm: Norm = "linf", top: int = LEVELS) -> Quantised:
        """Round `values [..., m]` to the nearest level, in each group with that of a few scales up to the norm which loses least.

        Not right on average, but contractive: ‖Q(x) − x‖ < ‖x‖ unless x = 0, which at two bits rounding at random is not.
        """
        single = values.float()
        largest = _norms(single, groups, norm)
        scales, least = largest, torch.full_like(largest, torch.inf)
        for share in _SHARES:
            tried = share * largest
            lost = _norms(_levels(single, tried, groups, top) / top * _spread(tried, values.shape[-1], groups) - single, groups, "l2")
            scales, least = torch.where(lost < least, tried, scales), torch.minimum(lost, least)
        return Quantised(_levels(single, scales, groups, top).to(torch.int8), scales, None if groups is None else tuple(groups), top)

    def values(self) -> Tensor:
        """Return the float32 values `[..., m]`."""
        return self.levels.float() / self.top * _spread(self.scales, self.levels.shape[-1], self.groups)


def _levels(values: Tensor, scales: Tensor, groups: Sequence[int] | None, top: int) -> Tensor:
    """Return the nearest of −top … top for each of `values [..., m]` in units of scale / top."""
    units = values / _spread(torch.where(scales > 0, scales, torch.ones_like(scales)), values.shape[-1], groups) * top
    return units.round().clamp(-top, top)


def _norms(values: Tensor, groups: Sequence[int] | None, norm: Norm) -> Tensor:
    """Return one number for each group of `values [..., m]`: `[..., groups]`."""
    count, clients = values.shape[-1], values.shape[:-1]
    if groups is None:
        padded = F.pad(values, (0, blocks_of(count) * BLOCK - count)).view(*clients, blocks_of(count), BLOCK)
        return padded.abs().amax(-1) if norm == "linf" else torch.linalg.vector_norm(padded, dim=-1, dtype=torch.float64).float()
    lengths = torch.tensor(tuple(groups) * math.prod(clients), device=values.device)  # reduced is a vector: one client after the other
    if norm == "linf":
        return torch.segment_reduce(values.abs().flatten(), "max", lengths=lengths, initial=0.0).view(*clients, -1)
    squares = values.double().square()  # those of tiny or huge float32 are no float32
    return torch.segment_reduce(squares.flatten(), "sum", lengths=lengths, initial=0.0).sqrt().float().view(*clients, -1)


def _spread(scales: Tensor, count: int, groups: Sequence[int] | None) -> Tensor:
    """Return every value's scale `[..., m]`."""
    if groups is None:
        return scales[..., None].expand(*scales.shape, BLOCK).flatten(-2)[..., :count]
    return scales.repeat_interleave(torch.tensor(groups, device=scales.device), dim=-1, output_size=count)


def blocks_of(count: int) -> int:
    """Return the number of scales for `count` values."""
    return -(-count // BLOCK)
