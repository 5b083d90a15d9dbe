"""The cost of an experiment's rounds for one client."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from fedrts.client.order import Order
from fedrts.client.workbench import Workbench
from fedrts.costs.inputs import FEW, MORE
from fedrts.costs.measured import CLIENT, held_parts, on_mask, saved_bytes
from fedrts.costs.on_paper import flops_on_paper
from fedrts.costs.on_this_machine import timed_steps
from fedrts.costs.table import ACCOUNTINGS, FRESH, HOLDER, PUBLISHED, STRICT, Cost, Row, TimedStep
from fedrts.methods.contract import State
from fedrts.runs.build import Assembled
from fedrts.secure import sizes
from fedrts.server import rounds
from fedrts.server.aggregate import Sums
from fedrts.sparse.cost import Book
from fedrts.sparse.mask import Mask
from fedrts.sparse.schedule import Schedule
from fedrts.wire import codec
from fedrts.wire.codec import Kind
from fedrts.wire.fields import Field, Frame, Message, OnOwnMask, Values

ROUNDS = ("set-up", "inner", "outer")


class PlayedRound(NamedTuple):
    """A round that a client has actually run."""

    rows: list[Row]
    state: State
    """After it."""
    orders: list[Order]
    """One of each exchange."""


@dataclass(frozen=True)
class Estimate:
    """One client's rounds of an assembled run, in all accountings."""

    run: Assembled
    samples: int
    exact: bool
    step: bool = False
    """Is a step to be timed on this machine?"""
    at_most: bool = False
    """Values whose length depends on them count as long as they can be."""
    residuals: dict[int, Tensor] = field(default_factory=dict)
    """What the client's rounds so far have not told."""
    invited: int | None = None
    """Clients of a secure sum; None: as many as the experiment asks in a round."""

    def cost(self) -> Cost:
        run, training, macs = self.run, self.run.training, self.run.bench.macs
        rows: list[Row] = []
        state = run.method.begin(run.setup)
        activations: int | None = None
        for name, index in _rounds(run.plan.schedule):
            if not run.method.exchanges(run.plan.round(index, state.mask)):
                continue
            if activations is None:
                activations = self.activations(state, index)
            rows += self.on_paper(name, index, state, activations)
            measured = self.measured(name, index, state, activations)
            rows, state = rows + measured.rows, measured.state
        steps: tuple[TimedStep, ...] = ()
        if self.step:
            inner = next(index for name, index in _rounds(run.plan.schedule) if name == "inner")
            steps = timed_steps(run.bench, self.order(state, inner))
        rows.sort(key=lambda row: (list(ACCOUNTINGS).index(row.accounting), ROUNDS.index(row.round)))
        return Cost(
            model=run.experiment.model,
            method=run.experiment.method,
            density=run.experiment.density,
            parameters=run.layout.parameters,
            links=run.layout.links,
            macs=macs.dense,
            input_shape=run.data.input_shape,
            classes=run.data.classes,
            samples=self.samples,
            epochs=training.epochs,
            batch_size=training.batch_size,
            rows=tuple(rows),
            density_start=run.experiment.topology.density_start,
            steps=steps,
        )

    # -- on paper ---------------------------------------------------------------------------------------------------------

    def on_paper(self, name: str, index: int, state: State, activations: int) -> Iterator[Row]:
        """Return the rows of `paper` and `rules`; a round with a full mask (set-up, dense methods) costs as much as a dense one."""
        run, macs, batch = self.run, self.run.bench.macs, self.run.training.batch_size
        layout, current = run.layout, run.plan.round(index, state.mask)
        target, full = run.experiment.first_density, state.mask.is_full
        budget = layout.sizes if run.method.dense else tuple(run.setup.counts(run.experiment.density))
        density, counts = (1.0, layout.sizes) if full else (target, budget)
        fraction = run.plan.schedule.adjust  # f(0)
        exchanges = run.method.exchanges(current)
        published = tuple(map(run.method.published, exchanges))
        cases = {PUBLISHED: published, STRICT: exchanges} if published != exchanges else {"": exchanges}
        stored = activations / state.values.element_size()
        for accounting, book, pruned, unit in (
            ("paper", Book.paper(layout, density, fraction), target * macs.dense, batch * batch),
            ("rules", Book.rules(layout, counts, fraction), macs.at(budget, layout.sizes), batch),
        ):
            active = sum(book.active) + book.layout.parameters - book.layout.links
            sparse = unit * (macs.dense if full else pruned) + run.method.overhead(current, active, stored)
            prices = sparse, unit * macs.dense, unit * pruned
            for case, charged in cases.items():
                flops = sum(flops_on_paper(exchange, run.training, self.samples, *prices) for exchange in charged)
                lengths = [exchange.charged(book) for exchange in charged]
                down, up = (sum(way) for way in zip(*lengths, strict=True))
                yield Row(accounting, name, case, down, up, flops, memory_bytes=3 * book.sparse())

    # -- measured ---------------------------------------------------------------------------------------------------------

    def measured(self, name: str, index: int, state: State, activations: int) -> PlayedRound:
        """Run a round on the client and measure it."""
        plan, bench, rows = self.run.plan, self.run.bench, torch.arange(self.samples)
        at_work, seen = (bench, rows) if self.exact else (_for_few(bench, FEW), torch.arange(FEW))
        holder = fresh = up = 0
        flops = 0.0
        memory = memory_on_mask = dict[str, int]()
        held: Mask | None = None
        orders: list[Order] = []
        for number in range(len(plan.method.exchanges(plan.round(index, state.mask)))):
            order = self.order(state, index, number)
            orders.append(order)
            exchange, frame = order.exchange, order.upload_frame()
            flops += bench.flops(order, bench.job(order, CLIENT, rows))
            job = at_work.job(order, CLIENT, seen)
            reply = at_work.carry_out(order, CLIENT, job)
            more = self._longer(exchange.down, order.sent, order.frame)
            fresh += codec.size(Kind.DOWNLOAD, exchange.down, order.sent, order.frame, held) + more
            holder += codec.size(Kind.DOWNLOAD, exchange.down, order.sent, order.frame, held or order.frame.mask) + more
            if plan.summing is None:
                up += codec.size(Kind.UPLOAD, exchange.up, reply.message, frame) + self._longer(exchange.up, reply.message, frame)
            else:  # words, keys and shares
                clients = self.run.experiment.clients.per_round if self.invited is None else self.invited
                up += sizes.upload(plan.summing.form(order, plan.method, clients).ring)
                fresh, holder = fresh + sizes.download(clients), holder + sizes.download(clients)
            self.residuals.update({} if reply.left is None else {CLIENT: reply.left})
            held = order.frame.mask
            parts = held_parts(job, order, bench.training, activations)
            if sum(parts.values()) > sum(memory.values()):
                memory, memory_on_mask = parts, on_mask(parts, order)
            sums = Sums()
            opened = {entry: kind.open(reply.message[entry], frame) for entry, kind in exchange.up.items()}
            sums.add(plan.method.contribution(opened, state, order.round), reply.samples)
            state = rounds.updated(plan, state, order, sums.mean())
        amount = sum(memory.values()), sum(memory_on_mask.values()), memory
        cases = ((HOLDER, holder), (FRESH, fresh))
        return PlayedRound([Row("measured", name, case, down, up, flops, *amount) for case, down in cases], state, orders)

    def _longer(self, fields: Mapping[str, Field], message: Message, frame: Frame) -> int:
        """Return the additional bytes that a message with the same fields may have, for upper bounds."""
        irregular = {name: entry for name, entry in fields.items() if isinstance(entry, Values | OnOwnMask) and not entry.format.regular}
        return sum(entry.most(frame) - entry.size(message[name], frame) for name, entry in irregular.items()) if self.at_most else 0

    def order(self, state: State, index: int, number: int = 0) -> Order:
        plan = self.run.plan
        current = plan.round(index, state.mask, number)
        order = Order.of(plan.exchanges(current)[number], current, plan.layout, state, plan.key(index, f"rounding {number}"))
        return replace(order, residuals=self.residuals)

    def activations(self, state: State, index: int) -> int:
        """Return the bytes that autograd keeps of one batch, extrapolated from two small ones."""
        bench, order = self.run.bench, self.order(state, index)
        few, more = (saved_bytes(_for_few(bench, count), order, count) for count in (FEW, MORE))
        each = (more - few) / (MORE - FEW)
        return round(few + each * (min(bench.training.batch_size, self.samples) - FEW))


def _rounds(schedule: Schedule) -> list[tuple[str, int]]:
    """Return name and index of the set-up, the first inner and the first outer round (if there is one), in time order."""
    inner = next(t for t in range(schedule.end + 2) if not schedule.is_outer(t))
    outer = [("outer", schedule.first_outer)] if schedule.is_outer(schedule.first_outer) else []
    return [("set-up", -1), *sorted([("inner", inner), *outer], key=lambda named: named[1])]


def _for_few(bench: Workbench, samples: int) -> Workbench:
    """Return the same workbench for one step on this many samples."""
    return replace(bench, training=bench.training.but(epochs=1, batch_size=samples))
