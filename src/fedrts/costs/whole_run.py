"""What a whole run costs, for any number of rounds: planned from what one client's rounds cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

from fedrts.client.masks import REMEMBERED
from fedrts.config import Experiment
from fedrts.costs.estimate import Estimate
from fedrts.costs.table import FRESH, HOLDER, Row
from fedrts.methods.contract import State
from fedrts.runs.build import Assembled
from fedrts.sparse.schedule import Schedule
from fedrts.wire.value_types import ValueType

_FAR = 1_000
"""Intervals until the end of the rehearsed schedule: both of its outer rounds exchange as many links as any may."""


@dataclass(frozen=True)
class RunCost:
    """Bytes, FLOPs and memory of a run, as a function of its rounds.

    Bytes are at most these, whoever is asked when: every client gets the whole mask once, and clients take turns, so that as many
    of them as possible miss a change of the mask and must be told. A change is priced as the share f(t) of links that round t puts
    up for exchange. Rounds that are repeated for want of replies are not foreseen.
    """

    experiment: Experiment
    end: int | None
    """T_end as it was asked for; None: 0.6 of the rounds."""
    setup: tuple[Row, Row] | None
    """Rows of a client that has the mask, and of a fresh one."""
    inner: tuple[Row, Row]
    outer: tuple[Row, Row]
    moves: bool
    """Do outer rounds change the mask?"""
    sizes: tuple[int, ...]
    counts: tuple[int, ...]
    """n^l and K^l."""

    @property
    def heaviest(self) -> float:
        """Bytes, both ways, of a fresh client in the round that sends most."""
        return max(down_and_up(rows[1]) for rows in self._rows)

    @property
    def memory(self) -> float:
        """Bytes that a client holds at most."""
        return max(rows[0].memory_bytes for rows in self._rows)

    def schedule(self, rounds: int) -> Schedule:
        """The schedule of a run of so many rounds."""
        e = self.experiment.model_copy(update={"rounds": rounds, "topology": self.experiment.topology.model_copy(update={"end": self.end})})
        return Schedule(e.topology.interval, min(e.end, rounds), e.topology.adjust, e.topology.first_outer, e.topology.outer_at_end)

    def bytes(self, rounds: int) -> float:
        """Of all messages of all clients, both ways, set-up included."""
        outers = self.schedule(rounds).outers_before(rounds)
        fields = [((rounds - outers), self.inner[0]), (outers, self.outer[0])]
        if self.setup is not None:
            fields.append((1, self.setup[1]))
        sent = sum(times * (self._asked * row.download_bytes + self._answering * row.upload_bytes) for times, row in fields)
        return sent + self._masks(rounds)

    def flops(self, rounds: int) -> float:
        """Of all clients."""
        outers = self.schedule(rounds).outers_before(rounds)
        once = self.setup[0].flops if self.setup is not None else 0.0
        return self._answering * (once + (rounds - outers) * self.inner[0].flops + outers * self.outer[0].flops)

    def affordable(self, total: float, most: int) -> int:
        """The largest number of rounds, up to `most`, whose bytes are within `total`; 0 if not even one is."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.bytes(middle) <= total else (low, middle - 1)
        return low

    @property
    def _rows(self) -> list[tuple[Row, Row]]:
        return [rows for rows in (self.setup, self.inner, self.outer) if rows is not None]

    @property
    def _asked(self) -> int:
        e = self.experiment
        return min(e.guard.asked(e.clients.per_round), e.clients.total)

    @property
    def _answering(self) -> int:
        return self.experiment.clients.per_round

    def _masks(self, rounds: int) -> float:
        """Bytes by which all clients are told the masks."""
        whole, schedule, total = self._whole_mask, self.schedule(rounds), self.experiment.clients.total
        first = min(total, rounds * self._asked)  # contacts with a client that holds no mask
        turn = math.ceil(total / self._asked)
        changed, changes = [0.0], [0]  # before each round: links exchanged so far, as a share, and in how many outer rounds
        for t in range(rounds):
            moved = self.moves and schedule.is_outer(t)
            changed.append(changed[-1] + schedule.fraction(t) * moved)
            changes.append(changes[-1] + moved)
        priced, told = cache(self._difference), 0.0
        for t in range(turn, rounds):
            missed = changes[t] - changes[t - turn]
            told += priced(round(changed[t] - changed[t - turn], 6)) if missed <= REMEMBERED else whole
        return first * whole + self._asked * told

    @cached_property
    def _whole_mask(self) -> float:
        return max(self.inner[1].download_bytes - self.inner[0].download_bytes, 0)

    def _difference(self, share: float) -> float:
        """Bytes of a change by this share of the active links, from those of the whole mask and the entropies of both."""
        if share <= 0 or not self._whole_mask:
            return 0.0
        moved = [min(share * active, size - active) for active, size in zip(self.counts, self.sizes, strict=True)]
        of_change = sum(size * _entropy(min(2 * links / size, 0.5)) for links, size in zip(moved, self.sizes, strict=True))
        of_mask = sum(size * _entropy(active / size) for active, size in zip(self.counts, self.sizes, strict=True))
        return self._whole_mask * min(1.0, of_change / of_mask if of_mask else 1.0)


def down_and_up(row: Row) -> float:
    """Bytes both ways."""
    return row.download_bytes + row.upload_bytes


def _entropy(share: float) -> float:
    """Bits by which one place is told that is taken with this probability."""
    return -share * math.log2(share) - (1 - share) * math.log2(1 - share) if 0 < share < 1 else 0.0


def rehearsed(run: Assembled, samples: int, types: Sequence[ValueType], end: int | None) -> dict[ValueType, RunCost]:
    """The cost of runs like this one with values of each type, from one client's set-up, an inner round and two outer ones.

    Two, because a method may have nothing to tell in its first. The heavier one counts.
    """
    usual = run.plan.schedule
    schedule = replace(usual, end=_FAR * usual.interval)
    begun = run.method.begin(run.setup)
    first = -1 if run.method.exchanges(replace(run.plan, schedule=schedule).round(-1, begun.mask)) else 0
    activations: int | None = None
    found: dict[ValueType, RunCost] = {}
    for name in types:
        estimate = Estimate(replace(run, plan=replace(run.plan, value_type=name, schedule=schedule)), samples, exact=False, at_most=True)
        activations = estimate.activations(begun, first) if activations is None else activations
        found[name] = _played(estimate, begun, first, activations, end)
    return found


def _played(estimate: Estimate, state: State, first: int, activations: int, end: int | None) -> RunCost:
    """The rounds of a rehearsal, which begins with round `first`, one after the other."""
    run = estimate.run
    schedule = run.plan.schedule
    inner = next(t for t in range(schedule.end + 2) if not schedule.is_outer(t))
    outers = (schedule.first_outer, schedule.first_outer + schedule.interval)
    rows: dict[int, tuple[Row, Row]] = {}
    moves = False
    for index in sorted({inner, *outers} | ({-1} if first < 0 else set())):
        before = state.mask.fingerprint
        measured, state = estimate.measured("", index, state, activations)
        rows[index] = _case(measured, HOLDER), _case(measured, FRESH)
        moves = moves or (index in outers and state.mask.fingerprint != before)
    heavier = max((rows[index] for index in outers), key=lambda pair: down_and_up(pair[0]))
    return RunCost(run.experiment, end, rows.get(-1), rows[inner], heavier, moves, run.layout.sizes, state.mask.counts)


def _case(rows: list[Row], case: str) -> Row:
    return next(row for row in rows if row.case == case)
