"""Handling of replies: each is judged, and what may count is added to the sums.

A tally is the same wherever it is made: in the server's process over all clients of a round, or by several workers, each over its
share of them, whose tallies are then added in the order of the shares.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fedrts.client.order import Failure, Order, Reply
from fedrts.client.summing import SumForm, Summing
from fedrts.methods.base import Method
from fedrts.methods.contract import State
from fedrts.secure.call import TAG
from fedrts.secure.ring import Words
from fedrts.server.aggregate import RingSums, Sums
from fedrts.server.guard import Guard, findings, judge
from fedrts.server.opposition import Hearing
from fedrts.server.phases import each, phase
from fedrts.server.reducers import reduction
from fedrts.wire import codec
from fedrts.wire.checks import Finding
from fedrts.wire.codec import Kind
from fedrts.wire.fields import Message

DROPPED, LATE, LATE_AGAIN, UNREACHABLE, UNASKED = "dropped out", "late", "late again", "not reachable", "not asked: too few are here"


WITHDRAWN, REMOVED = "withdrawn", "removed"
"""A client that takes part no more from this round on, by its own word or the coordinator's."""


_PARTS = 12
"""Bytes that a message of masked words has for its client's number and the lengths of both."""

EXCUSED = (DROPPED, LATE, LATE_AGAIN, UNREACHABLE, UNASKED, WITHDRAWN, REMOVED)
"""Reasons in a history why a reply is missing that are no rejection. Only the server gives them: see `Failure.excused`."""


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
        """Decode a client's message."""
        return {name: entry.open(message[name], self.order.opening_frame) for name, entry in self.order.exchange.up.items()}

    def contribution(self, message: Message) -> Message:
        """Return the contribution of a client with this message."""
        return self.added(self.opened(message))

    def added(self, opened: Message) -> Message:
        """Return the contribution of this decoded message."""
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


def add_up(question: Question, replies: Iterable[Reply | Failure]) -> Tally:
    """Judge and add up `replies` as they come, until enough of them count or the rest is late."""
    order, samples = question.order, question.samples
    weights = question.guard.weights(samples)
    frame = order.upload_frame()
    result, hearing = Tally(question.sums()), question.hearing()
    answered: set[int] = set()
    for reply, came, finding in _examined(question, replies):
        result.resent_bytes += reply.resent
        if isinstance(reply, Failure) and reply.excused:
            result.missing[reply.client] = reply.reason
            continue
        if came > question.due:
            result.missing |= {client: LATE for client in question.asked if client not in answered and client not in result.missing}
            break
        answered.add(reply.client)
        rejection = judge(reply, finding.fault, order, samples, result.counted)
        if rejection is not None:
            result.rejected.append({"client": reply.client, "reason": rejection.reason})
            if rejection.blamed:
                result.blamed.append(reply.client)
            continue
        assert isinstance(reply, Reply)  # a failure never counts
        with phase("sums"):
            result.flops += reply.flops
            opened = question.opened(reply.message)
            contribution = question.added(opened)
            if isinstance(result.sums, RingSums):
                result.sums.add(_words(question, result.sums, contribution, reply), 1, reply.samples)
                result.upload_bytes += TAG + _PARTS + result.sums.form.ring.size
            else:
                result.sums.add(contribution, reply.samples, weights[reply.client])
                result.upload_bytes += reply.size or codec.size(Kind.UPLOAD, order.exchange.up, reply.message, frame)
                if hearing is not None and (word := hearing.of(opened, contribution)) is not None:
                    result.words[reply.client] = word
        result.counted.append(reply.client)
        for name, number in finding.measured.items():
            result.measured.setdefault(name, {})[reply.client] = number
        if reply.left is not None:
            result.left[reply.client] = reply.left
        if reply.kept is not None:
            result.kept[reply.client] = reply.kept
        if len(result.counted) == question.wanted:
            break
    return result


def _words(question: Question, sums: RingSums, contribution: Message, reply: Reply) -> Words:
    """Turn a client's reply into words before it leaves."""
    assert question.summing is not None
    key = question.summing.key(reply.round, reply.client)
    return sums.form.words(contribution, question.order, reply.samples / sums.most_samples, key)


def _examined(question: Question, replies: Iterable[Reply | Failure]) -> Iterator[tuple[Reply | Failure, float, Finding]]:
    """Yield every reply, its time, and its fault; replies that arrive together are measured together."""
    for some in each("clients", _together(replies)):
        with phase("guard"):
            found = findings(
                [reply for reply, _ in some], question.order, question.guard, question.samples, bounded=question.summing is None
            )
        yield from ((reply, came, finding) for (reply, came), finding in zip(some, found, strict=True))


def _together(replies: Iterable[Reply | Failure]) -> Iterator[list[tuple[Reply | Failure, float]]]:
    """Yield lists of replies that arrived together, each with its time."""
    some: list[tuple[Reply | Failure, float]] = []
    for reply in replies:
        some.append((reply, reply.at or time.monotonic()))
        if not reply.more:
            yield some
            some = []
    if some:
        yield some
