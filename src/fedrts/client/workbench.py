"""How one client carries out an exchange; every engine runs this same program.

A client keeps only its data between rounds and, with error feedback, its residual. It binds the model to the received vector, runs the
exchange's steps in order, and takes the upload's fields from its tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from fedrts.client import sparse_training
from fedrts.client.job import Batch, Job
from fedrts.client.order import Order, Reply
from fedrts.client.privacy import Noise, Protection
from fedrts.client.steps import flops, perform
from fedrts.client.summing import Summing
from fedrts.client.training import LocalTraining
from fedrts.data.contract import Data
from fedrts.methods.contract import Rewire
from fedrts.programs.program import LinkProgram
from fedrts.sparse import random
from fedrts.sparse.cost import Macs
from fedrts.sparse.layout import Layout
from fedrts.sparse.mask import Mask
from fedrts.wire.fields import Field, Message, SideBySide, Values


@dataclass
class Workbench:
    """The model and data with which clients work, one at a time."""

    module: nn.Module
    layout: Layout
    data: Data
    training: LocalTraining
    seed: int
    macs: Macs
    protection: Protection = field(default_factory=Protection)
    noise: Noise = field(kw_only=True)
    """Where the protection's random numbers come from: whoever makes a bench says whether they are `Unpredictable`, or a simulation's."""
    eval_batch_size: int = 512
    program: LinkProgram | None = None
    """The model in kernels that compute active links alone, where an engine wants them."""
    summing: Summing | None = None
    """How clients sum where the server is to learn nothing but sums."""
    _gradient: Tensor | None = field(init=False, default=None, repr=False)

    def __post_init__(self) -> None:
        named = dict(self.module.named_parameters())
        parameter = named[self.layout.parameter_entries[0].name]
        self.device, self.dtype = parameter.device, parameter.dtype
        trained = [torch.full((entry.size,), named[entry.name].requires_grad) for entry in self.layout.parameter_entries]
        flags = torch.cat(trained) if trained else torch.ones(0, dtype=torch.bool)
        self.frozen = None if bool(flags.all()) else (~flags).nonzero().squeeze(-1).to(parameter.device)
        self.has_batchnorm = any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in self.module.modules())

    @property
    def gradient(self) -> Tensor:
        """Buffer for the module's gradient `[N_all]`, allocated on first use."""
        if self._gradient is None:
            self._gradient = torch.zeros(self.layout.parameters, dtype=self.dtype, device=self.device)
        return self._gradient

    def release(self) -> None:
        """Free all full-length vectors: orders on the mask need none, and other orders bring their own."""
        self._gradient = None
        self.layout.unbind(self.module)

    def allowed(self, mask: Mask) -> Tensor | None:
        """Return 1 where a parameter may change on a mask `[N_all]`: active links, and parameters neither pruned nor frozen; None: all."""
        if mask.is_full and self.frozen is None:
            return None
        allowed = torch.ones(self.layout.parameters, dtype=self.dtype, device=self.device)
        allowed[: len(mask.bits)] = mask.bits
        if self.frozen is not None:
            allowed[self.frozen] = 0.0
        return allowed

    @property
    def batch_macs(self) -> float:
        """MACs of a batch's forward pass."""
        return self.macs.dense * self.training.batch_size

    def batches(self, rows: Tensor, key: int, epoch: int) -> Iterator[Batch]:
        """Return the batches of an epoch of the client with this `key`: only full ones, or one short one if it has less than a batch."""
        order = rows[random.permutation(random.key(key, "order", epoch), len(rows)).to(rows.device)]
        for index, batch in enumerate(self.divided(order)):
            yield Batch(batch, self.augmentation(key, epoch, index))

    def divided(self, order: Tensor) -> Tensor:
        """Divide data rows `order [n]` into batches `[steps, size]`."""
        size = self.training.batch_size
        if len(order) >= size:
            return order[: len(order) // size * size].view(-1, size)
        return order[None] if len(order) > 1 or not self.has_batchnorm else order[:0, None]  # BatchNorm has no statistics of one sample

    def augmentation(self, key: int, epoch: int, index: int) -> int:
        """Return the key of a batch's augmentation; arbitrary if there is none."""
        return random.key(key, "augment", epoch, index) if self.data.augments else 0

    def work(self, order: Order, client: int, rows: Tensor) -> Reply:
        """Carry out one order as `client`, which holds the data rows `rows`."""
        with order.blaming(client):
            if sparse_training.keeps_to_the_mask(self, order):
                return self._work_on_mask(order, client, rows)
            return self.carry_out(order, client, self.job(order, client, rows))

    def _work_on_mask(self, order: Order, client: int, rows: Tensor) -> Reply:
        """Run `work` without full-length vectors, a module or random numbers; several threads may do so at once."""
        received = order.reference
        assert received is not None
        key = random.key(self.seed, "client", order.round.index, client)
        tensors = {"weights": received.clone(), "received": received}
        job = Job(self, tensors, order.frame.mask, rows, key, order.round.index)
        for step in order.exchange.steps:
            perform(step, job)
        return self._reply(order, client, job, self.flops(order, job))

    def job(self, order: Order, client: int, rows: Tensor) -> Job:
        """Return the job of `client` when an order arrives."""
        tensors = {name: entry.put(order.sent[name], order.frame) for name, entry in order.exchange.down.items()}
        tensors["received"] = tensors["weights"].clone()
        tensors |= order.residual(client, tensors["weights"])
        return Job(self, tensors, order.frame.mask, rows, random.key(self.seed, "client", order.round.index, client), order.round.index)

    def upload(self, order: Order, tensors: Mapping[str, Tensor], key: int, fields: Mapping[str, Field] | None = None) -> Message:
        """Return what `client` uploads of its `tensors`, or some fields of it. Its `key` determines rounding and, in simulations only,
        noise.

        Rounding is a function of the client's `key`; so is noise in a simulation, and nowhere else.
        """
        frame = order.upload_frame(random.key(key, "rounding", order.round.exchange))
        draws = self.noise(random.key(key, "noise", order.round.exchange))
        if self.summing is not None:
            tensors = self.summing.ballot(order, tensors)
        return self.protection.message(order.exchange.up if fields is None else fields, tensors, frame, draws)

    def uploads(self, order: Order, tensors: Mapping[str, Tensor], keys: Sequence[int]) -> Message | None:
        """Return the `upload` of several clients with these `keys` as one message; None where each needs its own.

        The clients are the leading axis of the tensors, which the message may share, and of what is in the message.
        """
        up = order.exchange.up
        if self.protection.on or self.summing is not None or not all(isinstance(entry, SideBySide) for entry in up.values()):
            return None
        frame = order.upload_frame()
        if not all(isinstance(entry, Values) and entry.lossless for entry in up.values()):
            rounding = [random.signed(random.key(key, "rounding", order.round.exchange)) for key in keys]
            frame = replace(frame, keys=torch.tensor(rounding).to(self.device, non_blocking=True))
        return {
            name: entry.chosen(tensors, frame) if isinstance(entry, Values) and entry.lossless else entry.take(tensors, frame)
            for name, entry in up.items()
        }

    def flops(self, order: Order, job: Job) -> float:
        """Return the FLOPs of an order for the client, without running it."""
        total = 0.0
        counts: tuple[int, ...] = job.mask.counts
        for step in order.exchange.steps:
            counts = order.round.targets if isinstance(step, Rewire) else counts
            total += flops(step, job, counts)
        return total

    def carry_out(self, order: Order, client: int, job: Job) -> Reply:
        """Run the steps of an order in sequence and return the client's reply."""
        exchange, arithmetic = order.exchange, self.flops(order, job)
        self.layout.bind(self.module, job.weights, self.gradient)
        with _isolated(random.key(job.key, "module"), self.device):
            for step in exchange.steps:
                perform(step, job)
        return self._reply(order, client, job, arithmetic)

    def _reply(self, order: Order, client: int, job: Job, arithmetic: float) -> Reply:
        message = self.upload(order, job.tensors, job.key)
        loss = float(job.loss / job.steps) if job.steps else float("nan")
        left = order.left(message, job.tensors)
        return Reply(client, order.round.index, order.round.exchange, len(job.rows), message, arithmetic, loss, left=left)


@contextmanager
def _isolated(key: int, device: torch.device) -> Iterator[None]:
    """Make global random numbers depend on `key` alone (dropout in a user's model), without changing the state outside."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        seed = random.seed(key)
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would format a stack trace for every kind of device
        if device.type == "cuda":
            torch.cuda.manual_seed(seed)
        yield
