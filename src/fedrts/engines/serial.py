"""The reference engine: one client at a time, in a plain PyTorch loop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from fedrts.client.order import Order, Reply
from fedrts.client.workbench import Workbench
from fedrts.engines import sparse_kernel
from fedrts.engines.kinds import EngineKind
from fedrts.engines.settings import EngineSettings
from fedrts.engines.threads import threads_for
from fedrts.methods.contract import State
from fedrts.programs.program import Evaluated
from fedrts.tasks import Metrics


@dataclass
class SerialEngine:
    """Clients take turns at one workbench."""

    bench: Workbench
    rows: Sequence[Tensor]
    """The data rows of every client."""
    eval_batch_size: int

    @property
    def label(self) -> str:
        return "serial engine" if self.bench.program is None else "serial engine (sparse)"

    def run(self, order: Order, clients: Sequence[int]) -> Iterator[Reply]:
        for client in clients:
            with threads_for(self.bench.batch_macs):
                reply = self.bench.work(order, client, self.rows[client].to(self.bench.device))
            yield reply

    def evaluate(self, state: State) -> Metrics:
        bench = self.bench
        if bench.program is not None:
            return bench.data.evaluate(Evaluated(bench.program, state.values, state.mask), self.eval_batch_size)
        bench.layout.bind(bench.module, state.weights.clone())
        with threads_for(self.bench.batch_macs):
            return bench.data.evaluate(bench.module, self.eval_batch_size)


class Serial(EngineKind):
    """One client at a time."""

    bf16 = False

    def decided(self, asked: EngineSettings, bench: Workbench, per_round: int) -> EngineSettings:
        return asked

    def make(self, settings: EngineSettings, bench: Workbench, rows: Sequence[Tensor], eval_batch_size: int) -> SerialEngine:
        return SerialEngine(bench, rows, eval_batch_size)

    def candidates(self, asked: EngineSettings, bench: Workbench, per_round: int) -> list[EngineSettings]:
        return [sparse_kernel.required(asked, bench) if asked.kernel == "sparse" else asked]
