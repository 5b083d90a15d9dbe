"""Who holds which mask, so that a download tells a client only what it lacks.

A client that answers in a round holds the mask it was sent, and uploads need no positions. With the next download it gets
nothing if the mask is still the same, else the cheaper of the whole mask and the difference to the one it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from fedrts.client.order import Order
from fedrts.sparse.layout import Layout
from fedrts.sparse.mask import Mask
from fedrts.wire import codec
from fedrts.wire.codec import Header, Kind
from fedrts.wire.errors import MaskMissingError, WireError
from fedrts.wire.fields import Field, Frame, Message
from fedrts.wire.packing import Reader

REMEMBERED = 8
"""Masks that the server keeps; a client with an older one gets the whole mask."""


@dataclass
class MaskMemory:
    """The server's book on its clients' masks. Memory: an entry per client with one of the last eight masks, and these masks."""

    holds: dict[int, bytes] = field(default_factory=dict)
    """Client → fingerprint of the mask it holds."""
    masks: dict[bytes, Mask] = field(default_factory=dict)
    """The last masks by fingerprint, the newest last."""
    lengths: dict[tuple[bytes, bytes], int] = field(default_factory=dict)
    """Bytes by which a mask is told to a client that holds another one (or none), by their fingerprints."""

    def held_by(self, client: int) -> Mask | None:
        """The mask that a client holds, as far as the server can tell the difference to it."""
        return self.masks.get(self.holds.get(client, b""))

    def send(self, client: int, mask: Mask) -> None:
        """Note that a client was sent a mask."""
        self.holds[client] = mask.fingerprint
        known = self.masks.pop(mask.fingerprint, None) or Mask(mask.bits, mask.sizes)  # without the indices that ours has cached
        self.masks[mask.fingerprint] = known
        while len(self.masks) > REMEMBERED:
            oldest = next(iter(self.masks))
            del self.masks[oldest]
            self.holds = {client: held for client, held in self.holds.items() if held != oldest}
            self.lengths = {pair: length for pair, length in self.lengths.items() if oldest not in pair}

    def forget(self, client: int) -> None:
        """A client said that it does not hold what we thought: the next download carries the whole mask."""
        self.holds.pop(client, None)

    def deliver(self, client: int, order: Order, hand_over: Callable[[bytes], bool]) -> int:
        """Send a client the download of an order, and the whole mask with it where it turns out to lack ours; bytes sent in all.

        `hand_over(data)` is true when the client could read the message: a lost mask costs a second message, never an error.
        """
        frame = order.frame
        header = Header(
            Kind.DOWNLOAD,
            bytes.fromhex(frame.layout.fingerprint),
            frame.mask.fingerprint,
            order.round.index,
            order.round.exchange,
            client,
        )
        sent = 0
        for _ in range(2):
            data = codec.encode(header, order.exchange.down, order.sent, frame, self.held_by(client))
            sent += len(data)
            if hand_over(data):
                self.send(client, frame.mask)
                return sent
            self.forget(client)
        raise WireError(f"client {client} cannot read a message that carries the whole mask")


@dataclass
class MaskHolder:
    """A client's side: the mask it holds, and downloads that count on it."""

    layout: Layout
    held: Mask | None = None

    def open(self, data: bytes) -> tuple[Header, Mask, Reader] | None:
        """Header, mask and field reader of a download; None if it counts on a mask that this client does not hold."""
        try:
            header, mask, reader = codec.open_download(data, self.layout, self.held)
        except MaskMissingError:
            return None
        self.held = mask
        return header, mask, reader


@dataclass
class Lengths:
    """Lengths of one exchange's downloads; what is the same for several clients, or in several rounds, is computed once."""

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
        """Bytes of the download to a client that holds `held`."""
        return self._of_fields + self._of_mask(held)

    def _of_mask(self, held: Mask | None) -> int:
        pair = (held.fingerprint if held is not None else b"", self.frame.mask.fingerprint)
        if pair not in self.of_masks:
            whole = self._of_mask(None) if held is not None and pair[0] != pair[1] else None
            self.of_masks[pair] = codec.mask_size(self.frame, held, whole)
        return self.of_masks[pair]


def addressed(order: Order, clients: Sequence[int], traffic: MaskMemory) -> tuple[Order, int]:
    """The order with the mask that each client holds before it, and the bytes of all downloads; from now on they hold the order's."""
    lengths = Lengths(order.exchange.down, order.sent, order.frame, traffic.lengths)
    held, size = {}, 0
    for client in clients:
        held[client] = traffic.held_by(client)
        size += lengths.download(held[client])
        traffic.send(client, order.frame.mask)
    return replace(order, held=held), size
