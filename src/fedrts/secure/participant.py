"""A client of a secure sum, as five answers to five messages (Bonawitz et al. 2017, Figure 4).

    advertise   →  three fresh public keys, signed by the registered key
    share       →  to every peer, sealed: its shares of the mask's private key and of the own mask's seed
    mask        →  the words plus the own mask, plus or minus the one agreed on with every peer
    endorse     →  a signature on the list of those whose words the server has
    reveal      →  for every survivor the share of its seed, for everybody else that of its private key, never both

Each is given once, in this order, and none after a failure. The last is given only after t survivors signed the very list that
this client signed, and only after `opening` has put on record that this client takes part in no other opening of the round.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Concatenate, ParamSpec

import numpy as np
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from fedrts.secure import masks, shamir
from fedrts.secure.call import Call, joined, number, parted, read_number
from fedrts.secure.errors import SecureError
from fedrts.secure.identity import Sign, is_signed
from fedrts.secure.ring import Ring, Words

STEPS = ("advertise", "share", "mask", "endorse", "reveal")
"""What a client is asked for, one after the other."""
WORDS = STEPS[2]
SEED, KEY = b"seed", b"key"
"""Kinds of share: of a survivor's own mask, and of a private key that went with a client that did not survive."""
_FAILED = -1
Handed = ParamSpec("Handed")


@dataclass(frozen=True)
class Advert:
    """The public keys of one client in one attempt."""

    client: int
    sealing: bytes
    """Shares are sealed with this one."""
    masking: bytes
    """Masks are agreed on with this one; peers share its private key."""
    listing: bytes
    """Its list of survivors is signed with this one (Ed25519)."""
    seed: bytes
    """SHA-256 of the seed of the client's own mask."""
    signature: bytes = b""

    @property
    def parts(self) -> list[bytes]:
        return [number(self.client), self.sealing, self.masking, self.listing, self.seed]

    @property
    def encoded(self) -> bytes:
        return joined([*self.parts, self.signature])

    @staticmethod
    def of(parts: list[bytes], call: Call) -> Advert:
        """Make an advert that its client's registered key has signed for this call."""
        if len(parts) != 6 or [len(part) for part in parts[1:5]] != [32] * 4:
            raise SecureError("an advert with parts of another length")
        found = Advert(read_number(parts[0]), *parts[1:])
        member = call.members.get(found.client)
        if member is None:
            raise SecureError(f"keys of client {found.client}, which is not on the roster")
        if not is_signed(member.key, found.signature, call.signed(b"keys", *found.parts)):
            raise SecureError(f"the keys of client {found.client} are not signed by its registered key for this round, attempt and roster")
        return found


def _step(
    stage: int, what: str
) -> Callable[[Callable[Concatenate[Participant, Handed], bytes]], Callable[Concatenate[Participant, Handed], bytes]]:
    """Let a client give each of its answers once, in order, and none after a failure."""

    def once(answer: Callable[Concatenate[Participant, Handed], bytes]) -> Callable[Concatenate[Participant, Handed], bytes]:
        @functools.wraps(answer)
        def answered(self: Participant, /, *given: Handed.args, **named: Handed.kwargs) -> bytes:
            if stage != self._stage + 1:
                when = "after a failure" if self._stage == _FAILED else "twice" if stage <= self._stage else "too early"
                where = f"round {self.call.round}, attempt {self.call.attempt}"
                raise SecureError(f"client {self.client} is asked {when} for {what} in {where}")
            self._stage = _FAILED
            said = answer(self, *given, **named)
            self._stage = stage
            return said

        return answered

    return once


@dataclass
class Participant:
    """One client in one attempt. `opening` puts on record that the sum of this round is about to be opened, or raises."""

    call: Call
    client: int
    sign: Sign
    opening: Callable[[], None]
    _stage: int = 0
    _adverts: dict[int, Advert] = field(default_factory=dict)
    _held: dict[int, tuple[bytes, bytes]] = field(default_factory=dict, repr=False)
    """Shares of (seed, private key) by the client that they are of; those that could not be read are not among them."""
    _sharing: tuple[int, ...] = ()
    _list: bytes = b""
    _survivors: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self._sealing, self._masking, self._seed = masks.new_secret(), masks.new_secret(), masks.new_secret()
        self._listing = Ed25519PrivateKey.generate()

    @property
    def is_needed(self) -> bool:
        """Are its words with the server, and its shares still to be revealed? If too many go now, their sum is never opened."""
        return STEPS.index(WORDS) < self._stage < len(STEPS)

    @_step(1, "its keys")
    def advertise(self) -> bytes:
        listing, seed = self._listing.public_key().public_bytes_raw(), hashlib.sha256(self._seed).digest()
        own = Advert(self.client, masks.public(self._sealing), masks.public(self._masking), listing, seed)
        own = replace(own, signature=self.sign(self.call.signed(b"keys", *own.parts)))
        self._adverts[self.client] = own
        return self.call.message([own.encoded])

    @_step(2, "its shares")
    def share(self, message: bytes) -> bytes:
        """Answer all adverts."""
        own = self._adverts[self.client]
        self._adverts = read_adverts(message, self.call)
        if self._adverts.get(self.client) != own:
            raise SecureError("the server hands out other keys than this client's own")
        self._enough(len(self._adverts), "keys")
        places = {client: self.call.places[client] for client in self._adverts}
        dealt = [shamir.shares(secret, list(places.values()), self.call.threshold) for secret in (self._seed, self._masking)]
        self._held[self.client] = (dealt[0][places[self.client]], dealt[1][places[self.client]])
        parts = []
        for peer, advert in self._adverts.items():
            if peer != self.client:
                key = self._sealing_key(advert, self.client, peer)
                parts.append(number(peer) + masks.sealed(key, dealt[0][places[peer]] + dealt[1][places[peer]], self.call.digest))
        return self.call.message([number(self.client), *parts])

    @_step(3, "its masked words")
    def mask(self, message: bytes, ring: Ring, words: Words) -> bytes:
        """Answer the shares of all peers with the client's `words`, masked."""
        if len(words) != ring.words:
            raise ValueError(f"{len(words)} words where {ring.words} are due")
        for part in self.call.parts(message):
            sender = read_number(part[:4])
            if sender not in self._adverts or sender == self.client or sender in self._held:
                raise SecureError(f"shares of client {sender}, from whom none are due")
            key = self._sealing_key(self._adverts[sender], sender, self.client)
            pair = masks.unsealed(key, part[4:], self.call.digest) or b""
            self._held[sender] = (pair[: shamir.SHARE], pair[shamir.SHARE :]) if len(pair) == 2 * shamir.SHARE else (b"", b"")
        self._sharing = tuple(sorted(self._held))
        self._enough(len(self._sharing), "shares")
        total = words + masks.stream(own_key(self._seed, self.call), ring.words)
        for peer in self._sharing:
            if peer != self.client:
                mask = masks.stream(pair_key(self._masking, self._adverts[peer].masking, self.call, self.client, peer), ring.words)
                (np.add if self.client < peer else np.subtract)(total, mask, out=total)
        return self.call.message([number(self.client), ring.packed(total)])

    @_step(4, "its signature on the survivors")
    def endorse(self, message: bytes) -> bytes:
        """Answer the list of survivors."""
        survivors = tuple(map(read_number, self.call.parts(message)))
        if sorted(set(survivors)) != list(survivors) or not set(survivors) <= set(self._sharing):
            raise SecureError("the list of survivors names a client twice, or one that shared nothing")
        if self.client not in survivors:
            raise SecureError("the list of survivors leaves out this client, whose words the server has")
        self._enough(len(survivors), "survivors")
        self._survivors = survivors
        self._list = listed(self.call, self._adverts, self._sharing, survivors)
        return self.call.message([number(self.client), self._listing.sign(self._list)])

    @_step(5, "shares that open the sum")
    def reveal(self, message: bytes) -> bytes:
        """Answer the survivors' signatures."""
        signed = set()
        for part in self.call.parts(message):
            signer = read_number(part[:4])
            if signer not in self._survivors or not is_endorsed(self._adverts[signer], part[4:], self._list):
                raise SecureError(f"client {signer} has not signed the list of survivors that this client was sent")
            signed.add(signer)
        self._enough(len(signed), "signatures on the same list")
        self.opening()
        parts = []
        for peer in self._sharing:
            seed, key = self._held[peer]
            share, kind = (seed, SEED) if peer in self._survivors else (key, KEY)
            if share:
                parts.append(joined([number(peer), kind, share]))
        self._forget()
        return self.call.message([number(self.client), *parts])

    def _sealing_key(self, peer: Advert, sender: int, receiver: int) -> bytes:
        """Return the key that seals shares from one client to the other; `peer` is one of the two."""
        way = b"shares " + number(sender) + number(receiver)
        return masks.derived(masks.agreed(self._sealing, peer.sealing), self.call.digest, way)

    def _enough(self, count: int, what: str) -> None:
        if count < self.call.threshold:
            raise SecureError(f"{count} {what} where {self.call.threshold} are needed")

    def _forget(self) -> None:
        self._sealing = self._masking = self._seed = b""
        self._held = {}


def read_adverts(message: bytes, call: Call) -> dict[int, Advert]:
    """Read all adverts of a message by client, each with a valid signature."""
    adverts = [Advert.of(parted(part), call) for part in call.parts(message)]
    found = {advert.client: advert for advert in sorted(adverts, key=lambda advert: advert.client)}
    if len(found) != len(adverts):
        raise SecureError("two adverts of one client")
    return found


def listed(call: Call, adverts: dict[int, Advert], sharing: tuple[int, ...], survivors: tuple[int, ...]) -> bytes:
    """Return what survivors sign: the keys that they saw, who shared, and who survived."""
    keys = hashlib.sha256(joined([advert.encoded for advert in adverts.values()])).digest()
    return call.signed(b"survivors", keys, joined(list(map(number, sharing))), joined(list(map(number, survivors))))


def is_endorsed(advert: Advert, signature: bytes, message: bytes) -> bool:
    """Whether this is the signature of an advert's client on a list of survivors."""
    try:
        Ed25519PublicKey.from_public_bytes(advert.listing).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


def own_key(seed: bytes, call: Call) -> bytes:
    """Return the key of a client's own mask."""
    return masks.derived(seed, call.digest, b"own mask")


def pair_key(secret: bytes, other: bytes, call: Call, one: int, two: int) -> bytes:
    """The key of the mask that the clients `one` and `two` agree on.

    Their numbers are in it: a client that advertises another's public key as its own would otherwise have that one's mask, and the two
    masks of a third client would cancel.
    """
    pair = number(min(one, two)) + number(max(one, two))
    return masks.derived(masks.agreed(secret, other), call.digest, b"mask of two " + pair)
