"""FLOPs by the paper's rules."""

from __future__ import annotations

from fedrts.client.training import LocalTraining
from fedrts.methods.contract import Calibrate, Evaluate, Exchange, ProbeGradient, Train
from fedrts.wire.fields import Masks


def flops_on_paper(exchange: Exchange, training: LocalTraining, samples: int, sparse: float, dense: float, pruned: float) -> float:
    """Return the FLOPs of E = samples · epochs / batch iterations.

    A batch's forward pass takes F_s = `sparse` on the mask and F_d = `dense` off it. A gradient of one batch is the last of the E
    iterations: 3·F_s·(E − 1) + F_s + 2·F_d. On a candidate mask, which the client has not got yet, a forward pass takes `pruned`.
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
