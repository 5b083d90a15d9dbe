"""The reference engine: one client after the other, in a plain PyTorch loop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from fedrts.client import Order, Reply, Workbench
from fedrts.methods.contract import State
from fedrts.tasks import Metrics

_WORTH_THREADS = 5e7
"""Multiply-accumulates of a batch's forward pass from which on several threads pay."""


@dataclass
class SerialEngine:
    """Clients take turns at one workbench."""

    bench: Workbench
    rows: Sequence[Tensor]
    """The data rows of every client."""
    eval_batch_size: int

    def __post_init__(self) -> None:
        self.threads = _threads(self.bench.macs.dense * self.bench.training.batch_size)

    def run(self, order: Order, clients: Sequence[int]) -> Iterator[Reply]:
        for client in clients:
            with self._limited():
                reply = self.bench.work(order, client, self.rows[client])
            yield reply

    def evaluate(self, state: State) -> Metrics:
        bench = self.bench
        bench.layout.bind(bench.module, state.weights.clone())
        with self._limited():
            return bench.data.evaluate(bench.module, self.eval_batch_size)

    @contextmanager
    def _limited(self) -> Iterator[None]:
        before = torch.get_num_threads()
        torch.set_num_threads(min(self.threads, before))
        try:
            yield
        finally:
            torch.set_num_threads(before)


def _threads(macs_per_batch: float) -> int:
    """Threads for a model of this size: a small one gains nothing from a second thread and loses much where cores are busy."""
    return 1 if macs_per_batch < _WORTH_THREADS else torch.get_num_threads()
