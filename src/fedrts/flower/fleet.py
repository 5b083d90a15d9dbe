"""Who is connected, and which clients each node stands for: what nodes say of themselves, checked and remembered."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from flwr.app import Message
from pydantic import TypeAdapter, ValidationError

from fedrts.checkpoint import write_atomically
from fedrts.errors import InputError, printable
from fedrts.flower import HELLO
from fedrts.flower.keys import Authority, fingerprint
from fedrts.flower.link import Link
from fedrts.flower.messages import Incoming, content, opened
from fedrts.flower.normalisation import Normalisation
from fedrts.wire.errors import WireError

_INTRODUCTION = 2**20
"""Bytes of a node's introduction at most."""
_ANSWER = 120.0
"""Seconds that a node has to introduce itself: it loads its data first."""
_LOOK = 1.0
"""Seconds between two looks at who is connected."""

MOST_SAMPLES = 2**31 - 1
"""Samples that a site may claim: sums of so many over all clients are exact."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Entry:
    """What is known of a client from its first introduction on."""

    samples: int
    data: str
    """Fingerprint of its data."""
    key: str
    """Fingerprint of its node's public key: nobody else may stand for this client."""
    held_out: int = 0
    """Samples on which it judges the global model."""
    statistics: tuple[float, ...] = ()
    """What its inputs are like, see `normalisation`; empty: it does not tell."""


_ENTRIES = TypeAdapter(dict[int, Entry])


@dataclass
class Roster:
    """The clients by number, as they first introduced themselves; kept in the run folder."""

    total: int
    file: Path | None = None
    keyed: bool = True
    """Do keys outlast a node's restart? Without registered keys they do not."""
    entries: dict[int, Entry] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.file is not None and self.file.exists():
            try:
                self.entries = _ENTRIES.validate_json(self.file.read_bytes(), strict=True)
            except ValidationError as error:
                raise InputError(f"{self.file} is damaged: {error.errors()[0]['msg']}; restore it from a backup") from error

    def admit(self, client: int | None, entry: Entry) -> int:
        """The number of a client that introduces itself; an `InputError` says why it is not admitted."""
        if client is None:
            client = self._number(entry)
        known = self.entries.get(client)
        if known is not None:
            if self.keyed and known.key != entry.key:
                raise InputError(f"client {client} belongs to the node with key {known.key}")
            if (known.samples, known.data) != (entry.samples, entry.data):
                raise InputError(f"client {client} has {entry.samples} samples of other data than before ({known.samples})")
        self.entries[client] = entry
        if self.file is not None and known != entry:
            write_atomically(self.file, json.dumps({number: asdict(entry) for number, entry in self.entries.items()}, indent=2).encode())
        return client

    def _number(self, entry: Entry) -> int:
        """The number of a site: the one it had, else the next."""
        for number, known in self.entries.items():
            if known.key == entry.key or (not self.keyed and (known.samples, known.data) == (entry.samples, entry.data)):
                return number
        if len(self.entries) == self.total:
            raise InputError(f"all {self.total} sites of the experiment are known, and this is none of them")
        return len(self.entries)


@dataclass
class _Node:
    """A connected node."""

    activated: str
    key: str
    hello: str | None = None
    """The name of the question that it has not answered yet."""
    asked: float = 0.0
    incoming: Incoming | None = None
    clients: tuple[int, ...] = ()


class Fleet:
    """The nodes that are connected right now."""

    def __init__(
        self,
        link: Link,
        introduction: dict[str, Any],
        roster: Roster,
        samples: Sequence[int] | None,
        data: str,
        authority: Authority | None,
        say: Say,
    ) -> None:
        self.link, self.introduction, self.roster, self.say = link, introduction, roster, say
        self.samples, self.data = samples, data
        """n_k and the fingerprint of the data where the server knows them: one data set is divided. None: sites have their own."""
        self.authority = authority
        self.nodes: dict[int, _Node] = {}
        self.hosts: dict[int, int] = {}
        """Client → node."""
        self._registered: dict[str, tuple[bytes, int]] = {}
        self._faults: dict[str, str] = {}
        """What is wrong with files of keys, by name: said once."""
        self._looked = float("-inf")
        self.forgotten: set[str] = set()
        """Messages whose answers nobody waits for any more."""

    def activation(self, node: int) -> str | None:
        """Names a node's connection; another one means that it was started anew. None: it is not connected."""
        return self.nodes[node].activated if node in self.nodes else None

    def look(self) -> None:
        """Notice who came, who went, and who introduced itself."""
        if time.monotonic() - self._looked < _LOOK:
            return
        self._looked = time.monotonic()
        self.follow_keys()
        connected = self.link.nodes()
        for number, info in connected.items():
            known = self.nodes.get(number)
            if known is None or known.activated != info.last_activated_at:
                self._forget(number)
                self.nodes[number] = _Node(info.last_activated_at, fingerprint(info.public_key))
        for number in set(self.nodes) - set(connected):
            self._forget(number)
        self._greet()
        self._listen()
        for head, _ in self.link.replies(list(self.forgotten)):
            self.forgotten.discard(head.metadata.reply_to_message_id)
            self.link.done_with(head.metadata.message_id)

    def follow_keys(self) -> None:
        """Let in whose key was registered, refuse whose key was revoked."""
        if self.authority is None:
            return
        wanted, faults = self.authority.inspected()
        for name, (key, number) in list(self._registered.items()):
            if wanted.get(name) != key and name not in faults:  # a file that is damaged now takes nothing away
                self.link.unregister(number)
                self._forget(number)
                del self._registered[name]
                self.say(f"refused from now on: {name}, whose key {fingerprint(key)} was revoked")
        for name, key in wanted.items():
            if name not in self._registered:
                try:
                    number = self.link.register(key, name)
                except InputError as error:
                    number = 0  # no node's: it is not tried again with this key
                    self.say(f"skipped: the key of '{name}': {error}")
                self._registered[name] = (key, number)
        for name, fault in faults.items():
            if self._faults.get(name) != fault:
                self.say(f"skipped: the key of '{name}': {fault}")
        self._faults = faults

    def _greet(self) -> None:
        for number, node in self.nodes.items():
            waiting = node.hello is not None and time.monotonic() - node.asked < _ANSWER
            if not node.clients and not waiting:
                node.incoming = None
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
                    raise InputError(head.error.reason or f"error {head.error.code}")
                self.nodes[number].incoming = Incoming(head.metadata.message_id, tree, _INTRODUCTION)
            except (WireError, InputError) as error:
                self._turn_down(number, str(error))
        for number, node in list(self.nodes.items()):
            if node.incoming is not None:
                self._hear(number, node, node.incoming)

    def _hear(self, number: int, node: _Node, incoming: Incoming) -> None:
        """Take a node's introduction; what it says is checked against what we know."""
        try:
            if not incoming.advance(self.link.piece):
                return
            node.incoming = None
            self.link.done_with(incoming.message_id)
            facts, _ = opened(incoming.message())
            if "refused" in facts:
                raise InputError(f"it cannot take part: {facts['refused']}")
            node.clients = self._admitted(facts, node.key)
            node.hello = None
        except (WireError, InputError) as error:
            self._turn_down(number, str(error))
            return
        self.hosts |= dict.fromkeys(node.clients, number)
        numbers = ", ".join(map(str, node.clients))
        self.say(f"connected: node {self._called(node)} with client{'s' * (len(node.clients) > 1)} {numbers}")

    def _admitted(self, facts: dict[str, Any], key: str) -> tuple[int, ...]:
        try:
            clients, samples, data = _counts(facts["clients"]), _counts(facts["samples"]), printable(facts["data"], 64)
        except KeyError as error:
            raise WireError(f"its introduction lacks {error}") from error
        if self.samples is None:
            if clients or len(samples) != 1 or not 1 <= samples[0] <= MOST_SAMPLES:
                raise InputError(f"it is not one site with data of its own, and with 1 to {MOST_SAMPLES:,} samples")
            return (self.roster.admit(None, Entry(samples[0], data, key, *_of_site(facts))),)
        if not clients or len(clients) != len(samples) or len(set(clients)) != len(clients):
            raise InputError("it does not say which clients it stands for")
        for client, count in zip(clients, samples, strict=True):
            if not 0 <= client < len(self.samples):
                raise InputError(f"there is no client {client}: there are {len(self.samples)}, numbered from 0")
            if (count, data) != (self.samples[client], self.data):
                raise InputError(f"its data is not the experiment's: client {client} has {self.samples[client]} samples, not {count}")
            if (host := self.hosts.get(client)) is not None:
                raise InputError(f"client {client} is already here, with node {self._called(self.nodes[host])}")
        return tuple(self.roster.admit(client, Entry(count, data, key)) for client, count in zip(clients, samples, strict=True))

    def _turn_down(self, number: int, reason: str) -> None:
        node = self.nodes[number]
        node.incoming, node.hello, node.asked = None, "", time.monotonic()  # it is asked again after a while
        self.say(f"refused: node {self._called(node)}: {printable(reason)}")

    def _called(self, node: _Node) -> str:
        for name, (key, _) in self._registered.items():
            if fingerprint(key) == node.key:
                return f"'{name}'"
        return f"with key {node.key}"

    def _forget(self, number: int) -> None:
        if (node := self.nodes.pop(number, None)) is None:
            return
        self.hosts = {client: host for client, host in self.hosts.items() if host != number}
        if node.clients:
            self.say(f"gone: node {self._called(node)} with clients {', '.join(map(str, node.clients))}")

    @property
    def expects(self) -> bool:
        """Is a node here that has not introduced itself yet?"""
        return any(not node.clients and node.hello != "" for node in self.nodes.values())

    def meet_again(self, number: int) -> None:
        """A node says that it does not know the experiment: it is asked to introduce itself."""
        if (node := self.nodes.get(number)) is not None and node.clients:
            self.hosts = {client: host for client, host in self.hosts.items() if host != number}
            node.clients, node.hello = (), None

    def gather(self, wanted: int, seconds: float) -> int:
        """Wait until `wanted` clients are here, or for so many seconds; how many there are."""
        due, told = time.monotonic() + seconds, -1
        while len(self.hosts) < wanted and time.monotonic() < due:
            if told != len(self.hosts):
                told = len(self.hosts)
                self.say(f"waiting for nodes: {told} of {wanted} clients are here")
            time.sleep(0.2)
            self.look()
        return len(self.hosts)


def _of_site(facts: dict[str, Any]) -> tuple[int, tuple[float, ...]]:
    """Samples that a site holds out, and what its inputs are like."""
    held_out, told = facts.get("held_out", 0), Normalisation.told(facts.get("statistics"))
    if type(held_out) is not int or not 0 <= held_out <= MOST_SAMPLES:
        raise WireError(f"its introduction holds out {held_out!r} samples")
    return held_out, () if told is None else tuple(told.numbers)


def _counts(value: object) -> list[int]:
    """A list of whole numbers, as a node sent it."""
    if not isinstance(value, list) or not all(type(number) is int for number in value):
        raise WireError("its introduction has no list of numbers where one must be")
    return value
