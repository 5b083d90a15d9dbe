"""Numbers as words of a ring in which the sum of all clients cannot wrap.

A client's value x in [−clip, clip] is rounded to an integer level, at random up or down so that it is right on average. A
counter is 0 or 1. Values and counters stand in words of at most 32 bits; words are added modulo 2^32, and of every sum only
as many bits are looked at, and travel, as the word is wide.

**No sum wraps.** With b bits a level is in [−o, o] for o = 2^(b−1) − 1, and travels as level + o in [0, 2o]. The sum of m ≤ n
clients is in [0, 2·o·n], and `value_width` is the bit length of 2·o·n: hence below 2^value_width. A counter's sum is in [0, n],
below 2^count_width. Two fields in one word, a below w bits and c above: Σ(a + c·2^w) = Σa + 2^w·Σc, and Σa < 2^w, so that
nothing is carried from one field into the next, and Σc < 2^count_width, so that nothing leaves the word. The same holds for
several counters in a word. What is read of a sum of words is thus the sum of each field, as an integer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from fedrts.errors import InputError
from fedrts.secure.errors import SecureError

_WORD = 32
Words = npt.NDArray[np.uint32]
WholeNumbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Ring:
    """Words for this many values of this many bits, and this many counters, of at most `clients` clients.

    The first counters occupy the bits above the values, one in each word, where both fit; the others share words of their own.
    """

    clients: int
    bits: int
    values: int
    counters: int = 0

    def __post_init__(self) -> None:
        if self.value_width > _WORD or self.clients < 1 or self.bits < 2:
            raise InputError(f"{self.clients} clients with secure.bits = {self.bits} do not fit into words of {_WORD} bits: lower one")

    @property
    def most(self) -> int:
        """The largest level, o."""
        return (1 << self.bits - 1) - 1

    @property
    def value_width(self) -> int:
        return (2 * self.most * self.clients).bit_length()

    @property
    def count_width(self) -> int:
        return self.clients.bit_length()

    @property
    def riding(self) -> int:
        """Counters that share a word with a value."""
        return min(self.values, self.counters) if self.value_width + self.count_width <= _WORD else 0

    @property
    def abreast(self) -> int:
        """Other counters per word."""
        return _WORD // self.count_width

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """(words, bits of each) of the parts of a message: values with a counter above, values alone, counters alone."""
        rest = -(-(self.counters - self.riding) // self.abreast)
        both = (self.riding, self.value_width + self.count_width)
        return both, (self.values - self.riding, self.value_width), (rest, self.abreast * self.count_width)

    @cached_property
    def words(self) -> int:
        return sum(count for count, _ in self.spans)

    @property
    def size(self) -> int:
        """Bytes of all words, packed."""
        return sum(_packed_size(count, width) for count, width in self.spans)

    def encoded(self, levels: WholeNumbers, flags: npt.NDArray[np.bool_]) -> Words:
        """Return one client's words: `levels [values]` within ±o, and `flags [counters]`."""
        if levels.shape != (self.values,) or flags.shape != (self.counters,):
            raise ValueError(f"{levels.shape} levels and {flags.shape} flags where {self.values} and {self.counters} are due")
        if len(levels) and max(int(levels.max()), -int(levels.min())) > self.most:
            raise ValueError(f"a level beyond ±{self.most}")
        first = (levels + self.most).astype(np.uint32)
        first[: self.riding] |= flags[: self.riding].astype(np.uint32) << np.uint32(self.value_width)
        rest = np.zeros((self.spans[2][0], self.abreast), np.uint32)
        rest.reshape(-1)[: self.counters - self.riding] = flags[self.riding :]
        shifts = np.arange(self.abreast, dtype=np.uint32) * np.uint32(self.count_width)
        return np.concatenate([first, np.bitwise_or.reduce(rest << shifts, axis=1)])

    def decoded(self, total: Words, clients: int) -> tuple[WholeNumbers, WholeNumbers, int]:
        """(sum of levels, sums of counters, fields larger than honest ones can be) of the words' sum over this many clients.

        What is beyond is cut to the most that honest clients come to: whoever does not keep to the ring moves no sum further than
        all of them together could.
        """
        total = self.trimmed(total)
        shifts = np.arange(self.abreast, dtype=np.uint32) * np.uint32(self.count_width)
        fields = total[self.values :, None] >> shifts & np.uint32((1 << self.count_width) - 1)
        beside = fields.reshape(-1)[: self.counters - self.riding]
        above = total[: self.riding] >> np.uint32(self.value_width)
        counts = np.concatenate([above, beside]).astype(np.int64)
        raised = (total[: self.values] & np.uint32((1 << self.value_width) - 1)).astype(np.int64)
        highest = 2 * self.most * clients
        beyond = int(np.count_nonzero(raised > highest) + np.count_nonzero(counts > clients))
        return np.minimum(raised, highest) - self.most * clients, np.minimum(counts, clients), beyond

    def trimmed(self, words: Words) -> Words:
        """Return words trimmed to their width in bits."""
        widths = np.repeat(*(np.array(part) for part in zip(*((_mask(width), count) for count, width in self.spans), strict=True)))
        return words & widths.astype(np.uint32)

    def packed(self, words: Words) -> bytes:
        """Pack the words of every part: first the whole bytes of all words, place by place, then the remaining bits."""
        return b"".join(_packed(words[start:stop], width) for (start, stop), width in self._parts())

    def unpacked(self, data: bytes) -> Words:
        if len(data) != self.size:
            raise SecureError(f"{len(data):,} bytes of masked words where {self.size:,} were due")
        found, at = [], 0
        for (start, stop), width in self._parts():
            length = _packed_size(stop - start, width)
            found.append(_unpacked(data[at : at + length], stop - start, width))
            at += length
        return np.concatenate(found)

    def _parts(self) -> list[tuple[tuple[int, int], int]]:
        places = np.cumsum([0, *(count for count, _ in self.spans)]).tolist()
        return list(zip(pairwise(places), (width for _, width in self.spans), strict=True))


def rounded(values: npt.NDArray[np.float64], most: int, drawn: npt.NDArray[np.float32]) -> WholeNumbers:
    """Whole of `values` in units of the clip: clipped to ±1, times `most`, and rounded up or down by `drawn` numbers in [0, 1).

    A value between two levels becomes the upper one with the probability of its distance to the lower one: right on average.
    """
    if not np.isfinite(values).all():
        raise SecureError("the update is not finite, and nothing of it leaves")
    scaled = np.clip(values, -1.0, 1.0) * most
    return np.floor(scaled + drawn).clip(-most, most).astype(np.int64)


def _mask(width: int) -> int:
    return (1 << width) - 1


def _packed_size(count: int, width: int) -> int:
    return count * (width // 8) + -(-count // 8) * (width % 8)


def _packed(words: Words, width: int) -> bytes:
    places = words.astype("<u4").view(np.uint8).reshape(-1, 4)
    whole = [places[:, place].tobytes() for place in range(width // 8)]
    single = [np.packbits((words >> np.uint32(bit) & np.uint32(1)).astype(np.bool_)).tobytes() for bit in range(width // 8 * 8, width)]
    return b"".join([*whole, *single])


def _unpacked(data: bytes, count: int, width: int) -> Words:
    found = np.zeros(count, np.uint32)
    at = 0
    for place in range(width // 8):
        found |= np.frombuffer(data, np.uint8, count, at).astype(np.uint32) << np.uint32(8 * place)
        at += count
    for bit in range(width // 8 * 8, width):
        row = np.unpackbits(np.frombuffer(data, np.uint8, -(-count // 8), at), count=count)
        found |= row.astype(np.uint32) << np.uint32(bit)
        at += -(-count // 8)
    return found
