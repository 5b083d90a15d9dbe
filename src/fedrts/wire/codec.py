"""Messages as bytes: a header that identifies the order, the declared fields, a checksum. Never a pickle.

Both sides know the exchange, so that names and lengths do not travel; what does travel is checked before anything is
allocated for it, and every malformed message is a `WireError`.

| bytes | header |
|------:|--------|
| 4     | `FRTS` |
| 1     | version of the format |
| 1     | kind: 0 download, 1 upload |
| 8     | fingerprint of the layout |
| 8     | fingerprint of the mask that the values are on |
| 4     | round, signed |
| 1     | exchange of the round |
| 4     | client |
| 4     | samples of the client (uploads; 0 in downloads) |

Then the positions of the mask (downloads), the fields in the order of the exchange, and 4 bytes of CRC-32 over all before.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum

from fedrts.sparse.layout import Layout
from fedrts.sparse.mask import Mask
from fedrts.wire.errors import MaskMissingError, WireError
from fedrts.wire.fields import Field, Frame, Message, Payload, SideBySide, arms_size, changes_size, read_arms, write_arms
from fedrts.wire.packing import Reader

VERSION = 1
_MAGIC = b"FRTS"
_HEADER = struct.Struct("<4sBB8s8siBII")
_CHECKSUM = struct.Struct("<I")


class Kind(IntEnum):
    DOWNLOAD = 0
    UPLOAD = 1


@dataclass(frozen=True)
class Header:
    """The identity of a message."""

    kind: Kind
    layout: bytes
    mask: bytes
    round: int
    exchange: int
    client: int
    samples: int = 0


class MaskForm(IntEnum):
    """How a download encodes the mask."""

    HELD = 0
    """Not at all: the client holds it."""
    WHOLE = 1
    CHANGED = 2
    """As the difference to the mask that the client holds."""


def encode(header: Header, fields: Mapping[str, Field], message: Mapping[str, Payload], frame: Frame, held: Mask | None = None) -> bytes:
    """Encode a message. A download to a client that holds the mask `held` (None: no mask) contains what the client lacks."""
    pieces = [_pack(header)]
    if header.kind == Kind.DOWNLOAD:
        pieces += _write_mask(frame, held)
    for name, field in fields.items():
        pieces += field.write(message[name], frame)
    data = b"".join(pieces)
    return data + _CHECKSUM.pack(zlib.crc32(data))


def size(kind: Kind, fields: Mapping[str, Field], message: Mapping[str, Payload], frame: Frame, held: Mask | None = None) -> int:
    """Exactly `len(encode(…))`, without encoding."""
    own = _HEADER.size + _CHECKSUM.size + (mask_size(frame, held) if kind == Kind.DOWNLOAD else 0)
    return own + sum(field.size(message[name], frame) for name, field in fields.items())


def uploads_size(fields: Mapping[str, Field], message: Mapping[str, Payload], frame: Frame, clients: int) -> int:
    """Return the `size` of the uploads of so many clients together, whose payloads have them as leading axis."""
    own = clients * (_HEADER.size + _CHECKSUM.size)
    for name, field in fields.items():
        assert isinstance(field, SideBySide)  # of other fields nobody makes one message for several
        own += sum(field.sizes(message[name], frame))
    return own


def most(fields: Mapping[str, Field], frame: Frame) -> int:
    """Return the largest size of an upload of these fields."""
    return _HEADER.size + _CHECKSUM.size + sum(field.most(frame) for field in fields.values())


def peek(data: bytes | memoryview) -> Header:
    """Read the header of a message with a valid checksum."""
    view = memoryview(data)
    if len(view) < _HEADER.size + _CHECKSUM.size:
        raise WireError(f"a message of {len(view)} bytes is too short to be one")
    magic, version, kind, layout, mask, index, exchange, client, samples = _HEADER.unpack_from(view)
    if magic != _MAGIC:
        raise WireError("this is no fedrts message")
    if version != VERSION:
        raise WireError(f"format version {version} is not known here (ours is {VERSION}): upgrade the older side")
    if kind not in set(Kind):
        raise WireError(f"message kind {kind} is not known")
    if zlib.crc32(view[: -_CHECKSUM.size]) != _CHECKSUM.unpack(view[-_CHECKSUM.size :])[0]:
        raise WireError("the checksum is wrong: the message was damaged on its way")
    return Header(Kind(kind), layout, mask, index, exchange, client, samples)


def open_download(data: bytes | memoryview, layout: Layout, held: Mask | None) -> tuple[Header, Mask, Reader]:
    """The header and mask of a download, for a client that holds `held`, and the reader of its fields (see `read_fields`).

    With these the client knows which exchange it is in. Where it does not hold the mask that the message counts on, this is
    `MaskMissingError` and the client asks for the whole.
    """
    header, reader = _opened(data, Kind.DOWNLOAD, layout)
    mask = _read_mask(reader, layout, held)
    if mask is None or mask.fingerprint != header.mask:
        raise MaskMissingError("the mask that the message is on is not here: ask for the whole")
    return header, mask, reader


def open_upload(data: bytes | memoryview, frame: Frame) -> tuple[Header, Reader]:
    """The header of an upload on the mask of `frame`, and the reader of its fields."""
    header, reader = _opened(data, Kind.UPLOAD, frame.layout)
    if header.mask != frame.mask.fingerprint:
        raise WireError("the message is on another mask")
    return header, reader


def read_fields(reader: Reader, fields: Mapping[str, Field], frame: Frame) -> Message:
    """Read all payloads; nothing may remain after them."""
    message = {name: field.read(reader, frame) for name, field in fields.items()}
    reader.end()
    return message


def mask_size(frame: Frame, held: Mask | None, whole: int | None = None) -> int:
    """Bytes of the mask in a download to a client that holds `held`; `whole`: to one that holds none, if known."""
    return 1 + min(_mask_sizes(frame, held, None if whole is None else whole - 1).values())


def _opened(data: bytes | memoryview, kind: Kind, layout: Layout) -> tuple[Header, Reader]:
    header = peek(data)
    if header.kind != kind:
        raise WireError(f"a message of kind {header.kind.name} where {kind.name} was expected")
    if header.layout != bytes.fromhex(layout.fingerprint):
        raise WireError("the message is of another model")
    return header, Reader(memoryview(data)[_HEADER.size : -_CHECKSUM.size])


def _mask_sizes(frame: Frame, held: Mask | None, whole: int | None = None) -> dict[MaskForm, int]:
    """Return bytes of the positions in every form that a client with `held` understands."""
    if held is not None and held.fingerprint == frame.mask.fingerprint:
        return {MaskForm.HELD: 0}
    if whole is None:
        whole = arms_size(frame.mask.bits, frame.layout)
    sizes = {MaskForm.WHOLE: whole}
    return sizes if held is None else sizes | {MaskForm.CHANGED: changes_size(held, frame)}


def _write_mask(frame: Frame, held: Mask | None) -> Iterator[bytes]:
    sizes = _mask_sizes(frame, held)
    form = min(sizes, key=sizes.__getitem__)
    yield bytes([form])
    if form != MaskForm.HELD:
        bits = frame.mask.bits ^ held.bits if form == MaskForm.CHANGED and held is not None else frame.mask.bits
        yield from write_arms(bits, frame.layout)


def _read_mask(reader: Reader, layout: Layout, held: Mask | None) -> Mask | None:
    form = reader.byte()
    if form == MaskForm.HELD:
        return held
    if form not in set(MaskForm):
        raise WireError(f"mask form {form} is not known")
    bits = read_arms(reader, layout)
    if form == MaskForm.WHOLE:
        return Mask(bits, layout.sizes)
    return None if held is None else Mask(bits ^ held.bits.cpu(), layout.sizes)


def _pack(header: Header) -> bytes:
    names = (header.layout, header.mask, header.round, header.exchange, header.client, header.samples)
    return _HEADER.pack(_MAGIC, VERSION, header.kind, *names)
