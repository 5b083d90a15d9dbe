"""Comparison of a round's replies once all are in: which is far larger than the others, and which client's are large too often.

One large update proves nothing: honest clients whose training takes a bad turn send one now and then. So there are two bounds, both in
multiples of the round's median. Beyond the far one the round is repeated without the client. Beyond the near one a reply counts and
weighs against its client; who sends several within a few rounds is asked no more. Replies are still added up as they come: only their
sizes are kept.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field

FEWEST = 3
"""Replies without which a round has no usual size."""


@dataclass(frozen=True)
class Measure:
    """A quantity that is measured in every reply."""

    name: str
    slack: float
    """How many times more than updates it varies among honest clients."""
    harmless: float
    """Below this nothing is large: a multiple of max(‖W‖, 1) for updates, of the norm that was sent for statistics."""
    told: str
    by_samples: bool = False
    """Whether it grows with a client's number of samples, since more samples are more steps."""


UPDATE = Measure("update", 1.0, 0.2, "an update {:.3g} times as large as the median of its round", by_samples=True)
STATISTICS = Measure("statistics", 5.0, 0.05, "statistics that move {:.3g} times as far as the median of their round")


@dataclass(frozen=True)
class Excess:
    """By how much a reply exceeds those of its round."""

    ratio: float
    """In multiples of the median, less the slack: comparable whatever was measured."""
    reason: str


def excesses(measured: Mapping[str, Mapping[int, float]], samples: Mapping[int, int], norm: float) -> dict[int, Excess]:
    """Return the largest excess of every client whose reply counts. `norm`: the model's; `samples`: n_k of the clients."""
    found: dict[int, Excess] = {}
    for measure, unit in ((UPDATE, max(norm, 1.0)), (STATISTICS, 1.0)):
        sizes = measured.get(measure.name, {})
        if len(sizes) < FEWEST or not (median := statistics.median(sizes.values())):
            continue
        typical = statistics.median(samples[client] for client in sizes)
        for client, size in sizes.items():
            ratio = size / median / (max(1.0, samples[client] / typical) if measure.by_samples else 1.0)
            excess = Excess(ratio / measure.slack if size > measure.harmless * unit else 0.0, measure.told.format(ratio))
            if client not in found or excess.ratio > found[client].ratio:
                found[client] = excess
    return found


_FORGIVEN = 0.25
"""What a usual reply takes off: an attacker that rests after each large reply gains less than one that stays below the bound."""


@dataclass
class Suspicion:
    """How much the large replies of each client weigh against it.

    A large reply weighs as much as it is larger than the bound, less than the `limit` (one proves nothing); a usual one takes some away.
    """

    limit: int
    weights: dict[int, float] = field(default_factory=dict)

    def add(self, ratios: Mapping[int, float]) -> list[int]:
        """Record by what factor replies exceeded the bound; return the clients whose suspicion is too high.

        Where there is somebody, nothing is remembered: the round is repeated without them.
        """
        weights = dict(self.weights)
        for client, ratio in ratios.items():
            more = min(ratio, max(self.limit - 1, 1)) if ratio > 1 else -_FORGIVEN
            weights[client] = max(0.0, weights.get(client, 0.0) + more)
        over = [client for client in ratios if weights[client] >= self.limit]
        if not over:
            self.weights = {client: weight for client, weight in weights.items() if weight}
        return over
