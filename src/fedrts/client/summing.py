"""A client's contribution to a secure sum, and how the server reads the sum.

A contribution (see `Method.contribution`) becomes words of a ring: changes of the weights, times n_k / n_max, clipped and rounded;
every indicator, and for every announced link the vote, as a counter. The server reads sums of the words, and makes of them the means
that a method's `update` takes. Weights count by samples, indicators and votes by clients.

An update that is not finite becomes the words of no change, and the first counter is of those that are finite. Were it refused, a
server could make models that overflow on data of some kind, and learn of each client in turn whether it has such data.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from fedrts.client.order import Order, digest_of
from fedrts.errors import InputError, note
from fedrts.methods.base import Method
from fedrts.methods.contract import Means, State
from fedrts.secure.ring import Ring, Words, rounded
from fedrts.secure.settings import SecureSums
from fedrts.sparse import random
from fedrts.sparse.mask import Mask
from fedrts.wire.fields import Indices, Message, Selection, carried

FINITE = "finite"
"""The counter of clients whose update is finite."""


@dataclass(frozen=True)
class Summing:
    """How the clients of an experiment take part in secure sums."""

    table: SecureSums
    seed: int
    _drawn: dict[int, tuple[bytes, Tensor]] = field(default_factory=dict, compare=False, repr=False)

    def announced(self, index: int, mask: Mask) -> Tensor:
        """Draw the inactive links (or arms) that a round's votes are among, ascending; server and clients draw alike."""
        known = self._drawn.get(index)
        if known is None or known[0] != mask.fingerprint:
            inactive = mask.arms.inactive
            drawn = random.uniform(random.key(self.seed, "votes among", index), len(inactive), mask.bits.device)
            known = (mask.fingerprint, inactive[drawn < self.table.votes_among])
            self._drawn.clear()
            self._drawn[index] = known
        return known[1]

    def ballot(self, order: Order, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return a client's tensors, with votes restricted to announced links."""
        named = {entry.of for entry in order.exchange.up.values() if isinstance(entry, Indices)}
        if not named:
            return tensors
        announced = self.announced(order.round.index, order.frame.mask)
        ballots = {}
        for of in named:
            scores = order.frame.mask.sizes.scored(tensors[of].abs())
            strength = scores.index_select(-1, announced)
            strength.clamp_(min=torch.finfo(strength.dtype).tiny)  # a gradient of 0 still comes before links that are not announced
            ballots[of] = torch.zeros_like(scores).index_copy_(-1, announced, strength)
        return {**tensors, **ballots}

    def form(self, order: Order, method: Method, clients: int) -> SumForm:
        """Return the meaning of the words for this many clients; the same on the server and on every client."""
        template = order.reference if order.values is None else order.values
        assert template is not None  # secure sums are of exchanges that send weights down
        nothing = Selection(torch.zeros(0, dtype=torch.int64, device=template.device), order.frame.layout.arms)
        message: Message = {name: nothing if isinstance(entry, Indices) else template for name, entry in order.exchange.up.items()}
        made = method.contribution(message, State(template, order.frame.mask), order.round)
        votes = any(isinstance(entry, Indices) for entry in order.exchange.up.values())
        announced = self.announced(order.round.index, order.frame.mask) if votes else nothing.indices
        counters = [(FINITE, 1)]
        for name, payload in made.items():
            if isinstance(payload, Selection) and payload.values is None:
                counters.append((name, len(announced)))
            elif isinstance(payload, Tensor) and payload.dtype == torch.bool:
                counters.append((name, len(payload)))
            elif name != "weights":
                raise InputError(f"secure.aggregation: the contribution '{name}' is neither weights nor indicators: choose another method")
        ring = Ring(clients, self.table.bits, order.frame.on_mask, sum(length for _, length in counters))
        return SumForm(ring, tuple(counters), announced, self.table)

    def key(self, index: int, client: int) -> int:
        """Return the key of a client's rounding, the same wherever the client works. It hides nothing."""
        return random.key(random.key(self.seed, "client", index, client), "ring")


@dataclass(frozen=True)
class SumForm:
    """How a contribution becomes words."""

    ring: Ring
    counters: tuple[tuple[str, int], ...]
    """Names of what is counted, and how many counters each has."""
    announced: Tensor
    table: SecureSums

    def digest(self, order: Order) -> bytes:
        """Return a digest of what the words mean: initial model, mask, announced links, and rounding.

        Clients refuse a sum of another model than their own: a server that sent a model that cannot change to all clients but one would
        read that one's change in the sum (Pasquini et al. 2022).
        """
        assert order.reference is not None
        shape = repr((self.ring, self.counters, order.round.index, order.round.exchange, order.frame.layout.fingerprint))
        scale = struct.pack("<dd", self.table.clip, self.table.statistic_clip)
        links = self.announced.cpu().numpy().astype("<i8").tobytes()
        return hashlib.sha256(shape.encode() + scale + digest_of(order.reference, order.frame.mask) + links).digest()

    def words(self, contribution: Message, order: Order, share: float, key: int) -> Words:
        """A client's words; its `share` is n_k / n_max."""
        assert order.reference is not None
        change = carried(contribution["weights"], Tensor).double() - order.reference.double()
        values = (change / self._units(order, change) * share).cpu().numpy()
        if not np.isfinite(values).all():
            note("this client's update is not finite: it counts as no change, and the server learns only how many such updates there were")
            return self.ring.encoded(np.zeros(self.ring.values, np.int64), np.zeros(self.ring.counters, np.bool_))
        drawn = random.uniform_halves(key, len(values)).numpy()
        flags = [self._flags(contribution[name]) for name, _ in self.counters[1:]]
        return self.ring.encoded(rounded(values, self.ring.most, drawn), np.concatenate([np.ones(1, np.bool_), *flags]))

    def means(self, total: Words, order: Order, clients: int, samples: int, most_samples: int) -> Means:
        """Return the means from the sum of the words of `clients`, with `samples` in total and at most `most_samples` each."""
        assert order.values is not None
        levels, counts, beyond = self.ring.decoded(total, clients)
        if beyond:
            note(
                f"round {order.round.index}: {beyond:,} sums were larger than {clients} clients can make them, and were cut to that: "
                "one of them breaks the rules of secure sums"
            )
        finite, counts = int(counts[0]), counts[1:]
        if not finite:
            raise InputError(f"round {order.round.index}: no client's update is finite (a train.lr that diverges needs a new run)")
        if finite < clients:
            note(f"round {order.round.index}: {clients - finite} of {clients} updates were not finite and count as no change")
        device, dtype = order.values.device, order.values.dtype
        change = torch.from_numpy(levels).double().to(device) / self.ring.most * (most_samples / samples)
        weights = (order.values.double() + change * self._units(order, change)).to(dtype)
        statistics = weights[len(weights) - order.frame.statistics :]
        statistics[order.variances] = statistics[order.variances].clamp(min=0)  # rounding may lead below
        means = {"weights": weights}
        shares = (torch.from_numpy(counts).double() / clients).float().to(device)
        counted = self.counters[1:]
        for (name, _), part in zip(counted, shares.split([length for _, length in counted]), strict=True):
            means[name] = self._of_all(part, order) if isinstance(order.exchange.up.get(name), Indices) else part
        return Means(means, clients, samples)

    def _units(self, order: Order, like: Tensor) -> Tensor:
        """The clip of every value."""
        units = torch.full_like(like, self.table.clip)
        units[len(units) - order.frame.statistics :] = self.table.statistic_clip
        return units

    def _flags(self, payload: object) -> np.ndarray:
        if isinstance(payload, Selection):
            named = torch.zeros(payload.size, dtype=torch.bool, device=payload.indices.device)
            named[payload.indices] = True
            payload = named[self.announced]
        assert isinstance(payload, Tensor)
        found: np.ndarray = payload.cpu().numpy()
        return found

    def _of_all(self, votes: Tensor, order: Order) -> Tensor:
        """Votes for announced links as votes for all: 0 for the others."""
        return votes.new_zeros(order.frame.layout.arms).index_copy_(0, self.announced, votes)
