"""Numbers: a model on the mask, on some or all of its links, statistics, single ones; as they are or in fewer bits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedrts.sparse.cost import VALUE_BYTES, Book
from fedrts.sparse.layout import Entry
from fedrts.wire.checks import Check, failed, finite
from fedrts.wire.fields.contract import Frame, Payload, Short, carried, owed, own_shape
from fedrts.wire.packing import Reader, raw
from fedrts.wire.quantise import Norm, blocks_of
from fedrts.wire.value_types import FORMATS, ValueFormat, ValueType


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
    """What shares a scale in types that have some: 256 values, or (full masks only) an output channel or a tensor."""
    norm: Norm = "linf"
    fixed: bool = False
    """The method's own choice of a type, which no setting changes."""
    feedback: bool = False
    """What rounding leaves of a change the client adds to its next one. Values are then rounded to the nearest: see `left`."""

    def __post_init__(self) -> None:
        if not self.lossless and self.on != "mask":
            raise ValueError("shorter types are for values on the mask")
        if self.feedback and self.lossless:
            raise ValueError("error feedback is for values that lose something on their way")

    @property
    def lossless(self) -> bool:
        return self.format.lossless

    @property
    def format(self) -> ValueFormat:
        return FORMATS[self.type]

    def take(self, tensors: Mapping[str, Tensor], frame: Frame) -> Tensor | Short:
        values = self.chosen(tensors, frame)
        if self.lossless:
            return values.clone() if values is tensors[self.of] else values
        change, groups = self._change(values, tensors, frame), self._groups(frame)
        statistics = values[..., change.shape[-1] :].clone()
        if self.feedback:
            return Short(self.format.nearest(change, groups, self.norm), statistics)
        return Short(self.format.shorten(change, frame.key if frame.keys is None else frame.keys, groups, self.norm), statistics)

    def left(self, payload: Payload, tensors: Mapping[str, Tensor], frame: Frame) -> Tensor:
        sent = self.format.values(carried(payload, Short).values).to(frame.dtype)
        return frame.mask.expand(self._change(self.chosen(tensors, frame), tensors, frame) - sent)

    def _change(self, values: Tensor, tensors: Mapping[str, Tensor], frame: Frame) -> Tensor:
        """Return what to send of the parameters among `values`: their change or, without a reference, the values themselves."""
        kept = values.shape[-1] - frame.statistics
        change = values[..., :kept] if frame.reference is None else values[..., :kept] - frame.reference[:kept]
        return owed(change, tensors, frame) if self.feedback else change

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
        if self.lossless:
            return carried(payload, Tensor)
        short = carried(payload, Short)
        values = self.format.values(short.values).to(frame.dtype)
        if frame.reference is not None:
            values = frame.reference[: values.shape[-1]] + values
        return torch.cat([values, short.statistics], dim=-1)

    def put(self, payload: Payload, frame: Frame) -> Tensor:
        values = self.open(payload, frame)
        return frame.mask.expand(values) if self.on == "mask" else values.clone()

    def write(self, payload: Payload, frame: Frame) -> Iterator[bytes]:
        *tensors, last = self.tensors(payload)
        yield from self.format.write(tensors)
        yield raw(last)

    def read(self, reader: Reader, frame: Frame) -> Tensor | Short:
        device, count = frame.mask.bits.device, self._count(frame)
        if self.lossless:
            return reader.tensor(count, frame.dtype).to(device)
        groups = self._groups(frame)
        tensors = [tensor.to(device) for tensor in self.format.read(reader, count - frame.statistics, groups)]
        return Short(self.format.of(tensors, groups), reader.tensor(frame.statistics, frame.dtype).to(device))

    def size(self, payload: Payload, frame: Frame) -> int:
        if self.format.regular:
            return self.most(frame)
        *tensors, statistics = self.tensors(payload)
        return self.format.size(tensors) + statistics.nbytes

    def sizes(self, payload: Payload, frame: Frame) -> Sequence[int]:
        *tensors, statistics = self.tensors(payload)
        if self.format.regular:
            return [self.most(frame)] * len(statistics)
        own = zip(*(tensor.cpu() for tensor in tensors), strict=True)
        return [self.format.size(some) + statistics[0].nbytes for some in own]

    def most(self, frame: Frame) -> int:
        count = self._count(frame)
        if self.lossless:
            return count * frame.dtype.itemsize
        return self.format.most(count - frame.statistics, self._groups(frame)) + frame.statistics * frame.dtype.itemsize

    def checks(self, payload: Payload, frame: Frame, clients: tuple[int, ...] = ()) -> Iterator[Check]:
        try:
            tensors = self.tensors(payload)
            found = [(own_shape(tensor, clients), tensor.dtype) for tensor in tensors]
        except (AttributeError, TypeError):
            yield failed(f"'{self.of}' is not of the type asked for")
            return
        expected = [((count,), dtype) for count, dtype in self._shapes(frame)]
        if found != expected:
            yield failed(f"'{self.of}' has {found} where {expected} was asked for")
            return
        yield from (finite(tensor, f"'{self.of}' is not finite") for tensor in tensors if tensor.numel() and tensor.is_floating_point())
        if not self.lossless and tensors[0].numel():
            yield from self.format.checks(tensors[:-1], f"'{self.of}' has levels or scales that no quantiser gives")

    def charged(self, book: Book) -> float:
        if self.on == "scalars":
            return VALUE_BYTES * self.copies
        if self.on == "statistics":
            return VALUE_BYTES * self.copies * book.statistics
        if self.on == "active":
            return VALUE_BYTES * sum(book.active)
        if self.on != "mask":
            return book.dense  # a tensor of all links counts as a whole model
        return book.sparse(self.format.bits) + VALUE_BYTES * (self._scales_charged(book) if self.format.scaled else 0)

    def _scales_charged(self, book: Book) -> float:
        """Scales of rounded values: of a vector's own the paper counts none."""
        entries = [entry for entry in book.layout.parameter_entries if len(entry.shape) > 1]
        if self.scales == "block":
            return blocks_of(round(sum(book.active)) + book.layout.parameters - book.layout.links)
        return sum(entry.shape[0] for entry in entries) if self.scales == "channel" else len(entries)

    def _count(self, frame: Frame) -> int:
        """Return how many numbers travel."""
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
        if self.lossless:
            return [(count, frame.dtype)]
        return [*self.format.shapes(count - frame.statistics, self._groups(frame)), (frame.statistics, frame.dtype)]

    def _groups(self, frame: Frame) -> tuple[int, ...] | None:
        """Return lengths of groups that share a scale; None for blocks of one length."""
        if self.scales == "block":
            return None
        if not frame.mask.is_full:
            raise ValueError("scales per channel or tensor are for models that are not pruned")
        entries = frame.layout.parameter_entries
        if self.scales == "tensor":
            return tuple(entry.size for entry in entries)
        return tuple(length for entry in entries for length in _channels(entry))

    def tensors(self, payload: Payload) -> list[Tensor]:
        """Return the tensors of a payload; statistics last."""
        if self.lossless:
            return [carried(payload, Tensor)]
        short = carried(payload, Short)
        return [*self.format.tensors(short.values), short.statistics]

    def of_tensors(self, tensors: Sequence[Tensor], frame: Frame) -> Tensor | Short:
        """Inverse of `tensors`."""
        return tensors[0] if self.lossless else Short(self.format.of(tensors[:-1], self._groups(frame)), tensors[-1])


def _channels(entry: Entry) -> list[int]:
    """Return lengths of a tensor's output channels; a vector is one channel."""
    return [entry.size // entry.shape[0]] * entry.shape[0] if len(entry.shape) > 1 else [entry.size]
