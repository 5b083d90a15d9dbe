"""What it costs the server to judge and add up the replies of clients that worked side by side: one by one, and as one.

    python benchmarks/replies.py [--clients 50] [--repeat 20] [--device cpu]

The replies are those of one round on handwritten digits, ten samples a client, made before the clock starts; timed are the guard, the
contributions, the sums, and what is noted about units. On a CPU it is the process's own time that counts, whatever else the machine
does. On a GPU the time of small models is that of starting operations, so these are counted too, as they are on a GPU: in parts of its
size, with the sums as products. Prints a table; benchmarks/results/replies.md is one such run.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fedrts import __version__, config
from fedrts.client.order import Order
from fedrts.engines import batched
from fedrts.methods.contract import State
from fedrts.runs.build import assemble
from fedrts.server import aggregate
from fedrts.server.collect import Arrival, Question, add_up
from fedrts.server.engine import Gathering

CASES: list[tuple[str, int, dict[str, Any]]] = [
    ("fedavg, cnn, float32", 1, {"method": "fedavg", "model": "cnn"}),
    ("fedrts, mlp, float32, inner round", 1, {"method": "fedrts", "model": "mlp"}),
    ("fedrts, mlp, float32, outer round", 0, {"method": "fedrts", "model": "mlp"}),
    ("fedrts, mlp, int8, inner round", 1, {"method": "fedrts", "model": "mlp", "wire": {"value_type": "int8"}}),
]


class Operations(TorchDispatchMode):
    """Counts operations on tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += 1
        return func(*args, **(kwargs or {}))


@dataclass
class Case:
    """A round's question, and the replies to it."""

    question: Question
    single: Sequence[Arrival]
    together: Sequence[Arrival]
    on_gpu: Sequence[Arrival]
    """Gathering in parts of a GPU's size."""


def case_of(index: int, settings: dict[str, Any], clients: int, device: str) -> Case:
    run = assemble(
        config.resolve(
            {"recipe": "paper", "data": "digits", "device": device},
            {
                "clients": {"total": clients, "per_round": clients, "partition": "iid", "min_size": 1},
                "train": {"epochs": 1, "batch_size": 10},
                "engine": {"name": "batched", "slots": clients, "workers": 1},
                **settings,
            },
        )
    )
    rows = [part[:10] for part in run.rows]
    engine = run.plan.engine
    assert isinstance(engine, Gathering)
    engine.rows = rows  # type: ignore[attr-defined]
    state = run.method.begin(run.setup)
    current = run.plan.round(index, state.mask)
    order = Order.of(run.plan.exchanges(current)[0], current, run.layout, state, 0)
    samples = dict.fromkeys(range(clients), 10)
    question = Question(order, State(state.values, state.mask), run.method, run.plan.guard, samples, list(samples), clients)
    single, together = list(run.plan.engine.run(order, question.asked)), list(engine.run_together(order, question.asked))
    with mock.patch.dict(batched._AT_ONCE, cpu=batched._AT_ONCE["cuda"]):
        return Case(question, single, together, list(engine.run_together(order, question.asked)))


def milliseconds(question: Question, replies: Sequence[Arrival], repeat: int) -> float:
    times = []
    for _ in range(repeat):
        started = now(question)
        assert len(add_up(question, replies).counted) == question.wanted
        times.append(1e3 * (now(question) - started))
    return statistics.median(times)


def now(question: Question) -> float:
    if not question.state.values.is_cuda:
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def operations(question: Question, replies: Sequence[Arrival]) -> int:
    counted = Operations()
    with mock.patch.object(aggregate, "_IN_TURN", set()), counted:
        add_up(question, replies)
    return counted.number


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    where = torch.cuda.get_device_name() if options.device.startswith("cuda") else f"one core, {platform.machine()}"
    print(f"fedrts {__version__}, torch {torch.__version__}, {where}; {options.clients} clients, medians of {options.repeat}\n")
    print("| replies | parameters | ms, one by one | ms, as one | operations, one by one | operations, as one |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for name, index, settings in CASES:
        case = case_of(index, settings, options.clients, options.device)
        add_up(case.question, case.together)  # what is cached once is no part of a round
        spent = [milliseconds(case.question, replies, options.repeat) for replies in (case.single, case.together)]
        started = [operations(case.question, replies) for replies in (case.single, case.on_gpu)]
        parameters = case.question.order.frame.layout.parameters
        print(f"| {name} | {parameters:,} | {spent[0]:.1f} | {spent[1]:.1f} | {started[0]:,} | {started[1]:,} |", flush=True)


if __name__ == "__main__":
    main()
