"""Bits and small integers as bytes, and a reader that trusts none of them.

Every value has exactly one accepted form: varints are minimal and padding bits are zero.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedrts.wire.errors import WireError

Bits = NDArray[np.bool_]
Integers = NDArray[np.integer[Any]]


def bytes_of(bits: int) -> int:
    """Return the number of bytes for `bits` bits."""
    return (bits + 7) // 8


def varint(value: int) -> bytes:
    """Encode LEB128: seven bits per byte, lowest first; the high bit is set on all bytes but the last."""
    head = bytearray()
    while value > 127:
        head.append(value & 127 | 128)
        value >>= 7
    return bytes([*head, value])


def varint_size(value: int) -> int:
    """Exactly `len(varint(value))`."""
    return max(1, (value.bit_length() + 6) // 7)


def pack_bits(bits: Bits) -> bytes:
    """`bits [...]` in row-major order, the first one lowest; the last byte is padded with zeros."""
    return np.packbits(bits, bitorder="little").tobytes()


def split_planes(integers: Integers, width: int) -> Bits:
    """Split the `integers [m]` into bit planes `[width, m]`, with bit p in plane p."""
    planes = np.empty((width, len(integers)), np.bool_)
    for place, plane in enumerate(planes):
        np.not_equal(integers & (1 << place), 0, out=plane)
    return planes


def join_planes(planes: Bits, dtype: np.dtype[Any]) -> Integers:
    """The integers `[m]` of `planes [width, m]`, which `dtype` must hold: inverse of `split_planes`."""
    integers: Integers = np.zeros(planes.shape[1], dtype)
    for place, plane in enumerate(planes):
        shifted = plane.astype(dtype)
        shifted <<= place
        integers |= shifted
    return integers


def pack_integers(integers: Integers, width: int) -> bytes:
    """Pack `integers [m]` of `width` bits each as `width` bit planes in sequence."""
    return pack_bits(split_planes(integers, width))


def raw(tensor: Tensor) -> bytes:
    """Return the bytes of a tensor's values, of any type: numpy has no bfloat16."""
    return tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


class Reader:
    """Reads a payload from front to back; what is missing, surplus or not canonical is a `WireError`.

    Nothing is allocated before the bytes it is made from are known to be there.
    """

    def __init__(self, payload: bytes | memoryview) -> None:
        self._rest = np.frombuffer(payload, np.uint8)

    @property
    def left(self) -> int:
        """The number of unread bytes."""
        return len(self._rest)

    def byte(self) -> int:
        return int(self.take(1)[0])

    def varint(self, most: int) -> int:
        """Read a varint of value `most` or less."""
        value = shift = 0
        while True:
            byte = self.byte()
            value |= (byte & 127) << shift
            if value > most:
                raise WireError(f"a number above {most}")
            if byte < 128:
                break
            shift += 7
            if shift > most.bit_length():  # nothing but zeros can follow, however long the payload
                raise WireError("a number longer than it need be")
        if byte == 0 and shift:
            raise WireError("a number longer than it need be")
        return value

    def bits(self, number: int) -> Bits:
        """Read the next `number` bits and the zeros that pad them to a byte."""
        bits = np.unpackbits(self.take(bytes_of(number)), bitorder="little").view(np.bool_)
        if bits[number:].any():
            raise WireError("padding bits are set")
        return bits[:number]

    def integers(self, number: int, width: int) -> Integers:
        """The next `number` integers of `width` bits each, in the narrowest type that holds them: inverse of `pack_integers`."""
        return join_planes(self.bits(number * width).reshape(width, number), np.min_scalar_type((1 << width) - 1))

    def tensor(self, number: int, dtype: torch.dtype) -> Tensor:
        """Read the next `number` values of a type as a new tensor."""
        if number == 0:
            return torch.zeros(0, dtype=dtype)
        return torch.frombuffer(bytearray(self.take(number * dtype.itemsize).data), dtype=dtype)

    def end(self) -> None:
        """Check that nothing is left."""
        if self.left:
            raise WireError(f"{self.left} bytes too many")

    def take(self, number: int) -> NDArray[np.uint8]:
        """Read the next `number` bytes."""
        if number > self.left:
            raise WireError(f"{number - self.left} bytes missing")
        taken, self._rest = self._rest[:number], self._rest[number:]
        return taken
