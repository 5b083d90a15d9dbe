"""Memory of one client, measured by running it."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from fedrts.client.job import Job
from fedrts.client.order import Order
from fedrts.client.training import LocalTraining
from fedrts.client.workbench import Workbench
from fedrts.methods.contract import ProbeCurvature, ProbeGradient, Train

CLIENT = 0
"""The number of the one that is looked at."""


def saved_bytes(bench: Workbench, order: Order, samples: int) -> int:
    """Return the bytes that autograd saves of one batch for the backward pass: every storage once, except the model's own."""
    job = bench.job(order, CLIENT, torch.arange(samples))
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
    """Return the bytes that a client holds at the end of its steps, by name."""
    tensors = {name: tensor for name, tensor in job.tensors.items() if name not in ("weights", "received", "mask")}
    trains = any(isinstance(step, Train) for step in order.exchange.steps)
    learns = any(isinstance(step, Train | ProbeGradient | ProbeCurvature) for step in order.exchange.steps)
    gradient = job.bench.gradient
    parts = {
        "weights": job.weights.nbytes,
        "received weights": job.tensors["received"].nbytes,
        "mask": job.mask.bits.nbytes,
        "gradient": gradient.nbytes,
        "optimizer": gradient.nbytes * len(training.make_optimizer().remembers) if trains else 0,
        "method": sum(tensor.nbytes for tensor in tensors.values()),
        "activations": activations if learns else 0,
    }
    return {name: size for name, size in parts.items() if size}


def on_mask(parts: Mapping[str, int], order: Order) -> dict[str, int]:
    """Return `parts` with weights, gradient and optimiser state stored on the mask, and the mask as bits."""
    layout, frame = order.frame.layout, order.frame
    weights, gradient = frame.on_mask / layout.length, (frame.on_mask - frame.statistics) / layout.parameters
    shares = {"weights": weights, "received weights": weights, "gradient": gradient, "optimizer": gradient, "mask": 1 / 8}
    return {name: math.ceil(size * shares.get(name, 1.0) - 1e-6) for name, size in parts.items()}
