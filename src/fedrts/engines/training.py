"""Local training of clients side by side: static tensors for a number of slots, one step for all of them.

Nothing in a step depends on Python's state: row numbers and keys of all steps lie in tensors, and a counter on the device says which are
next. So on CUDA a step is captured once as a graph and replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fedrts.client.local_step import Learner
from fedrts.client.workbench import Workbench
from fedrts.engines.kernels import Kernel
from fedrts.methods.contract import Influence
from fedrts.sparse.mask import Mask

_ALIGNED = 64
"""Rows of stacked weights start at multiples of this: kernels on tensor cores want round addresses."""
_EAGER_STEPS = 3
"""Steps before a graph is captured: they warm up what a capture cannot."""
_WIDTHS = {"cpu": 2, "cuda": 10}
"""At most this many graphs (on a CPU: recordings), for different numbers of slots that take part."""


def stacked(rows: int, length: int, like: Tensor) -> Tensor:
    """Return zeros `[rows, length]` whose rows begin at aligned addresses."""
    return like.new_zeros(rows, -(-length // _ALIGNED) * _ALIGNED)[:, :length]


class Slots:
    """`width` clients that train side by side on batches of `size`, in tensors that never move."""

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
        self.kernel, self.bench, self.layout = kernel, bench, bench.layout
        layout, training = bench.layout, bench.training
        device = like.device
        self.rows = torch.zeros(capacity, width, size, dtype=torch.int64, device=device)
        self.keys = torch.zeros(capacity, width, dtype=torch.int64, device=device)
        self.now = torch.zeros(1, dtype=torch.int64, device=device)
        self.weights = stacked(width, layout.length, like)
        self.received = like.new_zeros(layout.parameters)
        self.allowed = like.new_ones(masks, layout.parameters) if masks else None
        """1 where a parameter may change `[1, N_all]`, or `[width, N_all]` where clients have their own masks; None: all may."""
        self.squares = like.new_zeros(width, layout.links) if records else None
        self.losses = like.new_zeros(width)
        self.rate = like.new_full((), training.lr)
        self.taken, self.planned = like.new_zeros(width), like.new_ones(width)
        """Steps that the client in a slot has made, and will have made."""
        self.influence = influence
        self.marks = like.new_zeros(layout.parameters if influence else 0)
        self.optimizer = training.make_optimizer()
        self.past = {name: stacked(width, layout.parameters, like) for name in self.optimizer.remembers}
        self._learners: dict[int, Learner] = {}
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        """By the number of slots that take part."""
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self._eager = 0

    def begin(self, rows: Tensor, keys: Tensor, received: Tensor, rate: float) -> None:
        """Begin an exchange: `rows [steps, width, size]` and `keys [steps, width]` of all its batches."""
        self.rows[: len(rows)], self.keys[: len(keys)] = rows.to(self.rows.device), keys.to(self.keys.device)
        self.now.zero_()
        self.received.copy_(received)
        self.rate.fill_(rate)

    def mark(self, marks: Tensor) -> None:
        """Set the marks that the influence uses in this exchange, `[N_all]`."""
        self.marks.copy_(marks)

    def allow(self, slots: list[int], masks: Sequence[Mask]) -> None:
        """Let clients in `slots` change what their masks allow; if all share one mask, slot 0 has it."""
        if self.allowed is not None:
            for slot, mask in zip(slots, masks, strict=True):
                allowed = self.bench.allowed(mask)
                self.allowed[slot] = 1.0 if allowed is None else allowed

    def load(self, slots: list[int], weights: Tensor, steps: list[int]) -> None:
        """Put clients with `weights [k, n]` into `slots`, for this many steps."""
        self.weights[slots] = weights
        self.planned[slots] = self.planned.new_tensor(steps)
        for tensor in (self.taken, self.losses, self.squares, *self.past.values()):
            if tensor is not None:
                tensor[slots] = 0.0

    def step(self, active: int) -> None:
        """Run one step in the first `active` slots."""
        active = self._rounded(active)
        if self.weights.device.type == "cuda" and self._eager >= _EAGER_STEPS:
            if active not in self._graphs:
                self._graphs[active] = captured(lambda: self._step(active), self._pool)
            self._graphs[active].replay()
            return
        self._step(active)
        self._eager += 1

    def _rounded(self, active: int) -> int:
        """Round up the number of slots, so that few graphs are needed; idle slots take part."""
        width = len(self.weights)
        unit = -(-width // _WIDTHS[self.weights.device.type])
        return min(-(-active // unit) * unit, width)

    def _step(self, active: int) -> None:
        parameters, links = self.layout.parameters, self.layout.links
        rows, keys = self.rows.index_select(0, self.now)[0, :active], self.keys.index_select(0, self.now)[0, :active]
        weights = self.weights[:active]
        gradient, loss, statistics = self.kernel(weights, *self.bench.data.training_batches(rows, keys))
        if self.bench.frozen is not None:
            gradient[:, self.bench.frozen] = 0.0
        self.losses[:active] += loss
        weights[:, parameters:] = statistics
        if self.squares is not None:
            self.squares[:active] += gradient[:, :links].square()
        self._learner(active).step(gradient, self.rate)
        self.now += 1

    def _learner(self, active: int) -> Learner:
        """Return the clients in the first `active` slots."""
        if active not in self._learners:
            allowed = self.allowed if self.allowed is None or len(self.allowed) == 1 else self.allowed[:active]
            self._learners[active] = Learner(
                self.bench.training,
                self.optimizer,
                self.weights[:active, : self.layout.parameters],
                self.received,
                allowed,
                past={name: vectors[:active] for name, vectors in self.past.items()},
                taken=self.taken[:active],
                planned=self.planned[:active],
                influence=self.influence,
                marks=self.marks,
            )
        return self._learners[active]


def captured(step: Callable[[], None], pool: Any) -> torch.cuda.CUDAGraph:
    """Capture one `step` as a graph. Graphs that never replay at the same time may share a memory `pool`."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        step()
    return graph
