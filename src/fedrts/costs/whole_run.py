"""The cost of a whole run of any number of rounds, planned from one client's rounds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache

from fedrts.client.masks import REMEMBERED
from fedrts.client.order import Order
from fedrts.config import Experiment
from fedrts.costs.estimate import Estimate, PlayedRound
from fedrts.costs.table import FRESH, HOLDER, Row
from fedrts.runs.build import Assembled
from fedrts.server.rounds import Plan, sampled
from fedrts.sparse.arms import Layers
from fedrts.sparse.cost import Macs
from fedrts.sparse.falling import Fall
from fedrts.sparse.schedule import Schedule
from fedrts.wire import codec
from fedrts.wire.codec import Kind
from fedrts.wire.fields import Field, Frame, Missed
from fedrts.wire.value_types import WHOLE, ValueType

_FAR = 1_000
"""Intervals until the end of the rehearsed schedule: both of its outer rounds exchange as many links as any may."""

_SIZES = ("download_bytes", "upload_bytes", "memory_bytes")


@dataclass(frozen=True)
class RunCost:
    """Bytes, FLOPs and memory of a run, as a function of its rounds.

    Bytes are at most these, whoever is asked when: every client gets the whole mask once, and clients take turns, so that as many
    of them as possible miss a change of the mask and must be told. A change is priced as the share f(t) of links that round t puts
    up for exchange. A density that falls is priced round by round. Rounds that are repeated for want of replies are not foreseen.
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
    steps: tuple[float, float] | None = None
    """Where a download goes on from the client's last one (`Missed`): bytes without a step, and of each step."""
    last: RunCost | None = None
    """The same at the density that this one falls to, along `fall`; None: it stays."""
    fall: Fall | None = None

    @property
    def heaviest(self) -> float:
        """Bytes, both ways, of a new client in the round that sends most."""
        return max(down_and_up(rows[1]) for rows in self._rows)

    @property
    def memory(self) -> float:
        """Largest number of bytes that a client holds."""
        return max(rows[0].memory_bytes for rows in self._rows)

    def schedule(self, rounds: int) -> Schedule:
        """The schedule of a run of this many rounds."""
        e = self.experiment.model_copy(update={"rounds": rounds, "topology": self.experiment.topology.model_copy(update={"end": self.end})})
        t = e.topology
        return Schedule(t.interval, min(e.end, rounds), t.adjust, t.first_outer, t.outer_at_end, self.fall)

    def bytes(self, rounds: int) -> float:
        """The bytes of all messages of all clients, both ways, set-up included."""
        schedule = self.schedule(rounds)
        course = self._course(schedule, rounds)
        played = self._played(schedule, course)
        if self.steps is None:
            downloads = self._masks(schedule, course) + self._asked * sum(times * row.download_bytes for times, row in played)
        else:
            downloads = self._in_steps(rounds, *self.steps)
        sent = downloads + self._answering * sum(times * row.upload_bytes for times, row in played)
        if self.setup is not None:
            sent += self._asked * self.setup[1].download_bytes + self._answering * self.setup[1].upload_bytes
        return sent

    def flops(self, rounds: int) -> float:
        """The FLOPs of all clients."""
        schedule = self.schedule(rounds)
        once = self.setup[0].flops if self.setup is not None else 0.0
        return self._answering * (once + sum(times * row.flops for times, row in self._played(schedule, self._course(schedule, rounds))))

    def affordable(self, total: float, most: int) -> int:
        """The largest number of rounds, up to `most`, whose bytes are within `total`; 0 if not even one is."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.bytes(middle) <= total else (low, middle - 1)
        return low

    @property
    def _rows(self) -> list[tuple[Row, Row]]:
        own = [rows for rows in (self.setup, self.inner, self.outer) if rows is not None]
        return own + (self.last._rows if self.last is not None else [])

    @property
    def _asked(self) -> int:
        e = self.experiment
        return min(e.guard.asked(e.clients.per_round), e.clients.total)

    @property
    def _answering(self) -> int:
        return self.experiment.clients.per_round

    @property
    def _turn(self) -> int:
        """Rounds from one download of a client to its next, where clients take turns."""
        return math.ceil(self.experiment.clients.total / self._asked)

    def _first_contacts(self, rounds: int) -> int:
        return min(self.experiment.clients.total, rounds * self._asked)

    def _course(self, schedule: Schedule, rounds: int) -> list[tuple[int, ...]]:
        """Links of each layer before each round."""
        counts, course = self.counts, []
        for t in range(rounds):
            course.append(counts)
            counts = schedule.targets(t, counts)
        return course

    def _played(self, schedule: Schedule, course: Sequence[tuple[int, ...]]) -> list[tuple[float, Row]]:
        """How often each row is played by a client that has the mask; at a density between two, both in part."""
        if self.last is None:
            outers = schedule.outers_before(len(course))
            return [(len(course) - outers, self.inner[0]), (outers, self.outer[0])]
        most, least = sum(self.counts), sum(self.last.counts)
        found = []
        for kind, row, later in ((False, self.inner[0], self.last.inner[0]), (True, self.outer[0], self.last.outer[0])):
            links = [sum(counts) for t, counts in enumerate(course) if schedule.is_outer(t) == kind]
            share = sum((active - least) / max(most - least, 1) for active in links)
            found += [(share, row), (len(links) - share, later)]
        return found

    def _in_steps(self, rounds: int, none: float, each: float) -> float:
        """Bytes of all downloads that go on from a client's last one: it is known beforehand who is asked when."""
        e, whole = self.experiment, self.inner[0].download_bytes
        sent, last = 0.0, dict[int, int]()
        for t in range(rounds):
            for client in asked(e.seed, t, e.clients.total, self._asked):
                missed = t - last.get(client, -math.inf)
                sent += min(whole, none + missed * each) if missed <= Missed.KEPT else whole
                last[client] = t
        return sent

    def _masks(self, schedule: Schedule, course: Sequence[tuple[int, ...]]) -> float:
        """Return the bytes that send the masks to all clients."""
        rounds, turn = len(course), self._turn
        first = max(map(self._mask, set(course[:turn])), default=0.0)  # to a client that holds no mask
        changed, changes = [0.0], [0]  # before each round: links exchanged so far, as a share, and in how many outer rounds
        for t in range(rounds):
            moved = self.moves and schedule.is_outer(t)
            changed.append(changed[-1] + schedule.fraction(t) * moved)
            changes.append(changes[-1] + moved)
        priced, told = cache(self._difference), 0.0
        for t in range(turn, rounds):
            missed = changes[t] - changes[t - turn]
            share = round(changed[t] - changed[t - turn], 6)
            told += priced(share, course[t - turn], course[t]) if missed <= REMEMBERED else self._mask(course[t])
        return self._first_contacts(rounds) * first + self._asked * told

    @cached_property
    def _whole_mask(self) -> float:
        return max(self.inner[1].download_bytes - self.inner[0].download_bytes, 0)

    @cached_property
    def _priced(self) -> float:
        """Bytes for each bit of a mask's entropy."""
        own = self._whole_mask / bits if (bits := _bits(self.counts, self.sizes)) else 0.0
        return max(own, self.last._priced) if self.last is not None else own

    def _mask(self, counts: tuple[int, ...]) -> float:
        """Bytes of a whole mask."""
        return self._whole_mask if counts == self.counts else self._priced * _bits(counts, self.sizes)

    def _difference(self, share: float, before: tuple[int, ...], after: tuple[int, ...]) -> float:
        """Bytes of a change of this share of the active links, and of a reduction in their number, by its entropy."""
        if share <= 0 and before == after:
            return 0.0
        layers = zip(before, after, self.sizes, strict=True)
        changed = [had - has + 2 * min(share * has, size - had) for had, has, size in layers]
        told = self._priced * _bits([min(links, size / 2) for links, size in zip(changed, self.sizes, strict=True)], self.sizes)
        return min(self._mask(after), told)


def down_and_up(row: Row) -> float:
    """Bytes both ways."""
    return row.download_bytes + row.upload_bytes


@lru_cache(2**14)
def asked(seed: int, t: int, clients: int, count: int) -> tuple[int, ...]:
    """The clients of a round, at the first attempt."""
    return tuple(sampled(seed, t, 0, clients, count))


def _bits(counts: Sequence[float], sizes: Sequence[int]) -> float:
    """Return the bits that name `counts[l]` of `sizes[l]` links, arm by arm."""
    layers = zip(counts, sizes, Layers.of(sizes).arms, strict=True)
    return sum(arms * _entropy(count / size) for count, size, arms in layers if size)


def _entropy(share: float) -> float:
    """Return the bits that say whether one place is taken, which has this probability."""
    return -share * math.log2(share) - (1 - share) * math.log2(1 - share) if 0 < share < 1 else 0.0


def rehearsed(run: Assembled, samples: int, types: Sequence[ValueType], end: int | None) -> dict[ValueType, RunCost]:
    """The cost of runs like this one with values of each type, from one client's set-up, an inner round and two outer ones.

    Two, because a method may have nothing to tell in its first. The heavier one counts. Where the density falls, rounds are rehearsed
    at the first and at the last.
    """
    fall = run.plan.schedule.fall
    if fall is None:
        return _steady(run, samples, types, end)
    first, last = (_steady(_staying(run, density), samples, types, end) for density in (fall.start, fall.end))
    return {name: replace(first[name], last=last[name], fall=fall) for name in types}


def between(low: RunCost, high: RunCost, experiment: Experiment, counts: tuple[int, ...], macs: Macs) -> RunCost:
    """The cost at a density between those of two rehearsals, at which layers have `counts` links.

    What travels follows the number of links, masks their entropy, and FLOPs the multiplications.
    """
    if low.last is not None and high.last is not None and low.fall is not None:
        last, fall = between(low.last, high.last, experiment, counts, macs), replace(low.fall, end=experiment.density)
        return replace(low, experiment=experiment, last=last, fall=fall)
    few, links, many = (sum(each) for each in (low.counts, counts, high.counts))
    least, work, most = (macs.at(each, low.sizes) for each in (low.counts, counts, high.counts))
    share, of_work = (links - few) / max(many - few, 1), (work - least) / max(most - least, 1.0)
    mask = max(low._priced, high._priced) * _bits(counts, low.sizes)

    def mixed(one: Row, other: Row) -> Row:
        sized = {name: (1 - share) * getattr(one, name) + share * getattr(other, name) for name in _SIZES}
        return replace(one, **sized, flops=(1 - of_work) * one.flops + of_work * other.flops)

    def told(one: tuple[Row, Row], other: tuple[Row, Row]) -> tuple[Row, Row]:
        holder = mixed(one[0], other[0])
        return holder, replace(holder, case=FRESH, download_bytes=holder.download_bytes + mask)

    setup = None
    if low.setup is not None and high.setup is not None:
        setup = mixed(low.setup[0], high.setup[0]), mixed(low.setup[1], high.setup[1])
    inner, outer = told(low.inner, high.inner), told(low.outer, high.outer)
    return replace(low, experiment=experiment, setup=setup, inner=inner, outer=outer, moves=low.moves or high.moves, counts=counts)


def _staying(run: Assembled, density: float) -> Assembled:
    """The run at a density that does not fall."""
    method = run.method.model_copy(update={"density": density})
    plan = replace(run.plan, method=method, schedule=replace(run.plan.schedule, fall=None))
    return replace(run, method=method, plan=plan, setup=replace(run.setup, density_start=None))


def _steady(run: Assembled, samples: int, types: Sequence[ValueType], end: int | None) -> dict[ValueType, RunCost]:
    """One rehearsal, with values that travel whole: how much shorter they are in another type their number says."""
    usual = run.plan.schedule
    plan = replace(run.plan, schedule=replace(usual, end=_FAR * usual.interval), value_type=WHOLE)
    run = replace(run, plan=plan)
    estimate = Estimate(run, samples, exact=False, at_most=True)
    state = run.method.begin(run.setup)
    first = -1 if run.method.exchanges(plan.round(-1, state.mask)) else 0
    activations = estimate.activations(state, first)
    inner = next(t for t in range(plan.schedule.end + 2) if not plan.schedule.is_outer(t))
    outers = (plan.schedule.first_outer, plan.schedule.first_outer + plan.schedule.interval)
    played: dict[int, PlayedRound] = {}
    moves = False
    for index in sorted({inner, *outers} | ({-1} if first < 0 else set())):
        before = state.mask.fingerprint
        played[index] = estimate.measured("", index, state, activations)
        state = played[index].state
        moves = moves or (index in outers and state.mask.fingerprint != before)
    counts, steps = state.mask.counts, _in_steps(estimate.order(state, max(played) + 1))
    found: dict[ValueType, RunCost] = {}
    for name in types:
        typed = replace(plan, value_type=name)
        rows = {index: _typed(measured, typed) for index, measured in played.items()}
        heavier = max((rows[index] for index in outers), key=lambda pair: down_and_up(pair[0]))
        found[name] = RunCost(run.experiment, end, rows.get(-1), rows[inner], heavier, moves, run.layout.sizes, counts, steps)
    return found


def _typed(measured: PlayedRound, plan: Plan) -> tuple[Row, Row]:
    """The rows (of a holder, of a fresh client) of a round that was played with whole values, in the types of another plan."""
    down = up = memory = 0
    for order in measured.orders:
        exchange = plan.exchanges(order.round)[order.round.exchange]
        down += _more(exchange.down, order.exchange.down, order.frame)
        up += _more(exchange.up, order.exchange.up, order.frame)
        remembers = exchange.fed_back is not None and order.exchange.fed_back is None
        memory = max(memory, remembers * order.frame.layout.parameters * order.frame.dtype.itemsize)
    holder, fresh = (
        replace(row, download_bytes=row.download_bytes + down, upload_bytes=row.upload_bytes + up, memory_bytes=row.memory_bytes + memory)
        for row in (_case(measured.rows, case) for case in (HOLDER, FRESH))
    )
    return holder, fresh


def _more(fields: Mapping[str, Field], whole: Mapping[str, Field], frame: Frame) -> int:
    """Bytes that a message of these fields has more than one of the same with whole values, at most."""
    return sum(entry.most(frame) - whole[name].most(frame) for name, entry in fields.items() if entry != whole[name])


def _in_steps(order: Order) -> tuple[float, float] | None:
    """Bytes of a download without a step, and of one step, where downloads go on from the client's last."""
    down = order.exchange.down
    if not any(isinstance(entry, Missed) for entry in down.values()):
        return None
    none, one = (codec.size(Kind.DOWNLOAD, down, order.sent, replace(order.frame, missed=missed), order.frame.mask) for missed in (0, 1))
    return none, one - none


def _case(rows: list[Row], case: str) -> Row:
    return next(row for row in rows if row.case == case)
