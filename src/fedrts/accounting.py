"""What a round costs a client: bytes, FLOPs and memory, in three accountings that are never mixed (see docs/cost.md).

`paper` reproduces the published tables, `rules` is what the paper's text says, `measured` is what this package sends, computes and
holds. All three derive from the exchanges that a method declares.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from fedrts import config, data, rounds
from fedrts.aggregate import Sums
from fedrts.assemble import Assembled, build_model, put_together
from fedrts.client import Job, LocalTraining, Order, Workbench
from fedrts.config import Experiment
from fedrts.data.contract import Data
from fedrts.errors import InputError, reason
from fedrts.methods.base import Method
from fedrts.methods.contract import Calibrate, Evaluate, Exchange, ProbeCurvature, ProbeGradient, State, Train
from fedrts.privacy import Repeatable
from fedrts.sparse.cost import Book
from fedrts.sparse.mask import Mask
from fedrts.sparse.mode import training
from fedrts.sparse.schedule import Schedule
from fedrts.tasks import Classification, Language
from fedrts.wire import codec
from fedrts.wire.codec import Kind
from fedrts.wire.fields import Masks

ACCOUNTINGS = {
    "paper": "reproduces the published tables: uniform density, a bitmap at every density, 4-byte values, index cost of t = 0; memory is "
    "three copies of the model; a batch's forward pass counts batch² · MAC",
    "rules": "the paper's text: each layer dense, bitmap, coordinates or CSR by its own density; memory is three such copies; a batch's "
    "forward pass counts batch · MAC",
    "measured": "what this package does: lengths of encoded messages, MACs at the layers' densities over the samples seen, tensors that a "
    "client holds with the activations of one batch",
}
"""The accountings, and what each counts."""

ROUNDS = ("set-up", "inner", "outer")
PUBLISHED, STRICT = "as published", "strictly"
HOLDER, FRESH = "has mask", "fresh"

SAMPLES = 500
"""Of a client where no data set says how many: CIFAR-10 among 100 clients."""

_CLIENT = 0
_FEW, _MORE = 2, 4
"""Samples of a rehearsal, and of the second one by which activations are extrapolated to a batch."""


@dataclass(frozen=True)
class Row:
    """What one round costs one client in one accounting."""

    accounting: str
    round: str
    case: str
    """What tells rows of one round apart: `as published` or `strictly`; a client that `has mask` or a `fresh` one; else empty."""
    download_bytes: float
    upload_bytes: float
    flops: float
    memory_bytes: float
    memory_on_mask_bytes: float | None = None
    """Measured: what the same tensors would take if weights, gradient and optimiser state were stored on the mask alone."""
    memory_parts: Mapping[str, int] | None = None

    @property
    def megabytes(self) -> float:
        """Both ways, in 10⁶ bytes."""
        return (self.download_bytes + self.upload_bytes) / 1e6

    def as_flat_dict(self) -> dict[str, Any]:
        """Without the parts of the memory: one line of a table."""
        return {name: value for name, value in vars(self).items() if name != "memory_parts"}


@dataclass(frozen=True)
class Cost:
    """Everything that `cost` found, and for what."""

    model: str
    method: str
    density: float
    parameters: int
    links: int
    macs: float
    """Of the dense model's forward pass, per sample."""
    input_shape: tuple[int, ...]
    classes: int
    samples: int
    epochs: int
    batch_size: int
    rows: tuple[Row, ...] = field(default=())

    def row(self, accounting: str, round: str, case: str | None = None) -> Row:
        """The row of an accounting and a round; the first where no case is named."""
        for row in self.rows:
            if (row.accounting, row.round) == (accounting, round) and case in (None, row.case):
                return row
        raise KeyError(f"no row {accounting} · {round} · {case or 'any case'}")

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "accountings": ACCOUNTINGS}


def cost(
    experiment: str | Path | None = None,
    *,
    model: str | nn.Module | None = None,
    method: Method | str | None = None,
    input_shape: Sequence[int] | None = None,
    classes: int | None = None,
    samples: int | None = None,
    exact: bool = False,
    data_dir: str | Path | None = None,
    **keywords: Any,
) -> Cost:
    """Bytes, FLOPs and memory per client of the set-up (where there is one), an inner and an outer round.

    `model`, `method` and other keywords are those of `run`. Inputs are those of `data` where it is named, else of `input_shape` and
    `classes`, else those of the paper that the model reads. `samples` is what the client holds: by default its share of the data, or
    500. Measured messages come from one step on two samples; `exact` lets the client work through all its samples instead.
    """
    layers = [] if experiment is None else [config.from_file(experiment)]
    named, options = config.from_method(method, keywords)
    module = model if isinstance(model, nn.Module) else None
    layers += [config.from_keywords({**keywords, **named, "model": model if module is None else config.CUSTOM}), options]
    return of_settings(layers, module, input_shape, classes, samples, exact, data_dir)


def of_settings(
    layers: Sequence[config.Settings],
    module: nn.Module | None = None,
    input_shape: Sequence[int] | None = None,
    classes: int | None = None,
    samples: int | None = None,
    exact: bool = False,
    data_dir: str | Path | None = None,
) -> Cost:
    """`cost` of settings, of which later ones override earlier ones."""
    given: dict[str, Any] = {}
    for layer in layers:
        given = config.merged(given, layer)
    if samples is not None and samples < 1:
        raise InputError(f"samples must be at least 1 (got {samples})")
    wanted = samples or SAMPLES
    if input_shape is None and ("data" in given or given.get("model", "auto") == "auto"):
        if classes is not None:
            raise InputError("classes are counted from the data: name either the data or --input-shape and --classes")
        experiment = config.resolve(given, _HERE)
        held = data.load(experiment.data, experiment.data_options, data_dir)
        wanted = samples or max(1, len(held.y) // experiment.clients.total)
        if exact and wanted > len(held.y):
            raise InputError(f"samples = {wanted:,} is more than the {len(held.y):,} that '{experiment.data}' has for training")
        module = copy.deepcopy(module) if module is not None else build_model(experiment, held.input_shape, held.classes)
    else:
        experiment, module, held = _without_data(given, module, input_shape, classes, wanted if exact else _MORE)
    run = put_together(experiment, module, held, [torch.arange(wanted)], noise=Repeatable)
    return Estimate(run, wanted, exact).cost()


_HERE = {"device": "cpu"}


@dataclass(frozen=True)
class Inputs:
    """What a model may read where no data set is named."""

    shape: tuple[int, ...]
    classes: int
    kinds: tuple[str, ...] = ("numbers", "tokens")
    settings: config.Settings = field(default_factory=dict)


PAPER_INPUTS = (
    Inputs((3, 32, 32), 10, ("numbers",)),
    Inputs((256,), 50_257, ("tokens",), {"train": {"batch_size": 16}}),
)
"""CIFAR-10's images and TinyStories' tokens."""


def _without_data(
    given: config.Settings, own: nn.Module | None, shape: Sequence[int] | None, classes: int | None, count: int
) -> tuple[Experiment, nn.Module, Data]:
    """The experiment, its model and random inputs: of the shape that is given, or the first of the paper's that the model reads."""
    if min([1 if classes is None else classes, *(shape or ())]) < 1:
        raise InputError("the input shape and the number of classes must be at least 1 each")
    offered = PAPER_INPUTS if shape is None else (Inputs(tuple(shape), PAPER_INPUTS[0].classes),)
    refusals: list[InputError] = []
    for inputs in offered:
        experiment = config.resolve(inputs.settings, given, _HERE, {"data": config.CUSTOM, "data_options": {}})
        inputs = replace(inputs, classes=classes or inputs.classes)
        try:
            module = copy.deepcopy(own) if own is not None else build_model(experiment, inputs.shape, inputs.classes)
            return experiment, module, random_data(module, inputs, count)
        except InputError as error:
            refusals.append(error)
    if len(refusals) == 1:
        raise refusals[0]
    raise InputError(f"{refusals[0]}; nor does it read tokens: say what it reads by --data, or by --input-shape and --classes")


def random_data(module: nn.Module, inputs: Inputs, count: int) -> Data:
    """`count` random samples of the first kind that the model reads, with targets that suit its output."""
    count = max(count, 2 * _MORE)  # of which small batches are measured too
    generator, size, classes = torch.Generator().manual_seed(0), (count, *inputs.shape), inputs.classes
    reasons = []
    for kind in inputs.kinds:
        x = torch.randint(classes, size, generator=generator) if kind == "tokens" else torch.randn(size, generator=generator)
        try:
            with training(module, False), torch.no_grad():
                output = module(x[:2])
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            reasons.append(reason(error))
            continue
        if not isinstance(output, Tensor):
            raise InputError(f"the model returns {type(output).__name__}: it must return one tensor")
        if output.dim() == 2:
            return Data(x, torch.randint(output.shape[1], (count,), generator=generator), x[:1], x[:1], classes)
        if output.dim() == 3:
            y = torch.randint(output.shape[2], (count, output.shape[1]), generator=generator)
            return Data(x, y, x[:1], y[:1], classes, Language())
        squares = Classification(criterion=lambda output, target: output.square().mean())
        return Data(x, torch.zeros(count), x[:1], x[:1], classes, squares)
    raise InputError(f"the model cannot read inputs of shape {list(inputs.shape)}: {reasons[0]}")


@dataclass(frozen=True)
class Estimate:
    """One client's rounds of an assembled run, in all accountings."""

    run: Assembled
    samples: int
    exact: bool

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
            measured, state = self.measured(name, index, state, activations)
            rows += measured
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
        )

    # -- on paper ---------------------------------------------------------------------------------------------------------

    def on_paper(self, name: str, index: int, state: State, activations: int) -> Iterator[Row]:
        """The rows of `paper` and `rules`; a round whose mask is full (the set-up, dense methods) is charged as dense."""
        run, macs, batch = self.run, self.run.bench.macs, self.run.training.batch_size
        layout, current = run.layout, run.plan.round(index, state.mask)
        target, full = run.experiment.density, state.mask.is_full
        budget = layout.sizes if run.method.dense else tuple(run.setup.counts(target))
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

    def measured(self, name: str, index: int, state: State, activations: int) -> tuple[list[Row], State]:
        """The rows of a round that the client really plays, and the state after it."""
        plan, bench, rows = self.run.plan, self.run.bench, torch.arange(self.samples)
        at_work, seen = (bench, rows) if self.exact else (_for_few(bench, _FEW), torch.arange(_FEW))
        holder = fresh = up = 0
        flops = 0.0
        memory = memory_on_mask = dict[str, int]()
        held: Mask | None = None
        for number in range(len(plan.method.exchanges(plan.round(index, state.mask)))):
            order = self.order(state, index, number)
            exchange, frame = order.exchange, order.upload_frame()
            flops += bench.flops(order, bench.job(order, _CLIENT, rows))
            job = at_work.job(order, _CLIENT, seen)
            reply = at_work.carry_out(order, _CLIENT, job)
            fresh += codec.size(Kind.DOWNLOAD, exchange.down, order.sent, order.frame, held)
            holder += codec.size(Kind.DOWNLOAD, exchange.down, order.sent, order.frame, held or order.frame.mask)
            up += codec.size(Kind.UPLOAD, exchange.up, reply.message, frame)
            held = order.frame.mask
            parts = held_parts(job, order, bench.training, activations)
            if sum(parts.values()) > sum(memory.values()):
                memory, memory_on_mask = parts, on_mask(parts, order)
            sums = Sums()
            opened = {entry: kind.open(reply.message[entry], frame) for entry, kind in exchange.up.items()}
            sums.add(plan.method.contribution(opened, state, order.round), reply.samples)
            state = rounds.updated(plan, state, order, sums)
        amount = sum(memory.values()), sum(memory_on_mask.values()), memory
        return [Row("measured", name, case, down, up, flops, *amount) for case, down in ((HOLDER, holder), (FRESH, fresh))], state

    def order(self, state: State, index: int, number: int = 0) -> Order:
        plan = self.run.plan
        current = plan.round(index, state.mask, number)
        return Order.of(plan.exchanges(current)[number], current, plan.layout, state, plan.key(index, f"rounding {number}"))

    def activations(self, state: State, index: int) -> int:
        """Bytes that autograd keeps of one batch, extrapolated from two small ones."""
        bench, order = self.run.bench, self.order(state, index)
        few, more = (_saved_bytes(_for_few(bench, count), order, count) for count in (_FEW, _MORE))
        each = (more - few) / (_MORE - _FEW)
        return round(few + each * (min(bench.training.batch_size, self.samples) - _FEW))


def flops_on_paper(exchange: Exchange, training: LocalTraining, samples: int, sparse: float, dense: float, pruned: float) -> float:
    """Of E = samples · epochs / batch iterations, where a batch's forward pass takes F_s = `sparse` on the mask and F_d = `dense` off it.

    A gradient of one batch is the last of the E iterations: 3·F_s·(E − 1) + F_s + 2·F_d. On a candidate mask, which the client has not
    got yet, a forward pass takes `pruned`.
    """
    epoch = samples / training.batch_size
    probes = sum(isinstance(step, ProbeGradient) and step.batches == "one" for step in exchange.steps)
    total = 0.0
    for step in exchange.steps:
        iterations, forward = epoch, sparse
        match step:
            case Train():
                iterations = (epoch * training.epochs - probes) * (step.stop - step.start)
            case ProbeGradient(batches="one"):
                iterations = 1
            case Calibrate() | Evaluate():
                pool = exchange.down[step.masks]
                candidates = pool.count if isinstance(pool, Masks) else 1
                iterations, forward = epoch * candidates * (step.passes if isinstance(step, Calibrate) else 1), pruned
        total += iterations * step.flops(forward, dense)
    return total


def _rounds(schedule: Schedule) -> list[tuple[str, int]]:
    """Name and index of the set-up, the first inner and the first outer round (where there is one), in the order of time."""
    inner = next(t for t in range(schedule.end + 2) if not schedule.is_outer(t))
    outer = [("outer", schedule.first_outer)] if schedule.is_outer(schedule.first_outer) else []
    return [("set-up", -1), *sorted([("inner", inner), *outer], key=lambda named: named[1])]


def _for_few(bench: Workbench, samples: int) -> Workbench:
    """The same workbench for one step on so many samples."""
    return replace(bench, training=replace(bench.training, epochs=1, batch_size=samples))


def _saved_bytes(bench: Workbench, order: Order, samples: int) -> int:
    """What autograd saves of one batch for the backward pass: every storage once, apart from the model's own."""
    job = bench.job(order, _CLIENT, torch.arange(samples))
    bench.layout.bind(bench.module, job.weights, bench.gradient)
    own = {tensor.untyped_storage().data_ptr() for tensor in (job.weights, *bench.module.buffers())}
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.random.fork_rng([]), job.probing(), saved_tensors_hooks(note, lambda tensor: tensor):
        loss = job.loss_on(next(job.batches(0)))  # which keeps what was saved alive while we count
        total = sum(saved.values())
        del loss
    return total


def held_parts(job: Job, order: Order, training: LocalTraining, activations: int) -> dict[str, int]:
    """Bytes of what a client holds at the end of its steps, by name."""
    tensors = {name: tensor for name, tensor in job.tensors.items() if name not in ("weights", "received", "mask")}
    trains = any(isinstance(step, Train) for step in order.exchange.steps)
    learns = any(isinstance(step, Train | ProbeGradient | ProbeCurvature) for step in order.exchange.steps)
    gradient = job.bench.gradient
    parts = {
        "weights": job.weights.nbytes,
        "received weights": job.tensors["received"].nbytes,
        "mask": job.mask.bits.nbytes,
        "gradient": gradient.nbytes,
        "optimizer": gradient.nbytes * optimizer_states(training) if trains else 0,
        "method": sum(tensor.nbytes for tensor in tensors.values()),
        "activations": activations if learns else 0,
    }
    return {name: size for name, size in parts.items() if size}


def on_mask(parts: Mapping[str, int], order: Order) -> dict[str, int]:
    """`parts` where weights, gradient and optimiser state are stored on the mask, and the mask as bits."""
    layout, frame = order.frame.layout, order.frame
    weights, gradient = frame.on_mask / layout.length, (frame.on_mask - frame.statistics) / layout.parameters
    shares = {"weights": weights, "received weights": weights, "gradient": gradient, "optimizer": gradient, "mask": 1 / 8}
    return {name: math.ceil(size * shares.get(name, 1.0) - 1e-6) for name, size in parts.items()}


def optimizer_states(training: LocalTraining) -> int:
    """Numbers that the optimiser keeps for every parameter."""
    parameter = nn.Parameter(torch.zeros(_MORE))
    parameter.grad = torch.zeros(_MORE)
    optimizer = training.make_optimizer(parameter, 0)
    optimizer.step()
    states = (state for entry in optimizer.state.values() for state in entry.values())
    return sum(isinstance(state, Tensor) and state.shape == parameter.shape for state in states)
