"""The largest changes of a model, with the names of their links."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from fedrts.sparse.cost import Book
from fedrts.sparse.mask import Mask
from fedrts.wire.checks import Check, failed
from fedrts.wire.fields.coded import arms_size, bitmaps, read_arms, write_arms
from fedrts.wire.fields.contract import Frame, OwnValues, Payload, carried, owed
from fedrts.wire.fields.values import Values
from fedrts.wire.packing import Reader
from fedrts.wire.value_types import FORMATS, ValueType


@dataclass(frozen=True)
class Largest:
    """How far a dense model's weights have moved, for the `share` of each layer's links that moved most, and for all that is not prunable.

    Which links these are travels as positions, in the smallest coding; statistics travel as they are. With `feedback` the
    client adds to its next change what did not travel of this one, be it left out or rounded away.
    """

    share: float
    of: str = "weights"
    type: ValueType = "float32"
    feedback: bool = True

    @property
    def lossless(self) -> bool:
        """Whether nothing is lost of what travels."""
        return self._values.lossless

    def counts(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Return the number of links named in layers of these sizes, at least one each."""
        return tuple(max(1, round(self.share * size)) if size else 0 for size in sizes)

    def take(self, tensors: Mapping[str, Tensor], frame: Frame) -> OwnValues:
        change = self._change(tensors, frame)
        mask = Mask.top(change[: frame.layout.links].abs(), self.counts(frame.mask.sizes), frame.mask.sizes)
        whole = torch.cat([change, tensors[self.of][frame.layout.parameters :]])
        return OwnValues(mask, self._values.take({self.of: mask.compact(whole)}, _on(mask, frame)))

    def left(self, payload: Payload, tensors: Mapping[str, Tensor], frame: Frame) -> Tensor:
        return self._change(tensors, frame) - self._opened(payload, frame)[: frame.layout.parameters]

    def open(self, payload: Payload, frame: Frame) -> Tensor:
        opened, kept = self._opened(payload, frame), frame.layout.parameters
        return opened if frame.reference is None else torch.cat([frame.reference[:kept] + opened[:kept], opened[kept:]])

    def put(self, payload: Payload, frame: Frame) -> Tensor:
        return self.open(payload, frame)

    def write(self, payload: Payload, frame: Frame) -> Iterator[bytes]:
        own = carried(payload, OwnValues)
        yield from write_arms(own.mask.bits, frame.layout)
        yield from self._values.write(own.values, _on(own.mask, frame))

    def read(self, reader: Reader, frame: Frame) -> OwnValues:
        bits = read_arms(reader, frame.layout, self.counts(frame.mask.sizes))
        mask = Mask(bits.to(frame.mask.bits.device), frame.mask.sizes)
        return OwnValues(mask, self._values.read(reader, _on(mask, frame)))

    def size(self, payload: Payload, frame: Frame) -> int:
        own = carried(payload, OwnValues)
        return arms_size(own.mask.bits, frame.layout) + self._values.size(own.values, _on(own.mask, frame))

    def most(self, frame: Frame) -> int:
        first = torch.zeros(len(frame.mask.bits))
        mask = Mask.top(first, self.counts(frame.mask.sizes), frame.mask.sizes)
        return bitmaps(frame.mask.sizes) + self._values.most(_on(mask, frame))

    def checks(self, payload: Payload, frame: Frame) -> Iterator[Check]:
        wanted = self.counts(frame.mask.sizes)
        if not isinstance(payload, OwnValues) or payload.mask.sizes != frame.mask.sizes:
            yield failed(f"'{self.of}' is not a change of some of this model's links")
        elif payload.mask.counts != wanted:
            yield failed(f"layers have {payload.mask.counts} links named where {wanted} were asked for")
        else:
            yield from self._values.checks(payload.values, _on(payload.mask, frame))

    def charged(self, book: Book) -> float:
        return self._values.charged(replace(book, active=tuple(self.share * size for size in book.layout.sizes)))

    @cached_property
    def _values(self) -> Values:
        return Values(self.of, type=self.type, feedback=self.feedback and not FORMATS[self.type].lossless)

    def tensors(self, payload: OwnValues) -> list[Tensor]:
        """All that a payload is made of, in tensors that have the same shapes for every payload."""
        return [torch.from_numpy(payload.mask.packed()), *self._values.tensors(payload.values)]

    def of_tensors(self, tensors: Sequence[Tensor], frame: Frame) -> OwnValues:
        """Inverse of `tensors`."""
        mask = Mask.unpacked(tensors[0].cpu().numpy(), frame.mask.sizes).to(frame.mask.bits.device)
        return OwnValues(mask, self._values.of_tensors(tensors[1:], _on(mask, frame)))

    def _change(self, tensors: Mapping[str, Tensor], frame: Frame) -> Tensor:
        """Return how far the parameters `[N_all]` have moved, plus the rest of earlier messages."""
        if not frame.mask.is_full:
            raise ValueError("the largest changes are those of a model that is not pruned")
        kept = frame.layout.parameters
        values = tensors[self.of][:kept]
        change = values if frame.reference is None else values - frame.reference[:kept]
        return owed(change, tensors, frame) if self.feedback else change

    def _opened(self, payload: Payload, frame: Frame) -> Tensor:
        """Return the changes in a payload, 0 elsewhere, and the statistics: `[n]`."""
        own = carried(payload, OwnValues)
        return own.mask.expand(self._values.open(own.values, _on(own.mask, frame)))


def _on(mask: Mask, frame: Frame) -> Frame:
    """Return the frame of the named changes."""
    return replace(frame, mask=mask, reference=None)
