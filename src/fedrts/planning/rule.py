"""The recommended setting among those that fit a budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedrts.wire.value_types import ValueType

LEAST_BITS = 4
"""Bits of a value that buy most accuracy for equal bytes in our measurements; fewer lose far more than they save (docs/plan.md)."""
FREE_BITS = 8
"""Bits of a value beyond which more of them gained nothing."""


@dataclass(frozen=True)
class Fitting:
    """A setting that fits a budget: a row of the table."""

    density: float
    value_type: ValueType
    bits: int
    """Bits of a value."""
    rounds: int
    """The horizon, or what the budget pays for where that is less."""
    affordable: int
    """Rounds that the budget pays for."""
    bytes: float
    """Upper bound over all clients and rounds, both ways."""
    client_bytes: float
    """Bytes of one client in the round that sends most, both ways."""
    memory_bytes: float
    """That a client holds at most."""
    flops: float
    """Sum over all clients and rounds."""
    seconds: float | None
    """By which one client sends and receives `client_bytes`, where the speed of the link is known."""


def recommended(fitting: Sequence[Fitting]) -> Fitting:
    """Enough rounds first, then links before bits.

    - Rounds: a run that stops early has not learned; no density makes up for it. Where no setting has all rounds of the horizon,
      those with most rounds are left.
    - Links: values of `LEAST_BITS`, and the largest density. At equal bytes twice the links or rounds at 4 bits mostly beat 8 bits
      (docs/plan.md has the measurements, and the exception). Fewer bits are taken only where nothing else fits, and then as many as
      possible.
    - Bits: where the density can be no larger, up to `FREE_BITS`.
    """
    most = max(one.rounds for one in fitting)
    lasting = [one for one in fitting if one.rounds == most]
    enough = [one.bits for one in lasting if one.bits >= LEAST_BITS]
    bits = min(enough) if enough else max(one.bits for one in lasting)
    widest = max((one for one in lasting if one.bits == bits), key=lambda one: one.density)
    if not _is_widest(widest, fitting):
        return widest
    finer = [one for one in lasting if one.density == widest.density and bits <= one.bits <= FREE_BITS]
    return max(finer, key=lambda one: one.bits, default=widest)


def _is_widest(one: Fitting, fitting: Sequence[Fitting]) -> bool:
    """Whether there is no larger density to choose."""
    return one.density == 1 or len({other.density for other in fitting}) == 1


def reason(chosen: Fitting, fitting: Sequence[Fitting], horizon: int, type_said: bool = False) -> str:
    """Explain the recommendation in one line."""
    rounds = f"all {horizon} rounds" if chosen.rounds == horizon else f"{chosen.rounds} of {horizon} rounds, the most that fit"
    densities = {one.density for one in fitting}
    density = "the largest density that fits" if len(densities) > 1 else f"density {chosen.density:g}"
    if type_said:
        bits = f"{chosen.value_type} as you set it"
    elif chosen.bits < LEAST_BITS:
        bits = f"{chosen.bits} bits per value, because {LEAST_BITS} do not fit"
    elif chosen.bits == LEAST_BITS and not _is_widest(chosen, fitting):
        bits = f"{chosen.bits} bits per value, which leaves the most bytes for links"
    else:
        bits = f"{chosen.bits} bits per value, for which the budget is large enough"
    return f"first {rounds}, then {bits}, then {density}"
