"""What one client does with an exchange: the same program in every engine.

A client keeps nothing between rounds but its data. It binds the model to the vector it received, carries out the
exchange's steps in order, and takes the upload's fields from its tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, singledispatch

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedrts import rates
from fedrts.data.contract import Data
from fedrts.methods.contract import Calibrate, Evaluate, Exchange, Judge, ProbeCurvature, ProbeGradient, Rewire, Round, State, Train
from fedrts.privacy import Noise, Protection, Unpredictable
from fedrts.sparse import random
from fedrts.sparse.cost import Macs
from fedrts.sparse.layout import Layout
from fedrts.sparse.mask import Mask
from fedrts.wire.fields import Field, Frame, Message, Values


@dataclass(frozen=True)
class LocalTraining:
    """How a client trains; a new optimiser for every client and round."""

    epochs: int
    batch_size: int
    lr: float
    optimizer: str = "sgd"
    momentum: float = 0.0
    weight_decay: float = 0.0
    proximal: float = 0.0
    """μ of the proximal term μ/2·‖W − W_received‖² (FedProx)."""
    schedule: str = "constant"
    lr_end: float = 1.0
    rounds: int = 1
    amsgrad: bool = False
    """Adam divides by the largest second moment so far."""

    def rate(self, round_index: int) -> float:
        """The learning rate of a round."""
        return self.lr * rates.share(self.schedule, round_index, self.rounds, self.lr_end)

    def samples(self, rows: int) -> int:
        """Samples that a client with so many rows sees in a round."""
        return self.epochs * (rows // self.batch_size * self.batch_size or rows)

    def epochs_of(self, step: Train) -> range:
        """The epochs of a step of training."""
        first, last = (int(share * self.epochs) for share in (step.start, step.stop))
        return range(first, last)

    def make_optimizer(self, parameter: Tensor, round_index: int) -> torch.optim.Optimizer:
        lr = self.rate(round_index)
        if self.optimizer == "adam":
            return torch.optim.Adam([parameter], lr=lr, weight_decay=self.weight_decay, amsgrad=self.amsgrad)
        return torch.optim.SGD([parameter], lr=lr, momentum=self.momentum, weight_decay=self.weight_decay)


@dataclass(frozen=True)
class Order:
    """What the server asks of clients in one exchange; the same for all of them."""

    exchange: Exchange
    round: Round
    frame: Frame
    sent: Message
    values: Tensor | None = None
    """The server's own weights on the mask, which may be more precise than what it sends."""
    held: Mapping[int, Mask | None] = field(default_factory=dict)
    """The mask that each client holds before its download, as far as the server knows."""

    @staticmethod
    def of(exchange: Exchange, round: Round, layout: Layout, state: State, key: int) -> Order:
        """The order that a server in `state` gives; `key` decides the rounding of what it sends."""
        frame = Frame(layout, state.mask, state.values.dtype, key)
        tensors = {"weights": state.values, **state.memory}
        return Order(exchange, round, frame, {name: entry.take(tensors, frame) for name, entry in exchange.down.items()}, state.values)

    @cached_property
    def reference(self) -> Tensor | None:
        """The weights on the mask as clients receive them, where they do."""
        return self.exchange.down["weights"].open(self.sent["weights"], self.frame) if "weights" in self.exchange.down else None

    @cached_property
    def reference_norm(self) -> float:
        """‖W‖ of the parameters as clients receive them."""
        if self.reference is None:
            return 0.0
        parameters = self.reference[: len(self.reference) - self.frame.statistics]
        return float(torch.linalg.vector_norm(parameters, dtype=torch.float64))

    @cached_property
    def variances(self) -> Tensor:
        """Where among a model's statistics the variances are: `[v]`."""
        places = [torch.arange(span.start, span.stop) for span in self.frame.layout.variances()]
        return torch.cat([torch.zeros(0, dtype=torch.int64), *places]).to(self.frame.mask.bits.device)

    def upload_frame(self, key: int = 0) -> Frame:
        """What both sides know of an upload; the `key` of its rounding is the client's alone."""
        return replace(self._uploading, key=key) if key else self._uploading

    @cached_property
    def _uploading(self) -> Frame:
        return replace(self.frame, key=0, reference=self.reference)

    @cached_property
    def opening_frame(self) -> Frame:
        """With which the server opens an upload: changes are from its own weights, which stay precise: W ← W + Σ p_k Q(ΔW_k)."""
        return replace(self.frame, reference=self.values if self.reference is not None else None)


@dataclass(frozen=True)
class Reply:
    """A client's answer to an exchange, as it claims to be."""

    client: int
    round: int
    exchange: int
    samples: int
    """n_k: the weight of this client in every mean."""
    message: Message
    flops: float = 0.0
    loss: float = float("nan")
    """Mean training loss over the client's steps (NaN if it made none)."""
    size: int | None = None
    """Bytes that really came, where they did."""
    resent: int = 0
    """Bytes of a second download, to a client that turned out to lack the mask."""
    at: float | None = None
    """When it came (`time.monotonic`), where that is not now."""
    more: bool = False
    """The next reply is there too: whoever looks at this one may look at both together."""


@dataclass(frozen=True)
class Failure:
    """No usable answer: what came in its place."""

    client: int
    reason: str
    excused: bool = False
    """The server itself found that nothing came, or nothing in time. Whatever a client says, it is no excuse."""
    resent: int = 0
    at: float | None = None
    more: bool = False
    """See `Reply`."""


@dataclass(frozen=True)
class Batch:
    """Data rows of one step."""

    rows: Tensor
    key: int | None = None
    """Of its augmentation; None: it is not augmented."""

    def __len__(self) -> int:
        return len(self.rows)


@dataclass
class Workbench:
    """The model and data with which clients work, one after the other."""

    module: nn.Module
    layout: Layout
    data: Data
    training: LocalTraining
    seed: int
    macs: Macs
    protection: Protection = field(default_factory=Protection)
    noise: Noise = Unpredictable
    """Where the protection's random numbers come from; a simulation asks for repeatable ones."""
    eval_batch_size: int = 512
    gradient: Tensor = field(init=False)

    def __post_init__(self) -> None:
        parameter = next(self.module.parameters())
        self.gradient = torch.zeros(self.layout.parameters, dtype=parameter.dtype, device=parameter.device)
        named = dict(self.module.named_parameters())
        trained = [torch.full((entry.size,), named[entry.name].requires_grad) for entry in self.layout.parameter_entries]
        flags = torch.cat(trained) if trained else torch.ones(0, dtype=torch.bool)
        self.frozen = None if bool(flags.all()) else (~flags).nonzero().squeeze(-1).to(parameter.device)
        self.has_batchnorm = any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in self.module.modules())

    @property
    def batch_macs(self) -> float:
        """MACs of a batch's forward pass."""
        return self.macs.dense * self.training.batch_size

    def batches(self, rows: Tensor, key: int, epoch: int) -> Iterator[Batch]:
        """The batches of an epoch of the client with this `key`. Only full ones, or one short one if it has less than a batch."""
        order = rows[random.permutation(random.key(key, "order", epoch), len(rows)).to(rows.device)]
        for index, batch in enumerate(self.divided(order)):
            yield Batch(batch, self.augmentation(key, epoch, index))

    def divided(self, order: Tensor) -> Tensor:
        """Data rows `order [n]` as batches `[steps, size]`."""
        size = self.training.batch_size
        if len(order) >= size:
            return order[: len(order) // size * size].view(-1, size)
        return order[None] if len(order) > 1 or not self.has_batchnorm else order[:0, None]  # BatchNorm has no statistics of one sample

    def augmentation(self, key: int, epoch: int, index: int) -> int:
        """The key of a batch's augmentation; any, where there is none."""
        return random.key(key, "augment", epoch, index) if self.data.augments else 0

    def work(self, order: Order, client: int, rows: Tensor) -> Reply:
        """Carry out one order as `client`, which holds the data rows `rows`."""
        return self.carry_out(order, client, self.job(order, client, rows))

    def job(self, order: Order, client: int, rows: Tensor) -> Job:
        """What `client` has before it when an order came."""
        tensors = {name: entry.put(order.sent[name], order.frame) for name, entry in order.exchange.down.items()}
        tensors["received"] = tensors["weights"].clone()
        return Job(self, tensors, order.frame.mask, rows, random.key(self.seed, "client", order.round.index, client), order.round.index)

    def upload(self, order: Order, tensors: Mapping[str, Tensor], key: int, fields: Mapping[str, Field] | None = None) -> Message:
        """What leaves a client of its `tensors`, or some fields of it.

        Rounding is a function of the client's `key`; so is noise in a simulation, and nowhere else.
        """
        frame = order.upload_frame(random.key(key, "rounding", order.round.exchange))
        draws = self.noise(random.key(key, "noise", order.round.exchange))
        return self.protection.message(order.exchange.up if fields is None else fields, tensors, frame, draws)

    def uploads(self, order: Order, tensors: Mapping[str, Tensor], keys: Sequence[int]) -> Iterator[Message]:
        """`upload` of several clients with these `keys`; their tensors have them as leading axis, and may become part of what leaves."""
        up, frame = order.exchange.up, order.upload_frame()
        whole = {} if self.protection.on else {name: entry for name, entry in up.items() if isinstance(entry, Values) and entry.lossless}
        taken = {name: entry.chosen(tensors, frame).unbind() for name, entry in whole.items()}
        rest = {name: entry for name, entry in up.items() if name not in whole}
        for place, key in enumerate(keys):
            message = {name: payloads[place] for name, payloads in taken.items()}
            own = {name: tensor[place] for name, tensor in tensors.items()} if rest else {}
            yield message | self.upload(order, own, key, rest) if rest else message

    def flops(self, order: Order, job: Job) -> float:
        """What an order costs the client; nothing of it need be carried out."""
        return sum(flops(step, job) for step in order.exchange.steps)

    def carry_out(self, order: Order, client: int, job: Job) -> Reply:
        """The steps of an order one after the other, and the client's answer."""
        exchange, arithmetic = order.exchange, self.flops(order, job)
        self.layout.bind(self.module, job.weights, self.gradient)
        with _isolated(random.key(job.key, "module"), self.gradient.device):
            for step in exchange.steps:
                perform(step, job)
        message = self.upload(order, job.tensors, job.key)
        loss = float(job.loss / job.steps) if job.steps else float("nan")
        return Reply(client, order.round.index, order.round.exchange, len(job.rows), message, arithmetic, loss)


@dataclass
class Job:
    """One client's work in progress."""

    bench: Workbench
    tensors: dict[str, Tensor]
    mask: Mask
    rows: Tensor
    key: int
    round_index: int = 0
    loss: Tensor | float = 0.0
    steps: int = 0

    @property
    def weights(self) -> Tensor:
        return self.tensors["weights"]

    @property
    def samples(self) -> int:
        """How many samples the batches of an epoch have."""
        rows, size = len(self.rows), self.bench.training.batch_size
        return 0 if rows == 1 < size and self.bench.has_batchnorm else rows // size * size or rows

    def batches(self, epoch: int) -> Iterator[Batch]:
        return self.bench.batches(self.rows, self.key, epoch)

    def loss_on(self, batch: Batch, temperature: float = 1.0, twice: bool = False) -> Tensor:
        """Mean loss of a batch; `twice`: its gradient will be differentiated again."""
        bench = self.bench
        x, y = bench.data.training_batch(batch.rows, batch.key)
        return bench.data.task.loss(bench.module, x, y, temperature=temperature, twice=twice)

    def backward(self, batch: Batch, temperature: float = 1.0) -> Tensor:
        """Loss on a batch, and its gradient in `bench.gradient [N_all]`."""
        self.bench.gradient.zero_()
        loss = self.loss_on(batch, temperature)
        loss.backward()
        return loss.detach()

    @contextmanager
    def probing(self) -> Iterator[None]:
        """Train-mode passes that leave the weights and BatchNorm statistics as they were."""
        self.bench.module.train()
        with self.same_buffers():
            yield

    @contextmanager
    def same_buffers(self) -> Iterator[None]:
        """Every buffer of the module comes back: statistics, and the counts of batches that are no part of the vector."""
        before = [(buffer, buffer.clone()) for buffer in self.bench.module.buffers()]
        yield
        for buffer, value in before:
            buffer.copy_(value)

    def candidates(self, name: str) -> Iterator[None]:
        """The model on one candidate mask of the tensor `name` after the other; the client's own weights come back at the end."""
        kept = self.weights.clone()
        for bits in self.tensors[name]:
            self.weights[: len(bits)].masked_fill_(~bits, 0.0)
            with self.same_buffers():
                yield
            self.weights.copy_(kept)


@singledispatch
def perform(step: object, job: Job) -> None:
    """Carry out one step of an exchange."""
    raise TypeError(f"no client knows the step {step!r}")


@perform.register
def _train(step: Train, job: Job) -> None:
    bench = job.bench
    keep = None if job.mask.is_full else job.mask.bits.to(bench.gradient.dtype)
    links = bench.gradient[: bench.layout.links]
    parameter = nn.Parameter(job.weights[: bench.layout.parameters])
    parameter.grad = bench.gradient
    optimizer = bench.training.make_optimizer(parameter, job.round_index)
    bench.module.train()
    received = job.tensors["received"][: bench.layout.parameters]
    unmoved = None if bench.frozen is None else parameter.data[bench.frozen]
    influence, marks = step.influence, step.marked(received, job.mask)
    squares = torch.zeros_like(links) if step.record else None
    batches = [rows for epoch in bench.training.epochs_of(step) for rows in job.batches(epoch)]
    for number, rows in enumerate(batches):
        job.loss = job.loss + job.backward(rows)
        if squares is not None:
            squares += links.square() / len(batches)
        if influence is not None:
            bench.gradient += influence.pull(parameter.data, marks)
            rate = influence.rate(parameter.data, marks, number, len(batches), bench.training.rate(job.round_index), bench.training.lr)
            optimizer.param_groups[0]["lr"] = float(rate)
        if bench.training.proximal:
            bench.gradient.add_(parameter.data - received, alpha=bench.training.proximal)
        if keep is not None:
            links *= keep  # the optimisers leave a weight at exactly 0 whose gradient is always 0; many times faster than filling
        optimizer.step()
        if unmoved is not None:
            parameter.data[bench.frozen] = unmoved  # weight decay would move them
        job.steps += 1
    if step.record and squares is not None:
        job.tensors[step.record] = squares


@perform.register
def _probe(step: ProbeGradient, job: Job) -> None:
    bench = job.bench
    total, samples = torch.zeros_like(bench.gradient[: bench.layout.links]), 0
    with job.probing():
        for rows in job.batches(bench.training.epochs):  # the order of the epoch after the last
            job.backward(rows, step.temperature)
            total.add_(bench.gradient[: bench.layout.links], alpha=len(rows))
            samples += len(rows)
            if step.batches == "one":
                break
    job.tensors[step.into] = total / max(samples, 1)


@perform.register
def _probe_curvature(step: ProbeCurvature, job: Job) -> None:
    bench, layers = job.bench, job.bench.layout.layers
    named = dict(bench.module.named_parameters())
    trained = [entry for entry in layers if named[entry.name].requires_grad]
    links = [named[entry.name] for entry in trained]
    along = bench.layout.views(job.tensors[step.along], layers)
    total, samples = torch.zeros_like(job.tensors[step.along]), 0
    found = bench.layout.views(total, layers)
    with job.probing(), sdpa_kernel(SDPBackend.MATH):  # the fused attention kernels have no second derivative
        for rows in job.batches(bench.training.epochs):
            loss = job.loss_on(rows, step.temperature, twice=True)
            gradients = torch.autograd.grad(loss, links, create_graph=True, materialize_grads=True)  # 0 where the loss does not look
            slope = torch.stack([(g * along[entry.name]).sum() for g, entry in zip(gradients, trained, strict=True)]).sum()
            for product, entry in zip(torch.autograd.grad(slope, links, materialize_grads=True), trained, strict=True):
                found[entry.name].add_(product, alpha=len(rows))
            samples += len(rows)
    job.tensors[step.into] = total / max(samples, 1)


@perform.register
def _calibrate(step: Calibrate, job: Job) -> None:
    bench = job.bench
    buffers = job.weights[bench.layout.parameters :]
    bench.module.train()
    found = []
    for _ in job.candidates(step.masks):
        for batch in (batch for epoch in range(step.passes) for batch in job.batches(epoch)):
            with torch.no_grad():
                bench.module(bench.data.training_batch(batch.rows, batch.key)[0])
        found.append(buffers.clone())
    job.tensors[step.into] = torch.cat(found)


@perform.register
def _evaluate(step: Evaluate, job: Job) -> None:
    bench = job.bench
    buffers = job.weights[bench.layout.parameters :]
    bench.module.eval()
    losses = []
    for index, _ in enumerate(job.candidates(step.masks)):
        if step.statistics is not None:
            buffers.copy_(job.tensors[step.statistics].view(-1, len(buffers))[index])
        with torch.no_grad():
            total = sum(job.loss_on(Batch(rows)) * len(rows) for rows in job.rows.split(bench.training.batch_size))
        losses.append(torch.as_tensor(total) / len(job.rows))
    job.tensors[step.into] = torch.stack(losses)


@perform.register
def _judge(step: Judge, job: Job) -> None:
    bench = job.bench
    found = bench.data.judge(bench.module, bench.data.test_x, bench.data.test_y, bench.eval_batch_size)
    job.tensors[step.into] = torch.tensor([found[name] for name in step.metrics]).to(job.weights)


@perform.register
def _rewire(step: Rewire, job: Job) -> None:
    kept, job.mask = step.choose(job.tensors, job.mask)
    job.tensors["mask"] = job.mask.bits
    job.weights[: len(kept.bits)].masked_fill_(~kept.bits, 0.0)


@singledispatch
def flops(step: object, job: Job) -> float:
    """What a step costs a client (see `sparse.cost` for what counts), known before it is carried out."""
    raise TypeError(f"no client knows the step {step!r}")


@flops.register
def _of_training(step: Train, job: Job) -> float:
    return len(job.bench.training.epochs_of(step)) * job.samples * step.flops(*_forward(job))


@flops.register(ProbeGradient)
@flops.register(ProbeCurvature)
def _of_probing(step: ProbeGradient | ProbeCurvature, job: Job) -> float:
    one = isinstance(step, ProbeGradient) and step.batches == "one"
    return (min(job.samples, job.bench.training.batch_size) if one else job.samples) * step.flops(*_forward(job))


@flops.register(Calibrate)
@flops.register(Evaluate)
def _of_candidates(step: Calibrate | Evaluate, job: Job) -> float:
    samples = step.passes * job.samples if isinstance(step, Calibrate) else len(job.rows)
    macs = job.bench.macs
    masks = (Mask(bits, job.mask.sizes) for bits in job.tensors[step.masks])
    return samples * sum(step.flops(macs.forward(mask), macs.dense) for mask in masks)


@flops.register(Judge)
@flops.register(Rewire)
def _of_nothing(step: Judge | Rewire, job: Job) -> float:
    return 0.0


def _forward(job: Job) -> tuple[float, float]:
    """MACs of a sample's forward pass: on the client's mask, and dense."""
    return job.bench.macs.forward(job.mask), job.bench.macs.dense


@contextmanager
def _isolated(key: int, device: torch.device) -> Iterator[None]:
    """Global random numbers that depend on `key` alone (dropout in a user's model), and leave no trace outside."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        seed = random.seed(key)
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would format a stack trace for every kind of device
        if device.type == "cuda":
            torch.cuda.manual_seed(seed)
        yield
