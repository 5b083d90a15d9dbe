"""Local training of clients side by side: static tensors for a number of slots, one step for all of them.

Nothing in a step depends on Python's state: row numbers and keys of all steps lie in tensors, and a counter on the device says which are
next. So on CUDA a step is captured once as a graph and replayed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fedrts.client.workbench import Workbench
from fedrts.engines.kernels import Kernel
from fedrts.methods.contract import Influence

_ALIGNED = 64
"""Rows of stacked weights start at multiples of this: kernels on tensor cores want round addresses."""
_EAGER_STEPS = 3
"""Steps before a graph is captured: they warm up what a capture cannot."""
_WIDTHS = {"cpu": 2, "cuda": 10}
"""At most so many graphs (on a CPU: recordings), for different numbers of slots that take part."""


def stacked(rows: int, length: int, like: Tensor) -> Tensor:
    """Zeros `[rows, length]` whose rows begin at round addresses."""
    return like.new_zeros(rows, -(-length // _ALIGNED) * _ALIGNED)[:, :length]


class Slots:
    """`width` clients that train side by side on batches of `size`, in tensors that stay where they are."""

    def __init__(
        self,
        kernel: Kernel,
        bench: Workbench,
        width: int,
        size: int,
        capacity: int,
        like: Tensor,
        masks: int,
        records: bool,
        influence: Influence | None,
    ) -> None:
        self.kernel, self.data, self.frozen = kernel, bench.data, bench.frozen
        self.layout, self.training = layout, training = bench.layout, bench.training
        device = like.device
        self.rows = torch.zeros(capacity, width, size, dtype=torch.int64, device=device)
        self.keys = torch.zeros(capacity, width, dtype=torch.int64, device=device)
        self.now = torch.zeros(1, dtype=torch.int64, device=device)
        self.weights = stacked(width, layout.length, like)
        self.received = like.new_zeros(layout.parameters)
        self.unmoved = like.new_zeros(width, 0 if bench.frozen is None else len(bench.frozen))
        """Frozen parameters as they were before training."""
        self.keep = like.new_ones(masks, layout.parameters) if masks else None
        """1 where a parameter may change `[1, N_all]`, or `[width, N_all]` where clients have their own masks; None: all may."""
        self.squares = like.new_zeros(width, layout.links) if records else None
        self.losses = like.new_zeros(width)
        self.rate = like.new_full((), training.lr)
        self.taken, self.planned = like.new_zeros(width), like.new_ones(width)
        """Steps that the client in a slot has made, and will have made."""
        self.influence = influence
        self.marks = like.new_zeros(layout.parameters if influence else 0)
        self.first = stacked(width, layout.parameters, like) if training.momentum or training.optimizer == "adam" else None
        self.second = stacked(width, layout.parameters, like) if training.optimizer == "adam" else None
        self.largest = stacked(width, layout.parameters, like) if training.amsgrad else None
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        """By the number of slots that take part."""
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self._eager = 0

    def begin(self, rows: Tensor, keys: Tensor, received: Tensor, rate: float) -> None:
        """A new exchange: `rows [steps, width, size]` and `keys [steps, width]` of all its batches."""
        self.rows[: len(rows)], self.keys[: len(keys)] = rows.to(self.rows.device), keys.to(self.keys.device)
        self.now.zero_()
        self.received.copy_(received)
        self.rate.fill_(rate)

    def mark(self, marks: Tensor) -> None:
        """What the influence goes by in this exchange, `[N_all]`."""
        self.marks.copy_(marks)

    def load(self, slots: list[int], weights: Tensor, steps: list[int], masks: Tensor | None) -> None:
        """Clients with `weights [k, n]` take `slots`; `masks [k, P]` are theirs where slots have their own."""
        self.weights[slots] = weights
        if self.frozen is not None:
            self.unmoved[slots] = weights[:, self.frozen]
        self.planned[slots] = self.planned.new_tensor(steps)
        for tensor in (self.taken, self.losses, self.squares, self.first, self.second, self.largest):
            if tensor is not None:
                tensor[slots] = 0.0
        if masks is not None and self.keep is not None:
            self.keep[slots, : masks.shape[1]] = masks.to(self.keep.dtype)

    def step(self, active: int) -> None:
        """One step in the first `active` slots."""
        active = self._rounded(active)
        if self.weights.device.type == "cuda" and self._eager >= _EAGER_STEPS:
            if active not in self._graphs:
                self._graphs[active] = captured(lambda: self._step(active), self._pool)
            self._graphs[active].replay()
            return
        self._step(active)
        self._eager += 1

    def _rounded(self, active: int) -> int:
        """Not every number of slots is worth a graph of its own: idle ones take part."""
        width = len(self.weights)
        unit = -(-width // _WIDTHS[self.weights.device.type])
        return min(-(-active // unit) * unit, width)

    def _step(self, active: int) -> None:
        parameters, links = self.layout.parameters, self.layout.links
        rows, keys = self.rows.index_select(0, self.now)[0, :active], self.keys.index_select(0, self.now)[0, :active]
        weights = self.weights[:active]
        gradient, loss, statistics = self.kernel(weights, *self.data.training_batches(rows, keys))
        if self.frozen is not None:
            gradient[:, self.frozen] = 0.0
        self.losses[:active] += loss
        weights[:, parameters:] = statistics
        current = weights[:, :parameters]
        if self.squares is not None:
            self.squares[:active] += gradient[:, :links].square()
        rate = self.rate
        if self.influence is not None:
            gradient += self.influence.pull(current, self.marks)
            taken, planned = self.taken[:active], self.planned[:active]
            rate = torch.as_tensor(self.influence.rate(current, self.marks, taken, planned, self.rate, self.training.lr))[:, None]
        if self.training.proximal:
            gradient += self.training.proximal * (current - self.received)
        self.taken[:active] += 1
        self._optimise(current, gradient, rate)
        if self.frozen is not None:
            current[:, self.frozen] = self.unmoved[:active]
        self.now += 1

    def _optimise(self, current: Tensor, gradient: Tensor, rate: Tensor) -> None:
        """SGD, Adam or AMSGrad as `torch.optim` has them; every slot with a past of its own."""
        training, active = self.training, len(current)
        if training.weight_decay:
            gradient += training.weight_decay * current
        if self.first is None:
            current.addcmul_(gradient, rate if self.keep is None else rate * self.keep[:active], value=-1)
            return
        if self.keep is not None:
            gradient *= self.keep[:active]  # many times faster than filling
        if self.second is None:
            current.addcmul_(self.first[:active].mul_(training.momentum).add_(gradient), rate, value=-1)
            return
        mean = self.first[:active].mul_(0.9).add_(gradient, alpha=0.1)
        square = self.second[:active].mul_(0.999).addcmul_(gradient, gradient, value=0.001)
        if self.largest is not None:
            square = torch.maximum(self.largest[:active], square, out=self.largest[:active])
        taken = self.taken[:active].double()[:, None]  # 1 − 0.999 has few digits in float32
        first, second = (correction.to(current.dtype) for correction in (1 - 0.9**taken, (1 - 0.999**taken).sqrt()))
        current -= rate / first * mean / (square.sqrt() / second + 1e-8)


def captured(step: Callable[[], None], pool: Any) -> torch.cuda.CUDAGraph:
    """A graph of one `step`. Graphs that are never replayed at the same time may share a memory `pool`."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        step()
    return graph
