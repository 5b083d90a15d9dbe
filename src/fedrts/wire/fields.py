"""The fields of a message: declarations of what travels, from which everything else about traffic derives.

A method declares fields; it never touches bytes. A field takes its payload from a sender's tensors, puts it into a
receiver's, writes and reads it as bytes, and says how long it is. Payloads are tensors; a `Selection` where only some links
are named; a `Short` where values travel in fewer bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from fedrts.sparse.cost import VALUE_BYTES, Book
from fedrts.sparse.layout import Entry, Layout, starts
from fedrts.sparse.mask import Mask, flat_indices
from fedrts.sparse.topk import top_among
from fedrts.wire import positions
from fedrts.wire.checks import Check, at_least, failed, finite, none_of
from fedrts.wire.packing import Bits, Integers, Reader, bytes_of, varint, varint_size
from fedrts.wire.quantise import LEVELS, Norm, Quantised, ValueType, blocks_of


@dataclass(frozen=True)
class Selection:
    """Some of `size` links: ascending `indices [..., q]`, with their `values [..., q]` where those travel too."""

    indices: Tensor
    size: int
    values: Tensor | None = None


@dataclass(frozen=True)
class Short:
    """Values in a shorter type, and the statistics behind them as they are."""

    values: Tensor | Quantised
    statistics: Tensor


Payload = Any
"""A tensor, a `Selection`, a `Short` for values in a shorter type, or `OwnValues` on a mask of the sender's own."""
Message = dict[str, Payload]


@dataclass(frozen=True)
class Frame:
    """What sender and receiver of a message both know."""

    layout: Layout
    mask: Mask
    dtype: torch.dtype = torch.float32
    """Of the model's weights."""
    key: int = 0
    """Of stochastic rounding."""
    reference: Tensor | None = None
    """The weights on the mask `[A + n − P]` as the client received them: quantised uploads are changes from these."""

    @property
    def on_mask(self) -> int:
        """A model's values on the mask: `A + n − P`."""
        return self.mask.number + self.layout.length - self.layout.links

    @property
    def statistics(self) -> int:
        """How many of a model's values, the last ones, are buffers; these are never quantised."""
        return self.layout.length - self.layout.parameters


class Field(Protocol):
    """What one entry of a message is."""

    def take(self, tensors: Mapping[str, Tensor], frame: Frame) -> Payload:
        """The payload, from a sender's tensors by name."""
        ...

    def open(self, payload: Payload, frame: Frame) -> Payload:
        """What a payload means: a tensor or a `Selection`."""
        ...

    def put(self, payload: Payload, frame: Frame) -> Tensor:
        """The receiver's own tensor of a payload."""
        ...

    def write(self, payload: Payload, frame: Frame) -> Iterator[bytes]:
        """The payload as bytes, piece by piece."""
        ...

    def read(self, reader: Reader, frame: Frame) -> Payload:
        """The payload again; a `WireError` where the bytes can be none."""
        ...

    def size(self, payload: Payload, frame: Frame) -> int:
        """Exactly the number of bytes that `write` gives."""
        ...

    def most(self, frame: Frame) -> int:
        """No payload is longer: what need not be read at all."""
        ...

    def checks(self, payload: Payload, frame: Frame) -> Iterator[Check]:
        """What must be true of a payload that somebody sent; after a check that needs no numbers, and fails, there is none."""
        ...

    def charged(self, book: Book) -> float:
        """Bytes by one of the accountings on paper."""
        ...


@dataclass(frozen=True)
class Values:
    """Numbers of the tensor `of`: of a model on the mask with the unpruned rest, of the active links, of all links, of everything;
    or BatchNorm statistics, or single numbers.
    """

    of: str = "weights"
    on: Literal["mask", "active", "links", "all", "statistics", "scalars"] = "mask"
    copies: int = 1
    """So many of them one after the other (statistics and single numbers)."""
    type: ValueType = "float32"
    """float32 means the model's own type and is lossless. Shorter types are for values on the mask and keep statistics (buffers) whole."""
    scales: Literal["block", "channel", "tensor"] = "block"
    """What shares a scale in 8 bits: 256 values, or (full masks only) an output channel or a tensor."""
    norm: Norm = "linf"
    fixed: bool = False
    """The method's own choice of a type, which no setting changes."""

    def __post_init__(self) -> None:
        if self.type != "float32" and self.on != "mask":
            raise ValueError("shorter types are for values on the mask")

    @property
    def lossless(self) -> bool:
        return self.type == "float32"

    def take(self, tensors: Mapping[str, Tensor], frame: Frame) -> Payload:
        values = self.chosen(tensors, frame)
        if self.type == "float32":
            return values.clone() if values is tensors[self.of] else values
        kept = len(values) - frame.statistics
        change = values if frame.reference is None else values - frame.reference
        short = change[:kept].half() if self.type == "float16" else Quantised.of(change[:kept], frame.key, self._groups(frame), self.norm)
        return Short(short, values[kept:].clone())

    def chosen(self, tensors: Mapping[str, Tensor], frame: Frame) -> Tensor:
        """The numbers that travel, of one sender or (as leading axis of tensors) of several; the very tensor where they are all of it."""
        values = tensors[self.of]  # of a client everything, of a server what is on the mask
        if self.on == "mask" and values.shape[-1] != frame.on_mask:
            return frame.mask.compact(values)
        if self.on == "active":
            return values.index_select(-1, frame.mask.active)
        if self.on == "all" and values.shape[-1] != frame.layout.length:
            return frame.mask.expand(values)
        return values

    def open(self, payload: Payload, frame: Frame) -> Tensor:
        if self.type == "float32":
            tensor: Tensor = payload
            return tensor
        short = payload.values
        values = (short.values() if isinstance(short, Quantised) else short).to(frame.dtype)
        if frame.reference is not None:
            values = frame.reference[: len(values)] + values
        return torch.cat([values, payload.statistics])

    def put(self, payload: Payload, frame: Frame) -> Tensor:
        values = self.open(payload, frame)
        return frame.mask.expand(values) if self.on == "mask" else values.clone()

    def write(self, payload: Payload, frame: Frame) -> Iterator[bytes]:
        for tensor in self._tensors(payload):
            if tensor.numel():
                yield tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes()  # any type, bfloat16 too

    def read(self, reader: Reader, frame: Frame) -> Payload:
        device = frame.mask.bits.device
        tensors = [reader.tensor(count, dtype).to(device) for count, dtype in self._shapes(frame)]
        if self.type == "float32":
            return tensors[0]
        return Short(tensors[0] if self.type == "float16" else Quantised(tensors[0], tensors[1], self._groups(frame)), tensors[-1])

    def size(self, payload: Payload, frame: Frame) -> int:
        return self.most(frame)

    def most(self, frame: Frame) -> int:
        return sum(count * dtype.itemsize for count, dtype in self._shapes(frame))

    def checks(self, payload: Payload, frame: Frame) -> Iterator[Check]:
        try:
            tensors = self._tensors(payload)
            found = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
        except (AttributeError, TypeError):
            yield failed(f"'{self.of}' is not of the type asked for")
            return
        expected = [((count,), dtype) for count, dtype in self._shapes(frame)]
        if found != expected:
            yield failed(f"'{self.of}' has {found} where {expected} was asked for")
            return
        tensors = [tensor for tensor in tensors if tensor.numel()]
        yield from (finite(tensor, f"'{self.of}' is not finite") for tensor in tensors if tensor.is_floating_point())
        if self.type == "int8" and expected[0] != ((0,), torch.int8):
            reason = f"'{self.of}' has levels or scales that no quantiser gives"
            yield at_least(-LEVELS, tensors[0], reason)
            yield at_least(0, tensors[1], reason)

    def charged(self, book: Book) -> float:
        if self.on == "scalars":
            return VALUE_BYTES * self.copies
        if self.on == "statistics":
            return VALUE_BYTES * self.copies * book.statistics
        if self.on == "active":
            return VALUE_BYTES * sum(book.active)
        if self.on != "mask":
            return book.dense  # a tensor of all links counts as a whole model
        return book.sparse(_BITS[self.type]) + VALUE_BYTES * (self._scales_charged(book) if self.type == "int8" else 0)

    def _scales_charged(self, book: Book) -> float:
        """Scales of 8-bit values: of a vector's own the paper counts none."""
        entries = [entry for entry in book.layout.parameter_entries if len(entry.shape) > 1]
        if self.scales == "block":
            return blocks_of(round(sum(book.active)) + book.layout.parameters - book.layout.links)
        return sum(entry.shape[0] for entry in entries) if self.scales == "channel" else len(entries)

    def _count(self, frame: Frame) -> int:
        """How many numbers travel."""
        match self.on:
            case "mask":
                return self.copies * frame.on_mask
            case "active":
                return self.copies * frame.mask.number
            case "links":
                return self.copies * frame.layout.links
            case "all":
                return self.copies * frame.layout.length
            case "statistics":
                return self.copies * frame.statistics
            case "scalars":
                return self.copies

    def _shapes(self, frame: Frame) -> list[tuple[int, torch.dtype]]:
        """(number, type) of the tensors that travel."""
        count = self._count(frame)
        if self.type == "float32":
            return [(count, frame.dtype)]
        kept = count - frame.statistics
        if self.type == "float16":
            return [(kept, torch.float16), (frame.statistics, frame.dtype)]
        groups = self._groups(frame)
        scales = blocks_of(kept) if groups is None else len(groups)
        return [(kept, torch.int8), (scales, torch.float32), (frame.statistics, frame.dtype)]

    def _groups(self, frame: Frame) -> tuple[int, ...] | None:
        """Lengths of what shares a scale; None for blocks of one length."""
        if self.scales == "block":
            return None
        if not frame.mask.is_full:
            raise ValueError("scales per channel or tensor are for models that are not pruned")
        entries = frame.layout.parameter_entries
        if self.scales == "tensor":
            return tuple(entry.size for entry in entries)
        return tuple(length for entry in entries for length in _channels(entry))

    def _tensors(self, payload: Payload) -> list[Tensor]:
        if self.type == "float32":
            return [payload]
        short = payload.values
        return [*([short.levels, short.scales] if isinstance(short, Quantised) else [short]), payload.statistics]


def _channels(entry: Entry) -> list[int]:
    """Lengths of a tensor's output channels; a vector is one channel."""
    return [entry.size // entry.shape[0]] * entry.shape[0] if len(entry.shape) > 1 else [entry.size]


@dataclass(frozen=True)
class Indices:
    """Names of links: the `k[l]` largest magnitudes of the tensor `of` in each layer among the inactive links.

    They travel as positions among the inactive links of the layer, in the smallest coding; their `values` only if asked for.
    """

    of: str
    k: Sequence[int]
    values: bool = False

    def take(self, tensors: Mapping[str, Tensor], frame: Frame) -> Selection:
        mask, source = frame.mask, tensors[self.of]
        indices = top_among(source.abs(), self.k, mask.inactive, mask.free)
        return Selection(indices, len(mask.bits), source[indices] if self.values else None)

    def open(self, payload: Payload, frame: Frame) -> Selection:
        selection: Selection = payload
        return selection

    def put(self, payload: Payload, frame: Frame) -> Tensor:
        indices: Tensor = payload.indices
        return indices

    def write(self, payload: Payload, frame: Frame) -> Iterator[bytes]:
        for bits in self._among_inactive(payload, frame):
            yield write_positions(bits, (len(bits),))
        if self.values:
            yield payload.values.cpu().numpy().tobytes()

    def read(self, reader: Reader, frame: Frame) -> Selection:
        device = frame.mask.bits.device
        named = np.zeros(len(frame.mask.bits), np.bool_)
        for span, inactive, k in self._layers(frame):
            layer = np.zeros(len(inactive), np.bool_)
            layer[inactive] = read_positions(reader, (int(inactive.sum()),), k)
            named[span] = layer
        values = reader.tensor(sum(self.k), frame.dtype).to(device) if self.values else None
        return Selection(torch.from_numpy(np.flatnonzero(named)).to(device), len(named), values)

    def size(self, payload: Payload, frame: Frame) -> int:
        values = sum(self.k) * frame.dtype.itemsize if self.values else 0
        free = frame.mask.free
        return values + _places_size(frame.mask.places[payload.indices].cpu().numpy(), [(count,) for count in free])

    def most(self, frame: Frame) -> int:
        return (sum(self.k) * frame.dtype.itemsize if self.values else 0) + _bitmaps(frame.mask.sizes)

    def checks(self, payload: Payload, frame: Frame) -> Iterator[Check]:
        if (reason := self._misfit(payload, frame)) is not None:
            yield failed(reason)
            return
        if not sum(self.k):
            return
        mask, indices = frame.mask, payload.indices
        if payload.values is not None:
            yield finite(payload.values, f"'{self.of}' is not finite")
        unknown, last = "a link is named that does not exist", payload.size - 1
        yield Check(lambda first, final: None if first >= 0 and final <= last else unknown, torch.stack(indices.aminmax()))
        yield none_of(indices[1:] <= indices[:-1], "links are named twice or out of order")
        yield none_of(mask.bits[indices.clamp(0, last)], "an active link is named")
        yield Check(self._miscounted, torch.searchsorted(indices, mask.bounds).diff())

    def _misfit(self, payload: Payload, frame: Frame) -> str | None:
        """What is wrong with a payload at first sight."""
        wanted = isinstance(payload, Selection) and isinstance(payload.indices, Tensor) and (payload.values is not None) == self.values
        if not wanted or payload.size != len(frame.mask.bits):
            return f"'{self.of}' is not a choice of this model's links"
        values, indices = payload.values, payload.indices
        if values is not None and (values.shape != indices.shape or values.dtype != frame.dtype):
            return f"'{self.of}' has other values than asked for"
        if indices.dtype != torch.int64 or indices.shape != (sum(self.k),):
            return f"{tuple(indices.shape)} links are named where {sum(self.k)} were asked for"
        return None

    def _miscounted(self, *counts: int) -> str | None:
        return None if counts == tuple(self.k) else f"layers have {list(counts)} links named where {list(self.k)} were asked for"

    def charged(self, book: Book) -> float:
        return (1.0 if self.values else 0.5) * book.fraction * book.sparse()  # O_ξ = ζ_t·O_s, half of it for names alone

    def _layers(self, frame: Frame) -> Iterator[tuple[slice, Bits, int]]:
        """(span, which links are inactive, k) of every layer."""
        bits, begin = frame.mask.bits.cpu().numpy(), starts(frame.mask.sizes)
        for start, stop, k in zip(begin, begin[1:], self.k, strict=False):
            yield slice(start, stop), ~bits[start:stop], k

    def _among_inactive(self, payload: Selection, frame: Frame) -> Iterator[Bits]:
        """For every layer, which of its inactive links are named."""
        mask = frame.mask
        named = torch.zeros_like(mask.bits)
        named[payload.indices] = True
        yield from (part.numpy() for part in named[mask.inactive].cpu().split(list(mask.free)))


@dataclass(frozen=True)
class OwnValues:
    """Values on a mask of the sender's own."""

    mask: Mask
    values: Payload
    """A tensor, or a `Short` where they travel in fewer bits."""


@dataclass(frozen=True)
class OnOwnMask:
    """The client's weights on the mask that it made itself, with K^l links per layer like the one it was sent.

    The mask travels as its difference to the sent one. The client's tensors hold it under `mask`, as a boolean vector `[P]`. In a
    shorter type the values are changes from the received weights, which are 0 where a link is new.
    """

    of: str = "weights"
    type: ValueType = "float32"

    def take(self, tensors: Mapping[str, Tensor], frame: Frame) -> OwnValues:
        mask = Mask(tensors["mask"], frame.mask.sizes)
        return OwnValues(mask, self._values.take(tensors, _moved(frame, mask)))

    def open(self, payload: Payload, frame: Frame) -> OwnValues:
        return OwnValues(payload.mask, self._values.open(payload.values, _moved(frame, payload.mask)))

    def put(self, payload: Payload, frame: Frame) -> Tensor:
        return self._values.put(payload.values, _moved(frame, payload.mask))

    def write(self, payload: Payload, frame: Frame) -> Iterator[bytes]:
        for bits, shape in self._changes(payload, frame):
            yield write_positions(bits, shape)
        yield from self._values.write(payload.values, _moved(frame, payload.mask))

    def read(self, reader: Reader, frame: Frame) -> OwnValues:
        changes = [read_positions(reader, entry.shape) for entry in frame.layout.layers]
        bits = frame.mask.bits ^ torch.from_numpy(np.concatenate(changes)).to(frame.mask.bits.device)
        return OwnValues(Mask(bits, frame.mask.sizes), self._values.read(reader, frame))  # as many values as on the mask that was sent

    def size(self, payload: Payload, frame: Frame) -> int:
        return changes_size(payload.mask, frame) + self._values.size(payload.values, frame)

    def most(self, frame: Frame) -> int:
        return _bitmaps(frame.mask.sizes) + self._values.most(frame)

    def checks(self, payload: Payload, frame: Frame) -> Iterator[Check]:
        if not isinstance(payload, OwnValues) or payload.mask.sizes != frame.mask.sizes:
            yield failed(f"'{self.of}' is not a model on a mask of its own")
        elif payload.mask.counts != frame.mask.counts:
            yield failed(f"layers have {payload.mask.counts} links where {frame.mask.counts} were asked for")
        else:
            yield from self._values.checks(payload.values, frame)

    def charged(self, book: Book) -> float:
        return self._values.charged(book)

    @property
    def _values(self) -> Values:
        return Values(self.of, type=self.type)

    def _changes(self, payload: OwnValues, frame: Frame) -> Iterator[tuple[Bits, tuple[int, ...]]]:
        changed, begin = (payload.mask.bits ^ frame.mask.bits).cpu().numpy(), starts(frame.mask.sizes)
        for entry, start, stop in zip(frame.layout.layers, begin, begin[1:], strict=False):
            yield changed[start:stop], entry.shape


def _moved(frame: Frame, mask: Mask) -> Frame:
    """The frame of the same message on another mask."""
    reference = None if frame.reference is None else mask.compact(frame.mask.expand(frame.reference))
    return replace(frame, mask=mask, reference=reference)


@dataclass(frozen=True)
class Signs:
    """A map `[P]` of −1, 0 and 1 (int8): which links are positive, and which of the others negative, as positions."""

    of: str

    def take(self, tensors: Mapping[str, Tensor], frame: Frame) -> Tensor:
        return tensors[self.of].clone()

    def open(self, payload: Payload, frame: Frame) -> Tensor:
        signs: Tensor = payload
        return signs

    def put(self, payload: Payload, frame: Frame) -> Tensor:
        return self.open(payload, frame).clone()

    def write(self, payload: Payload, frame: Frame) -> Iterator[bytes]:
        for bits in self._parts(payload, frame):
            yield write_positions(bits, (len(bits),))

    def read(self, reader: Reader, frame: Frame) -> Tensor:
        layers = []
        for size in frame.mask.sizes:
            positive = read_positions(reader, (size,))
            signs = positive.astype(np.int8)
            signs[~positive] = -read_positions(reader, (size - int(positive.sum()),)).astype(np.int8)
            layers.append(signs)
        return torch.from_numpy(np.concatenate(layers or [np.zeros(0, np.int8)])).to(frame.mask.bits.device)

    def size(self, payload: Payload, frame: Frame) -> int:
        return sum(positions_size(bits, (len(bits),)) for bits in self._parts(payload, frame))

    def most(self, frame: Frame) -> int:
        return 2 * _bitmaps(frame.mask.sizes)

    def checks(self, payload: Payload, frame: Frame) -> Iterator[Check]:
        reason = f"'{self.of}' is no map of signs"
        if not isinstance(payload, Tensor) or payload.dtype != torch.int8 or payload.shape != frame.mask.bits.shape:
            yield failed(reason)
        elif len(payload):
            yield Check(lambda lowest, highest: None if lowest >= -1 and highest <= 1 else reason, torch.stack(payload.aminmax()))

    def charged(self, book: Book) -> float:
        return book.sparse()

    def _parts(self, payload: Tensor, frame: Frame) -> Iterator[Bits]:
        for layer in payload.cpu().split(list(frame.mask.sizes)):
            signs = layer.numpy()
            yield signs > 0
            yield (signs < 0)[signs <= 0]


@dataclass(frozen=True)
class Masks:
    """`count` masks `bool [count, P]`, layer after layer as positions."""

    of: str
    count: int

    def take(self, tensors: Mapping[str, Tensor], frame: Frame) -> Tensor:
        return tensors[self.of].clone()

    def open(self, payload: Payload, frame: Frame) -> Tensor:
        masks: Tensor = payload
        return masks

    def put(self, payload: Payload, frame: Frame) -> Tensor:
        return self.open(payload, frame).clone()

    def write(self, payload: Payload, frame: Frame) -> Iterator[bytes]:
        for bits, shape in self._layers(payload, frame):
            yield write_positions(bits, shape)

    def read(self, reader: Reader, frame: Frame) -> Tensor:
        layers = frame.layout.layers * self.count
        bits = np.concatenate([read_positions(reader, entry.shape) for entry in layers] or [np.zeros(0, np.bool_)])
        return torch.from_numpy(bits).to(frame.mask.bits.device).view(self.count, -1)

    def size(self, payload: Payload, frame: Frame) -> int:
        return sum(positions_size(bits, shape) for bits, shape in self._layers(payload, frame))

    def most(self, frame: Frame) -> int:
        return self.count * _bitmaps(frame.mask.sizes)

    def checks(self, payload: Payload, frame: Frame) -> Iterator[Check]:
        if not isinstance(payload, Tensor) or payload.dtype != torch.bool or payload.shape != (self.count, len(frame.mask.bits)):
            yield failed(f"'{self.of}' is not {self.count} masks of this model")

    def charged(self, book: Book) -> float:
        return self.count * book.layout.links / 8

    def _layers(self, payload: Tensor, frame: Frame) -> Iterator[tuple[Bits, tuple[int, ...]]]:
        for mask in payload.cpu():
            for entry, layer in zip(frame.layout.layers, mask.split(list(frame.mask.sizes)), strict=True):
                yield layer.numpy(), entry.shape


_BITS: dict[ValueType, int] = {"float32": 32, "float16": 16, "int8": 8}


def write_positions(bits: Bits, shape: Sequence[int]) -> bytes:
    """`bits [n]` of a layer in their smallest coding: its number, the payload's length, the payload."""
    coding, payload = positions.encode(bits, shape)
    return bytes([coding]) + varint(len(payload)) + payload


def read_positions(reader: Reader, shape: Sequence[int], count: int | None = None) -> Bits:
    """Inverse of `write_positions`; a `count` of true bits known from elsewhere is checked."""
    coding = reader.byte()
    payload = reader.take(reader.varint(most=reader.left))
    return positions.decode(coding, payload.data, shape, count)


def positions_size(bits: Bits, shape: Sequence[int]) -> int:
    """Exactly `len(write_positions(bits, shape))`."""
    return _coded_size(positions.sizes(bits, shape))


def changes_size(mask: Mask, frame: Frame) -> int:
    """Bytes that tell a mask to somebody who holds that of `frame`, or the other way round."""
    changed = flat_indices(mask.bits ^ frame.mask.bits).cpu().numpy()
    return _places_size(changed, [entry.shape for entry in frame.layout.layers])


def _places_size(places: Integers, shapes: Sequence[Sequence[int]]) -> int:
    """Bytes of the positions of links at ascending `places [m]` in layers of these shapes, one after the other."""
    begin = starts([math.prod(shape) for shape in shapes])
    cuts = np.searchsorted(places, begin)
    layers = (places[a:b] - start for a, b, start in zip(cuts, cuts[1:], begin, strict=False))
    return sum(_coded_size(positions.sizes_at(layer, shape)) for layer, shape in zip(layers, shapes, strict=True))


def _coded_size(sizes: Mapping[positions.Coding, int]) -> int:
    """Bytes in the smallest coding, with its number and its length."""
    smallest = min(sizes.values())
    return 1 + varint_size(smallest) + smallest


def _bitmaps(sizes: Sequence[int]) -> int:
    """Bytes of the positions of layers of these sizes at most: no chosen coding is longer than a bitmap."""
    return sum(1 + varint_size(bytes_of(size)) + bytes_of(size) for size in sizes)
