"""The reference engine: one client after the other, in a plain PyTorch loop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from fedrts.client import Reply, Workbench, download
from fedrts.methods.contract import Exchange, State
from fedrts.tasks import Metrics


@dataclass
class SerialEngine:
    """Clients take turns at one workbench."""

    bench: Workbench
    rows: Sequence[Tensor]
    """The data rows of every client."""
    eval_batch_size: int

    def run(self, exchange: Exchange, state: State, round_index: int, clients: Sequence[int]) -> Iterator[Reply]:
        sent = download(exchange, {"weights": state.weights, **state.memory}, state.mask)
        for client in clients:
            yield self.bench.work(exchange, sent, state.mask, round_index, client, self.rows[client])

    def evaluate(self, state: State) -> Metrics:
        bench = self.bench
        bench.layout.bind(bench.module, state.weights.clone())
        return bench.data.task.evaluate(bench.module, bench.data.test_x, bench.data.test_y, self.eval_batch_size)
