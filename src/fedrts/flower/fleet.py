"""Who is connected, and which clients each node runs: nodes' own statements, checked and remembered."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import Any

from flwr.app import Message

import fedrts
from fedrts.audit.witness import Witness, entry, facts_entry
from fedrts.errors import InputError, printable
from fedrts.flower import FAREWELL, HELLO, PROTOCOL, WELCOME, Say
from fedrts.flower.certificates import Followed
from fedrts.flower.keys import Authority, Seat, fingerprint
from fedrts.flower.link import Link
from fedrts.flower.messages import Incoming, content, opened
from fedrts.flower.normalisation import MOST_CHANNELS, Normalisation
from fedrts.flower.roster import GONE, Member, Roster
from fedrts.logs import LOST, info, warning
from fedrts.server.collect import REMOVED, WITHDRAWN
from fedrts.wire.errors import WireError

_INTRODUCTION = 2**20
"""Bytes of a node's introduction at most."""
_ANSWER = 120.0
"""Seconds that a node has to introduce itself: it loads its data first."""
_LOOK = 1.0
"""Seconds between two looks at who is connected."""
_AGAIN, _TRIES = 15.0, 8
"""Seconds between attempts, and their number, for failures that may resolve themselves: a killed node still counts as here for a minute."""
_SUCCESSION = 60.0
"""Seconds for which a round waits for a node that changes its key."""
_GOODBYE = 15.0
"""Seconds that nodes have to acknowledge the end of a study."""

MOST_SAMPLES = 2**31 - 1
"""Samples that a site may claim: sums of this many over all clients are exact."""


class _PassingError(InputError):
    """A reason to refuse a node that may resolve itself."""


@dataclass
class _Node:
    """A connected node."""

    activated: str
    key: str
    """Fingerprint of its public key."""
    public: bytes
    hello: str | None = None
    """The name of the question that it has not answered yet; empty while it is left in peace."""
    asked: float = 0.0
    incoming: Incoming | None = None
    clients: tuple[int, ...] = ()
    tries: int = 0
    """How often it did not answer, or was refused for a reason that may mend itself."""
    done: bool = False
    """There is nothing more to say to it."""


class Fleet:
    """The currently connected nodes."""

    def __init__(
        self,
        link: Link,
        introduction: dict[str, Any],
        roster: Roster,
        samples: Sequence[int] | None,
        data: str,
        authority: Authority | None,
        say: Say,
        witness: Witness | None = None,
    ) -> None:
        self.witness = witness or Witness()
        self.link, self.introduction, self.roster, self.say = link, introduction, roster, say
        self.samples, self.data = samples, data
        """n_k and the fingerprint of the data where the server knows them: one data set is divided. None: sites have their own."""
        self.authority = authority
        self.nodes: dict[int, _Node] = {}
        self.hosts: dict[int, int] = {}
        """Client → node."""
        self._registered: dict[str, tuple[bytes, int]] = {}
        self._replaced: dict[str, tuple[bytes, int]] = {}
        """Keys that others have replaced, by name, until their nodes have no work at hand."""
        self._successors: dict[str, float] = {}
        """Keys whose nodes are about to come, and until when they are waited for."""
        self.certificates = None if authority is None else Followed(authority, say, self.witness)
        self._faults: dict[str, str] = {}
        """What is wrong with files of keys, by name: said once."""
        self._looked = float("-inf")
        self.forgotten: set[str] = set()
        """Messages whose answers nobody waits for any more."""
        self._farewells: set[str] = set()
        """Farewells that were not acknowledged yet."""

    def activation(self, node: int) -> str | None:
        """Return the identity of a node's connection, which changes when it restarts; None: not connected."""
        return self.nodes[node].activated if node in self.nodes else None

    def key(self, node: int) -> str:
        """Return the fingerprint of a connected node's key; empty if it is not connected."""
        return self.nodes[node].key if node in self.nodes else ""

    def public_key(self, client: int) -> bytes | None:
        """Return the public key of the node that runs a client; None if it is not connected."""
        host = self.hosts.get(client)
        return None if host is None else self.nodes[host].public

    @property
    def departed(self) -> Mapping[int, str]:
        """Clients that no longer take part."""
        return self.roster.departed

    def look(self) -> None:
        """Update who has come, gone and introduced itself."""
        if time.monotonic() - self._looked < _LOOK:
            return
        self._looked = time.monotonic()
        self.follow_keys()
        if self.certificates is not None:
            self.certificates.look()
        self._follow_roster()
        connected = self.link.nodes()
        for number, found in connected.items():
            known = self.nodes.get(number)
            if known is None or known.activated != found.last_activated_at:
                self._forget(number, "restarted")
                self.nodes[number] = _Node(found.last_activated_at, fingerprint(found.public_key), found.public_key)
        for number in set(self.nodes) - set(connected):
            self._forget(number)
        self._greet()
        self._listen()
        for head, _ in self.link.replies(list(self.forgotten | self._farewells)):
            self.forgotten.discard(head.metadata.reply_to_message_id)
            self._farewells.discard(head.metadata.reply_to_message_id)
            self.link.done_with(head.metadata.message_id)

    def follow_keys(self) -> None:
        """Admit nodes whose key was registered, refuse nodes whose key was revoked."""
        if self.authority is None:
            return
        wanted, faults = self.authority.inspected()
        self._follow_replaced(wanted)
        for name, (key, number) in list(self._registered.items()):
            if wanted.get(name) != key and name not in faults:  # a file that is damaged now takes nothing away
                for _, node in (self._registered.pop(name), self._replaced.pop(name, (key, number))):
                    self.link.unregister(node)
                    self._forget(node)
                self.say(warning("refused", f"refused from now on: {name}, whose key {fingerprint(key)} was revoked", name=name))
                self.witness("key revoked", name=name, key=fingerprint(key))
        for name, key in wanted.items():
            if name not in self._registered:
                try:
                    number = self.link.register(key, name)
                    self.witness("key registered", name=name, key=fingerprint(key))
                except InputError as error:
                    number = 0  # no node's: it is not tried again with this key
                    self.say(warning("skipped", f"skipped: the key of '{name}': {error}", name=name))
                self._registered[name] = (key, number)
        for name, fault in faults.items():
            if self._faults.get(name) != fault:
                self.say(warning("skipped", f"skipped: the key of '{name}': {fault}", name=name))
        self._faults = faults

    def _follow_replaced(self, wanted: Mapping[str, bytes]) -> None:
        """Admit the key that has replaced another; the old one is refused as soon as its node is idle."""
        assert self.authority is not None
        for name, (before, number) in list(self._registered.items()):
            key = wanted.get(name)
            if key is None or key == before or fingerprint(before) not in self.authority.seats().get(name, Seat(0)).former:
                continue
            try:
                self._registered[name] = (key, self.link.register(key, name))
            except InputError as error:
                self.say(warning("skipped", f"skipped: the new key of '{name}': {error}", name=name))
                continue
            self._replaced[name] = (before, number)
            words = f"the key of '{name}' was replaced: {fingerprint(before)} is followed by {fingerprint(key)}"
            self.say(info("key", words, name=name))
            self.witness("key replaced", name=name, key=fingerprint(key), before_key=fingerprint(before))

    def hand_over(self) -> None:
        """While nobody is working, refuse replaced keys from now on, and wait a while for their nodes to connect with the new ones."""
        for name, (key, number) in list(self._replaced.items()):
            had_clients = number in self.nodes and bool(self.nodes[number].clients)
            del self._replaced[name]
            self.link.unregister(number)
            self._forget(number, "changing its key")
            self.say(info("key", f"refused from now on: the key {fingerprint(key)} of '{name}', which was replaced", name=name))
            if had_clients:
                self._successors[fingerprint(self._registered[name][0])] = time.monotonic() + _SUCCESSION

    def _follow_roster(self) -> None:
        """Release clients that `fedrts roster` removed."""
        try:
            self.roster.refresh()
        except InputError as error:
            self.say(warning("lost", f"{LOST}: {error}"))
        for number, node in list(self.nodes.items()):
            if gone := [client for client in node.clients if client in self.roster.departed]:
                node.clients = tuple(client for client in node.clients if client not in gone)
                self.hosts = {client: host for client, host in self.hosts.items() if client not in gone}
                self.say(info("removed", f"removed: {', '.join(map(self.roster.called, gone))}", clients=gone))
                self.witness("removed", key=node.key, who=gone)
                if not node.clients:
                    self._part(number, REMOVED, "the coordinator removed this node from the study")

    def _greet(self) -> None:
        for number, node in self.nodes.items():
            waiting = node.hello is not None and time.monotonic() - node.asked < (_ANSWER if node.hello else _AGAIN)
            if not node.clients and not node.done and not waiting:
                node.incoming, node.tries = None, node.tries + bool(node.hello)
                self.witness("hello", key=node.key, facts=facts_entry(self.introduction))
                message = Message(content(self.introduction), number, HELLO, ttl=_ANSWER)
                node.hello, node.asked = self.link.push(message), time.monotonic()

    def _listen(self) -> None:
        asked = {node.hello: number for number, node in self.nodes.items() if node.hello and node.incoming is None}
        for head, tree in self.link.replies(list(asked)):
            number = asked.get(head.metadata.reply_to_message_id)
            if number is None:
                continue
            try:
                if head.HasField("error"):
                    raise _PassingError(head.error.reason or f"error {head.error.code}")
                self.nodes[number].incoming = Incoming(head.metadata.message_id, tree, _INTRODUCTION)
            except (WireError, InputError) as error:
                self._turn_down(number, error)
        for number, node in list(self.nodes.items()):
            if node.incoming is not None:
                self._hear(number, node, node.incoming)

    def _hear(self, number: int, node: _Node, incoming: Incoming) -> None:
        """Check a node's introduction against what we know, and accept it."""
        try:
            if not incoming.advance(self.link.piece):
                return
            node.incoming, node.hello = None, None
            self.link.done_with(incoming.message_id)
            facts, _ = opened(incoming.message())
            self.witness("told", key=node.key, facts=facts_entry(facts))
            _check_version(facts)
            if "refused" in facts:  # and goes by itself
                node.done = True
                why = f"it cannot take part: {printable(facts['refused'])}"
                self.say(warning("refused", f"refused: node {self._called(node)}: {why}", **self._whose(node)))
                return
            if facts.get("withdraws") is True:
                self._withdraw(number, node)
                return
            node.clients = self._admitted(facts, node)
            node.tries = 0
        except (WireError, InputError) as error:
            self._turn_down(number, error)
            return
        self.hosts |= dict.fromkeys(node.clients, number)
        numbers = ", ".join(map(str, node.clients))
        words = f"connected: node {self._called(node)} with client{'s' * (len(node.clients) > 1)} {numbers}"
        self.say(info("connected", words, clients=list(node.clients), **self._whose(node)))
        self.witness("connected", key=node.key, name=self._name(node.key), who=list(node.clients), here=len(self.hosts))
        if name := self.link.push(Message(content({"clients": list(node.clients)}), number, WELCOME, ttl=_ANSWER)):
            self.forgotten.add(name)

    def _admitted(self, facts: dict[str, Any], node: _Node) -> tuple[int, ...]:
        try:
            clients, samples, data = _counts(facts["clients"]), _counts(facts["samples"]), printable(facts["data"], 64)
        except KeyError as error:
            raise WireError(f"its introduction lacks {error}") from error
        entry = Member(0, data, node.key, self._name(node.key))
        seats = self.authority.seats() if self.authority is not None else {}
        if entry.name in seats and seats[entry.name].former:
            self.roster.follow(seats[entry.name].former, entry.key)
        if self.samples is None:
            if clients or len(samples) != 1 or not 1 <= samples[0] <= MOST_SAMPLES:
                raise InputError(f"it is not one site with data of its own, and with 1 to {MOST_SAMPLES:,} samples")
            reserved = {client for seat in seats.values() for client in seat.clients}
            site = replace(entry, samples=samples[0], **_of_site(facts))
            return (self.roster.admit(None, site, _place(entry.name, seats), reserved),)
        if not clients or len(clients) != len(samples) or len(set(clients)) != len(clients):
            raise InputError("it does not say which clients it stands for")
        for client, number in zip(clients, samples, strict=True):
            if not 0 <= client < len(self.samples):
                raise InputError(f"there is no client {client}: there are {len(self.samples)}, numbered from 0")
            if (number, data) != (self.samples[client], self.data):
                raise InputError(f"its data is not the experiment's: client {client} has {self.samples[client]} samples, not {number}")
            if self.authority is not None and not self._owns(client, entry, seats):
                raise InputError(
                    f"client {client} is not bound to its key: the coordinator can do that with "
                    f"`fedrts keys register {entry.name}.pub --clients {','.join(map(str, clients))}`"
                )
            if (host := self.hosts.get(client)) is not None:
                raise _PassingError(f"client {client} is already here, with node {self._called(self.nodes[host])}")
        with self.roster.changing():
            return tuple(self.roster.admit(client, replace(entry, samples=number)) for client, number in zip(clients, samples, strict=True))

    def _owns(self, client: int, entry: Member, seats: Mapping[str, Seat]) -> bool:
        """Whether the client was bound to this key at registration, or used it before such bonds existed."""
        known = self.roster.entries.get(client)
        return (entry.name in seats and client in seats[entry.name].clients) or (known is not None and known.key == entry.key)

    def _withdraw(self, number: int, node: _Node) -> None:
        """Withdraw a site at its own request."""
        mine = [client for client, entry in self.roster.entries.items() if entry.key == node.key and self.roster.keyed]
        if not mine:
            raise InputError("no client is known by its key: there is nothing to withdraw")
        with self.roster.changing():
            for client in mine:
                self.roster.leave(client, WITHDRAWN)
        self.say(info("withdrawn", f"withdrawn: {', '.join(map(self.roster.called, mine))}", clients=mine, **self._whose(node)))
        self.witness("withdrawn", key=node.key, who=mine)
        self._part(number, WITHDRAWN, "this site takes part no more")

    def _turn_down(self, number: int, error: Exception) -> None:
        """Refuse a node: at once and for good, or after some retries if waiting may help."""
        node = self.nodes[number]
        node.incoming, node.hello, node.asked, node.tries = None, "", time.monotonic(), node.tries + 1
        reason = printable(error)
        if isinstance(error, _PassingError) and node.tries < _TRIES:
            if node.tries == 1:
                words = f"refused for now: node {self._called(node)}: {reason}; it is asked again"
                self.say(warning("refused", words, **self._whose(node)))
            return
        self.say(warning("refused", f"refused: node {self._called(node)}: {reason}", **self._whose(node)))
        self._part(number, "refused", reason)

    def _part(self, number: int, why: str, text: str, blobs: Mapping[int, bytes] | None = None) -> None:
        """Say goodbye: the node tells its owner and disconnects."""
        node = self.nodes[number]
        node.done, node.clients = True, ()
        self.hosts = {client: host for client, host in self.hosts.items() if host != number}
        model = {} if not blobs else {"model": entry(next(iter(blobs.values())))}
        self.witness("farewell", key=node.key, why=why, here=len(self.hosts), **model)
        if name := self.link.push(Message(content({"why": why, "text": text}, blobs), number, FAREWELL, ttl=_ANSWER)):
            self._farewells.add(name)

    def dismiss(self, model: bytes | None) -> None:
        """End the study: notify all nodes, with the final model if they may have it, and wait a while until they know."""
        for number in [number for number, node in self.nodes.items() if not node.done]:
            self._part(number, "finished", "the study is finished", None if model is None else {0: model})
        due = time.monotonic() + _GOODBYE
        while self._farewells and time.monotonic() < due:
            time.sleep(0.2)
            self.look()

    def _name(self, key: str) -> str:
        """Return the name under which a key was registered; empty without keys."""
        known = [*self._registered.items(), *self._replaced.items()]
        return next((name for name, (public, _) in known if fingerprint(public) == key), "")

    def _called(self, node: _Node) -> str:
        name = self._name(node.key)
        return f"'{name}'" if name else f"with key {node.key}"

    def _whose(self, node: _Node) -> dict[str, str]:
        """Return the fields by which a line says who a node is."""
        name = self._name(node.key)
        return {"name": name} if name else {"key": node.key}

    def _forget(self, number: int, how: str = LOST) -> None:
        if (node := self.nodes.pop(number, None)) is None:
            return
        self.hosts = {client: host for client, host in self.hosts.items() if host != number}
        if gone := [client for client in node.clients if client not in self.hosts]:
            self.roster.note(gone, GONE)
            words = f"{how}: node {self._called(node)} with {', '.join(map(self.roster.called, gone))}"
            whose = {"clients": gone, **self._whose(node)}
            self.say(warning("lost", words, **whose) if how == LOST else info("left", words, **whose))
        self.witness("disconnected", key=node.key, who=gone, here=len(self.hosts))

    @property
    def expects(self) -> bool:
        """Whether a node is connected that has not introduced itself yet, and may do so soon."""
        now, here = time.monotonic(), {node.key for node in self.nodes.values() if node.clients}
        self._successors = {key: due for key, due in self._successors.items() if key not in here and now < due}
        strangers = any(not node.clients and not node.done and node.hello != "" and node.tries == 0 for node in self.nodes.values())
        return strangers or bool(self._successors)

    def meet_again(self, number: int) -> None:
        """Ask a node that does not know the experiment to introduce itself."""
        if (node := self.nodes.get(number)) is not None and node.clients:
            self.hosts = {client: host for client, host in self.hosts.items() if host != number}
            node.clients, node.hello = (), None

    def gather(self, wanted: int, seconds: float) -> int:
        """Wait until `wanted` clients are here, or for this many seconds; return their number. Departed clients are not waited for."""
        due, told = time.monotonic() + seconds, -1
        while len(self.hosts) < wanted - len(self.departed) * self.roster.fixed and time.monotonic() < due:
            if told != len(self.hosts):
                told = len(self.hosts)
                self.say(info("waiting", f"waiting for nodes: {told} of {wanted} clients are here", here=told, wanted=wanted))
            time.sleep(0.2)
            self.look()
            self.hand_over()
        return len(self.hosts)


def _of_site(facts: dict[str, Any]) -> dict[str, Any]:
    """Return a site's held-out samples and its input statistics (with secure sums, only the number of channels)."""
    held_out, told, channels = facts.get("held_out", 0), Normalisation.told(facts.get("statistics")), facts.get("channels", 0)
    if type(held_out) is not int or not 0 <= held_out <= MOST_SAMPLES:
        raise WireError(f"its introduction holds out {held_out!r} samples")
    if type(channels) is not int or not 0 <= channels <= MOST_CHANNELS:
        raise WireError(f"its introduction has images of {channels!r} channels")
    return {"held_out": held_out, "statistics": () if told is None else tuple(told.numbers), "channels": channels}


def _check_version(facts: Mapping[str, Any]) -> None:
    """Check that node and server understand each other; a node from before version numbers names none."""
    theirs = facts.get("protocol")
    if theirs != PROTOCOL:
        version, number = printable(facts.get("fedrts", "of unknown version"), 32), printable(theirs or "none", 32)
        raise InputError(
            f"it runs fedrts {version} (protocol {number}), this server fedrts {fedrts.__version__} (protocol {PROTOCOL}): "
            "install the same fedrts on both"
        )


def _place(name: str, seats: Mapping[str, Seat]) -> int | None:
    """Return the number of a site by its registration: one bound to it, or its place among those without any."""
    if name not in seats:
        return None
    if seats[name].clients:
        return seats[name].clients[0]
    bound = {client for seat in seats.values() for client in seat.clients}
    before = sum(1 for seat in seats.values() if not seat.clients and seat.order < seats[name].order)
    return next(islice((number for number in count() if number not in bound), before, None))


def _counts(value: object) -> list[int]:
    """Parse a list of whole numbers that a node sent."""
    if not isinstance(value, list) or not all(type(number) is int for number in value):
        raise WireError("its introduction has no list of numbers where one must be")
    return value
