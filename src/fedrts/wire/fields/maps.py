"""Maps over all links: signs, and masks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedrts.sparse.cost import Book
from fedrts.wire.checks import Check, failed, within
from fedrts.wire.fields.coded import arms_size, bitmaps, positions_size, read_arms, read_positions, write_arms, write_positions
from fedrts.wire.fields.contract import Frame, Payload, carried
from fedrts.wire.packing import Bits, Reader


@dataclass(frozen=True)
class Signs:
    """A map `[P]` of −1, 0 and 1 (int8): which links are positive, and which of the others negative, as positions."""

    of: str

    def take(self, tensors: Mapping[str, Tensor], frame: Frame) -> Tensor:
        return tensors[self.of].clone()

    def open(self, payload: Payload, frame: Frame) -> Tensor:
        return carried(payload, Tensor)

    def put(self, payload: Payload, frame: Frame) -> Tensor:
        return self.open(payload, frame).clone()

    def write(self, payload: Payload, frame: Frame) -> Iterator[bytes]:
        for bits in self._parts(carried(payload, Tensor), frame):
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
        return sum(positions_size(bits, (len(bits),)) for bits in self._parts(carried(payload, Tensor), frame))

    def most(self, frame: Frame) -> int:
        return 2 * bitmaps(frame.mask.sizes)

    def checks(self, payload: Payload, frame: Frame) -> Iterator[Check]:
        reason = f"'{self.of}' is no map of signs"
        if not isinstance(payload, Tensor) or payload.dtype != torch.int8 or payload.shape != frame.mask.bits.shape:
            yield failed(reason)
        elif len(payload):
            yield within(1, payload, reason)

    def charged(self, book: Book) -> float:
        return book.sparse()

    def _parts(self, payload: Tensor, frame: Frame) -> Iterator[Bits]:
        for layer in payload.cpu().split(list(frame.mask.sizes)):
            signs = layer.numpy()
            yield signs > 0
            yield (signs < 0)[signs <= 0]


@dataclass(frozen=True)
class Masks:
    """`count` masks `bool [count, P]`, layer after layer as positions of arms."""

    of: str
    count: int

    def take(self, tensors: Mapping[str, Tensor], frame: Frame) -> Tensor:
        return tensors[self.of].clone()

    def open(self, payload: Payload, frame: Frame) -> Tensor:
        return carried(payload, Tensor)

    def put(self, payload: Payload, frame: Frame) -> Tensor:
        return self.open(payload, frame).clone()

    def write(self, payload: Payload, frame: Frame) -> Iterator[bytes]:
        for bits in carried(payload, Tensor):
            yield from write_arms(bits, frame.layout)

    def read(self, reader: Reader, frame: Frame) -> Tensor:
        masks = torch.cat([read_arms(reader, frame.layout) for _ in range(self.count)])
        return masks.to(frame.mask.bits.device).view(self.count, -1)

    def size(self, payload: Payload, frame: Frame) -> int:
        return sum(arms_size(bits, frame.layout) for bits in carried(payload, Tensor))

    def most(self, frame: Frame) -> int:
        return self.count * bitmaps(frame.mask.sizes.arms)

    def checks(self, payload: Payload, frame: Frame) -> Iterator[Check]:
        if not isinstance(payload, Tensor) or payload.dtype != torch.bool or payload.shape != (self.count, len(frame.mask.bits)):
            yield failed(f"'{self.of}' is not {self.count} masks of this model")

    def charged(self, book: Book) -> float:
        return self.count * book.layout.links / 8
