"""Encode orders and replies as bytes, and decode them."""

from __future__ import annotations

from dataclasses import replace

from fedrts.client.order import Order, Reply
from fedrts.sparse.mask import Mask
from fedrts.wire import codec
from fedrts.wire.codec import Header, Kind


def encode_order(order: Order, client: int, held: Mask | None, missed: int | None = None) -> bytes:
    """Encode an order for a client that holds the mask `held` (or none) and lacks the last `missed` broadcasts, or all."""
    header = Header(Kind.DOWNLOAD, *_belongs_to(order), order.round.index, order.round.exchange, client)
    frame = order.frame if missed is None else replace(order.frame, missed=missed)
    return codec.encode(header, order.exchange.down, order.sent, frame, held)


def encode_reply(reply: Reply, order: Order) -> bytes:
    """Encode a reply."""
    header = Header(Kind.UPLOAD, *_belongs_to(order), reply.round, reply.exchange, reply.client, reply.samples)
    return codec.encode(header, order.exchange.up, reply.message, order.frame)


def decode_reply(data: bytes, order: Order) -> Reply:
    """Decode an untrusted reply; raises `WireError` if it is malformed. `faults` decides whether it counts."""
    header, reader = codec.open_upload(data, order.frame)
    message = codec.read_fields(reader, order.exchange.up, order.frame)
    return Reply(header.client, header.round, header.exchange, header.samples, message, size=len(data))


def _belongs_to(order: Order) -> tuple[bytes, bytes]:
    """Return the fingerprints of the model and of the mask."""
    return bytes.fromhex(order.frame.layout.fingerprint), order.frame.mask.fingerprint
