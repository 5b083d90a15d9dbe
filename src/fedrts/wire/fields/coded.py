"""Which links of a layer, as bytes in the smallest coding, and how long that is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from fedrts.sparse.layout import starts
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


def changes_size(mask: Mask, frame: Frame) -> int:
    """Bytes that tell a mask to somebody who holds that of `frame`, or the other way round."""
    changed = flat_indices(mask.bits ^ frame.mask.bits).cpu().numpy()
    return places_size(changed, [entry.shape for entry in frame.layout.layers])


def places_size(places: Integers, shapes: Sequence[Sequence[int]]) -> int:
    """Bytes of the positions of links at ascending `places [m]` in layers of these shapes, one after the other."""
    begin = starts([math.prod(shape) for shape in shapes])
    cuts = np.searchsorted(places, begin)
    layers = (places[a:b] - start for a, b, start in zip(cuts, cuts[1:], begin, strict=False))
    return sum(_coded_size(positions.sizes_at(layer, shape)) for layer, shape in zip(layers, shapes, strict=True))


def _coded_size(sizes: Mapping[positions.Coding, int]) -> int:
    """Bytes in the smallest coding, with its number and its length."""
    smallest = min(sizes.values())
    return 1 + varint_size(smallest) + smallest


def bitmaps(sizes: Sequence[int]) -> int:
    """Bytes of the positions of layers of these sizes at most: no chosen coding is longer than a bitmap."""
    return sum(1 + varint_size(bytes_of(size)) + bytes_of(size) for size in sizes)
