"""The index of a program: for every active link, which input it reads and which weight it has.

Links come output by output, each output's by input channel, in groups of channels that fit the nearest cache. The gradient of an input
is the same sum with inputs and outputs exchanged; with strides it falls into phases, whose positions read alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedrts.errors import InputError
from fedrts.programs.parts import LinksPart, Pair
from fedrts.programs.stages import Stage

LANES = 16
WINDOW = 3
"""Side of the windows for which there are kernels."""
NEAR = 32 * 1024
"""Bytes of the nearest cache that a group of input channels may fill; the rest is for outputs, weights and index."""
WORTH_A_GROUP = 4
"""Links of an output in a group, on the average: with fewer, groups cost more than they save. In windows three times as many."""
Numbers = NDArray[np.int32]


class Phase(NamedTuple):
    """Positions of an input at a stride from each other."""

    y: int
    x: int
    rows: int
    cols: int
    groups: int
    starts: int
    offsets: int
    begin: int
    """Where its links begin in the order."""


@dataclass(frozen=True)
class Linked:
    """The active links of a layer, as the program finds them in the index."""

    groups: int
    starts: int
    offsets: int
    largest: int
    """Links of the largest group."""
    window: int = 0
    """Side of the windows that links come in, for which there are kernels; 0: links come one by one."""
    border: int = 0
    """That the gradient of its output needs."""
    phases: tuple[Phase, ...] = ()
    order: int = 0
    """Places in the weights, by input channel."""
    ordered: int = 0
    """How many of them reach the input."""


class Index:
    """An index that grows layer by layer."""

    def __init__(self, samples: int) -> None:
        self.samples, self.blocks = samples, -(-samples // LANES)
        self.parts: list[Numbers] = []
        self.length = 0

    def add(self, values: NDArray[Any]) -> int:
        """Append these numbers; return their position."""
        if len(values) and max(-int(values.min()), int(values.max())) >= 2**31:
            raise InputError(f"the sparse kernel cannot reach all of a layer's inputs in batches of {self.samples}: use smaller ones")
        at = self.length
        self.parts.append(values.astype(np.int32))
        self.length += len(values)
        return at

    def whole(self) -> Numbers:
        return np.concatenate(self.parts) if self.parts else np.zeros(1, np.int32)

    def link(self, stage: Stage, before: Stage, outs: int, bits: NDArray[np.bool_] | None, backward: bool, grouped: bool = False) -> Linked:
        """Index a layer's active links (`bits`; None: all) and, if it goes `backward`, what gradients of its input need.

        `grouped`: all positions of a pair of channels are active together. Then the kernels may read windows: forward and backward, the
        links of a pair lie by ascending place of what they read.
        """
        part = stage.part
        assert isinstance(part, LinksPart)
        (ky, kx), (sy, sx), (py, px), (dy, dx) = part.kernel, part.stride, part.padding, part.dilation
        channels, group_channels = before.shape[0], before.shape[0] // part.groups
        if before.wide:
            height, width, rows, cols, in_width = 1, self.blocks, 1, self.blocks, self.blocks
        else:
            _, height, width = before.shape
            _, rows, cols = stage.shape
            in_width = width + 2 * before.border
        flat = np.arange(outs * group_channels * ky * kx) if bits is None else np.flatnonzero(bits)
        rest, x = np.divmod(flat.astype(np.int64), kx)
        rest, y = np.divmod(rest, ky)
        out, channel = np.divmod(rest, group_channels)
        channel += out // (outs // part.groups) * group_channels
        x, y = x * dx - px, y * dy - py
        window = WINDOW if grouped and _has_windows(part, bits) else 0
        reach = (dy * (ky - 1), dx * (kx - 1))
        worth = WORTH_A_GROUP * (window or 1)
        cuts = _cuts(out, channel, outs, channels, (rows, cols), (sy, sx), reach, worth)
        groups, starts, largest = len(cuts) - 1, self.add(cuts.ravel()), int(np.diff(cuts.sum(1)).max(initial=0))
        offsets = self.add(((y * channels + channel) * in_width + x) * LANES)
        if not backward:
            return Linked(groups, starts, offsets, largest, window)
        border = 0
        if before.wide:
            sy, sx = 1, 1
        else:
            border = max(_overhang(ky, sy, py, dy, height, rows), _overhang(kx, sx, px, dx, width, cols))
        slope_width = cols + 2 * border
        phases, orders, begin = [], [], 0
        by_channel = np.argsort(channel.astype(np.uint16 if channels < 2**16 else np.int64), kind="stable")
        for a, b in [(a, b) for a in range(min(sy, height)) for b in range(min(sx, width))]:
            some = by_channel[((a - y[by_channel]) % sy == 0) & ((b - x[by_channel]) % sx == 0)]
            if window:
                some = some.reshape(-1, window**2)[:, ::-1].ravel()
            at = (((a - y[some]) // sy * outs + out[some]) * slope_width + (b - x[some]) // sx) * LANES
            size = (height - a + sy - 1) // sy, (width - b + sx - 1) // sx
            cuts = _cuts(channel[some], out[some], channels, outs, size, (1, 1), (reach[0] // sy, reach[1] // sx), worth)
            phases.append(Phase(a, b, *size, len(cuts) - 1, self.add(cuts.ravel()), self.add(at), begin))
            orders.append(some)
            begin += len(some)
        return Linked(groups, starts, offsets, largest, window, border, tuple(phases), self.add(np.concatenate(orders)), begin)


def _has_windows(part: LinksPart, bits: NDArray[np.bool_] | None) -> bool:
    """Whether active links come in whole windows that read neighbouring places."""
    if (part.kernel, part.stride, part.dilation) != ((WINDOW, WINDOW), (1, 1), (1, 1)):
        return False
    pairs = None if bits is None else bits.reshape(-1, WINDOW**2)
    return pairs is None or bool((pairs.all(1) == pairs.any(1)).all())


def _cuts(
    out: NDArray[Any], channel: NDArray[Any], outs: int, channels: int, size: Pair, stride: Pair, reach: Pair, worth: int
) -> NDArray[Any]:
    """Where the links of each group of input channels begin `[groups + 1, outs]`; links lie by (`out`, `channel`).

    What a group's links read of the input for one tile of outputs should fit in the nearest cache; but a group takes up and puts
    down the sums of all outputs, for which there must be links enough (`worth` for each output).
    """
    high, wide = _tile(*size)
    read = ((high - 1) * stride[0] + reach[0] + 1) * ((wide - 1) * stride[1] + reach[1] + 1) * LANES * 4
    groups = max(1, min(-(-channels * read // NEAR), len(out) // (outs * worth)))
    members = -(-channels // groups)
    groups = -(-channels // members)
    key = out.astype(np.int64) * groups + channel // members
    found: NDArray[Any] = np.searchsorted(key, np.arange(outs)[None] * groups + np.arange(groups + 1)[:, None])
    return found


def _tile(rows: int, cols: int) -> Pair:
    """Return how many positions the kernels sum at once, as rows and columns: sixteen if the image has them (`kernels.c`)."""
    wide = min(16, cols)
    return min(rows, 1 if wide == 16 else 2 if wide >= 8 else 4), wide


def _overhang(kernel: int, stride: int, padding: int, dilation: int, size: int, outs: int) -> int:
    """Return how far the gradient of an input of `size` reaches beyond an output of `outs`."""
    most = 0
    for phase in range(min(stride, size)):
        last = (size - phase + stride - 1) // stride - 1
        taps = [phase + padding - tap * dilation for tap in range(kernel)]
        shifts = [tap // stride for tap in taps if tap % stride == 0]
        most = max([most, *(-shift for shift in shifts), *(last + shift - (outs - 1) for shift in shifts)])
    return most
