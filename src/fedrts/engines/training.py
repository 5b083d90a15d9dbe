"""Local training of clients side by side: static tensors for a number of slots, one step for all of them.

Nothing in a step depends on Python's state: row numbers and keys of all steps lie in tensors, and a counter on the device says which are
next. So on CUDA a step is captured once as a graph and replayed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fedrts.client import Workbench
from fedrts.engines.kernels import Kernel
from fedrts.methods.contract import Influence

_ALIGNED = 64
"""Rows of stacked weights start at multiples of this: kernels on tensor cores want round addresses."""
_EAGER_STEPS = 3
"""Steps before a graph is captured: they warm up what a capture cannot."""


def stacked(rows: int, length: int, like: Tensor) -> Tensor:
    """Zeros `[rows, length]` whose rows begin at round addresses."""
    return like.new_zeros(rows, -(-length // _ALIGNED) * _ALIGNED)[:, :length]


class Slots:
    """`width` clients that train side by side on batches of `size`, in tensors that stay where they are."""

    def __init__(
        self, kernel: Kernel, bench: Workbench, width: int, size: int, capacity: int, like: Tensor, masks: int, records: bool
    ) -> None:
        self.kernel, self.data, self.frozen = kernel, bench.data, bench.frozen
        self.layout, self.training = layout, training = bench.layout, bench.training
        device = like.device
        self.rows = torch.zeros(capacity, width, size, dtype=torch.int64, device=device)
        self.keys = torch.zeros(capacity, width, dtype=torch.int64, device=device)
        self.now = torch.zeros(1, dtype=torch.int64, device=device)
        self.weights = stacked(width, layout.length, like)
        self.received = like.new_zeros(layout.parameters)
        self.keep = like.new_ones(masks, layout.links) if masks else None
        """Masks as numbers `[1, P]`, or `[width, P]` where clients have their own; None: no link is inactive."""
        self.squares = like.new_zeros(width, layout.links) if records else None
        self.losses = like.new_zeros(width)
        self.rate = like.new_full((), training.lr)
        self.taken, self.planned = like.new_zeros(width), like.new_ones(width)
        """Steps that the client in a slot has made, and will have made."""
        self.influence: Influence | None = None
        self.first = stacked(width, layout.parameters, like) if training.momentum or training.optimizer == "adam" else None
        self.second = stacked(width, layout.parameters, like) if training.optimizer == "adam" else None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._eager = 0

    def begin(self, rows: Tensor, keys: Tensor, received: Tensor, rate: float, influence: Influence | None) -> None:
        """A new exchange: `rows [steps, width, size]` and `keys [steps, width]` of all its batches."""
        self.rows[: len(rows)], self.keys[: len(keys)] = rows.to(self.rows.device), keys.to(self.keys.device)
        self.now.zero_()
        self.received.copy_(received)
        self.rate.fill_(rate)
        if influence is not None or self.influence is not None:
            self.influence, self._graph, self._eager = influence, None, 0

    def load(self, slot: int, weights: Tensor, steps: int, bits: Tensor | None) -> None:
        """A client takes a slot; `bits [P]` is its mask where slots have their own."""
        self.weights[slot] = weights
        self.planned[slot] = steps
        for tensor in (self.taken, self.losses, self.squares, self.first, self.second):
            if tensor is not None:
                tensor[slot] = 0.0
        if bits is not None and self.keep is not None:
            self.keep[slot] = bits

    def step(self) -> None:
        """One step in every slot."""
        if self._graph is not None:
            self._graph.replay()
            return
        if self.weights.device.type == "cuda" and self._eager >= _EAGER_STEPS:
            self._graph = captured(self._step)
            self._graph.replay()
            return
        self._step()
        self._eager += 1

    def _step(self) -> None:
        parameters, links = self.layout.parameters, self.layout.links
        x, y = self.data.training_batches(self.rows.index_select(0, self.now)[0], self.keys.index_select(0, self.now)[0])
        gradient, loss, statistics = self.kernel(self.weights, x, y)
        if self.frozen is not None:
            gradient[:, self.frozen] = 0.0
        self.losses += loss
        self.weights[:, parameters:] = statistics
        current = self.weights[:, :parameters]
        if self.squares is not None:
            self.squares += gradient[:, :links].square()
        rate = self.rate
        if self.influence is not None:
            gradient += self.influence.pull(current)
            rate = torch.as_tensor(self.influence.rate(current, self.taken, self.planned, self.rate, self.training.lr))[:, None]
        if self.training.proximal:
            gradient += self.training.proximal * (current - self.received)
        if self.keep is not None:
            gradient[:, :links] *= self.keep  # many times faster than filling
        self.taken += 1
        self._optimise(current, gradient, rate)
        if self.frozen is not None:
            current[:, self.frozen] = self.received[self.frozen]
        self.now += 1

    def _optimise(self, current: Tensor, gradient: Tensor, rate: Tensor) -> None:
        """SGD or Adam as `torch.optim` has them; every slot with a past of its own."""
        training = self.training
        if training.weight_decay:
            gradient += training.weight_decay * current
        if self.first is not None and self.second is not None:
            self.first.mul_(0.9).add_(gradient, alpha=0.1)
            self.second.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
            taken = self.taken.double()[:, None]  # 1 − 0.999 has few digits in float32
            first, second = (correction.to(current.dtype) for correction in (1 - 0.9**taken, (1 - 0.999**taken).sqrt()))
            current -= rate / first * self.first / (self.second.sqrt() / second + 1e-8)
            return
        if self.first is not None:
            gradient = self.first.mul_(training.momentum).add_(gradient)
        current.addcmul_(gradient, rate, value=-1)


def captured(step: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """A graph of one `step`; what it allocates is its own."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph
