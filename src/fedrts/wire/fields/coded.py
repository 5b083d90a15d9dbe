"""Active links of a layer as bytes in the smallest coding, and their length."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from fedrts.sparse.layout import Layout, starts
from fedrts.sparse.mask import Mask, flat_indices
from fedrts.wire import positions
from fedrts.wire.fields.contract import Frame
from fedrts.wire.packing import Bits, Integers, Reader, bytes_of, varint, varint_size


def write_positions(bits: Bits, shape: Sequence[int]) -> bytes:
    """`bits [n]` of a layer in their smallest coding: its number, the payload's length, the payload."""
    coding, payload = positions.encode(bits, shape)
    return bytes([coding]) + varint(len(payload)) + payload


def read_positions(reader: Reader, shape: Sequence[int], count: int | None = None) -> Bits:
    """Inverse of `write_positions`; a `count` of true bits known from elsewhere is checked.

    The smallest coding is never longer than a bitmap: this bounds the memory that decoding takes, whatever a sender chose.
    """
    coding = reader.byte()
    payload = reader.take(reader.varint(most=min(reader.left, bytes_of(math.prod(shape)))))
    return positions.decode(coding, payload.data, shape, count)


def positions_size(bits: Bits, shape: Sequence[int]) -> int:
    """Exactly `len(write_positions(bits, shape))`."""
    return _coded_size(positions.sizes(bits, shape))


def arms_of(bits: Tensor, layout: Layout) -> Iterator[tuple[Bits, tuple[int, ...]]]:
    """Return for every layer the arms of the links `bits [P]`, and the layer's shape in arms: what travels of a mask."""
    arms, begin = layout.sizes.picked(bits).cpu().numpy(), starts(layout.sizes.arms)
    for entry, start, stop in zip(layout.layers, begin, begin[1:], strict=False):
        yield arms[start:stop], entry.grid


def write_arms(bits: Tensor, layout: Layout) -> Iterator[bytes]:
    """`bits [P]`, layer after layer as positions of arms."""
    return (write_positions(arms, grid) for arms, grid in arms_of(bits, layout))


def read_arms(reader: Reader, layout: Layout, links: Sequence[int] | None = None) -> Tensor:
    """Inverse of `write_arms`, on the CPU; `links[l]` of each layer that are known from elsewhere are checked."""
    counts = [None] * len(layout.layers) if links is None else layout.sizes.in_arms(links)
    parts = [read_positions(reader, entry.grid, count) for entry, count in zip(layout.layers, counts, strict=True)]
    return layout.sizes.spread(torch.from_numpy(np.concatenate([np.zeros(0, np.bool_), *parts])))


def arms_size(bits: Tensor, layout: Layout) -> int:
    """Return exactly the bytes of `write_arms`."""
    return sum(positions_size(arms, grid) for arms, grid in arms_of(bits, layout))


def changes_size(mask: Mask, frame: Frame) -> int:
    """Return the bytes that send a mask to a holder of `frame`'s mask, or the reverse."""
    changed = flat_indices(mask.arms.bits ^ frame.mask.arms.bits).cpu().numpy()
    return places_size(changed, [entry.grid for entry in frame.layout.layers])


def places_size(places: Integers, shapes: Sequence[Sequence[int]]) -> int:
    """Bytes of the positions of links at ascending `places [m]` in layers of these shapes, one after the other."""
    begin = starts([math.prod(shape) for shape in shapes])
    cuts = np.searchsorted(places, begin)
    layers = (places[a:b] - start for a, b, start in zip(cuts, cuts[1:], begin, strict=False))
    return sum(_coded_size(positions.sizes_at(layer, shape)) for layer, shape in zip(layers, shapes, strict=True))


def _coded_size(sizes: Mapping[positions.Coding, int]) -> int:
    """Return bytes in the smallest coding, including its number and its length."""
    smallest = min(sizes.values())
    return 1 + varint_size(smallest) + smallest


def bitmaps(sizes: Sequence[int]) -> int:
    """Return an upper bound on the bytes of layers' positions: no chosen coding is longer than a bitmap."""
    return sum(1 + varint_size(bytes_of(size)) + bytes_of(size) for size in sizes)
