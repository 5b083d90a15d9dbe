"""Many clients as one program: their weights stacked `[clients, n]`, their batches gathered by row number, one call for all of them.

What a client does is the same as in `client/steps.py`; here every tensor has a leading axis. Exchanges with steps of set-ups, which happen
once, are carried out one client after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property, singledispatchmethod
from typing import NamedTuple

import torch
from torch import Tensor

from fedrts.client import sparse_training
from fedrts.client.job import Job
from fedrts.client.order import Order, Replies, Reply
from fedrts.client.workbench import Workbench
from fedrts.data.holdings import Holdings
from fedrts.engines.kernels import Kernel
from fedrts.engines.serial import SerialEngine
from fedrts.engines.slots import Turn, busy, length, schedule
from fedrts.engines.threads import threads_for
from fedrts.engines.training import Slots
from fedrts.errors import note
from fedrts.methods.contract import ProbeGradient, Rewire, State, Step, Train
from fedrts.sparse import random
from fedrts.sparse.mask import Mask
from fedrts.sparse.units import start_anew, start_key
from fedrts.tasks import Metrics

_AT_ONCE = {"cpu": 1 << 18, "cuda": 1 << 25}
"""Numbers, in about as many of which replies come as one: on a CPU what fits its caches, else what hardly counts beside other memory."""


class Batches(NamedTuple):
    """All batches of a client."""

    rows: Tensor
    """`[steps, size]`."""
    keys: Tensor
    """`[steps]`, of their augmentation."""


@dataclass
class Cohort:
    """Clients that run an exchange together; clients are the tensors' leading axis."""

    order: Order
    clients: list[int]
    rows: list[Tensor]
    keys: list[int]
    mask: Mask
    tensors: dict[str, Tensor]
    losses: Tensor
    """Sum over steps of the training loss `[clients]`."""
    steps: list[int]
    own: list[Mask] | None = None
    """Masks of their own, where they have rewired."""
    worker: int = 0

    @property
    def round_index(self) -> int:
        return self.order.round.index

    @property
    def masks(self) -> list[Mask]:
        return self.own or [self.mask] * len(self.clients)


@dataclass
class BatchedEngine:
    """Clients train side by side on one device."""

    bench: Workbench
    rows: Sequence[Tensor]
    """The data rows of every client, on the CPU."""
    kernel: Kernel
    slots: int
    """How many clients train side by side; fewer if memory runs out."""
    together: int
    """How many clients' weights are held at once; the others wait."""
    serial: SerialEngine
    """For the steps of set-ups, which happen once."""
    workers: int = 1
    """Threads that share the clients, each on a core of its own."""
    _known: dict[tuple[object, ...], Slots] = field(default_factory=dict)

    @cached_property
    def _longest(self) -> int:
        return Holdings.of(self.rows).largest

    @property
    def label(self) -> str:
        threads = f" on {self.workers} threads" if self.workers > 1 else ""
        how = self.kernel.label if self.bench.program is None else "sparse"
        return f"batched engine ({self.slots} {how} slots{threads})"

    @property
    def width(self) -> int:
        """Slots per worker."""
        return -(-self.slots // self.workers)

    def evaluate(self, state: State) -> Metrics:
        with self.kernel.objective.reading():
            return self.serial.evaluate(state)

    def run(self, order: Order, clients: Sequence[int]) -> Iterator[Reply]:
        for some in self.run_together(order, clients):
            yield from some if isinstance(some, Replies) else (some,)

    def run_together(self, order: Order, clients: Sequence[int]) -> Iterator[Reply | Replies]:
        """Yield the same replies, those of clients side by side as one."""
        if not all(map(_is_common, order.exchange.steps)):
            yield from self.serial.run(order, clients)
            return
        waiting = list(clients)
        while waiting:
            try:
                replies = self._share(order, waiting[: self.together])
            except (torch.OutOfMemoryError, MemoryError) as error:
                if self.together == 1:
                    raise
                self._halve(error, min(self.together, len(waiting)))
                continue
            waiting = waiting[self.together :]
            yield from replies[:-1]
            yield replace(replies[-1], more=False)

    def _halve(self, error: BaseException, tried: int) -> None:
        """Halve the clients side by side after running out of memory or, with one slot, the clients held."""
        error.__traceback__ = None  # it holds the tensors of the failed attempt
        self._known.clear()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if self.slots > 1:
            self.slots = min(self.slots, tried) // 2 or 1
            self.workers = min(self.workers, self.slots)
        else:
            self.together = tried // 2 or 1
        note(f"out of memory: continuing with {self.slots} clients side by side")

    def _share(self, order: Order, clients: list[int]) -> list[Reply | Replies]:
        """Divide clients among the workers: each has its own slots and waits for no other until its last client is done.

        Replies come in the order of the clients, so those of several workers come one by one.
        """
        workers = min(self.workers, len(clients))
        if workers == 1:
            with threads_for(self.bench.batch_macs * self.slots):
                return self._work(order, clients)
        steps = [self.bench.training.samples(len(self.rows[client])) or 1 for client in clients]
        turns = schedule(steps, workers)
        shares = [[clients[turn.client] for turn in turns if turn.slot == worker] for worker in range(len({turn.slot for turn in turns}))]
        with threads_for(0), ThreadPoolExecutor(len(shares)) as pool:
            done = list(pool.map(self._work, [order] * len(shares), shares, range(len(shares))))
        replies = {reply.client: reply for share in done for some in share for reply in (some if isinstance(some, Replies) else (some,))}
        return [replies[client] for client in clients]

    def _work(self, order: Order, clients: list[int], worker: int = 0) -> list[Reply | Replies]:
        with order.blaming(*clients):
            return self._worked(order, clients, worker)

    def _worked(self, order: Order, clients: list[int], worker: int) -> list[Reply | Replies]:
        index, exchange, bench = order.round.index, order.exchange, self.bench
        if sparse_training.keeps_to_the_mask(bench, order):
            return [replace(bench.work(order, client, self.rows[client]), more=True) for client in clients]
        received = {name: entry.put(order.sent[name], order.frame) for name, entry in exchange.down.items()}
        tensors = {name: tensor.expand(len(clients), *tensor.shape) for name, tensor in received.items()}
        tensors |= {"received": tensors["weights"], "weights": tensors["weights"].clone()}
        residuals = [order.residual(client, received["weights"]) for client in clients]
        tensors |= {name: torch.stack([own[name] for own in residuals]) for name in residuals[0]}
        keys = [random.key(bench.seed, "client", index, client) for client in clients]
        rows = [self.rows[client] for client in clients]
        nothing = tensors["weights"].new_zeros(len(clients))
        cohort = Cohort(order, clients, rows, keys, order.frame.mask, tensors, nothing, [0] * len(clients), worker=worker)
        bench.module.train()
        for step in exchange.steps:
            self.perform(step, cohort)
        by_size = {len(part): Job(bench, received, order.frame.mask, part, key=0, round_index=index) for part in rows}
        flops = {size: bench.flops(order, job) for size, job in by_size.items()}  # while the device works
        losses = cohort.losses.double() / torch.tensor(cohort.steps).to(cohort.losses.device, non_blocking=True)
        held = [len(part) for part in rows]
        told = Replies(clients, index, order.round.exchange, held, {}, [flops[size] for size in held], losses, more=True)
        many = max(1, _AT_ONCE[bench.device.type] // bench.layout.length)
        parts = [range(start, min(start + many, len(clients))) for start in range(0, len(clients), many)]
        return [reply for part in parts for reply in self._replies(order, cohort, keys, told, part)]

    def _replies(self, order: Order, cohort: Cohort, keys: list[int], told: Replies, part: range) -> Iterator[Reply | Replies]:
        """Yield the replies of a part of a cohort with what they tell: as one where their messages can be."""
        tensors = {name: tensor[part.start : part.stop] for name, tensor in cohort.tensors.items()}
        message = self.bench.uploads(order, tensors, keys[part.start : part.stop])
        if message is not None:
            yield replace(told.some(part), message=message, left=order.left(message, tensors))
            return
        for place, reply in zip(part, told.some(part), strict=True):
            own = {name: tensor[place] for name, tensor in cohort.tensors.items()}
            message = self.bench.upload(order, own, keys[place])
            yield replace(reply, message=message, left=order.left(message, own))

    @singledispatchmethod
    def perform(self, step: Step, cohort: Cohort) -> None:
        """Run one step with all clients."""
        raise TypeError(f"no client knows the step {step!r}")

    @perform.register
    def _(self, step: Train, cohort: Cohort) -> None:
        batches = self._batches(cohort, self.bench.training.epochs_of(step))
        if step.record:
            cohort.tensors[step.record] = torch.zeros_like(cohort.tensors["weights"][:, : self.bench.layout.links])
        if sparse_training.suits(self.bench, step):
            self._train_active(cohort, batches)
            return
        for size, members in _by_size(batches).items():
            self._train(step, cohort, members, batches, size)
        for place, own in enumerate(batches):
            cohort.steps[place] += len(own.rows)

    def _train_active(self, cohort: Cohort, batches: list[Batches]) -> None:
        """Train each client by itself in kernels that compute only active links: each client keeps one core busy."""
        for place, (own, mask) in enumerate(zip(batches, cohort.masks, strict=True)):
            if len(own.rows):
                weights, received = (cohort.tensors[name][place] for name in ("weights", "received"))
                losses = sparse_training.train(self.bench, weights, received, mask, own.rows, own.keys, cohort.round_index)
                cohort.losses[place] += losses.sum()
                cohort.steps[place] += len(own.rows)

    def _batches(self, cohort: Cohort, epochs: Sequence[int]) -> list[Batches]:
        """Return all batches of every client, as `Workbench.batches` makes them."""
        bench = self.bench
        keys = [random.key(key, "order", epoch) for key in cohort.keys for epoch in epochs]
        orders = iter(random.permutations(keys, [len(rows) for rows in cohort.rows for _ in epochs]))
        found = []
        for rows, key in zip(cohort.rows, cohort.keys, strict=True):
            parts = [bench.divided(rows[next(orders)]) for _ in epochs]
            named = [bench.augmentation(key, epoch, index) for epoch, part in zip(epochs, parts, strict=True) for index in range(len(part))]
            steps = torch.cat(parts) if parts else rows.new_zeros(0, 0)  # half of one epoch is none
            found.append(Batches(steps, torch.tensor(list(map(random.signed, named)), dtype=torch.int64)))
        return found

    def _train(self, step: Train, cohort: Cohort, members: list[int], batches: list[Batches], size: int) -> None:
        """Train `members` of the cohort, whose batches all have one `size`."""
        width = self.width if 2 * len(members) > self.width else len(members)  # one width for most, because a graph has one
        turns = schedule([len(batches[member].rows) for member in members], width)
        slots = self._slots(step, cohort, turns, width, size)
        rows = torch.zeros(length(turns), *slots.rows.shape[1:], dtype=torch.int64)
        keys = torch.zeros(rows.shape[:2], dtype=torch.int64)
        for turn in turns:
            own = batches[members[turn.client]]
            rows[turn.start : turn.stop, turn.slot], keys[turn.start : turn.stop, turn.slot] = own
        received = cohort.tensors["received"][0, : self.bench.layout.parameters]
        slots.begin(rows, keys, received, self.bench.training.rate(cohort.round_index))
        if step.influence:
            slots.mark(step.marked(received, cohort.mask))
        if cohort.own is None:
            slots.allow([0], [cohort.mask])
        starting, ending = _events(turns, "start"), _events(turns, "stop")
        for now, active in enumerate(busy(turns)):
            if now in starting:
                self._load(slots, cohort, members, starting[now])
            slots.step(active)
            if now + 1 in ending:
                self._unload(step, slots, cohort, members, ending[now + 1])

    def _load(self, slots: Slots, cohort: Cohort, members: list[int], turns: list[Turn]) -> None:
        """Put clients into their slots."""
        clients, places = [members[turn.client] for turn in turns], [turn.slot for turn in turns]
        slots.load(places, cohort.tensors["weights"][clients], [turn.stop - turn.start for turn in turns])
        if cohort.own:
            slots.allow(places, [cohort.own[client] for client in clients])

    def _unload(self, step: Train, slots: Slots, cohort: Cohort, members: list[int], turns: list[Turn]) -> None:
        """Take clients out of their slots."""
        clients, places = [members[turn.client] for turn in turns], [turn.slot for turn in turns]
        cohort.tensors["weights"][clients] = slots.weights[places]
        cohort.losses[clients] += slots.losses[places]
        if step.record and slots.squares is not None:
            steps = slots.squares.new_tensor([turn.stop - turn.start for turn in turns])
            cohort.tensors[step.record][clients] = slots.squares[places] / steps[:, None]

    def _slots(self, step: Train, cohort: Cohort, turns: Sequence[Turn], width: int, size: int) -> Slots:
        """Return static tensors for these turns, kept for the next round."""
        masks = width if cohort.own else 0 if self.bench.allowed(cohort.mask) is None else 1
        key = (cohort.worker, width, size, masks, bool(step.record), step.influence)
        found = self._known.get(key)
        if found is None or len(found.rows) < length(turns):
            bench = self.bench
            capacity = max(length(turns), bench.training.samples(self._longest) // size)
            like = cohort.tensors["weights"]
            found = Slots(self.kernel, bench, width, size, capacity, like, masks, bool(step.record), step.influence)
            self._known[key] = found
        return found

    @perform.register
    def _(self, step: ProbeGradient, cohort: Cohort) -> None:
        bench = self.bench
        batches = self._batches(cohort, [bench.training.epochs])
        weights, links = cohort.tensors["weights"], bench.layout.links
        gradient = cohort.tensors[step.into] = torch.zeros_like(weights[:, :links])
        for members in _by_size(batches).values():
            for start in range(0, len(members), self.width):
                some = members[start : start + self.width]
                rows, keys = (torch.stack([part[0] for part in parts]) for parts in zip(*(batches[member] for member in some), strict=True))
                found = self.kernel(weights[some], *bench.data.training_batches(rows.to(weights.device), keys.to(weights.device)))
                if bench.frozen is not None:
                    found.gradient[:, bench.frozen] = 0.0
                gradient[some] = found.gradient[:, :links]

    @perform.register
    def _(self, step: Rewire, cohort: Cohort) -> None:
        chosen = []
        for place, mask in enumerate(cohort.masks):
            with cohort.order.blaming(cohort.clients[place]):
                chosen.append(step.choose({name: tensor[place] for name, tensor in cohort.tensors.items()}, mask))
        cohort.own = [new for _, new in chosen]
        cohort.tensors["mask"] = torch.stack([new.bits for new in cohort.own])
        kept = torch.stack([kept.bits for kept, _ in chosen])
        cohort.tensors["weights"][:, : kept.shape[1]].masked_fill_(~kept, 0.0)
        for weights, mask in zip(cohort.tensors["weights"], cohort.own, strict=True):
            start_anew(self.bench.layout.layers, weights, mask, start_key(self.bench.seed, cohort.order.round.index))


def _is_common(step: Step) -> bool:
    """Whether this is a step of ordinary rounds, which runs side by side."""
    plain = ProbeGradient(into=step.into) if isinstance(step, ProbeGradient) else None
    return isinstance(step, Train | Rewire) or step == plain


def _by_size(batches: Sequence[Batches]) -> dict[int, list[int]]:
    """Group clients by the size of their batches; clients without a batch are left out."""
    groups: dict[int, list[int]] = {}
    for member, own in enumerate(batches):
        if len(own.rows):
            groups.setdefault(own.rows.shape[1], []).append(member)
    return groups


def _events(turns: Sequence[Turn], end: str) -> dict[int, list[Turn]]:
    """Return turns by the time at which they start or stop."""
    events: dict[int, list[Turn]] = {}
    for turn in turns:
        events.setdefault(getattr(turn, end), []).append(turn)
    return events
