"""The loop: sample clients, run the exchanges, sum, update, evaluate."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedrts.aggregate import Sums
from fedrts.engines import Engine
from fedrts.errors import InputError
from fedrts.methods.base import Method
from fedrts.methods.contract import Round, Setup, State
from fedrts.sparse import random
from fedrts.sparse.layout import Layout
from fedrts.sparse.mask import Mask
from fedrts.sparse.schedule import Schedule

ALWAYS_EVALUATED = 10
"""The last rounds of a run, each of which is evaluated."""

_BINS = 20


@dataclass(frozen=True)
class Plan:
    """A run, apart from its state."""

    method: Method
    engine: Engine
    layout: Layout
    schedule: Schedule
    rounds: int
    clients: int
    per_round: int
    seed: int
    eval_every: int

    def sample(self, index: int) -> list[int]:
        """C_t: the clients of a round, a function of (seed, round) alone; the set-up is held with round 0's."""
        return random.choose(random.key(self.seed, "sample", max(index, 0)), self.clients, self.per_round)

    def key(self, index: int, purpose: str) -> int:
        return random.key(self.seed, "server", index, purpose)

    def is_evaluated(self, index: int) -> bool:
        return index >= 0 and ((index + 1) % self.eval_every == 0 or index >= self.rounds - ALWAYS_EVALUATED)


@dataclass
class Record:
    """One line of history.jsonl."""

    round: int
    outer: bool
    clients: list[int]
    rejected: list[dict[str, Any]] = field(default_factory=list)
    loss: float | None = None
    accuracy: float | None = None
    perplexity: float | None = None
    density: float = 1.0
    links_changed: float = 0.0
    upload_bytes: int = 0
    download_bytes: int = 0
    flops: float = 0.0
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Played:
    """What a round leaves behind."""

    state: State
    record: Record
    topology: dict[str, Any] | None
    """One line of topology.jsonl, in outer rounds."""


def begin(plan: Plan, setup: Setup) -> State:
    """The state before anything travelled."""
    return plan.method.begin(setup)


def play(plan: Plan, state: State, first: int) -> Iterator[Played]:
    """Rounds from `first` (-1: the set-up) to the last, each with the state after it."""
    for index in range(first, plan.rounds):
        if index < 0 and not plan.method.exchanges(Round.of(index, plan.schedule, state.mask)):
            continue
        played = play_round(plan, state, index)
        state = played.state
        yield played


def play_round(plan: Plan, before: State, index: int) -> Played:
    """One round with all its exchanges; `before` is left as it is."""
    started = time.perf_counter()
    clients = plan.sample(index)
    state = before
    record = Record(index, plan.schedule.is_outer(index), clients)
    exchanges = plan.method.exchanges(Round.of(index, plan.schedule, state.mask))
    for number in range(len(exchanges)):
        current = Round.of(index, plan.schedule, state.mask, number)
        exchange = plan.method.exchanges(current)[number]  # of the mask as the exchange before left it
        sums = Sums()
        for reply in plan.engine.run(exchange, state, index, clients):
            sums.add(plan.method.contribution(reply.message, state, current), reply.samples)
            record.upload_bytes += reply.upload_bytes
            record.download_bytes += reply.download_bytes
            record.flops += reply.flops
        mean = sums.mean()
        _check_finite(mean, index)
        state = plan.method.update(state, mean, current, lambda purpose: plan.key(index, purpose))
    record.density = density(plan.layout, state.mask)
    record.links_changed = state.mask.gained(before.mask) / max(state.mask.number, 1)
    if plan.is_evaluated(index):
        metrics = plan.engine.evaluate(state)
        record.loss, record.accuracy, record.perplexity = (metrics.get(name) for name in ("loss", "accuracy", "perplexity"))
    record.seconds = time.perf_counter() - started
    return Played(state, record, describe(plan, before, state, index) if record.outer else None)


def density(layout: Layout, mask: Mask) -> float:
    """(active + dense) / all parameters."""
    return (mask.number + layout.parameters - layout.links) / layout.parameters


def describe(plan: Plan, before: State, after: State, index: int) -> dict[str, Any]:
    """How an outer round changed the topology: overlap, links by layer, what the method believes of them."""
    gained = after.mask.bits & ~before.mask.bits
    names = [entry.name for entry in plan.layout.layers]
    changed = [int(part.count_nonzero()) for part in gained.split(list(after.mask.sizes))]
    kept = (after.mask.bits & before.mask.bits).count_nonzero()
    belief = plan.method.belief(after)
    return {
        "round": index,
        "overlap": float(kept) / max(before.mask.number, 1),
        "active": dict(zip(names, after.mask.counts, strict=True)),
        "changed": dict(zip(names, changed, strict=True)),
        "belief_active": _histogram(belief, after.mask.active),
        "belief_inactive": _histogram(belief, after.mask.inactive),
    }


def _histogram(belief: Tensor | None, at: Tensor) -> list[int] | None:
    """Counts in 20 equal bins of [0, 1]."""
    if belief is None:
        return None
    bins = (belief[at] * _BINS).long().clamp_(0, _BINS - 1)
    counts: list[int] = torch.bincount(bins, minlength=_BINS).tolist()
    return counts


def _check_finite(mean: dict[str, Tensor], index: int) -> None:
    for name, tensor in mean.items():
        if not torch.isfinite(tensor).all():
            raise InputError(f"the mean of '{name}' is not finite in round {index}: training diverged; lower train.lr")
