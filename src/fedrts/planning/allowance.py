"""Budgets: total bytes, or bytes per client and round."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fedrts.costs.whole_run import RunCost
from fedrts.errors import InputError
from fedrts.planning import units

RESERVE = 0.01
"""Share of the bytes in all that a plan leaves: lengths of messages are foreseen to about so much (docs/plan.md)."""


@dataclass(frozen=True)
class Allowance:
    """A budget as given."""

    words: str
    total: float = math.inf
    """Bytes of all clients and rounds, both ways."""
    per_round: float = math.inf
    """Bytes of a client in the round that sends most, both ways."""
    link: float | None = None
    """Bytes a second between a client and the server, where that is known."""

    @staticmethod
    def of(
        budget: str | float | None = None, per_round: str | float | None = None, link: str | None = None, deadline: str | None = None
    ) -> Allowance:
        """Parse a budget: `200MB` in total, `2MB` per client and round, or a `5Mbit/s` link for `60s`."""
        given = {"--budget": budget, "--per-round": per_round, "--deadline": deadline}
        named = [flag for flag, value in given.items() if value is not None]
        if len(named) > 1:
            raise InputError(f"{' and '.join(named)} exclude each other: give one budget")
        if deadline is not None and link is None:
            raise InputError("--deadline needs the speed of the link: add --link, such as --link 5Mbit/s")
        if not named:
            also = " (--link alone needs --deadline)" if link is not None else ""
            raise InputError(f"give a budget: --budget 200MB, --per-round 2MB, or --link 5Mbit/s --deadline 60s{also}")
        rate = None if link is None else units.speed(link)
        if budget is not None:
            total = units.size(budget)
            return Allowance(f"{units.shown_size(total)} in all", total=total, link=rate)
        if per_round is not None:
            carried, why = units.size(per_round, "--per-round"), ""
        else:
            carried, why = (rate or 0.0) * units.duration(str(deadline)), f" ({link} for {deadline})"
        return Allowance(f"{units.shown_size(carried)} a client and round{why}", per_round=carried, link=rate)

    def rounds(self, cost: RunCost, most: int) -> int:
        """Return how many rounds of a run fit, up to `most`; 0 if none does."""
        return cost.affordable((1 - RESERVE) * self.total, most) if cost.heaviest <= self.per_round else 0

    def needed(self, cost: RunCost, rounds: int) -> float:
        """Return the budget that this many rounds would need."""
        return cost.bytes(rounds) / (1 - RESERVE) if self.total < math.inf else cost.heaviest
