"""The table `[secure]` of an experiment."""

from __future__ import annotations

from pydantic import Field

from fedrts.secure.call import FEWEST
from fedrts.tables import Number, Table


class SecureSums(Table):
    """Secure sums: the server adds up uploads that it cannot read, see docs/security.md."""

    aggregation: bool = Field(False, description="mask uploads so that the server learns only sums over a round's clients")
    threshold: int | None = Field(
        None,
        ge=2,
        description="t: clients that must stay to the end of a round to open its sum; default: two thirds of the round's clients, plus one",
    )
    votes_among: Number = Field(
        0.1, gt=0, le=1, description="share of the inactive links that clients may vote for, redrawn for every outer round"
    )
    bits: int = Field(18, ge=8, le=24, description="bits of a rounded value; a word has a few more, so that sums fit")
    clip: Number = Field(1.0, gt=0, description="largest change of a parameter in a round; clients clip larger ones")
    statistic_clip: Number = Field(10.0, gt=0, description="largest change of a BatchNorm statistic in a round")
    metric_clip: Number = Field(1000.0, gt=0, description="largest metric that a site may report, for metrics that are not shares")

    def needed(self, clients: int) -> int:
        """Return t for this many clients."""
        return 2 * clients // 3 + 1 if self.threshold is None else self.threshold

    def least(self, invited: int, per_round: int) -> int:
        """Return t for this many invited clients when a round has `per_round`: the same t, or the same share of more clients."""
        needed = self.needed(per_round)
        return max(needed, -(-needed * invited // per_round))

    def refusal(self, clients: int) -> str | None:
        """Return why sums over this many clients are impossible, and the remedy; None if they are possible."""
        if clients < FEWEST:
            return f"secure.aggregation hides a client among others: clients.per_round = {clients} must be at least {FEWEST}"
        if not clients < 2 * self.needed(clients) <= 2 * clients:
            least = clients // 2 + 1
            return f"secure.threshold = {self.threshold} must be above half of clients.per_round = {clients}: {least} to {clients}"
        return None
