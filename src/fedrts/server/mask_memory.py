"""Which client holds which mask, so that a download contains only what it lacks.

A client that answers in a round holds the mask it was sent, and uploads need no positions. With the next download it gets
nothing if the mask is still the same, else the cheaper of the whole mask and the difference to the one it holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from fedrts.client.masks import LastMasks
from fedrts.client.order import Order
from fedrts.sparse.mask import Mask
from fedrts.wire import codec
from fedrts.wire.codec import Kind
from fedrts.wire.fields import Field, Frame, Message, Missed


@dataclass
class MaskMemory:
    """The server's book on its clients' masks. Memory: an entry per client with one of the last eight masks, and these masks."""

    holds: dict[int, bytes] = field(default_factory=dict)
    """Client → fingerprint of the mask it holds."""
    masks: LastMasks = field(default_factory=LastMasks)
    lengths: dict[tuple[bytes, bytes], int] = field(default_factory=dict)
    """Bytes by which a mask is told to a client that holds another one (or none), by their fingerprints."""

    rounds: dict[int, int] = field(default_factory=dict)
    """Client → round of its last download, where downloads go on from there (`Missed`)."""

    def missed_by(self, client: int, round: int) -> int | None:
        """Return how many broadcasts a client lacks in a round; None if it never had one."""
        return round - self.rounds[client] if client in self.rounds else None

    def held_by(self, client: int) -> Mask | None:
        """Return the mask that a client holds, if the server can still compute the difference to it."""
        return self.masks.get(self.holds.get(client, b""))

    def send(self, client: int, mask: Mask) -> None:
        """Record that a client was sent a mask."""
        self.holds[client] = mask.fingerprint
        for oldest in self.masks.keep(mask):
            self.holds = {client: held for client, held in self.holds.items() if held != oldest}
            self.lengths = {pair: length for pair, length in self.lengths.items() if oldest not in pair}


@dataclass
class Lengths:
    """Lengths of one exchange's downloads; parts common to several clients or rounds are computed once."""

    fields: Mapping[str, Field]
    message: Message
    frame: Frame
    of_masks: dict[tuple[bytes, bytes], int] = field(default_factory=dict)
    """What `MaskMemory.lengths` has."""

    @cached_property
    def _of_fields(self) -> int:
        return codec.size(Kind.DOWNLOAD, self.fields, self.message, self.frame, self.frame.mask) - codec.mask_size(
            self.frame, self.frame.mask
        )

    def download(self, held: Mask | None) -> int:
        """Return the bytes of the download to a client that holds `held`."""
        return self._of_fields + self._of_mask(held)

    def _of_mask(self, held: Mask | None) -> int:
        pair = (held.fingerprint if held is not None else b"", self.frame.mask.fingerprint)
        if pair not in self.of_masks:
            whole = self._of_mask(None) if held is not None and pair[0] != pair[1] else None
            self.of_masks[pair] = codec.mask_size(self.frame, held, whole)
        return self.of_masks[pair]


def addressed(order: Order, clients: Sequence[int], traffic: MaskMemory) -> tuple[Order, int]:
    """Return the order with each client's held mask, and the bytes of all downloads; record that they now hold the order's."""
    down, index = order.exchange.down, order.round.index
    in_steps = any(isinstance(entry, Missed) for entry in down.values())
    lengths: dict[int | None, Lengths] = {}
    held: dict[int, Mask | None] = {}
    lacking: dict[int, int | None] = {}
    size = 0
    for client in clients:
        held[client], missed = traffic.held_by(client), traffic.missed_by(client, index)
        if missed not in lengths:
            lengths[missed] = Lengths(down, order.sent, replace(order.frame, missed=missed), traffic.lengths)
        size += lengths[missed].download(held[client])
        lacking[client] = missed
        traffic.send(client, order.frame.mask)
        traffic.rounds |= {client: index} if in_steps else {}
    return replace(order, held=held, missed=lacking), size
