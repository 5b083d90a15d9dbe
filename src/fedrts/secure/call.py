"""A call: the server's invitation to a sum, with its subject, round, clients, and the number needed to open it.

Its digest names the attempt. Every signature covers it, every key is derived with it, and every message begins with it: what
belongs to another run, round, attempt or roster is nothing here.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

from fedrts.secure.errors import SecureError

FEWEST = 3
"""Clients of a sum: of two, either one would know the other's part."""
MOST = 2**12
TAG = 8
"""Bytes of the digest with which a message begins."""

UPDATE, METRICS, STATISTICS = b"update", b"metrics", b"statistics"
"""What is summed: clients' changes of the model, what they say of it on rows that they hold out, what their images are like.

Each has one opening in a round of its own. The three are functions of other rows or of another kind: no difference of an update's
sum and a metric's is a client's part of either, so one opening of each says no more than each alone.
"""

_NUMBER = struct.Struct("<i")
_VERSION = b"fedrts secure sum 2"


@dataclass(frozen=True)
class Invited:
    """A client on the roster."""

    client: int
    samples: int
    """n_k, which is public."""
    key: bytes
    """The public key (PEM) of its node."""


@dataclass(frozen=True)
class Call:
    """One attempt at the sum of a round."""

    run: bytes
    """The digest of the experiment that the owners agreed to: who runs it twice has no second opening."""
    round: int
    attempt: int
    threshold: int
    """t: this many survivors open the sum, and fewer cannot."""
    roster: tuple[Invited, ...]
    most_samples: int
    """n_max: no client of the federation has more."""
    form: bytes = b""
    """What the words mean, and of which model: it must be the same for all."""
    purpose: bytes = UPDATE
    """What is summed."""

    @cached_property
    def encoded(self) -> bytes:
        members = [number(one.client) + number(one.samples) + one.key for one in self.roster]
        numbers = map(number, (self.round, self.attempt, self.threshold, self.most_samples))
        return joined([_VERSION, self.purpose, self.run, *numbers, self.form, *members])

    @cached_property
    def digest(self) -> bytes:
        return hashlib.sha256(self.encoded).digest()

    @property
    def tag(self) -> bytes:
        return self.digest[:TAG]

    @staticmethod
    def decoded(data: bytes) -> Call:
        parts = parted(data)
        if len(parts) < 8 or parts[0] != _VERSION:
            raise SecureError("a call in another version of the protocol: install the same fedrts on both sides")
        purpose, run, index, attempt, threshold, most, form, *members = parts[1:]
        roster = tuple(Invited(read_number(one[:4]), read_number(one[4:8]), one[8:]) for one in members)
        return Call(run, read_number(index), read_number(attempt), read_number(threshold), roster, read_number(most), form, purpose)

    def __post_init__(self) -> None:
        n, clients = len(self.roster), [one.client for one in self.roster]
        if not FEWEST <= n <= MOST:
            raise SecureError(f"a sum of {n} clients: there must be {FEWEST} to {MOST}")
        if len(set(clients)) != n or sorted(clients) != clients:
            raise SecureError("the roster names a client twice, or not in order")
        if not n < 2 * self.threshold <= 2 * n:
            raise SecureError(f"a threshold of {self.threshold} for {n} clients: it must be above half of them, and not above all")
        if any(not 1 <= one.samples <= self.most_samples for one in self.roster):
            raise SecureError("the roster has a client without samples, or with more than any")

    @cached_property
    def members(self) -> dict[int, Invited]:
        return {one.client: one for one in self.roster}

    @cached_property
    def places(self) -> dict[int, int]:
        """The place of each client's shares, from 1 on."""
        return {one.client: place for place, one in enumerate(self.roster, start=1)}

    def message(self, parts: Sequence[bytes]) -> bytes:
        """Return a message that belongs to this call."""
        return self.tag + joined(parts)

    def parts(self, message: bytes) -> list[bytes]:
        """Split a message of this call into its parts."""
        if message[:TAG] != self.tag:
            raise SecureError("a message of another round, attempt or roster")
        return parted(message[TAG:])

    def signed(self, purpose: bytes, *parts: bytes) -> bytes:
        """Return the bytes that a signature in this call covers."""
        return joined([_VERSION, purpose, self.digest, *parts])


def check_call(call: Call, client: int, samples: int, key: bytes, pinned: Collection[bytes] | None, *, alone: bool = False) -> None:
    """Check that a client with these samples and this key may take part. `pinned`: keys of the peers that its owner knows; None: all.

    `alone`: every node stands for one client. Otherwise one node that colludes could be as many clients as it takes to open a sum.
    """
    own = call.members.get(client)
    if own is None:
        raise SecureError(f"client {client} is not on the roster that it was sent")
    if own.samples != samples:
        raise SecureError(f"the roster says {own.samples} samples of client {client}, which has {samples}")
    if own.key.strip() != key.strip():
        raise SecureError(f"the roster has another key for client {client}")
    keys = [one.key.strip() for one in call.roster]
    if alone and len(set(keys)) != len(keys):
        raise SecureError("the roster has one key for several clients, where every node stands for one")
    if pinned is not None:
        known = {one.strip() for one in pinned} | {key.strip()}
        if strangers := [one.client for one in call.roster if one.key.strip() not in known]:
            raise SecureError(f"the key of client {strangers[0]} is none of the peers' in --peers")


def number(value: int) -> bytes:
    """Encode a whole number in 4 bytes."""
    return _NUMBER.pack(value)


def read_number(data: bytes) -> int:
    """Inverse of `number`."""
    if len(data) != _NUMBER.size:
        raise SecureError("a message with a part of another length")
    found: int = _NUMBER.unpack(data)[0]
    return found


def joined(parts: Sequence[bytes]) -> bytes:
    """Join parts, each after its length, so that no two lists of parts give the same bytes."""
    return b"".join(number(len(part)) + part for part in parts)


def parted(data: bytes) -> list[bytes]:
    """Inverse of `joined`."""
    found, at = [], 0
    while at < len(data):
        length = read_number(data[at : at + 4])
        if not 0 <= length <= len(data) - at - 4:
            raise SecureError("a message that ends too soon")
        found.append(data[at + 4 : at + 4 + length])
        at += 4 + length
    return found
