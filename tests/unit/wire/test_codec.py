"""Messages: what goes in comes out, at the predicted length; what nobody can have sent is a WireError and nothing else."""

from __future__ import annotations

import struct
import tracemalloc
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedrts.client import envelope
from fedrts.client.order import Order, Reply
from fedrts.methods.contract import Exchange, Round
from fedrts.sparse.layout import Entry, Layout
from fedrts.sparse.mask import Mask
from fedrts.wire import codec, levels
from fedrts.wire.codec import Header, Kind, MaskForm
from fedrts.wire.errors import WireError
from fedrts.wire.fields import Field, Frame, Indices, Message, Short, Values
from fedrts.wire.fields.coded import positions_size, read_positions
from fedrts.wire.packing import Reader, varint
from fedrts.wire.quantise import Quantised
from fedrts.wire.value_types import FORMATS, ValueType

HEADER = 35
MASK = slice(14, 22)
"""Where a header has the fingerprint of the mask."""
DENSITIES = (0.0, 0.01, 0.1, 0.2, 0.5, 0.9, 1.0)
SHAPES = ((), (0,), (1,), (7,), (8,), (9,), (3, 5), (4, 2, 3, 3), (0, 4), (300,))
TYPES: tuple[ValueType, ...] = get_args(ValueType)
CODED = [type for type, format in FORMATS.items() if not format.regular]


def layout_of(*shapes: tuple[int, ...], dense: int = 3, buffers: int = 4) -> Layout:
    layers = tuple(Entry((f"layer{number}",), shape) for number, shape in enumerate(shapes))
    return Layout(layers, (Entry(("dense",), (dense,)),) if dense else (), (Entry(("buffers",), (buffers,)),) if buffers else ())


def random_mask(layout: Layout, density: float, rng: np.random.Generator) -> Mask:
    return Mask(torch.from_numpy(rng.random(layout.links) < density), layout.sizes)


def changed(mask: Mask, links: int, rng: np.random.Generator) -> Mask:
    """`mask` with so many links swapped."""
    bits = mask.bits.clone()
    bits[torch.from_numpy(rng.choice(len(bits), min(links, len(bits)), replace=False))] ^= True
    return Mask(bits, mask.sizes)


def any_bits(number: int, dtype: torch.dtype, rng: np.random.Generator) -> torch.Tensor:
    """Values of any bits at all: NaN with payloads, infinities, denormals, −0."""
    return torch.frombuffer(bytearray(rng.bytes(number * dtype.itemsize + dtype.itemsize)), dtype=dtype)[:number]


def tensors_of(layout: Layout, dtype: torch.dtype, rng: np.random.Generator, plain: bool) -> dict[str, torch.Tensor]:
    weights = torch.from_numpy(rng.normal(size=layout.length)).to(dtype) if plain else any_bits(layout.length, dtype, rng)
    return {"weights": weights, "gradient": torch.from_numpy(rng.normal(size=layout.links)).to(dtype)}


def header_of(kind: Kind, frame: Frame, **others: int) -> Header:
    names = {"round": 7, "exchange": 1, "client": 3, "samples": 500 if kind == Kind.UPLOAD else 0, **others}
    return Header(kind, bytes.fromhex(frame.layout.fingerprint), frame.mask.fingerprint, **names)


def taken(entries: Mapping[str, Field], tensors: Mapping[str, torch.Tensor], frame: Frame) -> Message:
    return {name: entry.take(tensors, frame) for name, entry in entries.items()}


def raw(payload: object) -> Any:
    """A payload as something that is equal only bit for bit."""
    if isinstance(payload, torch.Tensor):
        return payload.dtype, tuple(payload.shape), payload.contiguous().view(torch.uint8).numpy().tobytes() if payload.numel() else b""
    if is_dataclass(payload):
        return type(payload), [raw(getattr(payload, field.name)) for field in fields(payload)]
    if isinstance(payload, dict):
        return {name: raw(entry) for name, entry in payload.items()}
    return payload


# What goes in comes out


@dataclass(frozen=True)
class Case:
    frame: Frame
    fields: dict[str, Field]
    message: Message
    rng: np.random.Generator


@st.composite
def cases(draw: st.DrawFn) -> Case:
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shapes = draw(st.lists(st.sampled_from(SHAPES), max_size=4))
    layout = layout_of(*shapes, dense=draw(st.sampled_from((0, 1, 5))), buffers=draw(st.sampled_from((0, 1, 6))))
    mask = random_mask(layout, draw(st.sampled_from(DENSITIES)), rng)
    dtype = draw(st.sampled_from((torch.float32, torch.float64, torch.float16)))
    type = draw(st.sampled_from(TYPES))
    entries: dict[str, Field] = {"weights": Values(type=type)}
    if draw(st.booleans()):
        entries["everything"] = Values(on="all")
    if draw(st.booleans()):
        entries["scores"] = Values(of="gradient", on="links")
    inactive = [size - count for size, count in zip(mask.sizes, mask.counts, strict=True)]
    votes = draw(st.sampled_from((None, 0.0, 0.3, 1.0)))
    if votes is not None:
        entries["votes"] = Indices(of="gradient", k=[int(votes * number) for number in inactive])
    tensors = tensors_of(layout, dtype, rng, plain=type != "float32")
    reference = torch.from_numpy(rng.normal(size=layout.length - sum(inactive))).to(dtype) if draw(st.booleans()) else None
    frame = Frame(layout, mask, dtype, key=int(rng.integers(2**63)), reference=reference)
    return Case(frame, entries, taken(entries, tensors | {"everything": tensors["weights"]}, frame), rng)


@given(cases())
@settings(max_examples=250)
def test_uploads_return_bit_for_bit_at_their_length(case: Case) -> None:
    header = header_of(Kind.UPLOAD, case.frame)
    data = codec.encode(header, case.fields, case.message, case.frame)
    assert len(data) == codec.size(Kind.UPLOAD, case.fields, case.message, case.frame)
    for form in (data, memoryview(data)):
        opened, reader = codec.open_upload(form, case.frame)
        assert opened == header == codec.peek(form)
        assert raw(codec.read_fields(reader, case.fields, case.frame)) == raw(case.message)


@given(cases(), st.sampled_from(("none", "same", "older", "other")))
@settings(max_examples=250)
def test_downloads_return_bit_for_bit_at_their_length(case: Case, holds: str) -> None:
    frame = case.frame
    held = {
        "none": None,
        "same": Mask(frame.mask.bits.clone(), frame.mask.sizes),
        "older": changed(frame.mask, 3, case.rng),
        "other": random_mask(frame.layout, 0.5, case.rng),
    }[holds]
    header = header_of(Kind.DOWNLOAD, frame)
    data = codec.encode(header, case.fields, case.message, frame, held)
    assert len(data) == codec.size(Kind.DOWNLOAD, case.fields, case.message, frame, held)
    opened, mask, reader = codec.open_download(data, frame.layout, held)
    assert opened == header
    assert mask == frame.mask
    assert raw(codec.read_fields(reader, case.fields, replace(frame, mask=mask))) == raw(case.message)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_models_of_every_type_travel(dtype: torch.dtype) -> None:
    layout, rng = layout_of((3, 5), (9,)), np.random.default_rng(0)
    frame = Frame(layout, random_mask(layout, 0.5, rng), dtype)
    for type in TYPES:
        entries = {"weights": Values(type=type)}
        message = taken(entries, tensors_of(layout, dtype, rng, plain=True), frame)
        data = codec.encode(header_of(Kind.UPLOAD, frame), entries, message, frame)
        assert raw(codec.read_fields(codec.open_upload(data, frame)[1], entries, frame)) == raw(message)


def test_nan_payloads_and_signs_survive() -> None:
    layout = layout_of((6,), dense=0, buffers=0)
    frame = Frame(layout, Mask.full(layout.sizes))
    patterns = [0x7F800001, 0x7FC12345, 0xFFC00001, 0x80000000, 0x00000001, 0xFF800000]  # signalling and quiet NaN, −0, denormal, −∞
    weights = torch.from_numpy(np.array(patterns, np.uint32).view(np.float32))
    entries = {"weights": Values()}
    data = codec.encode(header_of(Kind.UPLOAD, frame), entries, {"weights": weights}, frame)
    values = codec.read_fields(codec.open_upload(data, frame)[1], entries, frame)["weights"]
    assert isinstance(values, torch.Tensor)
    assert values.numpy().view(np.uint32).tolist() == patterns
    assert entries["weights"].put(values, frame).numpy().view(np.uint32).tolist() == patterns


def test_what_was_read_is_the_readers_own() -> None:
    layout = layout_of((4,))
    frame = Frame(layout, Mask.full(layout.sizes))
    entries = {"weights": Values()}
    data = bytearray(codec.encode(header_of(Kind.UPLOAD, frame), entries, {"weights": torch.ones(layout.length)}, frame))
    values = codec.read_fields(codec.open_upload(memoryview(data), frame)[1], entries, frame)["weights"]
    assert isinstance(values, torch.Tensor)
    data[:] = bytes(len(data))
    values += 1
    assert values.tolist() == [2.0] * layout.length


@pytest.mark.parametrize("number", [0, -1, 2**31 - 1, -(2**31)])
def test_every_header_field_survives(number: int) -> None:
    layout = layout_of((4,))
    frame = Frame(layout, Mask.full(layout.sizes))
    header = header_of(Kind.UPLOAD, frame, round=number, exchange=255, client=2**32 - 1, samples=2**32 - 2)
    data = codec.encode(header, {}, {}, frame)
    assert codec.peek(data) == header
    assert envelope.decode_reply(data, order_of(frame, {}, {})) == Reply(2**32 - 1, number, 255, 2**32 - 2, {}, size=len(data), loss=Same())


class Same(float):
    """A loss that equals any other: NaN equals nothing."""

    def __new__(cls) -> Same:
        return super().__new__(cls, "nan")

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = float.__hash__


def test_messages_on_the_wire_are_stable() -> None:
    layout = Layout((Entry(("w",), (2, 4)),), (), (Entry(("mean",), (1,)),))
    mask = Mask(torch.tensor([True, False, False, False, False, True, False, False]), layout.sizes)
    frame = Frame(layout, mask)
    header = Header(Kind.DOWNLOAD, bytes(range(8)), bytes(range(8, 16)), round=-1, exchange=1, client=2)
    data = codec.encode(header, {"weights": Values()}, {"weights": torch.tensor([1.0, 2.0, 0.5])}, frame)
    expected = (
        "46525453 01 00 0001020304050607 08090a0b0c0d0e0f ffffffff 01 02000000 00000000"  # header
        "01 03 01 21"  # the whole mask: a bitmap of one byte
        "0000803f 00000040 0000003f"
    )
    body = bytes.fromhex(expected.replace(" ", ""))
    assert data.hex() == (body + struct.pack("<I", zlib.crc32(body))).hex()


@pytest.mark.parametrize(
    ("type", "top", "expected"),
    [
        ("int8", 127, "01 ff 00 01"),
        ("int6", 31, "00 64 66 96"),  # 32, 30, 31, 32 in six planes of four bits: 4, 6, 6, 6, 6, 9
        ("int4", 7, "00 56 3f"),  # 8·15 + 6 = 126 and 7·15 + 8 = 113 in eight planes of two bits: 2, 1, 1, 1, 3, 3, 3, 0
        ("int2", 1, "00 b2"),  # 2·81 + 0·27 + 1·9 + 2·3 + 1, the last a level 0 that fills up
    ],
)
def test_rounded_values_on_the_wire_are_stable(type: ValueType, top: int, expected: str) -> None:
    """Levels, scales, then the statistics as they are."""
    layout = Layout((Entry(("w",), (2, 2)),), (), (Entry(("mean",), (1,)),))
    frame = Frame(layout, Mask.full(layout.sizes))
    payload = Short(Quantised(torch.tensor([1, -1, 0, 1], dtype=torch.int8), torch.tensor([2.0]), top=top), torch.tensor([0.5]))
    data = b"".join(Values(type=type).write(payload, frame))
    assert data.hex(" ") == f"{expected} 00 00 00 40 00 00 00 3f"
    assert raw(Values(type=type).read(Reader(data), frame)) == raw(payload)


# How a download tells the mask


def form_of(data: bytes) -> MaskForm:
    return MaskForm(data[HEADER])


def positions_of(mask: Mask, bits: torch.Tensor, layout: Layout) -> int:
    parts = bits.split(list(mask.sizes))
    return sum(positions_size(part.numpy(), entry.shape) for part, entry in zip(parts, layout.layers, strict=True))


@pytest.mark.parametrize(("swapped", "form"), [(0, MaskForm.HELD), (6, MaskForm.CHANGED), (1200, MaskForm.WHOLE)])
def test_a_download_takes_the_smallest_form(swapped: int, form: MaskForm) -> None:
    layout, rng = layout_of((40, 30), (600,)), np.random.default_rng(1)
    frame = Frame(layout, random_mask(layout, 0.1, rng))
    held = changed(frame.mask, swapped, rng)
    data = codec.encode(header_of(Kind.DOWNLOAD, frame), {}, {}, frame, held)
    whole, difference = positions_of(held, frame.mask.bits, layout), positions_of(held, frame.mask.bits ^ held.bits, layout)
    assert form_of(data) == form
    assert len(data) - HEADER - 4 == codec.mask_size(frame, held) == 1 + (min(whole, difference) if swapped else 0)
    assert codec.mask_size(frame, None) == 1 + whole


@given(st.integers(0, 2**32 - 1), st.sampled_from(DENSITIES), st.integers(1, 60))
def test_no_form_would_be_smaller(seed: int, density: float, swapped: int) -> None:
    layout, rng = layout_of((7, 8), (50,)), np.random.default_rng(seed)
    frame = Frame(layout, random_mask(layout, density, rng))
    held = changed(frame.mask, swapped, rng)
    sizes = {
        MaskForm.WHOLE: positions_of(held, frame.mask.bits, layout),
        MaskForm.CHANGED: positions_of(held, frame.mask.bits ^ held.bits, layout),
    }
    data = codec.encode(header_of(Kind.DOWNLOAD, frame), {}, {}, frame, held)
    assert sizes[form_of(data)] == min(sizes.values()) == len(data) - HEADER - 4 - 1


@pytest.mark.parametrize("swapped", [0, 3])
def test_a_client_without_the_right_mask_asks_for_the_whole_and_then_decodes(swapped: int) -> None:
    layout, rng = layout_of((40, 30), (600,)), np.random.default_rng(2)
    frame = Frame(layout, random_mask(layout, 0.2, rng))
    entries = {"weights": Values()}
    message = taken(entries, tensors_of(layout, torch.float32, rng, plain=True), frame)
    counted_on = changed(frame.mask, swapped, rng)
    data = codec.encode(header_of(Kind.DOWNLOAD, frame), entries, message, frame, counted_on)
    assert form_of(data) == (MaskForm.CHANGED if swapped else MaskForm.HELD)
    for really in (None, changed(frame.mask, 5, rng), Mask.full(layout.sizes)):
        with pytest.raises(WireError, match="ask for the whole"):
            codec.open_download(data, layout, really)
        whole = codec.encode(header_of(Kind.DOWNLOAD, frame), entries, message, frame, None)
        _, mask, reader = codec.open_download(whole, layout, really)
        assert mask == frame.mask
        assert raw(codec.read_fields(reader, entries, replace(frame, mask=mask))) == raw(message)


# What a receiver refuses


def signed(data: bytes) -> bytes:
    """`data` with a right checksum in place of its last four bytes."""
    return data[:-4] + struct.pack("<I", zlib.crc32(data[:-4]))


def patched(data: bytes, at: int, replacement: bytes) -> bytes:
    return signed(data[:at] + replacement + data[at + len(replacement) :])


@pytest.mark.parametrize(
    ("at", "replacement", "message"),
    [
        (0, b"GIF8", "no fedrts message"),
        (4, b"\x02", "version 2 is not known here"),
        (4, b"\x00", "version 0 is not known here"),
        (5, b"\x00", "DOWNLOAD where UPLOAD"),
        (5, b"\x02", "kind 2"),
        (5, b"\xff", "kind 255"),
        (6, bytes(8), "another model"),
        (14, bytes(8), "another mask"),
    ],
)
def test_a_message_that_belongs_elsewhere_is_refused(at: int, replacement: bytes, message: str) -> None:
    layout = layout_of((4,))
    frame = Frame(layout, Mask.full(layout.sizes))
    data = codec.encode(header_of(Kind.UPLOAD, frame), {"weights": Values()}, {"weights": torch.ones(layout.length)}, frame)
    codec.open_upload(patched(data, 0, data[:4]), frame)
    with pytest.raises(WireError, match=message):
        codec.open_upload(patched(data, at, replacement), frame)


def test_a_download_that_belongs_elsewhere_is_refused() -> None:
    layout = layout_of((4,))
    frame = Frame(layout, Mask.full(layout.sizes))
    data = codec.encode(header_of(Kind.DOWNLOAD, frame), {}, {}, frame)
    for other, at, replacement, message in [
        (layout, 5, b"\x01", "UPLOAD where DOWNLOAD"),
        (layout, HEADER, b"\x03", "mask form 3"),
        (layout, 14, bytes(8), "ask for the whole"),
        (layout_of((2, 2)), 0, b"", "another model"),
    ]:
        with pytest.raises(WireError, match=message):
            codec.open_download(patched(data, at, replacement), other, None)


def test_every_single_flipped_bit_is_noticed() -> None:
    layout, rng = layout_of((5, 4)), np.random.default_rng(3)
    frame = Frame(layout, random_mask(layout, 0.5, rng))
    entries = {"weights": Values()}
    data = codec.encode(header_of(Kind.UPLOAD, frame), entries, {"weights": torch.randn(layout.length)}, frame)
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(WireError):
            codec.peek(bytes(damaged))
    for length in range(len(data)):
        with pytest.raises(WireError):
            codec.peek(data[:length])


@pytest.mark.parametrize(("cut", "message"), [(-1, "1 bytes missing"), (1, "1 bytes too many"), (-8, "8 bytes missing")])
def test_a_body_of_another_length_is_refused(cut: int, message: str) -> None:
    layout = layout_of((4,))
    frame = Frame(layout, Mask.full(layout.sizes))
    entries = {"weights": Values()}
    data = codec.encode(header_of(Kind.UPLOAD, frame), entries, {"weights": torch.ones(layout.length)}, frame)
    longer = signed(data + b"\x00") if cut > 0 else signed(data[:cut])
    with pytest.raises(WireError, match=message):
        envelope.decode_reply(longer, order_of(frame, entries, {}))


# What no sender may do, however hard it tries


def order_of(frame: Frame, up: Mapping[str, Field], sent: Message) -> Order:
    round = Round(7, True, False, frame.mask.counts, tuple(0 for _ in frame.mask.sizes), frame.layout)
    return Order(Exchange({}, (), up), round, frame, sent)


@dataclass(frozen=True)
class Target:
    """A message, and its receiver, which returns what it read encoded again."""

    data: bytes
    accept: Callable[[bytes], bytes]
    has_positions: bool


def upload(frame: Frame, entries: Mapping[str, Field], tensors: Mapping[str, torch.Tensor]) -> Target:
    order = order_of(frame, entries, {})
    reply = Reply(client=3, round=7, exchange=0, samples=500, message=taken(entries, tensors, frame))
    return Target(
        envelope.encode_reply(reply, order),
        lambda data: envelope.encode_reply(envelope.decode_reply(data, order), order),
        has_positions="votes" in entries,
    )


def download(frame: Frame, entries: Mapping[str, Field], tensors: Mapping[str, torch.Tensor], held: Mask | None) -> Target:
    def accept(data: bytes) -> bytes:
        header, mask, reader = codec.open_download(data, frame.layout, held)
        here = replace(frame, mask=mask)
        return codec.encode(header, entries, codec.read_fields(reader, entries, here), here, held)

    data = codec.encode(header_of(Kind.DOWNLOAD, frame), entries, taken(entries, tensors, frame), frame, held)
    return Target(data, accept, has_positions=True)


def targets() -> list[Target]:
    rng = np.random.default_rng(4)
    found = []
    for layout, density in [(layout_of((3, 5), (17,)), 0.4), (layout_of((4, 2, 3), (0,), (300,), buffers=0), 0.1)]:
        frame = Frame(layout, random_mask(layout, density, rng))
        tensors = tensors_of(layout, torch.float32, rng, plain=True)
        votes = Indices(of="gradient", k=[(size - count) // 3 for size, count in zip(frame.mask.sizes, frame.mask.counts, strict=True)])
        for type in TYPES:
            values = Values(type=type)
            found += [upload(frame, {"weights": values}, tensors), upload(frame, {"votes": votes, "weights": values}, tensors)]
        for held in (None, frame.mask, changed(frame.mask, 2, rng)):
            found += [download(frame, entries, tensors, held) for entries in ({"weights": Values(type="int8")}, {})]
    return found


def bits_flipped(data: bytes, rng: np.random.Generator, number: int) -> bytes:
    """Mostly behind the header, which is soon refused."""
    damaged = bytearray(data)
    begin = HEADER if rng.random() < 0.8 else 0
    for bit in rng.integers(8 * begin, 8 * (len(data) - 4), size=number) if begin < len(data) - 4 else ():
        damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)


def mutated(data: bytes, other: bytes, rng: np.random.Generator) -> bytes:
    """The message after one of the things that a sender may do to it; the last four bytes are the place of the checksum."""
    head, body, end = data[:HEADER], data[HEADER:-4], data[-4:]
    at = int(rng.integers(len(body) + 1))
    match rng.integers(9):
        case 0:
            return bits_flipped(data, rng, 1)
        case 1:
            return bits_flipped(data, rng, int(rng.integers(2, 9)))
        case 2:
            return data[: rng.integers(len(data))] if rng.random() < 0.2 else head + body[:at] + end
        case 3:
            return head + body + rng.bytes(int(rng.integers(1, 9))) + end
        case 4:
            return head + other[HEADER:]
        case 5:  # a number that promises a terabyte, written over what is there or put before it
            number = varint(2 ** int(rng.choice((7, 14, 31, 32, 40, 63, 64, 200))) - int(rng.integers(2)))
            return head + body[:at] + number + body[at + int(rng.choice((0, 1, len(number)))) :] + end
        case 6:
            return head + body[:at] + rng.bytes(int(rng.integers(40))) + end
        case 7:  # one number that means something: a form, a coding, a length, k
            return head + body[:at] + bytes([rng.integers(12)]) + body[at + 1 :] + end
        case _:
            return rng.bytes(int(rng.integers(80))) if rng.random() < 0.5 else head + rng.bytes(int(rng.integers(60))) + end


def with_its_own_mask(data: bytes, layout: Layout, held: Mask | None) -> bytes:
    """A damaged download whose header names the mask that it now tells, so that the fields are read too."""
    reader = Reader(memoryview(data)[HEADER:-4])
    try:
        form = reader.byte()
        bits = np.concatenate([read_positions(reader, entry.shape) for entry in layout.layers])
    except WireError:
        return data
    if form == MaskForm.CHANGED and held is not None:
        bits ^= held.bits.numpy()
    return data[: MASK.start] + Mask(torch.from_numpy(bits), layout.sizes).fingerprint + data[MASK.stop :]


def outcome(target: Target, data: bytes) -> str:
    """'accepted', or why not; whatever is neither fails the test.

    What is accepted is what `encode` makes of it, byte for byte, with one exception: a receiver takes positions in any coding
    and a mask in any form, not only the smallest that an encoder chooses. Then the encoder's own form is no longer, and stable.
    """
    try:
        again = target.accept(data)
    except WireError as error:
        return str(error)
    if again != data:
        assert target.has_positions
        assert len(again) <= len(data)
        assert target.accept(again) == again
    return "accepted"


CASES = 30_000


def damaged(number: int, seed: int) -> list[tuple[Target, bytes]]:
    rng = np.random.default_rng(seed)
    every = targets()
    found = []
    for case in range(number):
        target, other = every[case % len(every)], every[rng.integers(len(every))]
        data = mutated(target.data, other.data, rng)
        found.append((target, signed(data) if len(data) > 4 and rng.random() < 0.9 else data))
    return found


def test_targets_are_what_they_should_be() -> None:
    for target in targets():
        assert target.accept(target.data) == target.data


def test_no_damage_is_anything_but_an_error() -> None:
    outcomes = [outcome(target, data) for target, data in damaged(CASES, seed=5)]
    shallow = ("accepted", "checksum", "too short", "no fedrts message", "another model", "another mask", "version", "kind")
    deep = ("mask form", "ask for the whole", "missing", "too many", "a number above", "longer than it need be", "padding", "ascending")
    for reason in (*shallow, *deep, "cannot be decoded from coding", "active links instead", "gaps", "k ="):
        assert any(reason in found for found in outcomes), f"nothing reached '{reason}'"
    assert sum("checksum" in found for found in outcomes) < 0.2 * CASES, "most of the damage is behind the checksum"


def test_no_damage_to_coded_values_is_anything_but_an_error() -> None:
    layout, rng = layout_of((60, 50)), np.random.default_rng(8)
    frame = Frame(layout, random_mask(layout, 0.7, rng))
    tensors = {"weights": torch.from_numpy(rng.laplace(size=layout.length) ** 3).float()}
    every = [upload(frame, {"weights": Values(type=type)}, tensors) for type in CODED]
    assert all(target.data[HEADER] == levels.Form.CODED for target in every)
    for type, target in zip(CODED, every, strict=True):
        entries = {"weights": Values(type=type)}
        assert codec.size(Kind.UPLOAD, entries, taken(entries, tensors, frame), frame) == len(target.data) < codec.most(entries, frame)
    outcomes = []
    for case in range(3000):
        target = every[case % len(every)]
        data = mutated(target.data, every[rng.integers(len(every))].data, rng)
        outcomes.append(outcome(target, signed(data) if len(data) > 4 else data))
    for reason in ("accepted", "missing", "too many", "do not end", "shorter form", "form 7 of levels"):
        assert any(reason in found for found in outcomes), f"nothing reached '{reason}'"


def test_no_damage_to_a_mask_that_the_header_confirms_is_anything_but_an_error() -> None:
    layout, rng = layout_of((3, 5), (17,), (2, 2)), np.random.default_rng(6)
    frame = Frame(layout, random_mask(layout, 0.4, rng))
    entries: dict[str, Field] = {"weights": Values(type="float16"), "votes": Indices(of="gradient", k=(2, 3, 0))}
    tensors = tensors_of(layout, torch.float32, rng, plain=True)
    helds = (None, changed(frame.mask, 2, rng))
    some = [(download(frame, entries, tensors, held), held) for held in helds]
    outcomes = []
    for case in range(4000):
        target, held = some[case % 2]
        data = mutated(target.data, some[1 - case % 2][0].data, rng)
        if len(data) > HEADER + 4:
            outcomes.append(outcome(target, signed(with_its_own_mask(data, layout, held))))
    for reason in ("accepted", "missing", "too many", "active links instead"):
        assert any(reason in found for found in outcomes), f"nothing reached '{reason}'"


@pytest.mark.parametrize("claimed", [2**20, 2**32, 2**40, 2**63, 2**64, 2**700])
def test_no_length_makes_a_receiver_allocate(claimed: int) -> None:
    """A huge number at every place of every message, the checksum being right."""
    for target in targets()[::3]:
        for at in range(HEADER, len(target.data) - 4):
            data = signed(target.data[:at] + varint(claimed) + target.data[at:])
            assert len(data) > len(target.data)
            tracemalloc.start()
            try:
                outcome(target, data)
                peak = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
            assert peak < 200_000


def test_memory_stays_small_whatever_comes() -> None:
    cases = damaged(3000, seed=7)
    tracemalloc.start()
    try:
        for target, data in cases:
            outcome(target, data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000
