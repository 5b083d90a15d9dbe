"""A client's training in kernels that compute only its active links (`fedrts.programs`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedrts.client.local_step import Learner
from fedrts.client.optimizers import GradientDescent, LocalOptimizer
from fedrts.client.order import Order
from fedrts.client.training import LocalTraining
from fedrts.methods.contract import Train
from fedrts.programs.plan import Descent
from fedrts.programs.program import Feed, LinkProgram
from fedrts.sparse.layout import Layout
from fedrts.sparse.mask import Mask
from fedrts.wire.fields import Values

if TYPE_CHECKING:
    from fedrts.client.workbench import Workbench

_FLOATS_AT_ONCE = 2**23
"""Numbers of inputs that a view makes before the kernels read them."""


def suits(bench: Workbench, step: Train) -> bool:
    """Whether the kernels can run this step. They compute no gradients of inactive links and none of a method's additions."""
    return bench.program is not None and step.record is None and step.influence is None


def train(bench: Workbench, weights: Tensor, received: Tensor, mask: Mask, rows: Tensor, keys: Tensor, round_index: int) -> Tensor:
    """Train `weights` in place on batches `rows [steps, size]` with `keys [steps]`; return the loss of every step.

    `received` is what the server sent. Both are whole vectors `[n]`, or those on the mask (`Mask.compact`).
    """
    program, training = bench.program, bench.training
    assert program is not None
    values = _on_mask(weights, mask, bench.layout)
    sent = _on_mask(received, mask, bench.layout)[: program.parameters(mask)].contiguous() if training.proximal else None
    free = None if bench.frozen is None else _free(bench, mask)
    optimizer = training.make_optimizer()
    if type(optimizer) is GradientDescent:
        losses = _descended(bench, program, values, sent, free, mask, rows, keys, round_index)
    else:
        losses = _stepped(bench, program, optimizer, values, sent, free, mask, rows, keys, round_index)
    if len(values) == len(weights):
        weights.copy_(values)
    else:
        weights[mask.active] = values[: mask.number]
        weights[len(mask.bits) :] = values[mask.number :]
    return losses


def keeps_to_the_mask(bench: Workbench, order: Order) -> bool:
    """Whether an order needs only values on the mask, so that a client needs no full-length vector."""
    exchange = order.exchange
    fields = [*exchange.down.values(), *exchange.up.values()]
    return (
        all(isinstance(step, Train) and suits(bench, step) for step in exchange.steps)
        and all(isinstance(field, Values) and (field.of, field.on) == ("weights", "mask") for field in fields)
        and exchange.down.keys() == {"weights"}
        and exchange.fed_back is None
        and not bench.protection.on
    )


def _on_mask(vector: Tensor, mask: Mask, layout: Layout) -> Tensor:
    """Return the values on the mask, for vectors that may be compact."""
    return mask.compact(vector) if len(vector) == layout.length else vector


def descent_of(training: LocalTraining) -> Descent:
    """Return plain gradient descent in the kernels' terms, if it is that."""
    return Descent(training.momentum, training.weight_decay, training.proximal, training.clip)


def _descended(
    bench: Workbench,
    program: LinkProgram,
    values: Tensor,
    sent: Tensor | None,
    free: Tensor | None,
    mask: Mask,
    rows: Tensor,
    keys: Tensor,
    round_index: int,
) -> Tensor:
    """Run all steps in one program."""
    descent, rate = descent_of(bench.training), bench.training.rate(round_index)
    velocity = torch.zeros(program.parameters(mask)) if descent.momentum else None
    parts = batches(bench, program, rows, keys)
    return torch.cat([program.train(values, mask, part, [rate] * len(part.rows), descent, sent, velocity, free) for part in parts])


def _stepped(
    bench: Workbench,
    program: LinkProgram,
    optimizer: LocalOptimizer,
    values: Tensor,
    sent: Tensor | None,
    free: Tensor | None,
    mask: Mask,
    rows: Tensor,
    keys: Tensor,
    round_index: int,
) -> Tensor:
    """Take gradients from the kernels and step any other optimiser on the active links."""
    weights = values[: program.parameters(mask)]
    past = {name: torch.zeros_like(weights) for name in optimizer.remembers}
    taken, planned = weights.new_zeros(()), weights.new_tensor(len(rows))
    learner = Learner(bench.training, optimizer, weights, weights if sent is None else sent, free, past, taken, planned)
    rate, losses = weights.new_tensor(bench.training.rate(round_index)), []
    for part in batches(bench, program, rows, keys):
        for batch in part.rows:
            gradient, loss = program.gradient(values, mask, Feed(part.source, part.targets, batch[None]))
            learner.step(gradient, rate)
            losses.append(loss)
    return torch.stack(losses)


def batches(bench: Workbench, program: LinkProgram, rows: Tensor, keys: Tensor) -> Iterator[Feed]:
    """Yield batches as the kernels read them: data rows in place, or a view's output, some steps at a time."""
    data, wanted = bench.data, torch.float32 if program.loss.squares else torch.int64
    if data.view is None and data.x.dtype == torch.float32 and data.x.is_contiguous():
        yield Feed(data.x, data.y.to(wanted).contiguous(), rows.contiguous())
        return
    steps = max(1, _FLOATS_AT_ONCE // max(1, rows.shape[1] * data.x[0].numel()))
    for some, of in zip(rows.split(steps), keys.split(steps), strict=True):
        x, y = data.training_batches(some, of)
        places = torch.arange(some.numel()).view(some.shape)
        yield Feed(x.flatten(0, 1).float().contiguous(), y.flatten(0, 1).to(wanted).contiguous(), places)


def _free(bench: Workbench, mask: Mask) -> Tensor:
    """Return 1 where a parameter on the mask may change, 0 where it is frozen."""
    flags = torch.ones(bench.layout.parameters)
    flags[bench.frozen] = 0.0
    return mask.compact(flags)
