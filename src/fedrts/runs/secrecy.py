"""Which methods can run on sums alone."""

from __future__ import annotations

from fedrts.config import Experiment
from fedrts.errors import InputError
from fedrts.runs.feedback import exchanges
from fedrts.server.rounds import Plan
from fedrts.sparse.mask import Mask


def check_sums(experiment: Experiment, plan: Plan) -> None:
    """Refuse secure sums for a method whose contributions are not sums on a common mask."""
    if plan.summing is None:
        return
    mask, why = Mask.full(plan.layout.sizes), None
    if plan.method.exchanges(plan.round(-1, mask)):
        why = "its clients upload numbers before the first round"
    elif any(len(plan.method.exchanges(plan.round(index, mask))) > 1 for index in range(min(plan.rounds, _LOOKED_AT))):
        why = "its rounds have several exchanges, and a round is opened once"
    else:
        why = next((exchange.no_sum for exchange in exchanges(plan) if exchange.no_sum), None)
    if why is not None:
        raise InputError(f"secure.aggregation is not for '{experiment.method}': {why}; choose another method, or leave it out")


_LOOKED_AT = 100
"""Rounds whose exchanges are looked at."""
