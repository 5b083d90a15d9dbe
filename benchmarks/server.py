"""What a round costs the server: FedRTS on resnet18's links against plain averaging of dense models, in one run.

    python benchmarks/server.py [--density 0.2] [--clients 10] [--repeat 7]

Ten rounds (one outer, nine inner) with ready-made client messages; only the server's work is timed: contributions,
sums, posterior, draw, top-k. Prints a table; benchmarks/results/server.md is one such run.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from fedrts import __version__, methods
from fedrts.client.order import Order, Reply
from fedrts.methods.contract import Round, Setup, State
from fedrts.server.aggregate import Sums
from fedrts.server.guard import Guard, faults
from fedrts.sparse import random
from fedrts.sparse.layout import Entry, Layout
from fedrts.sparse.schedule import Schedule
from fedrts.wire.fields import Message, Selection

_STEP = 0.1
"""How far local training moves a weight, in units of an initial one."""


def resnet18_layout() -> Layout:
    """The shapes of torchvision's resnet18 with 10 classes: 11,166,912 prunable weights."""
    shapes = [(64, 3, 7, 7)]
    for stage, width in enumerate((64, 128, 256, 512)):
        before = max(width // 2, 64)
        shapes += [(width, before, 3, 3), *[(width, width, 3, 3)] * 3]
        if stage:
            shapes.append((width, before, 1, 1))
    entries = tuple(Entry((f"conv{index}",), shape) for index, shape in enumerate(shapes))
    return Layout(entries, (Entry(("rest",), (14_730,)),), (Entry(("statistics",), (9_600,)),))


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def play_round(method: methods.base.Method, state: State, current: Round, messages: list[Message]) -> State:
    sums = Sums()
    for number, message in enumerate(messages):
        sums.add(method.contribution(dict(message), state, current), 400 + number)
    return method.update(state, sums.mean(), current, lambda purpose: random.key(current.index, purpose))


def messages_of(state: State, current: Round, clients: int) -> list[Message]:
    messages: list[Message] = []
    inactive = state.mask.inactive
    for client in range(clients):
        message: Message = {"weights": torch.add(state.values, torch.randn(len(state.values)), alpha=_STEP)}
        if current.outer:
            chosen = random.permutation(random.key("votes", client), len(inactive))[: sum(current.quota)].sort().values
            message["votes"] = Selection(inactive[chosen], len(state.mask.bits))
        messages.append(message)
    return messages


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--density", type=float, default=0.2)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--repeat", type=int, default=7)
    options = parser.parse_args()
    torch.manual_seed(0)

    layout = resnet18_layout()
    dense = [torch.randn(layout.length) for _ in range(options.clients)]

    def average() -> torch.Tensor:
        total = torch.zeros(layout.length)
        for weights in dense:
            total.add_(weights, alpha=1 / len(dense))
        return total

    method = methods.get(methods.DEFAULT)(density=options.density)
    begin = method.begin(Setup(layout, dense[0], (3, 32, 32), rng=lambda purpose: random.key(0, purpose)))
    schedule = Schedule()
    turns = [(current := Round.of(index, schedule, begin.mask, layout), messages_of(begin, current, options.clients)) for index in (0, 1)]
    times: dict[str, list[float]] = {"plain": [], "outer": [], "inner": []}
    for _ in range(options.repeat):  # turn by turn, because other work comes and goes on a shared machine
        times["plain"].append(seconds(average))
        for current, messages in turns:
            spent = seconds(partial(play_round, method, begin, current, messages))
            times["outer" if current.outer else "inner"].append(spent)
    plain, one_outer, one_inner = (statistics.median(times[name]) for name in ("plain", "outer", "inner"))

    current = Round.of(1, schedule, begin.mask, layout)
    order = Order.of(method.exchanges(current)[0], current, layout, begin, key=0)
    replies = [Reply(client, 1, 0, 400, message) for client, message in enumerate(messages_of(begin, current, options.clients))]
    samples = dict.fromkeys(range(options.clients), 400)
    reasons = faults(replies, order, Guard(), samples)
    assert reasons == [None] * options.clients, reasons
    checks = statistics.median(seconds(lambda: faults(replies, order, Guard(), samples)) for _ in range(5))
    mean = (one_outer + 9 * one_inner) / 10

    print(
        f"fedrts {__version__}, torch {torch.__version__}, {platform.machine()}, {torch.get_num_threads()} cores; {layout.links:,} links, ",
        end="",
    )
    print(f"density {options.density}, {options.clients} clients; medians of {options.repeat} repeats\n")
    print("| server's work | ms | × plain averaging |\n| --- | ---: | ---: |")
    rows = [
        ("plain averaging of dense models", plain),
        (f"{methods.DEFAULT}, inner round", one_inner),
        (f"{methods.DEFAULT}, outer round", one_outer),
    ]
    rows += [(f"{methods.DEFAULT}, mean of nine inner and one outer", mean), ("the guard's checks of all replies, besides", checks)]
    for name, value in rows:
        print(f"| {name} | {value * 1e3:.0f} | {value / plain:.2f} |")


if __name__ == "__main__":
    main()
