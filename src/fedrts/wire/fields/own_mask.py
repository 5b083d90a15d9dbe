"""A model on a mask that the sender made itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedrts.sparse.cost import Book
from fedrts.sparse.mask import Mask
from fedrts.wire.checks import Check, failed
from fedrts.wire.fields.coded import bitmaps, changes_size, read_arms, write_arms
from fedrts.wire.fields.contract import Frame, OwnValues, Payload, carried
from fedrts.wire.fields.values import Values
from fedrts.wire.packing import Reader
from fedrts.wire.value_types import ValueFormat, ValueType


@dataclass(frozen=True)
class OnOwnMask:
    """The client's weights on the mask that it made itself, with `counts[l]` links per layer, or as many as the one it was sent.

    The mask travels as its difference to the sent one. The client's tensors hold it under `mask`, as a boolean vector `[P]`. In a
    shorter type the values are changes from the received weights, which are 0 where a link is new.
    """

    of: str = "weights"
    type: ValueType = "float32"
    counts: tuple[int, ...] | None = None

    @property
    def format(self) -> ValueFormat:
        return self._values.format

    @property
    def lossless(self) -> bool:
        return self._values.lossless

    def take(self, tensors: Mapping[str, Tensor], frame: Frame) -> OwnValues:
        mask = Mask(tensors["mask"], frame.mask.sizes)
        return OwnValues(mask, self._values.take(tensors, _moved(frame, mask)))

    def open(self, payload: Payload, frame: Frame) -> OwnValues:
        own = carried(payload, OwnValues)
        return OwnValues(own.mask, self._values.open(own.values, _moved(frame, own.mask)))

    def put(self, payload: Payload, frame: Frame) -> Tensor:
        own = carried(payload, OwnValues)
        return self._values.put(own.values, _moved(frame, own.mask))

    def write(self, payload: Payload, frame: Frame) -> Iterator[bytes]:
        own = carried(payload, OwnValues)
        yield from write_arms(own.mask.bits ^ frame.mask.bits, frame.layout)
        yield from self._values.write(own.values, _moved(frame, own.mask))

    def read(self, reader: Reader, frame: Frame) -> OwnValues:
        bits = frame.mask.bits
        mask = Mask(bits ^ read_arms(reader, frame.layout).to(bits.device), frame.mask.sizes)
        return OwnValues(mask, self._values.read(reader, replace(frame, mask=mask)))

    def size(self, payload: Payload, frame: Frame) -> int:
        own = carried(payload, OwnValues)
        return changes_size(own.mask, frame) + self._values.size(own.values, replace(frame, mask=own.mask))

    def most(self, frame: Frame) -> int:
        return bitmaps(frame.mask.sizes.arms) + self._values.most(frame)

    def checks(self, payload: Payload, frame: Frame) -> Iterator[Check]:
        wanted = frame.mask.counts if self.counts is None else self.counts
        if not isinstance(payload, OwnValues) or payload.mask.sizes != frame.mask.sizes:
            yield failed(f"'{self.of}' is not a model on a mask of its own")
        elif payload.mask.counts != wanted:
            yield failed(f"layers have {payload.mask.counts} links where {wanted} were asked for")
        elif frame.mask.sizes.grouped and not torch.equal(payload.mask.sizes.touched(payload.mask.bits), payload.mask.bits):
            yield failed(f"'{self.of}' is on a mask that cuts arms apart")
        else:
            yield from self._values.checks(payload.values, replace(frame, mask=payload.mask))

    def charged(self, book: Book) -> float:
        return self._values.charged(book)

    @property
    def _values(self) -> Values:
        return Values(self.of, type=self.type)


def _moved(frame: Frame, mask: Mask) -> Frame:
    """Return the frame of the same message on another mask."""
    reference = None if frame.reference is None else mask.compact(frame.mask.expand(frame.reference))
    return replace(frame, mask=mask, reference=reference)
