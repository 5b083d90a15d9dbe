"""The steps of an exchange, executed on a client's job, and their cost."""

from __future__ import annotations

from collections.abc import Sequence
from functools import singledispatch

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedrts import trees
from fedrts.client import sparse_training
from fedrts.client.job import Batch, Job
from fedrts.client.local_step import Learner
from fedrts.methods.contract import Calibrate, Evaluate, Judge, ProbeCurvature, ProbeGradient, Rewire, Train
from fedrts.sparse import random
from fedrts.sparse.mask import Mask
from fedrts.sparse.units import start_anew, start_key


@singledispatch
def perform(step: object, job: Job) -> None:
    """Run one step of an exchange."""
    raise TypeError(f"no client knows the step {step!r}")


@perform.register
def _train(step: Train, job: Job) -> None:
    bench, training = job.bench, job.bench.training
    batches = [rows for epoch in training.epochs_of(step) for rows in job.batches(epoch)]
    if sparse_training.suits(bench, step):
        if batches:
            stacked = torch.stack([batch.rows for batch in batches])
            keys = torch.tensor([random.signed(batch.key or 0) for batch in batches])
            losses = sparse_training.train(bench, job.weights, job.tensors["received"], job.mask, stacked, keys, job.round_index)
            job.loss, job.steps = job.loss + losses.sum(), job.steps + len(batches)
        return
    weights, received = (tensor[: bench.layout.parameters] for tensor in (job.weights, job.tensors["received"]))
    links = bench.gradient[: bench.layout.links]
    squares = torch.zeros_like(links) if step.record else None
    optimizer, rate = training.make_optimizer(), weights.new_tensor(training.rate(job.round_index))
    learner = Learner(
        training,
        optimizer,
        weights,
        received,
        bench.allowed(job.mask),
        past={name: torch.zeros_like(weights) for name in optimizer.remembers},
        taken=weights.new_zeros(()),
        planned=weights.new_tensor(len(batches)),
        influence=step.influence,
        marks=step.marked(received, job.mask),
    )
    bench.module.train()
    for rows in batches:
        job.loss = job.loss + job.backward(rows)
        if squares is not None:
            squares += links.square() / len(batches)
        learner.step(bench.gradient, rate)
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
                trees.called(bench.module, bench.data.training_batch(batch.rows, batch.key)[0])
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
    start_anew(job.bench.layout.layers, job.weights, job.mask, start_key(job.bench.seed, job.round_index))


@singledispatch
def flops(step: object, job: Job, counts: Sequence[int]) -> float:
    """Return the FLOPs of a step for layers with `counts` active links (see `sparse.cost`), without running it."""
    raise TypeError(f"no client knows the step {step!r}")


@flops.register
def _of_training(step: Train, job: Job, counts: Sequence[int]) -> float:
    return len(job.bench.training.epochs_of(step)) * job.samples * step.flops(*_forward(job, counts))


@flops.register(ProbeGradient)
@flops.register(ProbeCurvature)
def _of_probing(step: ProbeGradient | ProbeCurvature, job: Job, counts: Sequence[int]) -> float:
    one = isinstance(step, ProbeGradient) and step.batches == "one"
    return (min(job.samples, job.bench.training.batch_size) if one else job.samples) * step.flops(*_forward(job, counts))


@flops.register(Calibrate)
@flops.register(Evaluate)
def _of_candidates(step: Calibrate | Evaluate, job: Job, counts: Sequence[int]) -> float:
    samples = step.passes * job.samples if isinstance(step, Calibrate) else len(job.rows)
    macs = job.bench.macs
    masks = (Mask(bits, job.mask.sizes) for bits in job.tensors[step.masks])
    return samples * sum(step.flops(macs.forward(mask), macs.dense) for mask in masks)


@flops.register(Judge)
@flops.register(Rewire)
def _of_nothing(step: Judge | Rewire, job: Job, counts: Sequence[int]) -> float:
    return 0.0


def _forward(job: Job, counts: Sequence[int]) -> tuple[float, float]:
    """Return the MACs of a sample's forward pass: on the client's mask, and dense."""
    return job.bench.macs.at(counts, job.mask.sizes), job.bench.macs.dense
