"""The loop: sample clients, run the exchanges, sum, update, evaluate."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fedrts.client.order import DRIFT, Order, called
from fedrts.client.summing import Summing
from fedrts.errors import InputError, note
from fedrts.methods.base import Method
from fedrts.methods.contract import Exchange, Means, Round, State
from fedrts.server import reducers
from fedrts.server.assessment import assess
from fedrts.server.averaging import LateAverage, average_of
from fedrts.server.client_records import ClientRecords
from fedrts.server.collect import DROPPED, EXCUSED, LATE, LATE_AGAIN, Question, Tally, add_up
from fedrts.server.engine import Adding, Engine, Remote, arrivals
from fedrts.server.guard import Guard
from fedrts.server.mask_memory import addressed
from fedrts.server.opposition import Hearing, agreed, cancelling, not_keeping, ranked
from fedrts.server.optimizer import Averaging, ServerOptimizer
from fedrts.server.outliers import excesses
from fedrts.server.phases import phase
from fedrts.sparse import random
from fedrts.sparse.layout import Layout
from fedrts.sparse.mask import Mask
from fedrts.sparse.schedule import Schedule
from fedrts.sparse.units import connected, cut_off, start_anew, start_key
from fedrts.tasks import Metrics
from fedrts.tasks.metrics import Metric, described, followed
from fedrts.wire.value_types import ValueType

ALWAYS_EVALUATED = 10
"""The last rounds of a run, each of which is evaluated."""


@dataclass(frozen=True)
class Plan:
    """A run, apart from its state."""

    method: Method
    engine: Engine
    layout: Layout
    schedule: Schedule
    rounds: int
    samples: Sequence[int]
    """n_k of every client."""
    per_round: int
    seed: int
    eval_every: int
    guard: Guard = field(default_factory=Guard)
    value_type: ValueType = "float32"
    download_type: ValueType | None = None
    """Value type of downloads; None: as `value_type`."""
    feedback: bool = False
    """Do clients add what rounding left of a change to their next one?"""
    dropout: float = 0.0
    optimizer: ServerOptimizer = field(default_factory=Averaging)
    average: LateAverage = field(default_factory=LateAverage)
    metrics: tuple[Metric, ...] = ()
    """What evaluations give, and clients tell of a model that they judge."""
    summing: Summing | None = None
    """How clients sum where the server is to learn nothing but sums."""
    held_out: Mapping[int, int] = field(default_factory=dict)
    """Samples by client on which the clients that hold some out judge the global model."""

    @property
    def metric_names(self) -> tuple[str, ...]:
        return tuple(metric.name for metric in self.metrics)

    def sample(self, index: int, attempt: int = 0, quarantined: Collection[int] = ()) -> list[int]:
        """The clients asked in a round: a function of (seed, round, attempt) and of who is not asked.

        The set-up is held with round 0's clients.
        """
        asked = self.guard.asked(self.per_round)
        order = sampled(self.seed, index, attempt, len(self.samples), asked + len(quarantined))
        chosen = [client for client in order if client not in quarantined][:asked]
        return chosen if asked > self.per_round else sorted(chosen)

    def needed(self, departed: Collection[int] = ()) -> int:
        """Return the usable replies without which a round is repeated, given the clients that have left."""
        return self.guard.needed(min(self.per_round, len(self.samples) - len(departed)))

    def drops_out(self, index: int, attempt: int, client: int) -> bool:
        """Whether the simulation drops this client after its download."""
        return self.dropout > 0 and float(random.uniform(random.key(self.seed, "dropout", index, attempt, client), 1)) < self.dropout

    def round(self, index: int, mask: Mask, exchange: int = 0) -> Round:
        return Round.of(index, self.schedule, mask, self.layout, exchange)

    def exchanges(self, round: Round) -> list[Exchange]:
        down = self.download_type or self.value_type
        typed = [exchange.with_values_as(self.value_type, self.feedback, down) for exchange in self.method.exchanges(round)]
        return typed if self.summing is None else [exchange.with_whole_uploads() for exchange in typed]

    def key(self, index: int, purpose: str) -> int:
        return random.key(self.seed, "server", index, purpose)

    def is_evaluated(self, index: int) -> bool:
        return index >= 0 and ((index + 1) % self.eval_every == 0 or index >= self.rounds - ALWAYS_EVALUATED)


def sampled(seed: int, index: int, attempt: int, clients: int, count: int) -> list[int]:
    """Return the first `count` clients in the order in which a round asks them."""
    order: list[int] = random.first(random.key(seed, "sample", max(index, 0), attempt), clients, count).tolist()
    return order


@dataclass
class Record:
    """One line of history.jsonl."""

    round: int
    outer: bool
    clients: list[int]
    """Whose replies count."""
    rejected: list[dict[str, Any]] = field(default_factory=list)
    loss: float | None = None
    accuracy: float | None = None
    perplexity: float | None = None
    density: float = 1.0
    links_changed: float = 0.0
    upload_bytes: int = 0
    download_bytes: int = 0
    flops: float = 0.0
    seconds: float = 0.0
    valid_accuracy: float | None = None
    """A key of its line only where there is a validation set."""
    federated: dict[str, Any] | None = None
    """What clients say of the model on data that they hold out; a key of its line only where they do."""
    metrics: dict[str, float | None] = field(default_factory=dict)
    """Further metrics by name, and `valid_…` of them: keys of its line."""

    def as_dict(self) -> dict[str, Any]:
        line = {key: value for key, value in asdict(self).items() if value is not None or key not in ("valid_accuracy", "federated")}
        further: dict[str, float | None] = line.pop("metrics")
        return line | further

    @property
    def metric_keys(self) -> tuple[str, ...]:
        """Return the keys of its line that describe the quality of the model."""
        return (*_METRIC_FIELDS, *self.metrics)

    def value(self, metric: Metric) -> float | None:
        """Return a metric on the test set; None if it was not evaluated."""
        found: float | None = self.metrics.get(metric.name) if metric.name in self.metrics else getattr(self, metric.name, None)
        return found

    def evaluated(self, declared: Sequence[Metric], found: Metrics) -> None:
        """Record an evaluation: the metrics that lines have always had, and all followed ones."""
        own = [name for name in found if name in _METRIC_FIELDS]
        for name in own:
            setattr(self, name, found[name])
        for metric in followed(described(declared, found)):
            for name in (metric.name, f"valid_{metric.name}"):
                if name in found and name not in own:
                    self.metrics[name] = _finite(name, found[name])


_METRIC_FIELDS = ("loss", "accuracy", "perplexity", "valid_accuracy")


def _unevaluated(declared: Sequence[Metric]) -> dict[str, float | None]:
    """Return a line without further metrics."""
    return {metric.name: None for metric in followed(declared) if metric.name not in _METRIC_FIELDS}


def _finite(name: str, value: float) -> float | None:
    if math.isfinite(value):
        return value
    note(f"the metric '{name}' is {value} on these data, which JSON cannot express: it is recorded as null")
    return None


@dataclass(frozen=True)
class Played:
    """The result of a round."""

    state: State
    record: Record
    topology: dict[str, Any] | None
    """One line of topology.jsonl, in outer rounds."""


class TooFewError(InputError):
    """A round failed: too few replies were usable in all attempts."""

    def __init__(self, message: str, rejected: list[dict[str, Any]]) -> None:
        super().__init__(message)
        self.missing: dict[int, str] = {entry["client"]: entry["reason"] for entry in rejected if entry["reason"] in EXCUSED}
        """Who was absent, with the reason."""
        self.refused = [entry for entry in rejected if entry["reason"] not in EXCUSED]
        """Replies that were refused: a {client, reason} of each."""


def play(plan: Plan, state: State, first: int, ledger: ClientRecords | None = None) -> Iterator[Played]:
    """Play rounds from `first` (-1: the set-up) to the last; yield each with the state after it."""
    ledger = ledger or ClientRecords.of(plan.guard)
    for index in range(first, plan.rounds):
        if index < 0 and not plan.method.exchanges(plan.round(index, state.mask)):
            continue
        played = play_round(plan, state, index, ledger)
        state = played.state
        yield played


def play_round(plan: Plan, before: State, index: int, ledger: ClientRecords | None = None) -> Played:
    """Play one round, with attempts until enough replies are usable; `before` is left unchanged."""
    started = time.perf_counter()
    ledger = ledger or ClientRecords.of(plan.guard)
    record = Record(index, plan.schedule.is_outer(index), [], metrics=_unevaluated(plan.metrics))
    attempt, outliers = 0, set[int]()
    while (made := _attempt(plan, before, index, attempt, ledger, record, outliers)) is None:
        attempt += 1
        if attempt - len(outliers) < plan.guard.attempts:  # an outlier costs its round one attempt more, and takes no other away
            continue
        reasons = _complaints(record)
        raise TooFewError(
            f"round {index}: fewer than {plan.needed(ledger.departed)} usable replies in {plan.guard.attempts} attempts ({reasons}): "
            "nothing of it was applied; mend the cause or lower guard.quorum, then resume (a train.lr that diverges needs a new run)",
            record.rejected,
        )
    state, against = made
    record.density = density(plan.layout, state.mask)
    record.links_changed = state.mask.gained(before.mask) / max(state.mask.number, 1)
    if plan.is_evaluated(index):
        with phase("evaluation"):
            metrics = plan.engine.evaluate(state)
            if plan.held_out:
                record.federated = assess(plan, state, index, ledger)
                metrics = {**record.federated["mean"], **metrics}  # the coordinator's own test set, where it has one
            if index == plan.rounds - 1 and (late := average_of(state)) is not None:
                record.metrics |= {f"average_{name}": _finite(name, value) for name, value in plan.engine.evaluate(late).items()}
        record.evaluated(plan.metrics, metrics)
    record.seconds = time.perf_counter() - started
    return Played(state, record, describe(plan, before, state, index) | against if record.outer else None)


def _complaints(record: Record) -> str:
    """Return why replies of a round did not count: every reason, and the clients concerned."""
    told: dict[str, set[int]] = {}
    for entry in record.rejected:
        told.setdefault(str(entry["reason"]), set()).add(entry["client"])
    return "; ".join(f"{called(sorted(clients))}: {reason}" for reason, clients in sorted(told.items())) or "nobody was left to ask"


def _attempt(
    plan: Plan, before: State, index: int, attempt: int, ledger: ClientRecords, record: Record, outliers: set[int]
) -> tuple[State, dict[str, Any]] | None:
    """All exchanges of a round with one sample of clients; None if too few replies were usable, or some turned out to be outliers.

    The state after it, and for topology.jsonl who cut units off. `outliers`: whose replies were some in this round; they are not asked
    again, and new ones join them.
    """
    state = before
    clients = plan.sample(index, attempt, _not_asked(plan, index, ledger, record) | outliers)
    needed = plan.needed(ledger.departed)
    left: dict[int, Tensor] = {}
    kept: dict[int, int] = {}
    against: dict[str, Any] = {}
    for number in range(len(plan.method.exchanges(plan.round(index, state.mask)))):
        current = plan.round(index, state.mask, number)
        exchange = plan.exchanges(current)[number]  # of the mask as the exchange before left it
        order = Order.of(exchange, current, plan.layout, state, plan.key(index, f"rounding {number}"))
        order = replace(order, residuals=ledger.residuals, kept=ledger.kept)
        found = _collect(plan, order, state, attempt, clients, ledger, record)
        if len(record.clients) < needed or 2 * len(found.blamed) > len(clients):
            return None
        if far := _far_out(plan, order, found, ledger, record):
            outliers |= far
            return None
        clients = list(record.clients)
        left |= found.left
        kept |= found.kept
        with phase("update"):
            means = found.sums.mean()
            state = updated(plan, state, order, means)
            against |= _against(plan, order, found, means, state.mask, ledger)
            if reducers.get(plan.guard.reducer).remembers and "weights" in means and order.values is not None:
                state = state.remember(**{DRIFT: order.frame.mask.expand(means["weights"] - order.values)})
    ledger.remember(left, kept)
    if index >= 0:
        state = _started_anew(plan, before, plan.optimizer.step(before, state, plan.layout.parameters), index)
        state = plan.average.enter(before, state, index)
    return state, against


def _started_anew(plan: Plan, before: State, after: State, index: int) -> State:
    """Return the state `after` a round, with weights for units whose links a new mask of groups has all replaced."""
    if not after.mask.sizes.grouped or after.mask is before.mask or after.mask == before.mask:
        return after
    weights = after.weights.clone()
    start_anew(plan.layout.layers, weights, after.mask, start_key(plan.seed, index))
    return after.moved(weights, after.mask)


def _against(plan: Plan, order: Order, found: Tally, means: Means, after: Mask, ledger: ClientRecords) -> dict[str, Any]:
    """For topology.jsonl: who worked against the units that an exchange cut off, and who cancels those to which `after` leaves links.

    Nothing where there are none. What is cancelled in one round may be lost in a much later one, so that is remembered until clients agree
    on a unit again.
    """
    if "weights" in means and found.words:
        weights = plan.guard.weights({client: plan.samples[client] for client in found.counted})
        shares = {client: weight / sum(weights.values()) for client, weight in weights.items()}
        mean = Hearing(order).norms(means["weights"])
        ledger.cancel(cancelling(found.words, shares, mean), agreed(found.words, mean))
    if after is order.frame.mask and not order.round.outer:
        return {}
    has = connected(plan.layout.layers, after)
    lost = connected(plan.layout.layers, order.frame.mask) & ~has
    told: dict[str, Any] = {}
    if silent := _named(ranked(ledger.cancelled, has)):
        told["silenced"] = silent
    if bool(lost.any()):  # sums alone do not tell by whom
        who = {"cancelled": ranked(ledger.cancelled, lost), "not_kept": ranked(not_keeping(found.words), lost)}
        told["against"] = {what: _named(counts) for what, counts in who.items()} if plan.summing is None else None
    return told


def _named(counts: Mapping[int, int]) -> dict[str, int]:
    """Return counts by client as a line of a file has them."""
    return {str(client): count for client, count in counts.items()}


def _not_asked(plan: Plan, index: int, ledger: ClientRecords, record: Record) -> set[int]:
    """Return who is left out of a round: quarantined and departed clients (recorded once) and, if possible, those late again."""
    departed = plan.engine.departed if isinstance(plan.engine, Remote) else {}
    record.rejected += [{"client": client, "reason": reason} for client, reason in departed.items() if client not in ledger.departed]
    ledger.departed = {client: ledger.departed.get(client, index) for client in departed}
    excluded = ledger.strikes.quarantined | departed.keys()
    resting = ledger.lateness.resting(index) - excluded
    return excluded | resting if len(plan.samples) - len(excluded | resting) >= plan.needed(departed) else excluded


def _far_out(plan: Plan, order: Order, found: Tally, ledger: ClientRecords, record: Record) -> set[int]:
    """Return the clients whose replies are so large that the round is repeated without them.

    Of those that are only large it is remembered, and who sends several within a few rounds is asked no more.
    """
    guard, index = plan.guard, order.round.index
    excess = excesses(found.measured, guard.claims({client: plan.samples[client] for client in found.counted}), order.reference_norm)
    far = {client for client, found_here in excess.items() if found_here.ratio > guard.median_bound}
    for client in far:
        ledger.strikes.add(client, index)
    if not far:
        far = set(ledger.large.add({client: excess[client].ratio / guard.large_bound for client in sorted(excess)}))
        for client in sorted(far):
            ledger.strikes.quarantine(
                client, f"it sent {excess[client].reason}, the last of several above guard.large_bound = {guard.large_bound:g}"
            )
    record.rejected += [
        {"client": client, "reason": f"{excess[client].reason}: the round is repeated without it"} for client in sorted(far)
    ]
    return far


def updated(plan: Plan, state: State, order: Order, means: Means) -> State:
    """Return the next state from the means over the clients that answered an order."""
    return plan.method.update(state, means, order.round, lambda purpose: plan.key(order.round.index, purpose))


def _collect(plan: Plan, order: Order, state: State, attempt: int, clients: list[int], ledger: ClientRecords, record: Record) -> Tally:
    """Send an order to `clients` and add up the usable replies; `record.clients` are those that counted."""
    samples = {client: plan.samples[client] for client in clients}
    gone = [client for client in clients if plan.drops_out(order.round.index, attempt, client)]
    order, size = addressed(order, clients, ledger.traffic)
    record.download_bytes += size
    due = time.monotonic() + plan.guard.deadline if plan.guard.deadline else float("inf")
    asked = [client for client in clients if client not in gone]
    ledger.count(asked, order.exchange.up)
    known = State(state.values, state.mask)  # what clients know too: contributions may be made where they are
    question = Question(order, known, plan.method, plan.guard, samples, asked, plan.per_round, due, plan.summing, max(plan.samples))
    found = plan.engine.answer(question) if isinstance(plan.engine, Adding) else add_up(question, arrivals(plan.engine, order, asked))
    comparable = order.round.index >= 0 and order.round.exchange == 0  # what dense averaging would have sent too
    ledger.messages += (len(clients) + len(found.counted)) * comparable
    if 2 * len(found.blamed) <= len(clients):
        for client in found.blamed:
            ledger.strikes.add(client, order.round.index)
    else:
        reasons = ", ".join(sorted({str(entry["reason"]) for entry in found.rejected}))
        words = f"round {order.round.index}: most replies were rejected ({reasons}): nobody is blamed, and the round is tried with others"
        note(words, "rejected", round=order.round.index)
    if isinstance(plan.engine, Remote):  # elsewhere being late means that our own machine is slow
        for client in found.counted:
            ledger.lateness.clear(client)
        for client in [client for client, reason in found.missing.items() if reason == LATE]:
            if ledger.lateness.add(client, order.round.index):
                found.missing[client] = LATE_AGAIN
    record.download_bytes += found.resent_bytes
    record.upload_bytes += found.upload_bytes
    record.flops += found.flops
    missing = dict.fromkeys(gone, DROPPED) | found.missing
    record.rejected += found.rejected + [{"client": client, "reason": reason} for client, reason in missing.items()]
    record.clients = sorted(found.counted)
    return found


def density(layout: Layout, mask: Mask) -> float:
    """(active + dense) / all parameters."""
    return (mask.number + layout.parameters - layout.links) / layout.parameters


def describe(plan: Plan, before: State, after: State, index: int) -> dict[str, Any]:
    """Describe how an outer round changed the topology: overlap, links by layer, the method's beliefs."""
    gained = after.mask.bits & ~before.mask.bits
    names = [entry.name for entry in plan.layout.layers]
    changed = [int(part.count_nonzero()) for part in gained.split(list(after.mask.sizes))]
    kept = (after.mask.bits & before.mask.bits).count_nonzero()
    believed = plan.method.belief(after)
    belief = None if believed is None else plan.layout.sizes.spread(believed)
    lost = cut_off(plan.layout.layers, after.mask, before.mask)
    return {
        "round": index,
        "overlap": float(kept) / max(before.mask.number, 1),
        "active": dict(zip(names, after.mask.counts, strict=True)),
        "changed": dict(zip(names, changed, strict=True)),
        "belief_active": _histogram(belief, after.mask.active),
        "belief_inactive": _histogram(belief, after.mask.inactive),
        **({"cut_off": {entry.layer: {"inputs": entry.inputs, "outputs": entry.outputs} for entry in lost}} if lost else {}),
        **plan.method.remarks(before, after, plan.round(index, before.mask)),
    }


def _histogram(belief: Tensor | None, at: Tensor) -> list[int] | None:
    """Return counts in 20 equal bins of [0, 1]."""
    if belief is None:
        return None
    bins = (belief[at] * BINS).long().clamp_(0, BINS - 1)
    counts: list[int] = torch.bincount(bins, minlength=BINS).tolist()
    return counts


BINS = 20
"""Number of bins in the histograms of a method's beliefs."""
