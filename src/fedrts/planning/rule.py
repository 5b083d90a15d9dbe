"""Which of the settings that fit a budget is recommended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedrts.wire.value_types import ValueType

FREE_BITS = 8
"""Bits of a value down to which our measurements found no loss of accuracy (docs/plan.md)."""


@dataclass(frozen=True)
class Fitting:
    """A setting that fits a budget: a row of the table."""

    density: float
    value_type: ValueType
    bits: int
    """Of a value."""
    rounds: int
    """The horizon, or what the budget pays for where that is less."""
    affordable: int
    """Rounds that the budget pays for."""
    bytes: float
    """Of all clients and rounds, both ways, at most."""
    client_bytes: float
    """Of one client in the round that sends most, both ways."""
    memory_bytes: float
    """That a client holds at most."""
    flops: float
    """Of all clients and rounds."""
    seconds: float | None
    """By which one client sends and receives `client_bytes`, where the speed of the link is known."""


def recommended(fitting: Sequence[Fitting]) -> Fitting:
    """Enough rounds first, then the fewest bits that are free, then the largest density.

    - Rounds: a run that stops early has not learned; no density makes up for it. Where no setting has all rounds of the horizon,
      those with most rounds are left.
    - Bits: on digits, 8 bits at density 0.2 send as much as 32 bits at 0.05 and are better, as good as 32 bits at 0.2 (docs/plan.md).
      Fewer bits than `FREE_BITS` are taken only where nothing else fits, and then as many as possible.
    - Density: what bytes are left buys links.
    """
    most = max(one.rounds for one in fitting)
    lasting = [one for one in fitting if one.rounds == most]
    free = [one.bits for one in lasting if one.bits >= FREE_BITS]
    bits = min(free) if free else max(one.bits for one in lasting)
    return max((one for one in lasting if one.bits == bits), key=lambda one: one.density)


def reason(chosen: Fitting, fitting: Sequence[Fitting], horizon: int, type_said: bool = False) -> str:
    """Why it is the one, in a line."""
    rounds = f"all {horizon} rounds" if chosen.rounds == horizon else f"{chosen.rounds} of {horizon} rounds, the most that fit"
    if type_said:
        bits = f"{chosen.value_type} as asked for"
    elif chosen.bits >= FREE_BITS:
        bits = f"{chosen.bits} bits a value, which cost no accuracy in our measurements"
    else:
        bits = f"{chosen.bits} bits a value, because {FREE_BITS} do not fit"
    densities = {one.density for one in fitting}
    density = "the largest density that fits" if len(densities) > 1 else f"density {chosen.density:g}"
    return f"first {rounds}, then {bits}, then {density}"
