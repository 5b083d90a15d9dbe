"""How values may travel: as they are, or in fewer bits. An entry of the table says all that there is to know of a type."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedrts.wire.checks import Check, at_least
from fedrts.wire.quantise import LEVELS, Norm, Quantised, blocks_of

ValueType = Literal["float32", "float16", "int8"]

Groups = Sequence[int] | None
"""Lengths of what shares a scale; None for blocks of one length."""


class ValueFormat(ABC):
    """Values in a shorter type than the model's."""

    lossless: ClassVar[bool] = False
    scaled: ClassVar[bool] = False
    """Do groups of values share a scale?"""

    @property
    @abstractmethod
    def bits(self) -> int:
        """Of one value."""

    @abstractmethod
    def shorten(self, values: Tensor, key: int, groups: Groups, norm: Norm) -> Tensor | Quantised:
        """`values [m]` in this type; where they are rounded at random, `key` decides."""

    @abstractmethod
    def values(self, short: Tensor | Quantised) -> Tensor:
        """What was meant `[m]`."""

    @abstractmethod
    def shapes(self, count: int, groups: Groups) -> list[tuple[int, torch.dtype]]:
        """(number, type) of the tensors by which `count` values travel."""

    @abstractmethod
    def tensors(self, short: Tensor | Quantised) -> list[Tensor]:
        """These tensors."""

    @abstractmethod
    def of(self, tensors: Sequence[Tensor], groups: Groups) -> Tensor | Quantised:
        """Inverse of `tensors`."""

    def checks(self, tensors: Sequence[Tensor], reason: str) -> Iterator[Check]:
        """What must be true of finite tensors that somebody sent, none of them empty."""
        yield from ()


@dataclass(frozen=True)
class Floats(ValueFormat):
    """A floating-point type."""

    dtype: torch.dtype

    @property
    def bits(self) -> int:
        return 8 * self.dtype.itemsize

    def shorten(self, values: Tensor, key: int, groups: Groups, norm: Norm) -> Tensor:
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
    """The model's own type, of which the entry is only the usual one: nothing is lost."""

    lossless = True


class Rounded(ValueFormat):
    """8 bits and a scale for every group, right on average."""

    scaled = True
    bits = 8

    def shorten(self, values: Tensor, key: int, groups: Groups, norm: Norm) -> Quantised:
        return Quantised.of(values, key, groups, norm)

    def values(self, short: Tensor | Quantised) -> Tensor:
        assert isinstance(short, Quantised)
        return short.values()

    def shapes(self, count: int, groups: Groups) -> list[tuple[int, torch.dtype]]:
        return [(count, torch.int8), (blocks_of(count) if groups is None else len(groups), torch.float32)]

    def tensors(self, short: Tensor | Quantised) -> list[Tensor]:
        if not isinstance(short, Quantised):
            raise TypeError(f"{type(short).__name__} are no values of 8 bits")
        return [short.levels, short.scales]

    def of(self, tensors: Sequence[Tensor], groups: Groups) -> Quantised:
        levels, scales = tensors
        return Quantised(levels, scales, None if groups is None else tuple(groups))

    def checks(self, tensors: Sequence[Tensor], reason: str) -> Iterator[Check]:
        levels, scales = tensors
        yield at_least(-LEVELS, levels, reason)
        yield at_least(0, scales, reason)


FORMATS: dict[ValueType, ValueFormat] = {"float32": Whole(torch.float32), "float16": Floats(torch.float16), "int8": Rounded()}
