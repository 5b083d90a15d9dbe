"""Handling of replies: each is judged, and what may count is added to the sums.

A tally is the same wherever it is made: in the server's process over all clients of a round, or by several workers, each over its
share of them, whose tallies are then added in the order of the shares.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add, itemgetter
from typing import Any

from torch import Tensor

from fedrts.client.order import Failure, Order, Replies, Reply
from fedrts.client.summing import SumForm, Summing
from fedrts.errors import InputError
from fedrts.methods.base import Method
from fedrts.methods.contract import State
from fedrts.secure.call import TAG
from fedrts.secure.ring import Words
from fedrts.server.aggregate import RingSums, Sums
from fedrts.server.guard import Guard, Rejection, findings, judge
from fedrts.server.opposition import Hearing
from fedrts.server.phases import each, phase
from fedrts.server.reducers import reduction
from fedrts.wire import codec
from fedrts.wire.checks import Findings
from fedrts.wire.codec import Kind
from fedrts.wire.fields import Message, Payload, Selection, carried, changed

DROPPED, LATE, LATE_AGAIN, UNREACHABLE, UNASKED = "dropped out", "late", "late again", "not reachable", "not asked: too few are here"


WITHDRAWN, REMOVED = "withdrawn", "removed"
"""A client that takes part no more from this round on, by its own word or the coordinator's."""


_PARTS = 12
"""Bytes that a message of masked words has for its client's number and the lengths of both."""

EXCUSED = (DROPPED, LATE, LATE_AGAIN, UNREACHABLE, UNASKED, WITHDRAWN, REMOVED)
"""Reasons in a history why a reply is missing that are no rejection. Only the server gives them: see `Failure.excused`."""


Arrival = Reply | Failure | Replies
"""What comes from clients: of one of them, or of several as one."""


@dataclass(frozen=True)
class Question:
    """An order as sent to clients, with everything needed to judge and add up the replies."""

    order: Order
    state: State
    """Weights and mask; the method's memory stays with the server."""
    method: Method
    guard: Guard
    samples: Mapping[int, int]
    """n_k of all clients of the round."""
    asked: Sequence[int]
    """Those of them who are reached, or a share of these."""
    wanted: int
    """Replies that count at most: the first ones."""
    due: float = float("inf")
    """When (`time.monotonic`) replies begin to be late."""
    summing: Summing | None = None
    """How clients round what they send, where all that is learned of it are sums."""
    most_samples: int = 0
    """n_max over the whole federation: what secure sums are scaled by."""

    @property
    def form(self) -> SumForm:
        """The meaning of the words of clients that sum in secret."""
        assert self.summing is not None
        return self.summing.form(self.order, self.method, len(self.samples))

    def sums(self) -> Sums | RingSums:
        """Return the sums to which replies are added."""
        if self.summing is None:
            return Sums(reduction(self.guard, self.order), self.guard.vote_trim)
        return RingSums(self.form, self.order, self.most_samples)

    def opened(self, message: Message) -> Message:
        """Decode a client's message, or that of several."""
        return {name: entry.open(message[name], self.order.opening_frame) for name, entry in self.order.exchange.up.items()}

    def contribution(self, message: Message) -> Message:
        """Return the contribution of a client with this message, or of several."""
        return self.added(self.opened(message))

    def added(self, opened: Message) -> Message:
        """Return the contribution of this decoded message, or of several."""
        return self.method.contribution(opened, self.state, self.order.round)

    def hearing(self) -> Hearing | None:
        """Return the record about units, while the topology may still change."""
        return None if self.order.round.frozen or self.method.dense else Hearing(self.order)


@dataclass
class Tally:
    """The result of the replies to a question."""

    sums: Sums | RingSums
    counted: list[int] = field(default_factory=list)
    """Whose replies are in the sums."""
    rejected: list[dict[str, Any]] = field(default_factory=list)
    blamed: list[int] = field(default_factory=list)
    """Whose replies speak against them."""
    missing: dict[int, str] = field(default_factory=dict)
    """Who did not answer, with the excuse."""
    upload_bytes: int = 0
    resent_bytes: int = 0
    """Bytes of second downloads."""
    flops: float = 0.0
    left: dict[int, Tensor] = field(default_factory=dict)
    """What the clients whose replies counted remember of their changes."""
    kept: dict[int, int] = field(default_factory=dict)
    """The names under which those elsewhere keep it."""
    measured: dict[str, dict[int, float]] = field(default_factory=dict)
    """How large the replies that counted are, by what was measured and by client."""
    words: dict[int, Tensor] = field(default_factory=dict)
    """What each client whose reply counted says of the model's units `[2, U]`."""

    def count(self, clients: Sequence[int], measured: Mapping[str, Sequence[float]]) -> None:
        """Record that the replies of `clients` are in the sums, and how large each is."""
        self.counted += clients
        for name, numbers in measured.items():
            self.measured.setdefault(name, {}).update(zip(clients, numbers, strict=True))

    def reject(self, client: int, rejection: Rejection) -> None:
        """Record that a reply does not count."""
        self.rejected.append({"client": client, "reason": rejection.reason})
        if rejection.blamed:
            self.blamed.append(client)

    def add(self, other: Tally) -> None:
        """Merge the tally of other clients' replies to the same question."""
        self.sums.merge(other.sums)  # type: ignore[arg-type]  # of the same question
        self.counted += other.counted
        self.rejected += other.rejected
        self.blamed += other.blamed
        self.missing |= other.missing
        self.upload_bytes += other.upload_bytes
        self.resent_bytes += other.resent_bytes
        self.flops += other.flops
        self.left |= other.left
        self.kept |= other.kept
        for name, sizes in other.measured.items():
            self.measured.setdefault(name, {}).update(sizes)
        self.words |= other.words


def add_up(question: Question, replies: Iterable[Arrival]) -> Tally:
    """Judge and add up `replies` as they come, until enough of them count or the rest is late."""
    order, samples = question.order, question.samples
    weights = question.guard.weights(samples)
    result, hearing = Tally(question.sums()), question.hearing()
    answered: set[int] = set()
    for reply, came, found in _judged_at_once(question, replies, result.counted):
        result.resent_bytes += 0 if isinstance(reply, Replies) else reply.resent
        if isinstance(reply, Failure) and reply.excused:
            result.missing[reply.client] = reply.reason
            continue
        if came > question.due:
            result.missing |= {client: LATE for client in question.asked if client not in answered and client not in result.missing}
            break
        if isinstance(reply, Replies):  # nothing is wrong with these
            answered |= {*reply.clients}
            with phase("sums"):
                _add_together(question, result, hearing, weights, reply)
            result.count(reply.clients, found.measured)
        else:
            answered.add(reply.client)
            rejection = judge(reply, found.faults.get(0), order, samples, result.counted)
            if rejection is not None:
                result.reject(reply.client, rejection)
                continue
            assert isinstance(reply, Reply)  # a failure never counts
            with phase("sums"):
                _add(question, result, hearing, weights, reply)
            result.count([reply.client], found.measured)
        if len(result.counted) == question.wanted:
            break
    return result


def _add(question: Question, result: Tally, hearing: Hearing | None, weights: Mapping[int, int], reply: Reply) -> None:
    """Add a reply that counts."""
    opened = question.opened(reply.message)
    contribution = question.added(opened)
    if isinstance(result.sums, RingSums):
        result.sums.add(_words(question, result.sums, contribution, reply), 1, reply.samples)
        result.upload_bytes += TAG + _PARTS + result.sums.form.ring.size
    else:
        result.sums.add(contribution, reply.samples, weights[reply.client])
        order = question.order
        result.upload_bytes += reply.size or codec.size(Kind.UPLOAD, order.exchange.up, reply.message, order.upload_frame())
        if hearing is not None and (word := hearing.of(opened, contribution)) is not None:
            result.words[reply.client] = word
    result.flops += reply.flops
    if reply.left is not None:
        result.left[reply.client] = reply.left
    if reply.kept is not None:
        result.kept[reply.client] = reply.kept


def _add_together(question: Question, result: Tally, hearing: Hearing | None, weights: Mapping[int, int], replies: Replies) -> None:
    """Add replies that count as one."""
    assert isinstance(result.sums, Sums)  # words travel
    opened, order = question.opened(replies.message), question.order
    contribution = question.added(opened)
    result.sums.add_together(contribution, replies.samples, [weights[client] for client in replies.clients])
    _check_of_several(question, opened, contribution)
    result.upload_bytes += codec.uploads_size(order.exchange.up, replies.message, order.upload_frame(), len(replies))
    if hearing is not None and (words := hearing.of(opened, contribution)) is not None:
        result.words |= zip(replies.clients, words.unbind(), strict=True)
    result.flops = reduce(add, replies.flops, result.flops)  # `sum` rounds otherwise
    if replies.left is not None:
        result.left |= zip(replies.clients, map(Tensor.clone, replies.left.cpu()), strict=True)


_OF_SEVERAL: set[tuple[object, ...]] = set()
"""Methods, in kinds of rounds, that are known to take the messages of several clients for those of several."""


def _check_of_several(question: Question, opened: Message, contribution: Message) -> None:
    """Refuse a method of somebody's own whose contribution of several clients is not each one's: once, by the first client."""
    method, round = question.method, question.order.round
    kind = (type(method), repr(method), round.outer, round.frozen, round.exchange)
    if kind in _OF_SEVERAL:
        return
    alone = question.added({name: changed(payload, itemgetter(0)) for name, payload in opened.items()})
    for name, payload in contribution.items():
        if not _alike(_tensors(changed(payload, itemgetter(0))), _tensors(alone[name])):
            raise InputError(
                f"the contribution '{name}' of {type(method).__name__} is not the same for several clients as for one: `contribution` has "
                "to work along the last axis (docs/contract.md), or use --engine serial"
            )
    _OF_SEVERAL.add(kind)


def _tensors(payload: Payload) -> list[Tensor]:
    """Return the tensors of a contribution."""
    if isinstance(payload, Selection):
        return [payload.indices, *([] if payload.values is None else [payload.values])]
    return [carried(payload, Tensor)]


def _alike(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    """Whether tensors are the same but for what rounding may do to a few numbers."""
    if [tensor.shape for tensor in ours] != [tensor.shape for tensor in theirs]:
        return False
    exact = [(a.double(), b.double()) for a, b in zip(ours, theirs, strict=True)]
    return not any(float((a - b).abs().sum()) > 0.01 * float(b.abs().sum()) for a, b in exact)


def _words(question: Question, sums: RingSums, contribution: Message, reply: Reply) -> Words:
    """Turn a client's reply into words before it leaves."""
    assert question.summing is not None
    key = question.summing.key(reply.round, reply.client)
    return sums.form.words(contribution, question.order, reply.samples / sums.most_samples, key)


def _judged_at_once(question: Question, replies: Iterable[Arrival], counted: Sequence[int]) -> Iterator[tuple[Arrival, float, Findings]]:
    """Yield what is judged at once, its time, and what is wrong with it: of several replies as one those that count, others one by one.

    Replies that arrive together are measured together. `counted`: whose replies count so far, while this goes on.
    """
    for some in each("clients", _together(replies)):
        with phase("guard"):
            found = findings(
                [reply for reply, _ in some], question.order, question.guard, question.samples, bounded=question.summing is None
            )
        for (reply, came), finding in zip(some, found, strict=True):
            parts = _parts(question, reply, finding, counted) if isinstance(reply, Replies) else [(reply, finding)]
            yield from ((part, came, its) for part, its in parts)


def _parts(question: Question, replies: Replies, found: Findings, counted: Sequence[int]) -> Iterator[tuple[Arrival, Findings]]:
    """Yield those of several replies that count, as one, after those that do not; nothing after the last one that is wanted."""
    clients, order, wanted = {*replies.clients}, question.order.round, question.wanted - len(counted)
    expected = len(clients) == len(replies) and clients <= question.samples.keys() and clients.isdisjoint(counted)
    if question.summing is not None or not expected or (replies.round, replies.exchange) != (order.index, order.exchange):
        yield from ((reply, found.of([place])) for place, reply in enumerate(replies))
        return
    fine = [place for place in range(len(replies)) if place not in found.faults][:wanted]
    end = fine[-1] if len(fine) == wanted else len(replies)
    yield from ((replies.one(place), found.of([place])) for place in sorted(found.faults) if place < end)
    if fine:
        yield replies.some(fine), found.of(fine)


def _together(replies: Iterable[Arrival]) -> Iterator[list[tuple[Arrival, float]]]:
    """Yield lists of replies that arrived together, each with its time."""
    some: list[tuple[Arrival, float]] = []
    for reply in replies:
        at = None if isinstance(reply, Replies) else reply.at
        some.append((reply, at or time.monotonic()))
        if not reply.more:
            yield some
            some = []
    if some:
        yield some
