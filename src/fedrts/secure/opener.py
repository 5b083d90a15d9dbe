"""The server of a secure sum: it passes messages on, adds masked words, and removes the remaining masks.

    opener = Opener(call, ring)
    opener.advertised(client, data) …  opener.adverts()
    opener.shared(client, data) …      opener.deal(client)
    opener.masked(client, data) …      opener.survivors()
    opener.endorsed(client, data) …    opener.endorsements()
    opener.revealed(client, data) …    opener.opened()

What a client sends is checked when it comes: a `SecureError` says why it does not count, and the others go on without it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np

from fedrts.secure import masks, shamir
from fedrts.secure.call import Call, joined, number, parted, read_number
from fedrts.secure.errors import SecureError
from fedrts.secure.participant import KEY, SEED, Advert, is_endorsed, listed, own_key, pair_key
from fedrts.secure.ring import Ring, Words


@dataclass
class Opener:
    """One attempt at the sum of a round."""

    call: Call
    ring: Ring
    _adverts: dict[int, Advert] = field(default_factory=dict)
    _boxes: dict[int, dict[int, bytes]] = field(default_factory=dict)
    """Sealed shares by sender and receiver."""
    _masked: list[int] = field(default_factory=list)
    _survivors: tuple[int, ...] = ()
    _sharing: tuple[int, ...] = ()
    _signatures: dict[int, bytes] = field(default_factory=dict)
    _shares: dict[tuple[int, bytes], dict[int, bytes]] = field(default_factory=dict)
    """By the client that they are of and their kind: shares by place."""
    _revealed: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._total: Words = np.zeros(self.ring.words, np.uint32)

    # -- keys ---------------------------------------------------------------------------------------------------------

    def advertised(self, client: int, data: bytes) -> None:
        (part,) = self._parts(data, 1)
        advert = Advert.of(parted(part), self.call)
        if advert.client != client:
            raise SecureError(f"keys of client {advert.client} from client {client}")
        for key in (advert.sealing, advert.masking):
            masks.agreed(masks.new_secret(), key)  # one with which nobody can agree would stop all others
        self._adverts[client] = advert

    def adverts(self) -> bytes:
        self._adverts = dict(sorted(self._adverts.items()))
        self._enough(self._adverts, "keys")
        return self.call.message([advert.encoded for advert in self._adverts.values()])

    # -- shares -------------------------------------------------------------------------------------------------------

    def shared(self, client: int, data: bytes) -> None:
        _, *parts = self._own(client, data)
        found = {read_number(part[:4]): part[4:] for part in parts}
        if found.keys() != self._adverts.keys() - {client} or len(parts) != len(found):
            raise SecureError(f"client {client} has not sealed one box for every peer")
        self._boxes[client] = found

    def deal(self, client: int) -> bytes:
        """Return what is for a client that shared; call only when all shares have arrived."""
        self._sharing = self._sharing or tuple(sorted(self._boxes))
        self._enough(self._sharing, "shares")
        return self.call.message([number(sender) + self._boxes[sender][client] for sender in self._sharing if sender != client])

    @property
    def sharing(self) -> list[int]:
        """Clients that proceed to the masked words."""
        return sorted(self._boxes)

    # -- masked words -------------------------------------------------------------------------------------------------

    def masked(self, client: int, data: bytes) -> None:
        _, packed = self._own(client, data, 2)
        if client not in self._sharing or client in self._masked or self._survivors:
            raise SecureError(f"words of client {client}, from whom none are due")
        np.add(self._total, self.ring.unpacked(packed), out=self._total)
        self._masked.append(client)

    def survivors(self) -> bytes:
        self._enough(self._masked, "masked updates")
        self._survivors = tuple(sorted(self._masked))
        return self.call.message(list(map(number, self._survivors)))

    @property
    def counted(self) -> list[int]:
        """Clients whose words are in the sum."""
        return list(self._survivors)

    # -- signatures on the list of survivors --------------------------------------------------------------------------

    def endorsed(self, client: int, data: bytes) -> None:
        _, signature = self._own(client, data, 2)
        message = listed(self.call, self._adverts, self._sharing, self._survivors)
        if client not in self._survivors or not is_endorsed(self._adverts[client], signature, message):
            raise SecureError(f"client {client} has signed another list of survivors")
        self._signatures[client] = signature

    def endorsements(self) -> bytes:
        self._enough(self._signatures, "signatures on the list of survivors")
        return self.call.message([number(client) + signature for client, signature in sorted(self._signatures.items())])

    @property
    def signed(self) -> list[int]:
        """Clients whose signatures have arrived."""
        return sorted(self._signatures)

    # -- shares that open ---------------------------------------------------------------------------------------------

    def revealed(self, client: int, data: bytes) -> None:
        _, *parts = self._own(client, data)
        if client not in self._signatures or client in self._revealed:
            raise SecureError(f"shares of client {client}, from whom none are due")
        found = {}
        for part in parts:
            peer, kind, share = _three(parted(part))
            whose = read_number(peer)
            if whose not in self._sharing or kind != (SEED if whose in self._survivors else KEY) or len(share) != shamir.SHARE:
                raise SecureError(f"client {client} reveals what it was not asked for")
            found[whose, kind] = share
        if len(found) != len(parts):
            raise SecureError(f"client {client} reveals two shares of one secret")
        for name, share in found.items():
            self._shares.setdefault(name, {})[self.call.places[client]] = share
        self._revealed.append(client)

    @property
    def opening(self) -> list[int]:
        """Who has revealed shares."""
        return sorted(self._revealed)

    def opened(self) -> Words:
        """Return the sum of the survivors' words."""
        self._enough(self._revealed, "clients that reveal shares")
        total, words = self._total.copy(), self.ring.words
        weights: dict[tuple[int, ...], dict[int, int]] = {}
        for client in self._survivors:
            seed = self._secret(client, SEED, weights)
            np.subtract(total, masks.stream(own_key(seed, self.call), words), out=total)
        for gone in (client for client in self._sharing if client not in self._survivors):
            secret = self._secret(gone, KEY, weights)
            for client in self._survivors:  # who added the mask of both, or subtracted it
                mask = masks.stream(pair_key(secret, self._adverts[client].masking, self.call, gone, client), words)
                (np.subtract if client < gone else np.add)(total, mask, out=total)
        return self.ring.trimmed(total)

    # -- what outlasts the process ------------------------------------------------------------------------------------

    def saved(self) -> bytes:
        """Return everything needed to ask for the opening shares, and to open."""
        clients = [joined(list(map(number, some))) for some in (self._sharing, self._survivors)]
        signatures = joined([number(client) + signature for client, signature in self._signatures.items()])
        adverts = joined([advert.encoded for advert in self._adverts.values()])
        return joined([self.call.encoded, adverts, *clients, signatures, self._total.astype("<u4").tobytes()])

    @staticmethod
    def call_of(saved: bytes) -> Call:
        """Return which attempt this is."""
        return Call.decoded(_saved_parts(saved)[0])

    @staticmethod
    def restored(saved: bytes, ring: Ring) -> Opener:
        """Restore a saved opener."""
        call, adverts, sharing, survivors, signatures, total = _saved_parts(saved)
        found = Opener(Call.decoded(call), ring)
        for part in parted(adverts):
            advert = Advert.of(parted(part), found.call)
            found._adverts[advert.client] = advert
        found._sharing, found._survivors = (tuple(map(read_number, parted(some))) for some in (sharing, survivors))
        found._signatures = {read_number(part[:4]): part[4:] for part in parted(signatures)}
        found._total = np.frombuffer(total, "<u4").astype(np.uint32)
        if len(found._total) != ring.words:
            raise SecureError("a saved opening of another length")
        return found

    # -- secrets ------------------------------------------------------------------------------------------------------

    def _secret(self, client: int, kind: bytes, weights: dict[tuple[int, ...], dict[int, int]]) -> bytes:
        """Reconstruct the secret that the client's advert confirms; leave out one wrong share among enough."""
        shares, needed = self._shares.get((client, kind), {}), self.call.threshold
        self._enough(shares, f"shares of client {client}'s {kind.decode()}")
        places = sorted(shares)
        for wrong in (None, *places):
            used = tuple(place for place in places if place != wrong)[:needed]
            if len(used) < needed:
                continue
            if used not in weights:
                weights[used] = shamir.lagrange(used)
            secret = shamir.secret_of({place: shares[place] for place in used}, weights[used])
            if secret is not None and self._confirmed(client, kind, secret):
                return secret
        raise SecureError(f"the shares of client {client}'s {kind.decode()} give another one than it advertised: one of them is wrong")

    def _confirmed(self, client: int, kind: bytes, secret: bytes) -> bool:
        advert = self._adverts[client]
        return hashlib.sha256(secret).digest() == advert.seed if kind == SEED else masks.public(secret) == advert.masking

    # -- what all have in common --------------------------------------------------------------------------------------

    def _own(self, client: int, data: bytes, count: int | None = None) -> list[bytes]:
        """Return the parts of a client's message, which begins with its number."""
        parts = self._parts(data, count)
        if not parts or parts[0] != number(client):
            raise SecureError(f"a message of another client than {client}")
        return parts

    def _parts(self, data: bytes, count: int | None) -> list[bytes]:
        parts = self.call.parts(data)
        if count is not None and len(parts) != count:
            raise SecureError(f"a message of {len(parts)} parts where {count} were due")
        return parts

    def _enough(self, found: Collection[object] | Mapping[int, object], what: str) -> None:
        if len(found) < self.call.threshold:
            raise SecureError(f"{len(found)} {what} where {self.call.threshold} are needed")


def _saved_parts(saved: bytes) -> list[bytes]:
    parts = parted(saved)
    if len(parts) != 6:
        raise SecureError("a saved opening in another form")
    return parts


def _three(parts: list[bytes]) -> tuple[bytes, bytes, bytes]:
    if len(parts) != 3:
        raise SecureError("a share in another form")
    return parts[0], parts[1], parts[2]
