"""The engine whose clients are on nodes: one message per node and exchange, with the bytes that the ledger charges each client."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import IO, Any

import torch
from flwr.app import Message

from fedrts.audit.witness import entries
from fedrts.client import envelope
from fedrts.client.order import Failure, Order, Reply
from fedrts.client.workbench import Workbench
from fedrts.errors import printable
from fedrts.flower import STRANGER, WORK
from fedrts.flower.fleet import LOST, Fleet
from fedrts.flower.inside import SUPERLINK_NODE_ID, ErrorCode, ObjectTree
from fedrts.flower.messages import HEAD, SUM, Incoming, content, memory_facts, named_memories, numbers, opened
from fedrts.methods.contract import Round, State
from fedrts.server.collect import LATE, UNASKED, UNREACHABLE
from fedrts.server.engine import Engine
from fedrts.tasks import Metrics
from fedrts.wire import codec
from fedrts.wire.errors import WireError

_POLL = 0.2
_OVERHEAD = 2**16
"""Bytes that a reply may have beside its encoded messages."""
_IN_MEMORY = 2**22
"""Bytes of a reply that wait for their turn in memory; more of them wait on disk."""
_LEAST_ALLOWANCE = 10.0
"""Seconds that nodes have for any order, however fast they were."""
_RECENT = 5
"""Replies of a client by which one knows how long it takes."""
_LEARNED = 3
"""So many of them are needed: one quick reply says little."""
_FORGETFUL = "its node keeps nothing of what an upload has not told: install this fedrts there"
"""Why a reply of an older node does not count where clients must remember."""
_LOST = (ErrorCode.NODE_UNAVAILABLE, ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE)


@dataclass
class Parcel:
    """A message on its way to a node, and back."""

    node: int
    activation: str | None
    clients: tuple[int, ...]
    whole: bool = False
    """It carries whole masks."""
    incoming: Incoming | None = None
    key: str = ""
    """The fingerprint of its node's key."""
    unheard: bool = False
    """It came to a node that did not know the experiment; no other answer to it will come."""


@dataclass
class Arrived:
    """An encoded reply that waits to be processed."""

    file: IO[bytes]
    at: float
    kept: int | None = None
    """The name of what it has not told."""

    @staticmethod
    def of(data: bytes, kept: int | None = None) -> Arrived:
        file = tempfile.SpooledTemporaryFile(_IN_MEMORY)  # noqa: SIM115
        file.write(data)
        return Arrived(file, time.monotonic(), kept)

    def read(self) -> bytes:
        with self.file:
            self.file.seek(0)
            return self.file.read()


class Paces:
    """Recent times of clients, by kind of exchange; they give the deadline of the next one."""

    def __init__(self, patience: float) -> None:
        self.patience = patience
        """Multiples of what the slowest client usually takes; 0: no limit."""
        self._seconds: defaultdict[tuple[bool, bool, int], defaultdict[int, deque[float]]]
        self._seconds = defaultdict(lambda: defaultdict(lambda: deque(maxlen=_RECENT)))

    def add(self, current: Round, client: int, seconds: float) -> None:
        """Record the time of a client's reply."""
        self._seconds[_kind(current)][client].append(seconds)

    def allowance(self, current: Round) -> float:
        """Return the seconds after which a missing client is late; no limit without experience of this kind of exchange."""
        usual = [statistics.median(seconds) for seconds in self._seconds[_kind(current)].values() if len(seconds) >= _LEARNED]
        return max(_LEAST_ALLOWANCE, self.patience * max(usual)) if usual and self.patience else float("inf")


def _kind(current: Round) -> tuple[bool, bool, int]:
    """Return the kind of an exchange; exchanges of one kind take about equally long."""
    return current.index < 0, current.outer, current.exchange


@dataclass
class FlowerEngine:
    """Run exchanges with the clients of a fleet."""

    fleet: Fleet
    bench: Workbench
    samples: Sequence[int]
    server: Engine
    """Evaluates the server's model."""
    needed: Callable[[Collection[int]], int]
    """Replies without which a round is repeated, of a federation that these clients have left."""
    timeout: float
    """Seconds that nodes have for an order."""
    deadline: float
    """Seconds after which replies of a round are late, whatever it was that took so long."""
    wait: float
    """Seconds to wait for enough nodes."""
    ordered: bool = True
    """Replies in the order of clients, so that sums have the same bits every time; else as they come."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What every order tells beside the round."""
    paces: Paces = field(default_factory=lambda: Paces(0.0))
    missed: set[int] = field(default_factory=set)
    """Clients that the last round which asked for them went without."""

    @property
    def label(self) -> str:
        return "Flower deployment"

    @property
    def departed(self) -> Mapping[int, str]:
        return self.fleet.departed

    def evaluate(self, state: State) -> Metrics:
        return self.server.evaluate(state)

    def run(self, order: Order, clients: Sequence[int]) -> Iterator[Reply | Failure]:
        yield from Errand(self, order, list(clients)).replies()


@dataclass
class Errand:
    """One order on its way to all of its clients."""

    engine: FlowerEngine
    order: Order
    clients: list[int]
    parcels: dict[str, Parcel] = field(default_factory=dict)
    outcomes: dict[int, Arrived | Failure] = field(default_factory=dict)
    resent: dict[int, int] = field(default_factory=dict)
    more_facts: dict[str, Any] = field(default_factory=dict)

    def replies(self) -> Iterator[Reply | Failure]:
        """Yield the outcome of every client, once."""
        for client, outcome in self.heard():
            yield self._made_of(client, outcome)

    def heard(self) -> Iterator[tuple[int, Arrived | Failure]]:
        """Yield every client with its bytes, or with the reason why there are none."""
        try:
            yield from self._heard()
        finally:
            self.engine.fleet.forgotten |= {name for name, parcel in self.parcels.items() if not parcel.unheard}

    def _heard(self) -> Iterator[tuple[int, Arrived | Failure]]:
        started = time.monotonic()
        self._send_all()
        sent = time.monotonic()
        usual = self.engine.paces.allowance(self.order.round)
        last = min(started + self.engine.deadline, sent + self.engine.timeout, sent + max(usual, self.engine.wait))
        waiting, came, told = list(self.clients), 0, False
        while waiting:
            arrived = self.outcomes.__contains__
            for client in list(takewhile(arrived, waiting) if self.engine.ordered else filter(arrived, waiting)):
                waiting.remove(client)
                outcome = self.outcomes.pop(client)
                self._tell(client, outcome)
                if isinstance(outcome, Arrived):
                    came += 1
                    self.engine.paces.add(self.order.round, client, outcome.at - sent)
                yield client, outcome
            if not waiting:
                return
            absent = [client for client in waiting if client not in self.outcomes]
            if absent and time.monotonic() > min(last, sent + usual):
                here = came + sum(isinstance(outcome, Arrived) for outcome in self.outcomes.values())
                if here >= min(self.engine.needed(self.engine.fleet.departed), len(self.clients)) or time.monotonic() > last:
                    self.outcomes |= {client: self._excused(client, LATE) for client in absent}
                    continue
                if not told:
                    told = True
                    names = ", ".join(map(self.engine.fleet.roster.called, absent))
                    self.engine.fleet.say(f"{LOST}: round {self.order.round.index} waits for {names}, without whom there is no quorum")
            if not self._receive():
                time.sleep(_POLL)

    def _tell(self, client: int, outcome: Arrived | Failure) -> None:
        """Report that rounds continue without a client, or that it is back."""
        fleet, missed = self.engine.fleet, self.engine.missed
        if isinstance(outcome, Failure) and outcome.excused:
            if client not in missed and outcome.reason != UNASKED:
                missed.add(client)
                fleet.say(f"{LOST}: round {self.order.round.index} goes without {fleet.roster.called(client)}: {outcome.reason}")
        elif client in missed:
            missed.discard(client)
            fleet.say(f"back: round {self.order.round.index} has {fleet.roster.called(client)} again")

    def gathered(self) -> bool:
        """Wait until all clients are here, or enough of them; return whether enough are."""
        fleet, due, told = self.engine.fleet, time.monotonic() + self.engine.wait, False
        while True:
            fleet.look()
            if self.first:
                fleet.hand_over()
            wanted = [client for client in self.clients if client not in fleet.departed]
            absent = [client for client in wanted if client not in fleet.hosts]
            enough = len(wanted) - len(absent) >= min(self.engine.needed(fleet.departed), len(wanted))
            if not absent or (enough and not fleet.expects) or time.monotonic() >= due:
                return enough
            if not enough and not told:
                told = True
                names = ", ".join(map(fleet.roster.called, absent))
                fleet.say(f"{LOST}: round {self.order.round.index} cannot go on without {names}: waiting for {self.engine.wait:g} s")
            time.sleep(_POLL)

    def _send_all(self) -> None:
        fleet = self.engine.fleet
        if not self.gathered():  # others would work, and give something away, for nothing
            self.outcomes |= {client: self._excused(client, UNASKED) for client in self.clients if client in fleet.hosts}
        by_node: dict[int, list[int]] = {}
        for client in self.clients:
            if client in fleet.hosts and client not in self.outcomes:
                by_node.setdefault(fleet.hosts[client], []).append(client)
            elif client not in self.outcomes:
                self.outcomes[client] = self._excused(client, UNREACHABLE)
        for node, some in by_node.items():
            self._send(node, {client: self._blob(client, first=True) for client in some})

    def _blob(self, client: int, first: bool = False) -> bytes:
        """Return a client's message: `first` the part that it lacks, later the whole."""
        held, missed = (self.order.held.get(client), self.order.missed.get(client)) if first else (None, None)
        return envelope.encode_order(self.order, client, held, missed)

    @property
    def first(self) -> bool:
        """Does nothing that nodes hold for this work depend on what they were asked before?"""
        return True

    @property
    def _most(self) -> int:
        """Return the largest number of bytes that a client's reply may have."""
        return codec.most(self.order.exchange.up, self.order.frame)

    def _send(self, node: int, blobs: dict[int, bytes], whole: bool = False) -> None:
        fleet = self.engine.fleet
        facts = {**self.engine.facts, "round": self.order.round.index, "exchange": self.order.round.exchange, **self.more_facts}
        if self.order.model_name is not None:
            facts["model"] = self.order.model_name
        if self.order.exchange.fed_back is not None:
            facts |= memory_facts({client: self.order.kept[client] for client in blobs if client in self.order.kept})
        key = fleet.key(node)
        fleet.witness("asked", **self._place, key=key, clients=entries(blobs))
        if head := fleet.witness.head:
            facts[HEAD] = head
        message = Message(content(facts, blobs), node, WORK, ttl=self.engine.timeout + 60, group_id=str(self.order.round.index))
        name = fleet.link.push(message)
        if name is None:
            self.outcomes |= {client: self._excused(client, UNREACHABLE) for client in blobs}
        else:
            self.parcels[name] = Parcel(node, fleet.activation(node), tuple(blobs), whole, key=key)

    @property
    def _place(self) -> dict[str, Any]:
        """Return the identity of a message, for the record."""
        step = {"step": self.more_facts[SUM]} if SUM in self.more_facts else {}
        return {"round": self.order.round.index, "exchange": self.order.round.exchange, **step}

    def _receive(self) -> bool:
        """Receive what has arrived; return whether anything did."""
        fleet = self.engine.fleet
        fleet.look()
        for name, parcel in list(self.parcels.items()):
            if parcel.activation != fleet.activation(parcel.node):
                self._lost(name, parcel)
        awaited = [name for name, parcel in self.parcels.items() if parcel.incoming is None and not parcel.unheard]
        heads = fleet.link.replies(awaited)
        for head, tree in heads:
            self._begin(head, tree)
        begun = [(name, parcel, parcel.incoming) for name, parcel in self.parcels.items() if parcel.incoming is not None]
        ended = [self._continue(*reply) for reply in begun]
        return any(ended) or bool(heads)

    def _begin(self, head: Any, tree: ObjectTree) -> None:
        """Read the head of a reply: which order it answers, and whether it is valid."""
        name = head.metadata.reply_to_message_id
        if (parcel := self.parcels.get(name)) is None:
            return
        try:
            if head.HasField("error"):
                code, reason = head.error.code, head.error.reason
                if code in _LOST and head.metadata.src_node_id == SUPERLINK_NODE_ID:  # a node's own word is no excuse
                    self._failed(name, parcel, UNREACHABLE, excused=True)
                    self.engine.fleet.link.done_with(head.metadata.message_id)
                    return
                raise WireError(_said(reason or f"error {code}"))
            parcel.incoming = Incoming(head.metadata.message_id, tree, len(parcel.clients) * self._most + _OVERHEAD)
        except WireError as error:
            self._failed(name, parcel, str(error))
            self.engine.fleet.link.done_with(head.metadata.message_id)

    def _continue(self, name: str, parcel: Parcel, incoming: Incoming) -> bool:
        """Receive the next pieces of a reply; return whether it is complete."""
        link = self.engine.fleet.link
        try:
            if not incoming.advance(link.piece):
                return False
            self._unpack(name, parcel, *opened(incoming.message()))
        except WireError as error:
            self._failed(name, parcel, str(error))
        link.done_with(incoming.message_id)
        return True

    def _unpack(self, name: str, parcel: Parcel, facts: dict[str, object], blobs: dict[int, bytes]) -> None:
        """Unpack a node's reply to its parcel. Clients that it does not mention have failed."""
        if STRANGER in facts:
            parcel.activation, parcel.incoming, parcel.unheard = None, None, True  # lost, see below
            self.engine.fleet.meet_again(parcel.node)
            return
        here = {client: blobs[client] for client in parcel.clients if client in blobs}
        self.engine.fleet.witness("received", **self._place, key=parcel.key, clients=entries(here))
        self.engine.fleet.witness.heard(facts.get(HEAD), key=parcel.key)
        missing = {client for client in numbers(facts.get("missing")) if client in parcel.clients and client not in blobs}
        reasons = dict(zip(numbers(facts.get("failed")), _words(facts.get("reasons")), strict=False))
        kept = named_memories(facts)
        for client in [client for client in numbers(facts.get("forgotten")) if client in parcel.clients]:
            who = self.engine.fleet.roster.called(client)
            self.engine.fleet.say(f"{LOST}: {who} no longer has what its earlier uploads have not told, and goes on without")
        for client in parcel.clients:
            if client in blobs and self.order.exchange.fed_back is not None and client not in kept:
                self.outcomes[client] = self._failure(client, _FORGETFUL)
            elif client in blobs:
                self.outcomes[client] = Arrived.of(blobs[client], kept.get(client))
            elif client not in missing or parcel.whole:
                self.outcomes[client] = self._failure(client, reasons.get(client, "its node does not answer for it"))
        del self.parcels[name]
        if missing and not parcel.whole:
            whole = {client: self._blob(client) for client in missing}
            self.resent |= {client: len(data) for client, data in whole.items()}
            self._send(parcel.node, whole, whole=True)

    def _lost(self, name: str, parcel: Parcel) -> None:
        """Handle a lost parcel: its node is gone, or was restarted; then it is sent again after the node's introduction."""
        fleet = self.engine.fleet
        if fleet.activation(parcel.node) is None or fleet.nodes[parcel.node].done:
            self._failed(name, parcel, UNREACHABLE, excused=True)
            fleet.forgotten.add(name)
        elif fleet.nodes[parcel.node].clients:
            del self.parcels[name]
            if not parcel.unheard:
                fleet.forgotten.add(name)
            still = [client for client in parcel.clients if fleet.hosts.get(client) == parcel.node]
            here = {client: self._blob(client) for client in still}
            self.outcomes |= {client: self._excused(client, UNREACHABLE) for client in parcel.clients if client not in here}
            self.resent |= {client: self.resent.get(client, 0) + len(data) for client, data in here.items()}
            if here:
                self._send(parcel.node, here, whole=True)

    def _failed(self, name: str, parcel: Parcel, reason: str, excused: bool = False) -> None:
        del self.parcels[name]
        self.outcomes |= {client: self._failure(client, reason, excused) for client in parcel.clients}

    def _failure(self, client: int, reason: str, excused: bool = False) -> Failure:
        return Failure(client, reason, excused, self.resent.get(client, 0), time.monotonic())

    def _excused(self, client: int, reason: str) -> Failure:
        return self._failure(client, reason, excused=True)

    def _made_of(self, client: int, outcome: Arrived | Failure) -> Reply | Failure:
        """Decode a client's reply; its cost is computed here, not taken from the client."""
        if isinstance(outcome, Failure):
            return outcome
        resent = self.resent.get(client, 0)
        try:
            reply = envelope.decode_reply(outcome.read(), self.order)
        except WireError as error:
            return Failure(client, str(error), False, resent, outcome.at)
        if reply.client != client:
            return Failure(client, f"its node answers as client {reply.client}", False, resent, outcome.at)
        bench = self.engine.bench
        rows = torch.zeros(()).expand(self.engine.samples[client])  # as many as it says, and no memory for them
        job = bench.job(self.order, client, rows)
        return replace(reply, flops=bench.flops(self.order, job), resent=resent, at=outcome.at, kept=outcome.kept)


def _words(value: object) -> list[str]:
    return [_said(word) for word in value] if isinstance(value, list) else []


def _said(words: object) -> str:
    """Mark a node's own words, so that no history mistakes them for ours: "late" would be excused."""
    return f"its node says: {printable(words)}"
