"""What one client does with an exchange: the same program in every engine.

A client keeps nothing between rounds but its data. It binds the model to the vector it received, carries out the
exchange's steps in order, and takes the upload's fields from its tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import singledispatch

import torch
from torch import Tensor, nn

from fedrts.data.contract import Data
from fedrts.methods.contract import Exchange, ProbeGradient, Train
from fedrts.sparse import random
from fedrts.sparse.cost import Macs
from fedrts.sparse.layout import Layout
from fedrts.sparse.mask import Mask
from fedrts.wire import fields
from fedrts.wire.fields import Message


@dataclass(frozen=True)
class LocalTraining:
    """How a client trains; a new optimiser for every client and round."""

    epochs: int
    batch_size: int
    lr: float
    optimizer: str = "sgd"
    momentum: float = 0.0
    weight_decay: float = 0.0

    def samples(self, rows: int) -> int:
        """Samples that a client with so many rows sees in a round."""
        return self.epochs * (rows // self.batch_size * self.batch_size or rows)

    def make_optimizer(self, parameter: Tensor) -> torch.optim.Optimizer:
        if self.optimizer == "adam":
            return torch.optim.Adam([parameter], lr=self.lr, weight_decay=self.weight_decay)
        return torch.optim.SGD([parameter], lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay)


@dataclass(frozen=True)
class Reply:
    """A client's answer to an exchange."""

    client: int
    samples: int
    """n_k: the weight of this client in every mean."""
    message: Message
    upload_bytes: int
    download_bytes: int
    flops: float
    loss: float
    """Mean training loss over the client's steps (NaN if it made none)."""


@dataclass
class Workbench:
    """The model and data with which clients work, one after the other."""

    module: nn.Module
    layout: Layout
    data: Data
    training: LocalTraining
    seed: int
    macs: Macs
    gradient: Tensor = field(init=False)

    def __post_init__(self) -> None:
        parameter = next(self.module.parameters())
        self.gradient = torch.zeros(self.layout.parameters, dtype=parameter.dtype, device=parameter.device)
        self.has_batchnorm = any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in self.module.modules())

    def work(self, exchange: Exchange, received: Message, mask: Mask, round_index: int, client: int, rows: Tensor) -> Reply:
        """Carry out one exchange as `client`, which holds the data rows `rows` and was sent `received` and `mask`."""
        tensors = {name: entry.put(received[name], mask) for name, entry in exchange.down.items()}
        job = Job(self, tensors, mask, rows, random.key(self.seed, "client", round_index, client))
        self.layout.bind(self.module, job.weights, self.gradient)
        with _isolated(random.key(job.key, "module"), self.gradient.device):
            for step in exchange.steps:
                perform(step, job)
        message: Message = {name: entry.take(job.tensors, mask) for name, entry in exchange.up.items()}
        return Reply(
            client=client,
            samples=len(rows),
            message=message,
            upload_bytes=fields.length(exchange.up, message, mask),
            download_bytes=fields.length(exchange.down, received, mask),
            flops=job.flops,
            loss=float(job.loss / job.steps) if job.steps else float("nan"),
        )


@dataclass
class Job:
    """One client's work in progress."""

    bench: Workbench
    tensors: dict[str, Tensor]
    mask: Mask
    rows: Tensor
    key: int
    flops: float = 0.0
    loss: Tensor | float = 0.0
    steps: int = 0

    @property
    def weights(self) -> Tensor:
        return self.tensors["weights"]

    def batches(self, epoch: int) -> Iterator[Tensor]:
        """Row numbers of each batch of an epoch. Only full batches, or one short one if the client has less than a batch."""
        size = self.bench.training.batch_size
        order = self.rows[random.permutation(random.key(self.key, "order", epoch), len(self.rows)).to(self.rows.device)]
        if len(order) >= size:
            yield from order[: len(order) // size * size].split(size)
        elif len(order) > 1 or not self.bench.has_batchnorm:  # BatchNorm has no statistics of a single sample
            yield order

    def backward(self, rows: Tensor) -> Tensor:
        """Loss on a batch, and its gradient in `bench.gradient [N_all]`."""
        bench = self.bench
        bench.gradient.zero_()
        loss = bench.data.task.loss(bench.module(bench.data.x[rows]), bench.data.y[rows])
        loss.backward()
        return loss.detach()


@singledispatch
def perform(step: object, job: Job) -> None:
    """Carry out one step of an exchange."""
    raise TypeError(f"no client knows the step {step!r}")


@perform.register
def _train(step: Train, job: Job) -> None:
    bench = job.bench
    inactive = None if job.mask.is_full else ~job.mask.bits
    links = bench.gradient[: bench.layout.links]
    parameter = nn.Parameter(job.weights[: bench.layout.parameters])
    parameter.grad = bench.gradient
    optimizer = bench.training.make_optimizer(parameter)
    bench.module.train()
    samples = 0
    for epoch in range(bench.training.epochs):
        for rows in job.batches(epoch):
            job.loss = job.loss + job.backward(rows)
            if inactive is not None:
                links.masked_fill_(inactive, 0.0)  # the optimisers leave a weight at exactly 0 whose gradient is always 0
            optimizer.step()
            samples += len(rows)
            job.steps += 1
    job.flops += 3 * samples * bench.macs.forward(job.mask)


@perform.register
def _probe(step: ProbeGradient, job: Job) -> None:
    bench = job.bench
    buffers = job.weights[bench.layout.parameters :]
    before = buffers.clone()
    bench.module.train()
    bench.gradient.zero_()
    for rows in job.batches(bench.training.epochs):  # the order of the epoch after the last
        job.backward(rows)
        job.flops += len(rows) * (bench.macs.forward(job.mask) + 2 * bench.macs.dense)
        break
    buffers.copy_(before)
    job.tensors[step.into] = bench.gradient[: bench.layout.links].clone()


@contextmanager
def _isolated(key: int, device: torch.device) -> Iterator[None]:
    """Global random numbers that depend on `key` alone (dropout in a user's model), and leave no trace outside."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(random.seed(key))
        yield


def download(exchange: Exchange, tensors: Mapping[str, Tensor], mask: Mask) -> Message:
    """What the server sends to every client in this exchange."""
    return {name: entry.take(tensors, mask) for name, entry in exchange.down.items()}
