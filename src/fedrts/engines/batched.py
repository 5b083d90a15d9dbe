"""Many clients as one program: their weights stacked `[clients, n]`, their batches gathered by row number, one call for all of them.

What a client does is the same as in `client.py`; here every tensor has a leading axis. Exchanges with steps that are rare (set-up) are carried
out one client after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import singledispatchmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from fedrts.client import Batch, LocalTraining, Order, Reply, Workbench
from fedrts.engines.serial import SerialEngine
from fedrts.engines.slots import Turn, length, schedule
from fedrts.errors import note
from fedrts.methods.contract import Influence, ProbeGradient, Rewire, State, Step, Train
from fedrts.sparse import random
from fedrts.sparse.layout import Layout
from fedrts.sparse.mask import Mask
from fedrts.tasks import Metrics, Task


class Objective(nn.Module):
    """A model with its task, as a function of a flat vector."""

    def __init__(self, module: nn.Module, task: Task, layout: Layout) -> None:
        super().__init__()
        self.module, self.task, self.layout = module, task, layout

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.task.loss(self.module, x, y)

    def loss(self, parameters: Tensor, buffers: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Loss of a batch at `parameters [N_all]`, and the BatchNorm statistics `[b]` after it, from `buffers [b]`."""
        layout = self.layout
        tensors = layout.views(parameters, layout.parameter_entries)
        statistics = {name: view.clone() for name, view in layout.views(buffers, layout.buffers).items()}  # updates of views are lost
        constants = {name: value.clone() for name, value in layout.constants.items()}
        named = {f"module.{name}": tensor for name, tensor in (tensors | statistics | constants).items()}
        loss: Tensor = functional_call(self, named, (x, y))
        return loss, torch.cat([part.flatten() for part in statistics.values()]) if statistics else buffers


@dataclass
class Cohort:
    """Clients that work through an exchange together; tensors have the clients as leading axis."""

    clients: list[int]
    rows: list[Tensor]
    keys: list[int]
    mask: Mask
    tensors: dict[str, Tensor]
    flops: list[float]
    losses: Tensor
    """Sum over steps of the training loss `[clients]`."""
    steps: list[int]
    own: list[Mask] | None = None
    """Masks of their own, where they have rewired."""

    @property
    def masks(self) -> list[Mask]:
        return self.own or [self.mask] * len(self.clients)


@dataclass
class BatchedEngine:
    """Clients train side by side on one device."""

    bench: Workbench
    rows: Sequence[Tensor]
    eval_batch_size: int
    slots: int = 16
    """How many clients train at once."""
    _objective: Objective = field(init=False)
    _serial: SerialEngine = field(init=False)

    def __post_init__(self) -> None:
        bench = self.bench
        self._objective = Objective(bench.module, bench.data.task, bench.layout)
        self._serial = SerialEngine(bench, self.rows, self.eval_batch_size)
        self._gradient = vmap(grad_and_value(self._objective.loss, has_aux=True))

    def evaluate(self, state: State) -> Metrics:
        return self._serial.evaluate(state)

    def run(self, order: Order, clients: Sequence[int]) -> Iterator[Reply]:
        if not all(isinstance(step, Train | ProbeGradient | Rewire) for step in order.exchange.steps):
            yield from self._serial.run(order, clients)
            return
        for start in range(0, len(clients), self.slots):
            yield from self._work(order, list(clients[start : start + self.slots]))

    def _work(self, order: Order, clients: list[int]) -> Iterator[Reply]:
        index, exchange, bench = order.round.index, order.exchange, self.bench
        received = {name: entry.put(order.sent[name], order.frame) for name, entry in exchange.down.items()}
        tensors = {name: tensor.expand(len(clients), *tensor.shape) for name, tensor in received.items()}
        tensors["received"] = tensors["weights"]
        tensors["weights"] = tensors["weights"].clone()
        keys = [random.key(bench.seed, "client", index, client) for client in clients]
        rows = [self.rows[client] for client in clients]
        nothing = torch.zeros(len(clients), dtype=order.frame.dtype, device=bench.gradient.device)
        cohort = Cohort(clients, rows, keys, order.frame.mask, tensors, [0.0] * len(clients), nothing, [0] * len(clients))
        bench.module.train()
        for step in exchange.steps:
            self.perform(step, cohort)
        losses = cohort.losses.tolist()
        for place, client in enumerate(clients):
            own = {name: tensor[place] for name, tensor in cohort.tensors.items()}
            frame = order.upload_frame(random.key(keys[place], "rounding", order.round.exchange))
            message = {name: entry.take(own, frame) for name, entry in exchange.up.items()}
            loss = losses[place] / cohort.steps[place] if cohort.steps[place] else float("nan")
            yield Reply(client, index, order.round.exchange, len(rows[place]), message, cohort.flops[place], loss)

    @singledispatchmethod
    def perform(self, step: Step, cohort: Cohort) -> None:
        """Carry out one step with all clients."""
        raise TypeError(f"no client knows the step {step!r}")

    @perform.register
    def _(self, step: Train, cohort: Cohort) -> None:
        bench = self.bench
        first, last = (int(share * bench.training.epochs) for share in (step.start, step.stop))
        batches = [
            [batch for epoch in range(first, last) for batch in bench.batches(rows, key, epoch)]
            for rows, key in zip(cohort.rows, cohort.keys, strict=True)
        ]
        if step.record:
            cohort.tensors[step.record] = torch.zeros_like(cohort.tensors["weights"][:, : bench.layout.links])
        for size, members in _by_size(batches).items():
            turns = schedule([len(batches[member]) for member in members], min(self.slots, len(members)))
            Training(self, step, cohort, [members[t.client] for t in turns], turns, [batches[members[t.client]] for t in turns], size).run()
        for place, (own, mask) in enumerate(zip(batches, cohort.masks, strict=True)):
            samples = sum(len(batch) for batch in own)
            cohort.steps[place] += len(own)
            cohort.flops[place] += samples * bench.macs.training(mask, dense=bool(step.record))

    @perform.register
    def _(self, step: ProbeGradient, cohort: Cohort) -> None:
        bench = self.bench
        epoch, links = bench.training.epochs, bench.layout.links
        batches = [list(bench.batches(rows, key, epoch)) for rows, key in zip(cohort.rows, cohort.keys, strict=True)]
        if step.batches == "one":
            batches = [own[:1] for own in batches]
        weights = cohort.tensors["weights"]
        total = torch.zeros_like(weights[:, :links])
        for _, members in _by_size(batches).items():
            for number in range(max(len(batches[member]) for member in members)):
                there = [member for member in members if number < len(batches[member])]
                x, y = self._batch([batches[member][number] for member in there])
                gradient, _ = self.gradients(weights[there], x, y)
                total[there] += gradient[:, :links] * x.shape[1]
        samples = [sum(len(batch) for batch in own) for own in batches]
        cohort.tensors[step.into] = total / torch.tensor(samples, device=total.device, dtype=total.dtype).clamp_(min=1)[:, None]
        for place, mask in enumerate(cohort.masks):
            cohort.flops[place] += samples[place] * bench.macs.probing(mask)

    @perform.register
    def _(self, step: Rewire, cohort: Cohort) -> None:
        chosen = [
            step.choose({name: tensor[place] for name, tensor in cohort.tensors.items()}, mask) for place, mask in enumerate(cohort.masks)
        ]
        cohort.own = [new for _, new in chosen]
        cohort.tensors["mask"] = torch.stack([new.bits for new in cohort.own])
        kept = torch.stack([kept.bits for kept, _ in chosen])
        cohort.tensors["weights"][:, : kept.shape[1]].masked_fill_(~kept, 0.0)

    def gradients(self, weights: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Gradients `[k, N_all]`, and (losses `[k]`, statistics `[k, b]`), of k clients with `weights [k, n]` on batches `[k, m, …]`."""
        parameters = self.bench.layout.parameters
        found: tuple[Tensor, tuple[Tensor, Tensor]] = self._gradient(weights[:, :parameters], weights[:, parameters:], x, y)
        return found

    def _batch(self, batches: list[Batch]) -> tuple[Tensor, Tensor]:
        rows = torch.stack([batch.rows for batch in batches])
        keys = torch.tensor([random.signed(batch.key or 0) for batch in batches], device=rows.device)
        return self.bench.data.training_batches(rows, keys)


@dataclass
class Training:
    """The slots of one training step, for clients whose batches have one size."""

    engine: BatchedEngine
    step: Train
    cohort: Cohort
    members: list[int]
    """Places in the cohort, by turn."""
    turns: list[Turn]
    batches: list[list[Batch]]
    """By turn."""
    size: int

    def __post_init__(self) -> None:
        slots, steps = max(turn.slot for turn in self.turns) + 1, length(self.turns)
        rows = torch.zeros(steps, slots, self.size, dtype=torch.int64)
        keys = torch.zeros(steps, slots, dtype=torch.int64)
        for turn, own in zip(self.turns, self.batches, strict=True):
            rows[turn.start : turn.stop, turn.slot] = torch.stack([batch.rows for batch in own]).cpu()
            keys[turn.start : turn.stop, turn.slot] = torch.tensor([random.signed(batch.key or 0) for batch in own])
        device = self.cohort.tensors["weights"].device
        self.rows, self.keys = rows.to(device), keys.to(device)
        self.weights = self.cohort.tensors["weights"].new_zeros(slots, self.cohort.tensors["weights"].shape[1])
        self.optimizer = Optimizer(self.engine.bench.training, slots, self.weights)
        parameters = self.engine.bench.layout.parameters
        received = self.cohort.tensors["received"][0, :parameters]
        self.received = received
        self.influence = self.step.influence(received, self.cohort.mask) if self.step.influence else None
        full = self.cohort.own is None and self.cohort.mask.is_full
        self.inactive = None if full else torch.zeros(slots, self.engine.bench.layout.links, dtype=torch.bool, device=device)
        self.losses = self.weights.new_zeros(slots)
        self.squares = self.weights.new_zeros(slots, self.engine.bench.layout.links) if self.step.record else None

    def run(self) -> None:
        starting, ending = _events(self.turns, "start"), _events(self.turns, "stop")
        numbers = torch.zeros(len(self.weights), dtype=torch.int64)
        for now in range(length(self.turns)):
            for place in starting.get(now, ()):
                self.load(place)
            self.advance(now)
            for place in ending.get(now + 1, ()):
                self.store(place)
        del numbers

    def load(self, place: int) -> None:
        """A client takes its slot."""
        slot, member, cohort = self.turns[place].slot, self.members[place], self.cohort
        self.weights[slot] = cohort.tensors["weights"][member]
        self.optimizer.reset(slot)
        self.losses[slot] = 0.0
        if self.inactive is not None:
            self.inactive[slot] = ~cohort.masks[member].bits
        if self.squares is not None:
            self.squares[slot] = 0.0

    def store(self, place: int) -> None:
        """A client leaves its slot with what it has become."""
        turn, member, cohort = self.turns[place], self.members[place], self.cohort
        cohort.tensors["weights"][member] = self.weights[turn.slot]
        cohort.losses[member] += self.losses[turn.slot]
        if self.squares is not None and self.step.record:
            cohort.tensors[self.step.record][member] = self.squares[turn.slot] / (turn.stop - turn.start)

    def advance(self, now: int) -> None:
        """One step in every slot."""
        bench = self.engine.bench
        parameters, links = bench.layout.parameters, bench.layout.links
        x, y = bench.data.training_batches(self.rows[now], self.keys[now])
        gradient, (loss, statistics) = self.engine.gradients(self.weights, x, y)
        self.losses += loss
        self.weights[:, parameters:] = statistics
        current = self.weights[:, :parameters]
        if self.squares is not None:
            self.squares += gradient[:, :links].square()
        rate: Tensor | float = bench.training.lr
        if self.influence is not None:
            gradient = gradient + self.influence.pull(current)
            rate = self._rates(now, current)
        if bench.training.proximal:
            gradient = gradient + bench.training.proximal * (current - self.received)
        if self.inactive is not None:
            gradient[:, :links].masked_fill_(self.inactive, 0.0)
        self.optimizer.step(current, gradient, rate)
        if bench.frozen is not None:
            current[:, bench.frozen] = self.received[bench.frozen]

    def _rates(self, now: int, current: Tensor) -> Tensor:
        """The rate of every slot's client `[slots, 1]`."""
        assert self.influence is not None
        training = self.engine.bench.training
        rates = current.new_full((len(current), 1), training.lr)
        for turn in self.turns:
            if turn.start <= now < turn.stop:
                own = self.influence.rate(current[turn.slot], now - turn.start, turn.stop - turn.start, training.lr, training.lr)
                rates[turn.slot] = own
        return rates


class Optimizer:
    """SGD or Adam of stacked parameters `[slots, N_all]`, each slot with a past of its own; as `torch.optim` computes them."""

    def __init__(self, training: LocalTraining, slots: int, like: Tensor) -> None:
        self.training = training
        self.moments: Mapping[str, Tensor] = {}
        self._like, self._slots = like, slots
        self.taken = torch.zeros(slots, 1, dtype=like.dtype, device=like.device)
        self._first: Tensor | None = None
        self._second: Tensor | None = None

    def reset(self, slot: int) -> None:
        self.taken[slot] = 0
        for moment in (self._first, self._second):
            if moment is not None:
                moment[slot] = 0.0

    def step(self, parameters: Tensor, gradient: Tensor, rate: Tensor | float) -> None:
        """Change `parameters` in place; `rate` is one number, or one of every slot `[slots, 1]`."""
        training = self.training
        if training.weight_decay:
            gradient = gradient + training.weight_decay * parameters
        self.taken += 1
        if training.optimizer == "adam":
            first, second = self._moments(gradient)
            first.mul_(0.9).add_(gradient, alpha=0.1)
            second.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
            size = rate / (1 - 0.9**self.taken)
            parameters -= size * first / ((second.sqrt() / (1 - 0.999**self.taken).sqrt()) + 1e-8)
            return
        if training.momentum:
            first, _ = self._moments(gradient)
            gradient = first.mul_(training.momentum).add_(gradient)
        if isinstance(rate, Tensor):
            parameters -= rate * gradient
        else:
            parameters.sub_(gradient, alpha=rate)

    def _moments(self, like: Tensor) -> tuple[Tensor, Tensor]:
        if self._first is None or self._second is None:
            self._first, self._second = torch.zeros_like(like), torch.zeros_like(like)
        return self._first, self._second


def _by_size(batches: Sequence[Sequence[Batch]]) -> dict[int, list[int]]:
    """Clients by the size of their batches; those without a batch are left out."""
    groups: dict[int, list[int]] = {}
    for member, own in enumerate(batches):
        if own:
            groups.setdefault(len(own[0]), []).append(member)
    return groups


def _events(turns: Sequence[Turn], end: str) -> dict[int, list[int]]:
    """Turns by the time at which they start or stop."""
    events: dict[int, list[int]] = {}
    for place, turn in enumerate(turns):
        events.setdefault(getattr(turn, end), []).append(place)
    return events


_: Any = (note, Influence)
