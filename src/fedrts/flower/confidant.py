"""A site's part in secure sums: it answers the steps of a sum for its clients, and nothing leaves it in the open.

What must outlast the process is one number a client and purpose: the last round whose sum it helped to open, on disk before it does.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from fedrts.client.figures import FigureForm
from fedrts.client.order import Order, digest_of
from fedrts.client.summing import SumForm, Summing
from fedrts.errors import printable
from fedrts.flower.consent import DeclinedError
from fedrts.methods.base import Method
from fedrts.methods.contract import State
from fedrts.secure.call import STATISTICS, TAG, UPDATE, Call, check_call, parted
from fedrts.secure.errors import SecureError
from fedrts.secure.identity import Sign
from fedrts.secure.participant import Participant
from fedrts.secure.ring import Ring, Words
from fedrts.wire.fields import Message


@dataclass(frozen=True)
class NodeKey:
    """A node's registered key."""

    sign: Sign
    public: bytes


class Stake(Protocol):
    """What a site contributes to sums, and what it must remember about them."""

    def samples(self, purpose: bytes, client: int) -> int:
        """The public number of samples that a client's part counts for; 0: it takes no part in sums for this purpose."""
        ...

    def opened(self, purpose: bytes, client: int) -> int:
        """Return the last round in which a client helped to open a sum for this purpose; below 0: none."""
        ...

    def note(self, purpose: bytes, client: int, round: int) -> None:
        """Record that a client helps to open a round."""
        ...

    @property
    def inputs(self) -> Sequence[float]:
        """The common statistics by which inputs are normalised."""
        ...


@dataclass
class Confidant:
    """A site's part in the secure sums of one experiment."""

    identity: NodeKey
    summing: Summing
    method: Method
    digest: str
    per_round: int
    """Clients of a round: more are invited to a sum of metrics or statistics alone, and then t is higher."""
    alone: bool
    """Does every node stand for one client?"""
    stake: Stake
    pinned: Collection[bytes] | None = None
    """Public keys of the peers that the owner knows; None: whom the server names."""
    under_way: dict[int, Participant] = field(default_factory=dict)
    _last: dict[tuple[bytes, int], tuple[int, int]] = field(default_factory=dict)
    """Round and attempt of each client's last call for a purpose."""
    _revealed: dict[int, tuple[bytes, bytes]] = field(default_factory=dict, repr=False)
    """By client the tag of the last call that it helped to open, and what it revealed: asked again, it says the very same."""

    def answer(self, step: object, client: int, data: bytes) -> bytes:
        """Return a client's reply to a step, except for its words."""
        match step:
            case "advertise":
                return self._called(client, data)
            case "share":
                return self._participant(client).share(data)
            case "endorse":
                return self._participant(client).endorse(data)
            case "reveal":
                return self._revealed_to(client, data)
        raise SecureError("the server asks for more than sums: nothing leaves this site in the open")

    @property
    def is_needed(self) -> bool:
        """Does a sum that has words of a client here wait for its shares?"""
        return any(one.is_needed for one in self.under_way.values())

    def ordered(self, client: int, data: bytes) -> tuple[bytes, bytes]:
        """Return the peers' shares and the client's order, of the step that asks for words."""
        parts = parted(data)
        if len(parts) != 2:
            raise SecureError("words are asked for without an order, or without shares")
        self._participant(client)
        return parts[0], parts[1]

    def called(self, client: int) -> Call:
        """Return the sum that a client takes part in."""
        return self._participant(client).call

    def check_round(self, client: int, order: Order) -> None:
        """Check that this is an order of the round for which the client was called."""
        if order.round.index != self.called(client).round:
            raise SecureError(f"an order of round {order.round.index} in a sum of round {self.called(client).round}")

    def check(self, client: int, form: bytes) -> None:
        """Check that all clients were called with this form, and normalise their inputs alike."""
        if bound(form, self.stake.inputs) != self.called(client).form:
            raise SecureError("the order is of another model, mask or normalisation than the sum was called for")

    def update(self, client: int, order: Order, form: SumForm, message: Message, dealt: bytes) -> bytes:
        """Return the masked words of a client that would otherwise upload this message."""
        assert order.reference is not None
        contribution = self.method.contribution(message, State(order.reference, order.frame.mask), order.round)
        return self._masked(client, dealt, form.ring, lambda share, key: form.words(contribution, order, share, key))

    def figures(self, client: int, form: FigureForm, numbers: Sequence[float], dealt: bytes) -> bytes:
        """Return the masked words of a client with these numbers."""
        return self._masked(client, dealt, form.ring, lambda share, key: form.words(numbers, share, key))

    def _masked(self, client: int, dealt: bytes, ring: Ring, words: Callable[[float, int], Words]) -> bytes:
        call = self.called(client)
        share = self.stake.samples(call.purpose, client) / call.most_samples
        return self._participant(client).mask(dealt, ring, words(share, self.summing.key(call.round, client)))

    def _called(self, client: int, data: bytes) -> bytes:
        """Return a new attempt if this client may take part in it."""
        call = Call.decoded(data)
        if call.run.hex() != self.digest:
            raise SecureError("a call of another experiment")
        if not (samples := self.stake.samples(call.purpose, client)):
            raise SecureError(f"client {client} takes no part in sums of {printable(call.purpose.decode(errors='replace'), 32)}")
        check_call(call, client, samples, self.identity.public, self.pinned, alone=self.alone)
        if call.purpose == STATISTICS and call.round:  # of other sites each time, their difference would be one site's
            raise SecureError("what inputs are like is told once, in round 0")
        invited = len(call.roster)
        if call.purpose == UPDATE and invited > self.per_round:
            raise SecureError(f"a sum of {invited} clients where a round has {self.per_round}")
        least = self.summing.table.least(invited, self.per_round)
        if call.threshold < least:
            raise SecureError(f"a threshold of {call.threshold} where the experiment has {least}")
        opened = self.stake.opened(call.purpose, client)
        if call.round <= opened:
            told = f"client {client} has helped to open round {opened}: no round is opened twice, and none before it"
            raise SecureError(f"{told} (a server that lost the sum needs another experiment: another seed is enough)")
        if (call.round, call.attempt) <= self._last.get((call.purpose, client), (-1, -1)):
            raise SecureError(f"round {call.round}, attempt {call.attempt} was called before")
        self._last[call.purpose, client] = (call.round, call.attempt)
        one = Participant(call, client, self.identity.sign, lambda: self._open(call, client))
        self.under_way[client] = one
        return one.advertise()

    def _revealed_to(self, client: int, data: bytes) -> bytes:
        """Return the shares that open a sum; asking again returns exactly the same shares."""
        tag, said = self._revealed.get(client, (b"", b""))
        if tag != data[:TAG]:
            one = self._participant(client)
            tag, said = one.call.tag, one.reveal(data)
            self._revealed[client] = (tag, said)
            del self.under_way[client]
        return said

    def _open(self, call: Call, client: int) -> None:
        if call.round <= self.stake.opened(call.purpose, client):
            raise SecureError(f"client {client} has helped to open round {call.round} before: no round is opened twice")
        self.stake.note(call.purpose, client, call.round)

    def _participant(self, client: int) -> Participant:
        if client not in self.under_way:
            raise DeclinedError(f"client {client} takes part in no sum: its node was started anew, or refused the call")
        return self.under_way[client]


def judged(order: Order) -> str:
    """Return what metrics are about: the model of an order."""
    assert order.reference is not None
    return f"{order.round.index} {digest_of(order.reference, order.frame.mask).hex()}"


def bound(form: bytes, inputs: Sequence[float]) -> bytes:
    """Return what a call fixes about its words: their form, and the statistics by which every client normalises inputs."""
    return hashlib.sha256(form + json.dumps(list(inputs)).encode()).digest()
