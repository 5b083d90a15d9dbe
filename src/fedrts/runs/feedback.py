"""Where error feedback is possible: uploads, engines, and memory."""

from __future__ import annotations

from fedrts.config import Experiment
from fedrts.engines.kinds import kind
from fedrts.errors import InputError, note
from fedrts.methods.contract import Exchange
from fedrts.server import reducers
from fedrts.server.optimizer import Averaging
from fedrts.server.rounds import Plan
from fedrts.sparse.mask import Mask
from fedrts.wire.fields import Missed, Values

_MUCH = 2**30
"""Bytes of residuals from which on a run says so."""


def check_feedback(experiment: Experiment, plan: Plan) -> None:
    """Refuse error feedback where it is impossible; note its memory where that is large."""
    found = exchanges(plan)
    uploads = [exchange for exchange in found if "weights" in exchange.up]
    if experiment.wire.feedback:
        for exchange in uploads:
            if exchange.fed_back is None:
                weights = exchange.up["weights"]
                raise InputError(f"wire.feedback = true: {_obstacle(weights, experiment)}")
    if not any(exchange.fed_back for exchange in uploads):
        return
    what = "wire.feedback = true" if experiment.wire.feedback else f"'{experiment.method}'"
    if experiment.privacy.on:
        raise InputError(f"{what} sends in a later round what [privacy] kept back in an earlier one: use one of them")
    if (setting := reducers.unlike(experiment.guard, "mergeable")) is not None:
        raise InputError(f"{what} has clients count as told what {setting} may leave out: use {reducers.those('mergeable')}")
    in_steps = any(isinstance(entry, Missed) for exchange in found for entry in exchange.down.values())
    if in_steps and not (isinstance(plan.optimizer, Averaging) and plan.optimizer.rate == 1):
        raise InputError(
            f"{what} tells clients in steps of the server's model, which a server optimiser would move beside them: "
            "set train.server_optimizer = 'sgd' and train.server_lr = 1"
        )
    size = len(plan.samples) * plan.layout.parameters * 4
    if size > _MUCH and not kind(experiment.engine.name).has_sites:  # whose clients keep their own
        note(f"error feedback keeps what each client did not send: {size / 2**30:.1f} GiB of memory, and of every checkpoint, at most")


def feeds_back(plan: Plan) -> bool:
    """Whether clients remember what compression dropped from their uploads."""
    return any(exchange.fed_back for exchange in exchanges(plan))


def exchanges(plan: Plan) -> list[Exchange]:
    """Return the exchanges of an inner and of an outer round."""
    mask, outer = Mask.full(plan.layout.sizes), plan.schedule.is_outer
    kinds = {next((index for index in range(plan.rounds) if outer(index) == wanted), 0) for wanted in (True, False)}
    return [exchange for index in sorted(kinds) for exchange in plan.exchanges(plan.round(index, mask))]


def _obstacle(weights: object, experiment: Experiment) -> str:
    """Return why an upload's weights have no error feedback, and the remedy."""
    if not isinstance(weights, Values):
        return f"clients of '{experiment.method}' upload weights on masks of their own; leave it out, or choose another method"
    if weights.fixed:
        return f"'{experiment.method}' rounds in its own way; leave it out, or use 'fedavg' with wire.value_type"
    return "values that travel whole leave nothing to feed back; set wire.value_type (int8, int4, …), or leave it out"
