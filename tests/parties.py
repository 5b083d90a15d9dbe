"""A federation of clients that sum in one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from cryptography.hazmat.primitives.asymmetric import ec

from fedrts.secure.call import Call, Invited
from fedrts.secure.identity import public_key, signer
from fedrts.secure.opener import Opener
from fedrts.secure.participant import Participant
from fedrts.secure.ring import Ring

KEYS = [ec.generate_private_key(ec.SECP256R1()) for _ in range(12)]


@dataclass
class Party:
    """n clients and a server, with every message that the server saw."""

    call: Call
    ring: Ring
    clients: dict[int, Participant] = field(default_factory=dict)
    seen: list[bytes] = field(default_factory=list)

    @staticmethod
    def of(n: int, threshold: int, attempt: int = 0, opening: Callable[[], None] = lambda: None) -> Party:
        roster = tuple(Invited(10 + number, 5, public_key(KEYS[number])) for number in range(n))
        call = Call(b"r" * 32, 3, attempt, threshold, roster, 5)
        party = Party(call, Ring(n, 12, 40, 60))
        party.clients = {one.client: Participant(call, one.client, signer(KEYS[number]), opening) for number, one in enumerate(roster)}
        return party

    def __post_init__(self) -> None:
        self.opener = Opener(self.call, self.ring)
        draw = np.random.default_rng(1)
        self.levels = {one.client: draw.integers(-self.ring.most, self.ring.most + 1, 40) for one in self.call.roster}
        self.flags = {one.client: draw.random(60) < 0.4 for one in self.call.roster}

    def words(self, client: int) -> np.ndarray:
        return self.ring.encoded(self.levels[client], self.flags[client])

    def passed(self, client: int, data: bytes, take: Callable[[int, bytes], None]) -> None:
        self.seen.append(data)
        take(client, data)

    def advertise(self, *gone: int) -> None:
        for client in self.here(gone):
            self.passed(client, self.clients[client].advertise(), self.opener.advertised)

    def share(self, *gone: int) -> None:
        adverts = self.opener.adverts()
        for client in self.here(gone):
            self.passed(client, self.clients[client].share(adverts), self.opener.shared)

    def mask(self, *gone: int) -> None:
        for client in self.here(gone):
            self.passed(client, self.clients[client].mask(self.opener.deal(client), self.ring, self.words(client)), self.opener.masked)

    def endorse(self, *gone: int) -> None:
        survivors = self.opener.survivors()
        for client in self.here(gone):
            self.passed(client, self.clients[client].endorse(survivors), self.opener.endorsed)

    def reveal(self, *gone: int) -> None:
        endorsements = self.opener.endorsements()
        for client in self.here(gone):
            self.passed(client, self.clients[client].reveal(endorsements), self.opener.revealed)

    def here(self, gone) -> list[int]:
        return [client for client in self.clients if client not in gone]

    def summed(self, *clients: int) -> tuple[list[int], list[int]]:
        """What the rounded values of these clients come to."""
        levels, flags = (np.sum([some[client] for client in clients], axis=0) for some in (self.levels, self.flags))
        return levels.tolist(), flags.astype(int).tolist()

    def opened(self) -> tuple[list[int], list[int]]:
        levels, counts, _ = self.ring.decoded(self.opener.opened(), len(self.opener.counted))
        return levels.tolist(), counts.tolist()


def opened_among(words: dict[int, np.ndarray], ring: Ring, n: int, threshold: int) -> np.ndarray:
    """The sum of these clients' words, of n that were invited, by the protocol; who has no words was lost after sharing."""
    roster = tuple(Invited(number, 5, public_key(KEYS[number])) for number in range(n))
    call = Call(b"r" * 32, 0, 0, threshold, roster, 5)
    opener = Opener(call, ring)
    clients = {number: Participant(call, number, signer(KEYS[number]), lambda: None) for number in range(n)}
    for client, one in clients.items():
        opener.advertised(client, one.advertise())
    adverts = opener.adverts()
    for client, one in clients.items():
        opener.shared(client, one.share(adverts))
    for client, own in words.items():
        opener.masked(client, clients[client].mask(opener.deal(client), ring, own))
    survivors = opener.survivors()
    for client in words:
        opener.endorsed(client, clients[client].endorse(survivors))
    endorsements = opener.endorsements()
    for client in words:
        opener.revealed(client, clients[client].reveal(endorsements))
    return opener.opened()
