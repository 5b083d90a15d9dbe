"""Names of links, or of arms where links are grouped, as positions among the inactive ones, optionally with their values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from fedrts.sparse.cost import Book
from fedrts.sparse.layout import starts
from fedrts.sparse.topk import top_among
from fedrts.wire.checks import Check, failed, finite, none_of
from fedrts.wire.fields.coded import bitmaps, places_size, read_positions, write_positions
from fedrts.wire.fields.contract import Frame, Payload, Selection, carried, changed, own_shape
from fedrts.wire.packing import Bits, Reader, raw


@dataclass(frozen=True)
class Indices:
    """Names of links: the `k[l]` largest magnitudes of the tensor `of` in each layer among the inactive links.

    They travel as positions among the inactive links of the layer, in the smallest coding; their `values` only if asked for. Where links
    are grouped, arms are named: of the largest norm, which is then their value, and as many as `k[l]` links make.
    """

    of: str
    k: Sequence[int]
    values: bool = False

    def take(self, tensors: Mapping[str, Tensor], frame: Frame) -> Selection:
        mask, source = frame.mask.arms, tensors[self.of]
        norms = frame.mask.sizes.scored(source.abs())
        indices = top_among(norms, self.named(frame), mask.inactive, mask.free)
        values = norms if frame.mask.sizes.grouped else source
        return Selection(indices, len(mask.bits), values.gather(-1, indices) if self.values else None)

    def open(self, payload: Payload, frame: Frame) -> Selection:
        return carried(payload, Selection)

    def put(self, payload: Payload, frame: Frame) -> Tensor:
        return carried(payload, Selection).indices

    def write(self, payload: Payload, frame: Frame) -> Iterator[bytes]:
        selection = carried(payload, Selection)
        for bits in self._among_inactive(selection, frame):
            yield write_positions(bits, (len(bits),))
        if selection.values is not None:
            yield raw(selection.values)

    def read(self, reader: Reader, frame: Frame) -> Selection:
        device = frame.mask.bits.device
        named = np.zeros(len(frame.mask.arms.bits), np.bool_)
        for span, inactive, k in self._layers(frame):
            layer = np.zeros(len(inactive), np.bool_)
            layer[inactive] = read_positions(reader, (int(inactive.sum()),), k)
            named[span] = layer
        values = reader.tensor(sum(self.named(frame)), frame.dtype).to(device) if self.values else None
        return Selection(torch.from_numpy(np.flatnonzero(named)).to(device), len(named), values)

    def size(self, payload: Payload, frame: Frame) -> int:
        return self.sizes(changed(payload, lambda tensor: tensor[None]), frame)[0]

    def sizes(self, payload: Payload, frame: Frame) -> Sequence[int]:
        values, mask = sum(self.named(frame)) * frame.dtype.itemsize if self.values else 0, frame.mask.arms
        places, layers = mask.places[carried(payload, Selection).indices].cpu().numpy(), [(count,) for count in mask.free]
        return [values + places_size(own, layers) for own in places]

    def most(self, frame: Frame) -> int:
        return (sum(self.named(frame)) * frame.dtype.itemsize if self.values else 0) + bitmaps(frame.mask.sizes.arms)

    def checks(self, payload: Payload, frame: Frame, clients: tuple[int, ...] = ()) -> Iterator[Check]:
        if (reason := self._misfit(payload, frame, clients)) is not None:
            yield failed(reason)
            return
        if not sum(self.k):
            return
        mask, selection = frame.mask.arms, carried(payload, Selection)
        indices, wanted = selection.indices, self.named(frame)
        if selection.values is not None:
            yield finite(selection.values, f"'{self.of}' is not finite")
        unknown, last = "a link is named that does not exist", selection.size - 1
        ends = torch.stack(indices.aminmax(dim=-1), dim=-1)
        yield Check(lambda ends: (ends[:, 0] < 0) | (ends[:, 1] > last), lambda *_: unknown, ends)
        yield none_of(indices[..., 1:] <= indices[..., :-1], "links are named twice or out of order")
        yield none_of(mask.bits[indices.clamp(0, last)], "an active link is named")
        counts = torch.searchsorted(indices, mask.bounds.expand(*clients, -1).contiguous()).diff()
        yield Check(lambda counts: (counts != wanted).any(1), partial(_miscounted, wanted), counts)

    def _misfit(self, payload: Payload, frame: Frame, clients: tuple[int, ...]) -> str | None:
        """Return what is wrong with a payload at first sight."""
        strange = f"'{self.of}' is not a choice of this model's links"
        if not isinstance(payload, Selection) or not isinstance(payload.indices, Tensor):
            return strange
        values, indices = payload.values, payload.indices
        if (values is not None) != self.values or payload.size != len(frame.mask.arms.bits):
            return strange
        if values is not None and (values.shape != indices.shape or values.dtype != frame.dtype):
            return f"'{self.of}' has other values than asked for"
        wanted, found = sum(self.named(frame)), own_shape(indices, clients)
        if indices.dtype != torch.int64 or found != (wanted,):
            return f"{found} links are named where {wanted} were asked for"
        return None

    def named(self, frame: Frame) -> tuple[int, ...]:
        """Return how many arms of each layer are named."""
        return frame.mask.sizes.in_arms(self.k)

    def charged(self, book: Book) -> float:
        return (1.0 if self.values else 0.5) * book.fraction * book.sparse()  # O_ξ = ζ_t·O_s, half of it for names alone

    def _layers(self, frame: Frame) -> Iterator[tuple[slice, Bits, int]]:
        """(span, which links are inactive, k) of every layer."""
        mask = frame.mask.arms
        bits, begin = mask.bits.cpu().numpy(), starts(mask.sizes)
        for start, stop, k in zip(begin, begin[1:], self.named(frame), strict=False):
            yield slice(start, stop), ~bits[start:stop], k

    def _among_inactive(self, payload: Selection, frame: Frame) -> Iterator[Bits]:
        """Return for every layer which of its inactive links are named."""
        mask = frame.mask.arms
        named = torch.zeros_like(mask.bits)
        named[payload.indices] = True
        yield from (part.numpy() for part in named[mask.inactive].cpu().split(list(mask.free)))


def _miscounted(wanted: tuple[int, ...], *counts: float) -> str:
    return f"layers have {list(map(int, counts))} links named where {list(wanted)} were asked for"
