"""Which links of one layer are active, as bytes: a choice of codings, the best of them near the entropy.

The receiver knows the layer's shape and which `Coding` it is told to expect; the payload carries the rest, the number
of active links included. Each bit vector has exactly one payload per coding, and decoding accepts no other:

| coding     | payload                                                                                              |
|------------|------------------------------------------------------------------------------------------------------|
| DENSE      | nothing: all n links are active                                                                      |
| EMPTY      | nothing: no link is active                                                                           |
| BITMAP     | n bits                                                                                               |
| COORDINATE | count; count positions of ⌈log2 n⌉ bits                                                              |
| CSR        | count; for each row its active links, ⌈log2(min(count, columns) + 1)⌉ bits; columns of ⌈log2 columns⌉ |
| CSC        | CSR of the transposed layer                                                                          |
| GAP        | count; k (one byte); Rice-coded gaps                                                                 |

The count is a varint. Rows are the first dimension of the shape and columns the product of the others. GAP lists the
active links or, where these are the majority, the inactive ones: for each the gap g of unlisted links before it, as k
bit planes of the lowest k bits of all gaps, and then ⌊g / 2^k⌋ zeros and a one for each gap in turn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

import numpy as np

from fedrts.wire.errors import WireError
from fedrts.wire.packing import (
    Bits,
    Integers,
    Reader,
    bytes_of,
    join_planes,
    pack_bits,
    pack_integers,
    split_planes,
    varint,
    varint_size,
)

_BLOCK = 1 << 17
"""Links at a time, so that 64-bit positions stay in the cache and are never all in memory."""


class Coding(IntEnum):
    """How positions travel; the numbers are those on the wire."""

    NONE = 0
    """They do not: the receiver knows them already. Nothing to encode or decode."""
    DENSE = 1
    EMPTY = 2
    BITMAP = 3
    COORDINATE = 4
    CSR = 5
    CSC = 6
    GAP = 7


def encode(bits: Bits, shape: Sequence[int], coding: Coding | None = None) -> tuple[Coding, bytes]:
    """Encode a layer's `bits [n]`, in the smallest coding unless a `coding` is given; return coding and payload."""
    links = _Links(bits, shape)
    if coding is None:
        lengths = _sizes(links)
        coding = min(lengths, key=lengths.__getitem__)
    return coding, _codec(coding, links).encode(links)


def decode(coding: int, payload: bytes | memoryview, shape: Sequence[int], count: int | None = None) -> Bits:
    """The `bits [n]` of a layer of `shape`; a `WireError` if `encode` cannot have made the `payload`.

    A `count` of active links that is known from elsewhere is checked. `coding` and `payload` need not be trusted:
    time and memory are O(n + len(payload)) whatever they are.
    """
    if coding not in _CODECS:
        raise WireError(f"positions cannot be decoded from coding {coding}")
    reader = Reader(payload)
    bits = _CODECS[Coding(coding)].decode(reader, _Grid.of(shape))
    reader.end()
    if count is not None and np.count_nonzero(bits) != count:
        raise WireError(f"{np.count_nonzero(bits)} active links instead of {count}")
    return bits


def size(bits: Bits, shape: Sequence[int], coding: Coding) -> int:
    """Exactly the length of the payload of `bits [n]`, without making it."""
    links = _Links(bits, shape)
    return _codec(coding, links).size(links)


def sizes(bits: Bits, shape: Sequence[int]) -> dict[Coding, int]:
    """Return the `size` in every coding that can carry `bits [n]`."""
    return _sizes(_Links(bits, shape))


def sizes_at(places: Integers, shape: Sequence[int]) -> dict[Coding, int]:
    """Return the same for the active links at ascending `places [m]`, in work that follows m and not the layer."""
    return _sizes(_Places(places, shape))


@dataclass(frozen=True)
class _Grid:
    """A layer as a matrix; one without links has a single row, so that rows never outnumber links by more than that."""

    rows: int
    columns: int

    @staticmethod
    def of(shape: Sequence[int]) -> _Grid:
        links = math.prod(shape)
        rows = shape[0] if links and shape else 1
        return _Grid(rows, links // rows)

    @property
    def links(self) -> int:
        return self.rows * self.columns

    @property
    def transposed(self) -> _Grid:
        return _Grid(self.columns, self.rows)

    def transpose(self, bits: Bits) -> Bits:
        """Return `bits [n]` of this layer in the order of the transposed one."""
        return bits.reshape(self.rows, self.columns).T.ravel()


class _Links:
    """The `bits [n]` of a layer, and what the codings need, each computed at most once."""

    def __init__(self, bits: Bits, shape: Sequence[int]) -> None:
        self.grid = _Grid.of(shape)
        if bits.dtype != np.bool_ or bits.shape != (self.grid.links,):
            raise ValueError(f"the links of a layer of {tuple(shape)} cannot be {bits.dtype} {bits.shape}")
        self.bits = bits

    @cached_property
    def count(self) -> int:
        return int(np.count_nonzero(self.bits))

    @cached_property
    def gaps(self) -> Integers:
        """Other links before each listed one; the active links are listed or, where those are fewer, the inactive ones."""
        few = 2 * self.count <= self.grid.links
        return _gaps(self.bits if few else ~self.bits)

    @cached_property
    def rice(self) -> tuple[int, int]:
        """The best Rice parameter k of the gaps, and the bits for it."""
        return _rice(self.gaps)


class _Places(_Links):
    """The same for links known by their places; derived values are computed on demand."""

    def __init__(self, places: Integers, shape: Sequence[int]) -> None:
        self.grid, self.places = _Grid.of(shape), places

    @cached_property
    def bits(self) -> Bits:  # type: ignore[override]
        return _bits_at(self.places, self.grid.links)

    @cached_property
    def count(self) -> int:
        return len(self.places)

    @cached_property
    def gaps(self) -> Integers:
        if 2 * self.count > self.grid.links:
            return _gaps(~self.bits)
        gaps = np.diff(self.places, prepend=-1) - 1
        return gaps.astype(np.min_scalar_type(gaps.max(initial=0)))


@dataclass(frozen=True)
class _Codec:
    size: Callable[[_Links], int]
    encode: Callable[[_Links], bytes]
    decode: Callable[[Reader, _Grid], Bits]
    fits: Callable[[_Links], bool] = lambda links: True


def _codec(coding: Coding, links: _Links) -> _Codec:
    if coding not in _CODECS or not _CODECS[coding].fits(links):
        raise ValueError(f"{links.count} of {links.grid.links} links cannot be encoded as {coding!r}")
    return _CODECS[coding]


def _sizes(links: _Links) -> dict[Coding, int]:
    return {coding: codec.size(links) for coding, codec in _CODECS.items() if codec.fits(links)}


def _width(choices: int) -> int:
    """Return ⌈log2 choices⌉."""
    return max(choices - 1, 0).bit_length()


def _bits_at(positions: Integers, links: int) -> Bits:
    bits = np.zeros(links, np.bool_)
    bits[positions] = True
    return bits


# COORDINATE


def _coordinate_size(links: _Links) -> int:
    return varint_size(links.count) + bytes_of(links.count * _width(links.grid.links))


def _encode_coordinate(links: _Links) -> bytes:
    return varint(links.count) + pack_integers(np.flatnonzero(links.bits), _width(len(links.bits)))


def _decode_coordinate(reader: Reader, grid: _Grid) -> Bits:
    count = reader.varint(most=grid.links)
    positions = reader.integers(count, _width(grid.links))
    if np.any(positions >= grid.links) or np.any(positions[1:] <= positions[:-1]):
        raise WireError("positions out of range or not ascending")
    return _bits_at(positions, grid.links)


# CSR and CSC


def _rows_size(grid: _Grid, count: int) -> int:
    lengths = bytes_of(grid.rows * _width(min(count, grid.columns) + 1))
    return varint_size(count) + lengths + bytes_of(count * _width(grid.columns))


def _encode_rows(grid: _Grid, bits: Bits, count: int) -> bytes:
    matrix = bits.reshape(grid.rows, grid.columns)
    lengths = np.count_nonzero(matrix, axis=1)
    columns = np.nonzero(matrix)[1]
    return varint(count) + pack_integers(lengths, _width(min(count, grid.columns) + 1)) + pack_integers(columns, _width(grid.columns))


def _decode_rows(reader: Reader, grid: _Grid) -> Bits:
    count = reader.varint(most=grid.links)
    lengths = reader.integers(grid.rows, _width(min(count, grid.columns) + 1))
    if lengths.sum() != count:
        raise WireError("the rows do not add up to the count")
    columns = reader.integers(count, _width(grid.columns))
    if np.any(columns >= grid.columns):
        raise WireError("columns out of range")
    bits = np.zeros(grid.links, np.bool_)
    type_ = np.min_scalar_type(grid.links)
    done = 0
    for start in range(0, grid.rows, _BLOCK):
        held = lengths[start : start + _BLOCK]
        positions = np.repeat(np.arange(start, start + len(held), dtype=type_) * type_.type(grid.columns), held)
        positions += columns[done : done + len(positions)]
        if np.any(positions[1:] <= positions[:-1]):
            raise WireError("columns are not ascending")
        bits[positions] = True
        done += len(positions)
    return bits


def _encode_columns(links: _Links) -> bytes:
    return _encode_rows(links.grid.transposed, links.grid.transpose(links.bits), links.count)


def _decode_columns(reader: Reader, grid: _Grid) -> Bits:
    return grid.transposed.transpose(_decode_rows(reader, grid.transposed))


# GAP


def _gaps(bits: Bits) -> Integers:
    """Return the number of unset bits before each of the set ones `[m]` among `bits`, in the narrowest type."""
    parts, last = [np.empty(0, np.uint8)], -1
    for start in range(0, len(bits), _BLOCK):
        positions = np.flatnonzero(bits[start : start + _BLOCK])
        if len(positions):
            gaps = positions - 1
            gaps[1:] -= positions[:-1]
            gaps[0] += start - last
            parts.append(gaps.astype(np.min_scalar_type(gaps.max())))
            last = start + int(positions[-1])
    return np.concatenate(parts)


def _bits(gaps: Integers, length: int) -> Bits:
    """`length` bits with these `gaps [m]` before the set ones: inverse of `_gaps`."""
    bits = np.zeros(length, np.bool_)
    last = -1
    for start in range(0, len(gaps), _BLOCK):
        positions = np.add(gaps[start : start + _BLOCK], 1, dtype=np.int64)
        positions[0] += last
        np.cumsum(positions, out=positions)
        bits[positions] = True
        last = int(positions[-1])
    return bits


def _rice(gaps: Integers) -> tuple[int, int]:
    """The smallest k with the fewest bits, and these: a gap g takes ⌊g / 2^k⌋ zeros, a one and k bits.

    What the next k saves of the zeros, Σ ⌈⌊g / 2^k⌋ / 2⌉, never grows with k: the first k whose successor saves no
    more than the bit that it adds to each gap is the best.
    """
    k, zeros, halved = 0, int(gaps.sum()), gaps.copy()
    while True:
        halved >>= 1
        fewer = int(halved.sum())
        if zeros - fewer <= len(gaps):
            return k, zeros + len(gaps) * (k + 1)
        k, zeros = k + 1, fewer


def _gap_size(links: _Links) -> int:
    return varint_size(links.count) + 1 + bytes_of(links.rice[1])


def _encode_gap(links: _Links) -> bytes:
    gaps, (k, length) = links.gaps, links.rice
    remainders = split_planes(gaps, k).ravel()
    quotients = _bits(gaps >> k, length - len(remainders))
    return varint(links.count) + bytes([k]) + pack_bits(np.concatenate([remainders, quotients]))


def _decode_gap(reader: Reader, grid: _Grid) -> Bits:
    count = reader.varint(most=grid.links)
    listed, unlisted = sorted((count, grid.links - count))
    k = reader.byte()
    # k is worth its bits only where k - 1 left more zeros than gaps, each for 2^(k - 1) links; this also keeps sums from overflowing
    if k and (listed + 1) << (k - 1) > unlisted:
        raise WireError(f"k = {k} is not the best for {listed} of {grid.links} links")
    payload = reader.left
    if 8 * payload > listed * (k + 1) + (unlisted >> k) + 7:
        raise WireError(f"{payload} bytes are too many for {listed} of {grid.links} links")
    stream = reader.bits(8 * payload)
    quotients = _gaps(stream[listed * k :])
    if len(quotients) != listed:
        raise WireError(f"{len(quotients)} gaps instead of {listed}")
    gaps = quotients.astype(np.min_scalar_type((int(quotients.max(initial=0)) + 1 << k) - 1), copy=False)
    if k:
        gaps <<= k
        gaps |= join_planes(stream[: listed * k].reshape(k, listed), gaps.dtype)
    del stream, quotients
    best, length = _rice(gaps)
    if k != best or payload != bytes_of(length) or int(gaps.sum()) > unlisted:
        raise WireError("the gaps do not fit, or could be shorter")
    bits = _bits(gaps, grid.links)
    return bits if count == listed else ~bits


_CODECS = {
    Coding.DENSE: _Codec(
        size=lambda links: 0,
        encode=lambda links: b"",
        decode=lambda reader, grid: np.ones(grid.links, np.bool_),
        fits=lambda links: links.count == links.grid.links,
    ),
    Coding.EMPTY: _Codec(
        size=lambda links: 0,
        encode=lambda links: b"",
        decode=lambda reader, grid: np.zeros(grid.links, np.bool_),
        fits=lambda links: links.count == 0,
    ),
    Coding.BITMAP: _Codec(
        size=lambda links: bytes_of(links.grid.links),
        encode=lambda links: pack_bits(links.bits),
        decode=lambda reader, grid: reader.bits(grid.links),
    ),
    Coding.COORDINATE: _Codec(_coordinate_size, _encode_coordinate, _decode_coordinate),
    Coding.CSR: _Codec(
        size=lambda links: _rows_size(links.grid, links.count),
        encode=lambda links: _encode_rows(links.grid, links.bits, links.count),
        decode=_decode_rows,
    ),
    Coding.CSC: _Codec(
        size=lambda links: _rows_size(links.grid.transposed, links.count),
        encode=_encode_columns,
        decode=_decode_columns,
    ),
    Coding.GAP: _Codec(_gap_size, _encode_gap, _decode_gap),
}
