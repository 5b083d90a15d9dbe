"""Federated evaluation: clients' metrics of the global model, on data that they hold out from training.

It is one more exchange after those of a round: the model goes down as it is, metrics come up. So it takes the same way as training
(messages, guard, byte counts), and a client on another machine builds it from the experiment as it builds every exchange.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fedrts.client.figures import FigureForm
from fedrts.client.order import Order, Reply
from fedrts.client.summing import Summing
from fedrts.errors import note
from fedrts.methods.contract import Exchange, Judge, State
from fedrts.server.client_records import ClientRecords
from fedrts.server.engine import Secretive
from fedrts.server.guard import faults, judge
from fedrts.server.mask_memory import addressed
from fedrts.tasks.metrics import Metric
from fedrts.wire.fields import Values, carried

if TYPE_CHECKING:
    from fedrts.server.rounds import Plan


def assessment(metrics: Sequence[str]) -> Exchange:
    """Return the exchange in which clients send these metrics of the model."""
    return Exchange({"weights": Values()}, (Judge(tuple(metrics)),), {"metrics": Values("metrics", on="scalars", copies=len(metrics))})


def assess(plan: Plan, state: State, index: int, ledger: ClientRecords) -> dict[str, Any]:
    """Return held-out metrics of the model after a round: the mean over samples, the mean over clients, and each client's.

    A client whose answer is late or cannot be is left out and named; nothing else becomes of it.
    """
    number = len(plan.exchanges(plan.round(index, state.mask)))
    order = Order.of(
        assessment(plan.metric_names), plan.round(index, state.mask, number), plan.layout, state, plan.key(index, "assessment")
    )
    absent = ledger.strikes.quarantined | ledger.lateness.resting(index) | ledger.departed.keys()
    clients = sorted(plan.held_out.keys() - absent)
    order, size = addressed(order, clients, ledger.traffic)
    if plan.summing is not None and isinstance(plan.engine, Secretive):
        return _in_sum(plan, plan.engine, plan.summing, order, clients, size)
    samples = {client: plan.samples[client] for client in clients}
    told: dict[int, dict[str, float]] = {}
    missing = []
    for reply in plan.engine.run(order, clients):
        (fault,) = faults([reply], order, plan.guard, samples)
        rejection = judge(reply, fault, order, samples, told)
        size += reply.resent
        if rejection is not None:
            missing.append({"client": reply.client, "reason": rejection.reason})
            continue
        assert isinstance(reply, Reply)  # a failure never counts
        metrics = dict(zip(plan.metric_names, carried(reply.message["metrics"], Tensor).tolist(), strict=True))
        if (reason := impossible(plan.metrics, metrics)) is not None:
            missing.append({"client": reply.client, "reason": reason})
            continue
        told[reply.client] = metrics
        size += reply.size or 0
    held_out = {client: plan.held_out[client] for client in told}
    return {
        "mean": _mean(told, plan.guard.weights(held_out)),
        "mean_of_clients": _mean(told, dict.fromkeys(told, 1)),
        "samples": sum(held_out.values()),
        "clients": [{"client": client, "samples": held_out[client], **told[client]} for client in sorted(told)],
        "missing": missing,
        "bytes": size,
    }


def _in_sum(plan: Plan, engine: Secretive, summing: Summing, order: Order, clients: Sequence[int], size: int) -> dict[str, Any]:
    """The same with secure sums: the mean over samples, and nothing about single clients."""
    held_out = {client: plan.held_out[client] for client in clients}
    found = engine.figures(order, held_out, partial(FigureForm.of_metrics, plan.metrics, summing.table))
    means = {name: value for name, value in found.means.items() if math.isfinite(value)}  # or a client had none
    reason = impossible([metric for metric in plan.metrics if metric.name in means], means)
    if reason is not None:
        note(f"round {order.round.index}: the sites' metrics give {reason}: one of the sites breaks the rules of secure sums")
    return {
        "mean": {} if reason is not None else means,
        "mean_of_clients": {},
        "samples": found.samples,
        "clients": [],
        "missing": [{"client": client, "reason": reason} for client, reason in sorted(found.missing.items())],
        "bytes": size + found.bytes,
    }


def impossible(declared: Sequence[Metric], told: Mapping[str, float]) -> str | None:
    """Return why these metrics are impossible; None if they are possible."""
    return next((reason for metric in declared if (reason := metric.impossible(told[metric.name])) is not None), None)


def _mean(told: Mapping[int, Mapping[str, float]], weights: Mapping[int, int]) -> dict[str, float]:
    """Return means of clients' metrics by name; empty without clients."""
    total = sum(weights.values())
    names = next(iter(told.values()), {})
    return {name: sum(weights[client] * metrics[name] for client, metrics in told.items()) / total for name in names}
