"""Types of values on the wire: full precision, or fewer bits. A table entry holds everything about a type."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedrts.sparse import random
from fedrts.wire import levels
from fedrts.wire.checks import Check, at_least, within
from fedrts.wire.packing import Reader, raw
from fedrts.wire.quantise import LEVELS, Norm, Quantised, blocks_of

RoundedType = Literal["int8", "int6", "int4", "int2"]
"""Types with scales, in which values are right on average."""
ValueType = Literal["float32", "float16", RoundedType]

Groups = Sequence[int] | None
"""Lengths of what shares a scale; None for blocks of one length."""


class ValueFormat(ABC):
    """A shorter type than the model's."""

    lossless: ClassVar[bool] = False
    scaled: ClassVar[bool] = False
    """Do groups of values share a scale?"""
    regular: ClassVar[bool] = True
    """Do all messages of as many values have the same length?"""

    @property
    @abstractmethod
    def bits(self) -> int:
        """Bits per value; an upper bound if lengths differ."""

    @abstractmethod
    def shorten(self, values: Tensor, key: int | Tensor, groups: Groups, norm: Norm) -> Tensor | Quantised:
        """Convert `values [m]` to this type, or `[k, m]` of several clients; `key`, or `[k]`, determines random rounding."""

    @abstractmethod
    def nearest(self, values: Tensor, groups: Groups, norm: Norm) -> Tensor | Quantised:
        """Convert `values [..., m]` to the nearest values of this type: biased, but never farther off than random rounding."""

    @abstractmethod
    def values(self, short: Tensor | Quantised) -> Tensor:
        """Return the decoded values `[..., m]`."""

    @abstractmethod
    def shapes(self, count: int, groups: Groups) -> list[tuple[int, torch.dtype]]:
        """Return (number, type) of the tensors that carry `count` values."""

    @abstractmethod
    def tensors(self, short: Tensor | Quantised) -> list[Tensor]:
        """Return these tensors."""

    @abstractmethod
    def of(self, tensors: Sequence[Tensor], groups: Groups) -> Tensor | Quantised:
        """Inverse of `tensors`."""

    def write(self, tensors: Sequence[Tensor]) -> Iterator[bytes]:
        """Return the bytes of these tensors."""
        return map(raw, tensors)

    def read(self, reader: Reader, count: int, groups: Groups) -> list[Tensor]:
        """Inverse of `write`, for `count` values."""
        return [reader.tensor(number, dtype) for number, dtype in self.shapes(count, groups)]

    def size(self, tensors: Sequence[Tensor]) -> int:
        """Exactly the bytes that `write` gives."""
        return sum(tensor.nbytes for tensor in tensors)

    def most(self, count: int, groups: Groups) -> int:
        """Return the largest number of bytes of `count` values."""
        return sum(number * dtype.itemsize for number, dtype in self.shapes(count, groups))

    def checks(self, tensors: Sequence[Tensor], reason: str) -> Iterator[Check]:
        """Return the checks of received finite tensors, of one client or with several as leading axis, none of them empty."""
        yield from ()


@dataclass(frozen=True)
class Floats(ValueFormat):
    """A floating-point type."""

    dtype: torch.dtype

    @property
    def bits(self) -> int:
        return 8 * self.dtype.itemsize

    def shorten(self, values: Tensor, key: int | Tensor, groups: Groups, norm: Norm) -> Tensor:
        return values.to(self.dtype)

    def nearest(self, values: Tensor, groups: Groups, norm: Norm) -> Tensor:
        return values.to(self.dtype)

    def values(self, short: Tensor | Quantised) -> Tensor:
        assert isinstance(short, Tensor)
        return short

    def shapes(self, count: int, groups: Groups) -> list[tuple[int, torch.dtype]]:
        return [(count, self.dtype)]

    def tensors(self, short: Tensor | Quantised) -> list[Tensor]:
        if not isinstance(short, Tensor):
            raise TypeError(f"{type(short).__name__} are no values of {self.dtype}")
        return [short]

    def of(self, tensors: Sequence[Tensor], groups: Groups) -> Tensor:
        return tensors[0]


class Whole(Floats):
    """The model's own type: nothing is lost."""

    lossless = True


@dataclass(frozen=True)
class Rounded(ValueFormat):
    """Unbiased rounding to levels −top … top, one byte each, with a scale for every group."""

    top: int = LEVELS
    scaled = True

    @property
    def bits(self) -> int:
        return (2 * self.top).bit_length()

    def shorten(self, values: Tensor, key: int | Tensor, groups: Groups, norm: Norm) -> Quantised:
        return Quantised.of(values, key, groups, norm, self.top)

    def nearest(self, values: Tensor, groups: Groups, norm: Norm) -> Quantised:
        return Quantised.nearest(values, groups, norm, self.top)

    def values(self, short: Tensor | Quantised) -> Tensor:
        assert isinstance(short, Quantised)
        return short.values()

    def shapes(self, count: int, groups: Groups) -> list[tuple[int, torch.dtype]]:
        return [(count, torch.int8), (blocks_of(count) if groups is None else len(groups), torch.float32)]

    def tensors(self, short: Tensor | Quantised) -> list[Tensor]:
        if not isinstance(short, Quantised) or short.top != self.top:
            raise TypeError(f"{type(short).__name__} are no values of {self.bits} bits")
        return [short.levels, short.scales]

    def of(self, tensors: Sequence[Tensor], groups: Groups) -> Quantised:
        levels, scales = tensors
        return Quantised(levels, scales, None if groups is None else tuple(groups), self.top)

    def checks(self, tensors: Sequence[Tensor], reason: str) -> Iterator[Check]:
        levels, scales = tensors
        yield within(self.top, levels, reason)
        yield at_least(0, scales, reason)


class Coded(Rounded):
    """The same with levels near their entropy, and two roundings decided by each hash: what coding takes is saved there."""

    regular = False

    def shorten(self, values: Tensor, key: int | Tensor, groups: Groups, norm: Norm) -> Quantised:
        return Quantised.of(values, key, groups, norm, self.top, random.uniform_halves)

    def write(self, tensors: Sequence[Tensor]) -> Iterator[bytes]:
        values, scales = tensors
        yield levels.encode(values, self.top)
        yield raw(scales)

    def read(self, reader: Reader, count: int, groups: Groups) -> list[Tensor]:
        _, (scales, dtype) = self.shapes(count, groups)
        return [torch.from_numpy(levels.decode(reader, count, self.top)), reader.tensor(scales, dtype)]

    def size(self, tensors: Sequence[Tensor]) -> int:
        values, scales = tensors
        return levels.size(values, self.top) + scales.nbytes

    def most(self, count: int, groups: Groups) -> int:
        _, (scales, dtype) = self.shapes(count, groups)
        return levels.most(count, self.top) + scales * dtype.itemsize


FORMATS: dict[ValueType, ValueFormat] = {
    "float32": Whole(torch.float32),
    "float16": Floats(torch.float16),
    "int8": Rounded(),
    "int6": Coded(31),
    "int4": Coded(7),
    "int2": Coded(1),
}

WHOLE: ValueType = next(name for name, format in FORMATS.items() if format.lossless)
"""The type in which nothing is lost."""
