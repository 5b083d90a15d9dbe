"""What agreement of the batched with the serial engine means: in float64 the same masks, and weights within 1e-9."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from fedrts import trees
from fedrts.client.workbench import Workbench
from fedrts.engines.batched import BatchedEngine
from fedrts.engines.kernels import Kernel, Objective, Vectorised
from fedrts.engines.serial import SerialEngine
from fedrts.methods.contract import Setup
from fedrts.runs.build import Assembled
from fedrts.server import rounds
from fedrts.server.rounds import Played
from fedrts.testing.federations import toy

FAMILIES = {"mlp": "no norm", "cnn": "BatchNorm", "tiny_gpt": "GPT"}
UNEQUAL = {"total": 6, "per_round": 5, "partition": "quantity", "alpha": 1.0, "min_size": 3}
"""Clients with several batches, with one short batch, and with different numbers of steps."""
OFTEN = {"interval": 2, "end": 3}
GRADIENTS_WITHIN = 5e-3
"""Largest relative difference of a step's gradients in float32: BatchNorm amplifies rounding."""

MakeKernel = Callable[[Objective], Kernel]
INPUTS = ("x", "test_x")


def unequal(method: str, model: str, **keywords: object) -> Assembled:
    """The run on which every method is compared: clients of unequal sizes, and a topology that changes often."""
    return toy(method, model, **{"clients": UNEQUAL, "topology": OFTEN, "train": {"epochs": 2}, "rounds": 5, **keywords})


def in_double(run: Assembled) -> tuple[Workbench, Setup]:
    """Return the same run in float64: module, data and initial weights."""
    bench, data = run.bench, run.data
    wide = {name: trees.mapped(lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, getattr(data, name)) for name in INPUTS}
    data = replace(data, **wide)
    module = bench.module.double()
    setup = replace(run.setup, weights=run.setup.weights.double(), module=module)
    return Workbench(module, run.layout, data, bench.training, bench.seed, bench.macs, summing=bench.summing, noise=bench.noise), setup


def both(run: Assembled, slots: int = 3, together: int = 4, make_kernel: MakeKernel = Vectorised, workers: int = 1) -> list[list[Played]]:
    """Return the states and records of every round in float64, from the serial and from the batched engine."""
    bench, setup = in_double(run)
    device = bench.device
    serial = SerialEngine(bench, [part.to(device) for part in run.rows], 64)
    kernel = make_kernel(Objective(bench.module, bench.data.task, bench.layout))
    batched = BatchedEngine(bench, [part.cpu() for part in run.rows], kernel, slots, together, serial, workers)
    return [list(rounds.play(replace(run.plan, engine=engine), run.method.begin(setup), -1)) for engine in (serial, batched)]


def agree(first: Sequence[Played], second: Sequence[Played]) -> None:
    """Assert that every round has the same masks, weights within 1e-9, the same bytes, and no rejections."""
    for a, b in zip(first, second, strict=True):
        assert a.state.mask == b.state.mask, f"round {a.record.round}: other masks"
        torch.testing.assert_close(a.state.weights, b.state.weights, rtol=0, atol=1e-9)
        for name in a.state.memory:
            torch.testing.assert_close(a.state[name].double(), b.state[name].double(), rtol=1e-6, atol=1e-6)
        assert a.record.upload_bytes == b.record.upload_bytes
        assert abs(a.record.flops - b.record.flops) <= 1e-12 * abs(a.record.flops)
        assert a.record.rejected == b.record.rejected == []


def largest_difference(first: Sequence[Played], second: Sequence[Played]) -> float:
    """Return the largest difference of two weights, over all rounds."""
    return max(float((a.state.weights - b.state.weights).abs().max()) for a, b in zip(first, second, strict=True))


def gradient_difference(run: Assembled, make_kernel: MakeKernel = Vectorised, clients: int = 4) -> float:
    """How far, relative to their norm, one step's gradients of clients side by side are from those of one after the other, in float32.

    Every client has weights of its own: the initial ones, moved a little.
    """
    bench, setup = run.bench, run.setup
    device, parameters = bench.device, bench.layout.parameters
    generator = torch.Generator().manual_seed(1)
    moves = torch.randn(clients, parameters, generator=generator).to(device)
    weights = setup.weights.repeat(clients, 1)
    weights[:, :parameters] += 0.01 * moves
    rows = torch.randperm(bench.data.samples, generator=generator)[: clients * bench.training.batch_size].view(clients, -1).to(device)
    x, y = bench.data.training_batches(rows, torch.arange(clients, device=device))
    bench.module.train()
    found = make_kernel(Objective(bench.module, bench.data.task, bench.layout))(weights.clone(), x, y).gradient
    worst = 0.0
    for client in range(clients):
        bench.layout.bind(bench.module, weights[client].clone(), bench.gradient)
        bench.gradient.zero_()
        bench.data.task.loss(bench.module, x[client], y[client]).backward()
        worst = max(worst, float((found[client] - bench.gradient).norm() / bench.gradient.norm()))
    return worst
