"""Levels of quantised values as bytes: near their entropy, or packed if that is no longer.

Levels are −top … top. As many of them as fit share a byte, the *symbol*: five of int2, two of int4, one of int6. The last symbol is
filled up with level 0. Each sequence of levels has exactly one payload, and decoding accepts no other:

| form   | payload                                                                                                        |
|--------|----------------------------------------------------------------------------------------------------------------|
| PACKED | symbols of ⌈log2 (2·top + 1)^g⌉ bits, g levels each, as bit planes                                             |
| CODED  | shares of the levels, 10 bits each; lengths in bits of segments of 512 symbols, 13 bits each; codes of symbols |

The codes are those of a canonical Huffman code of at most 13 bits whose weights are products of shares: codes of several values
at once come within a few per mille of the entropy even where one level is frequent. The segments let a reader decode all of them
side by side. The length of a payload follows from a histogram of the symbols alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from fedrts.wire.errors import WireError
from fedrts.wire.packing import Integers, Reader, bytes_of, pack_integers

LONGEST = 13
"""Bits of a code at most: four of them and an offset of seven fit into the 64 bits that a reader looks at."""
SEGMENT = 512
"""Symbols that are decoded one after the other; the segments' lengths add 0.4 % to codes of int4."""
_LENGTH_BITS = (SEGMENT * LONGEST).bit_length()
_SHARE_BITS = 10
_WHOLE = (1 << _SHARE_BITS) - 1
"""The share of a level that is alone; products of five shares are exact in 64 bits."""
_NOTHING = 255
"""A symbol that no levels have and that takes no bits."""
_AT_ONCE = 4
"""Codes read from one look at the stream."""
_BLOCK = 1 << 15
"""Pairs of symbols at a time, so that 64-bit positions stay in the cache."""

Levels = NDArray[np.int8]
Symbols = NDArray[np.uint8]
Counts = NDArray[np.int64]


class Form(IntEnum):
    """How levels travel; the numbers are those on the wire."""

    PACKED = 0
    CODED = 1


@dataclass(frozen=True)
class Alphabet:
    """The levels −top … top and their symbols."""

    top: int

    @property
    def base(self) -> int:
        """The number of levels."""
        return 2 * self.top + 1

    @cached_property
    def group(self) -> int:
        """The number of levels per symbol."""
        return next(group for group in range(8, 0, -1) if self.base**group <= _NOTHING)

    @property
    def symbols(self) -> int:
        """The number of symbols."""
        return int(self.base**self.group)

    def number(self, count: int) -> int:
        """Return the number of symbols that hold `count` levels."""
        return -(-count // self.group)

    def join(self, levels: Tensor) -> Tensor:
        """The symbols `uint8 [⌈m / group⌉]` of `levels int8 [m]`, the first level the highest digit."""
        digits = F.pad(levels, (0, -len(levels) % self.group)).view(-1, self.group).to(torch.uint8) + self.top
        symbols = digits[:, 0]
        for place in range(1, self.group):
            symbols = symbols * self.base + digits[:, place]
        return symbols

    def split(self, symbols: Integers) -> Levels:
        """The levels `[group · number]`: inverse of `join`."""
        digits = np.indices((self.base,) * self.group).reshape(self.group, -1).T - self.top
        return np.take(np.ascontiguousarray(digits, np.int8), symbols, axis=0).reshape(-1)

    def shares(self, symbols: Counts) -> Counts:
        """Return each level's share, given counts of the `symbols`: 0 for a missing level, 1023 for the only one."""
        levels = sum(symbols.reshape(-1, self.base, self.base**place).sum((0, 2)) for place in range(self.group))
        total = max(int(np.sum(levels)), 1)
        return np.where(levels, np.maximum((2 * _WHOLE * levels + total) // (2 * total), 1), 0)

    def packed_size(self, number: int) -> int:
        """Return the bytes of `number` packed symbols."""
        return bytes_of(number * self.width)

    @property
    def width(self) -> int:
        """Bits needed to distinguish symbols."""
        return (self.symbols - 1).bit_length()


def size(levels: Tensor, top: int) -> int:
    """Exactly `len(encode(levels, top))`, without encoding."""
    alphabet = Alphabet(top)
    return 1 + _Plan(alphabet, _histogram(alphabet, alphabet.join(levels))).size


def most(count: int, top: int) -> int:
    """Return the largest number of bytes of `count` levels."""
    alphabet = Alphabet(top)
    return 1 + alphabet.packed_size(alphabet.number(count))


def encode(levels: Tensor, top: int) -> bytes:
    """Encode `levels int8 [m]` as form and payload."""
    alphabet = Alphabet(top)
    joined = alphabet.join(levels)
    plan, symbols = _Plan(alphabet, _histogram(alphabet, joined)), joined.cpu().numpy()
    if plan.form == Form.PACKED:
        return bytes([Form.PACKED]) + pack_integers(symbols, alphabet.width)
    ends, stream = plan.code.write(symbols, plan.bits)
    heads = [pack_integers(plan.shares, _SHARE_BITS), pack_integers(np.diff(ends, prepend=0), _LENGTH_BITS)]
    return b"".join([bytes([Form.CODED]), *heads, stream])


def decode(reader: Reader, count: int, top: int) -> Levels:
    """The next `count` levels; a `WireError` if `encode` cannot have written them. Memory is O(count), whatever was sent."""
    alphabet = Alphabet(top)
    number, form = alphabet.number(count), reader.byte()
    if form not in set(Form):
        raise WireError(f"form {form} of levels is not known")
    shares = None
    if form == Form.PACKED:
        symbols = reader.integers(number, alphabet.width)
        if np.any(symbols >= alphabet.symbols):
            raise WireError("levels out of range")
    else:
        shares = reader.integers(alphabet.base, _SHARE_BITS).astype(np.int64)
        symbols = _read_codes(reader, alphabet, shares, number)
    plan = _Plan(alphabet, _histogram(alphabet, torch.from_numpy(symbols)))
    if plan.form != form or (shares is not None and not np.array_equal(shares, plan.shares)):
        raise WireError("the levels have a shorter form, or other shares")
    levels = alphabet.split(symbols)
    if levels[count:].any():
        raise WireError("the last levels are followed by others")
    return levels[:count]


def _histogram(alphabet: Alphabet, symbols: Tensor) -> Counts:
    """Count each symbol."""
    return torch.bincount(symbols, minlength=alphabet.symbols).cpu().numpy()


def _heads_size(alphabet: Alphabet, number: int) -> int:
    """Return bytes of the shares and the segment lengths of `number` symbols."""
    return bytes_of(alphabet.base * _SHARE_BITS) + bytes_of(-(-number // SEGMENT) * _LENGTH_BITS)


class _Plan:
    """The form for these counts of `symbols`, and its length."""

    def __init__(self, alphabet: Alphabet, symbols: Counts) -> None:
        number = int(symbols.sum())
        self.shares = alphabet.shares(symbols)
        self.code = _Code.of(alphabet, self.shares)
        self.bits = int(self.code.lengths @ symbols)
        sizes = {
            Form.PACKED: alphabet.packed_size(number),
            Form.CODED: _heads_size(alphabet, number) + bytes_of(self.bits),
        }
        self.form = min(sizes, key=sizes.__getitem__)
        self.size = sizes[self.form]


@dataclass(frozen=True)
class _Code:
    """A prefix code for the symbols `[n]`."""

    lengths: Counts
    """Bits of each symbol's code."""
    codes: Counts
    """The codes, first bit lowest."""
    used: Integers
    """The symbols that have a code, in its canonical order."""

    @staticmethod
    def of(alphabet: Alphabet, shares: Counts) -> _Code:
        """Build the shortest canonical code for symbols whose weights are the products of their levels' `shares`."""
        weights = shares
        for _ in range(1, alphabet.group):
            weights = np.multiply.outer(weights, shares).reshape(-1)
        lengths = _code_lengths(weights)
        used = np.flatnonzero(weights)
        used = used[np.argsort(lengths[used], kind="stable")]
        room = 1 << (LONGEST - lengths[used])
        first = np.cumsum(room) - room
        codes = np.zeros_like(lengths)
        for place in range(LONGEST):
            codes[used] |= (first >> place & 1) << (LONGEST - 1 - place)
        return _Code(lengths, codes, used)

    def write(self, symbols: Symbols, bits: int) -> tuple[Counts, bytes]:
        """Where segments end, in bits, and the stream of `bits` bits of the `symbols`' codes, two at a time."""
        pairs = np.append(symbols, np.full(len(symbols) % 2, _NOTHING, np.uint8)).view("<u2")
        table = self._of_pairs()
        words, ends, done = np.zeros(bits // 32 + 2, "<u4"), [], 0
        for start in range(0, len(pairs), _BLOCK):
            codes = table[pairs[start : start + _BLOCK]]
            lengths = codes & 255
            stops = np.cumsum(lengths) + done
            places = stops - lengths
            codes >>= 8
            codes <<= places & 31
            places >>= 5  # no pair is longer than a word: there is one that begins in each
            first = np.flatnonzero(np.diff(places, prepend=-1))
            sums = np.add.reduceat(codes, first)
            begin = int(places[0])
            words[begin : begin + len(sums)] |= sums.astype(np.uint32)
            words[begin + 1 : begin + 1 + len(sums)] |= (sums >> 32).astype(np.uint32)
            ends.append(stops[SEGMENT // 2 - 1 :: SEGMENT // 2])
            done = int(stops[-1])
        if len(pairs) % (SEGMENT // 2):
            ends.append(np.array([done]))
        return np.concatenate(ends), words.tobytes()[: bytes_of(bits)]

    def read(self, stream: NDArray[np.uint8], starts: Counts, number: int) -> tuple[Symbols, Counts]:
        """`number` symbols, and where their segments end, which begin at the bits `starts [s]` of a `stream`."""
        table = self._of_bits()
        padded = np.zeros(len(stream) + SEGMENT * LONGEST // 8 + 8, np.uint8)  # whatever the bits are, no segment goes further
        padded[: len(stream)] = stream
        views = np.ndarray(len(padded) - 7, "<i8", padded, strides=(1,)).copy()  # 64 bits from every byte on
        found = np.empty((SEGMENT, len(starts)), np.uint8)
        places = starts.copy()
        for step in range(0, SEGMENT, _AT_ONCE):
            view = views[places >> 3] >> (places & 7)
            for row in found[step : step + _AT_ONCE]:
                entry = table[view & ((1 << LONGEST) - 1)]
                row[:] = entry & 255
                entry >>= 8
                view >>= entry
                places += entry
        symbols = found.T.reshape(-1)[:number]
        begun = (len(starts) - 1) * SEGMENT
        places[-1] = starts[-1] + self.lengths[symbols[begun:]].sum()  # the last segment may be shorter
        return symbols, places

    def _of_pairs(self) -> Counts:
        """For two symbols, the first in the lower byte: their codes, and in the lowest 8 bits how long these are."""
        lengths, codes = (np.zeros(256, np.int64) for _ in range(2))
        lengths[: len(self.lengths)], codes[: len(self.codes)] = self.lengths, self.codes
        return ((codes | codes[:, None] << lengths) << 8 | (lengths + lengths[:, None])).reshape(-1)

    def _of_bits(self) -> Counts:
        """For the next 13 bits: the symbol whose code they begin with and, above 8 bits, how long it is."""
        table = np.empty(1 << LONGEST, np.int64)
        for symbol in self.used:
            table[self.codes[symbol] :: 1 << self.lengths[symbol]] = symbol | self.lengths[symbol] << 8
        return table


def _code_lengths(weights: Counts) -> Counts:
    """The lengths of at most 13 bits of a prefix code of least Σ weight · length, for symbols of a weight above 0 (package-merge)."""
    order = np.argsort(weights, kind="stable")[np.count_nonzero(weights == 0) :]
    leaves = weights[order]
    packages, merged = leaves[:0], []
    for _ in range(LONGEST):
        both = np.concatenate([leaves, packages])
        ranks = np.argsort(both, kind="stable")
        merged.append(ranks < len(leaves))
        packages = both[ranks][: len(both) // 2 * 2].reshape(-1, 2).sum(1)
    lengths = np.zeros(len(weights), np.int64)
    taken = max(2 * len(leaves) - 2, 0)
    for leaf in reversed(merged):
        chosen = int(np.count_nonzero(leaf[:taken]))
        lengths[order[:chosen]] += 1
        taken = 2 * (taken - chosen)
    return lengths


def _read_codes(reader: Reader, alphabet: Alphabet, shares: Counts, number: int) -> Symbols:
    """Read `number` symbols in the code of these `shares`."""
    lengths = reader.integers(-(-number // SEGMENT), _LENGTH_BITS).astype(np.int64)
    ends = np.cumsum(lengths)
    bits = int(ends[-1]) if number else 0
    if _heads_size(alphabet, number) + bytes_of(bits) >= alphabet.packed_size(number):
        raise WireError("the levels have a shorter form")
    if not shares.any():
        raise WireError("no level has a share")
    stream = reader.take(bytes_of(bits))
    if bits % 8 and stream[-1] >> bits % 8:
        raise WireError("padding bits are set")
    symbols, found = _Code.of(alphabet, shares).read(stream, ends - lengths, number)
    if not np.array_equal(found, ends):
        raise WireError("the codes of a segment do not end where it does")
    return symbols
