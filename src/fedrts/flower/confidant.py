"""A site's part in secure sums: it answers the steps of a sum for its clients, and nothing leaves it in the open.

What must outlast the process is one number a client: the last round whose sum it helped to open, on disk before it does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from fedrts.client.order import Order
from fedrts.client.summing import Summing
from fedrts.flower.consent import DeclinedError
from fedrts.methods.base import Method
from fedrts.methods.contract import State
from fedrts.secure.call import TAG, Call, check_call, parted
from fedrts.secure.errors import SecureError
from fedrts.secure.identity import Sign
from fedrts.secure.participant import Participant
from fedrts.wire.fields import Message


@dataclass(frozen=True)
class NodeKey:
    """A node's registered key."""

    sign: Sign
    public: bytes


@dataclass
class Confidant:
    """All that a site does for sums of one experiment."""

    identity: NodeKey
    summing: Summing
    method: Method
    digest: str
    samples: Callable[[int], int]
    opened: Callable[[int], int]
    """The last round that a client helped to open; below 0: none."""
    note: Callable[[int, int], None]
    """Puts on record that a client helps to open a round."""
    pinned: Collection[bytes] | None = None
    """Public keys of the peers that the owner knows; None: whom the server names."""
    under_way: dict[int, Participant] = field(default_factory=dict)
    _last: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Round and attempt of each client's last call."""
    _revealed: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)
    """By client the tag of the last call that it helped to open, and what it revealed: asked again, it says the very same."""

    def answer(self, step: object, client: int, data: bytes) -> bytes:
        """What a client says to a step, but for its words."""
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

    def ordered(self, client: int, data: bytes) -> tuple[bytes, bytes]:
        """The peers' shares, and the client's order, of the step that asks for words."""
        parts = parted(data)
        if len(parts) != 2:
            raise SecureError("words are asked for without an order, or without shares")
        self._participant(client)
        return parts[0], parts[1]

    def words(self, client: int, order: Order, message: Message, dealt: bytes) -> bytes:
        """The masked words of a client whose upload would be this message."""
        one = self._participant(client)
        call = one.call
        if order.round.index != call.round:
            raise SecureError(f"an order of round {order.round.index} in a sum of round {call.round}")
        assert order.reference is not None
        form = self.summing.form(order, self.method, len(call.roster))
        if form.digest(order) != call.form:
            raise SecureError("the order is of another model or mask than the sum was called for")
        contribution = self.method.contribution(message, State(order.reference, order.frame.mask), order.round)
        share = self.samples(client) / call.most_samples
        return one.mask(dealt, form.ring, form.words(contribution, order, share, self.summing.key(call.round, client)))

    def _called(self, client: int, data: bytes) -> bytes:
        """A fresh attempt, where this client may take part in it."""
        call = Call.decoded(data)
        if call.run.hex() != self.digest:
            raise SecureError("a call of another experiment")
        check_call(call, client, self.samples(client), self.identity.public, self.pinned)
        least = self.summing.table.needed(len(call.roster))
        if call.threshold < least:
            raise SecureError(f"a threshold of {call.threshold} where the experiment has {least}")
        if call.round <= self.opened(client):
            raise SecureError(
                f"client {client} has helped to open round {self.opened(client)}: no round is opened twice, and none before it"
            )
        if (call.round, call.attempt) <= self._last.get(client, (-1, -1)):
            raise SecureError(f"round {call.round}, attempt {call.attempt} was called before")
        self._last[client] = (call.round, call.attempt)
        one = Participant(call, client, self.identity.sign, lambda: self._open(client, call.round))
        self.under_way[client] = one
        return one.advertise()

    def _revealed_to(self, client: int, data: bytes) -> bytes:
        """The shares that open a sum; whoever asks for them again gets the very same."""
        tag, said = self._revealed.get(client, (b"", b""))
        if tag != data[:TAG]:
            one = self._participant(client)
            tag, said = one.call.tag, one.reveal(data)
            self._revealed[client] = (tag, said)
            del self.under_way[client]
        return said

    def _open(self, client: int, round: int) -> None:
        if round <= self.opened(client):
            raise SecureError(f"client {client} has helped to open round {round} before: no round is opened twice")
        self.note(client, round)

    def _participant(self, client: int) -> Participant:
        if client not in self.under_way:
            raise DeclinedError(f"client {client} takes part in no sum: its node was started anew, or refused the call")
        return self.under_way[client]
