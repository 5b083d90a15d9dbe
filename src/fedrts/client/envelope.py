"""A reply as bytes, and back."""

from __future__ import annotations

from fedrts.client.order import Order, Reply
from fedrts.wire import codec
from fedrts.wire.codec import Header, Kind


def encode_reply(reply: Reply, order: Order) -> bytes:
    """A reply as it travels."""
    frame = order.frame
    layout = bytes.fromhex(frame.layout.fingerprint)
    header = Header(Kind.UPLOAD, layout, frame.mask.fingerprint, reply.round, reply.exchange, reply.client, reply.samples)
    return codec.encode(header, order.exchange.up, reply.message, frame)


def decode_reply(data: bytes, order: Order) -> Reply:
    """A reply that came from outside; a `WireError` if it can be none. Whether it counts is for `faults` to say."""
    header, reader = codec.open_upload(data, order.frame)
    message = codec.read_fields(reader, order.exchange.up, order.frame)
    return Reply(header.client, header.round, header.exchange, header.samples, message, size=len(data))
