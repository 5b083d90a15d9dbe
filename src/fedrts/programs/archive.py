"""A trained model as one file whose size follows its density, with everything a device needs to run it without Python.

    data = write(ArchiveContent(about, (3, 32, 32), 10, None, tensors, stages), "float32")
    opened = OpenedArchive.of(data)                         # a WireError if `write` cannot have made it
    module.load_state_dict(opened.tensors(module.state_dict()))

docs/export.md describes the bytes. `kernels/src/fedrts_kernels/archive.c` reads them in C, operations included; here they are only written,
for whoever has Python has the module.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fedrts.programs.parts import FlattenPart, InputPart, LinksPart, MeanPart, NormPart, PoolPart, ReluPart, SumPart
from fedrts.programs.stages import Stage
from fedrts.sparse.arms import ArmBlock, places
from fedrts.wire.errors import WireError
from fedrts.wire.fields.coded import read_positions, write_positions
from fedrts.wire.packing import Reader, raw, varint
from fedrts.wire.value_types import FORMATS

VERSION = 1
MAGIC = b"FRTA"
StoredType = Literal["float32", "float16", "int8"]
"""How weights may be stored; vectors (biases, norms and their statistics) always stay whole."""

_CHECKSUM = struct.Struct("<I")
_VALUE_TYPES: tuple[StoredType, ...] = ("float32", "float16", "int8")
_DTYPES = ("float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
"""Types of tensors; their places here, and those of the value types, are their numbers in the file."""
_MOST = 2**31 - 1
"""Elements of a tensor."""


@dataclass(frozen=True)
class ArchivedTensor:
    """A tensor with all its names and, if its links are grouped, an arm's output and input channels."""

    names: tuple[str, ...]
    tensor: Tensor
    block: ArmBlock | None = None


@dataclass(frozen=True)
class ArchiveContent:
    """The content of an archive."""

    about: Mapping[str, Any]
    """What is needed to build the module again."""
    input_shape: tuple[int, ...]
    outputs: int
    """Numbers that the model gives for a sample; classes, where it tells them apart."""
    normalisation: tuple[Sequence[float], Sequence[float]] | None
    """Scale and shift of each channel by which stored pixels become inputs."""
    tensors: Sequence[ArchivedTensor]
    stages: Sequence[Stage]
    """None of a model that the kernels do not know."""


def write(content: ArchiveContent, value_type: StoredType = "float32") -> bytes:
    """The bytes of an archive; of what is not 0, weights in `value_type`, each rounded to the nearest there is.

    An `OverflowError` names a tensor whose values that type does not have.
    """
    pieces = [MAGIC, bytes([VERSION]), _text(json.dumps(content.about, sort_keys=True))]
    pieces += [_numbers(len(content.input_shape), *content.input_shape, content.outputs)]
    scale, shift = content.normalisation or ((), ())
    pieces += [varint(len(scale)), struct.pack(f"<{2 * len(scale)}f", *scale, *shift), varint(len(content.tensors))]
    for part in content.tensors:
        pieces += _tensor(part, value_type)
    number = {name: place for place, part in enumerate(content.tensors) for name in part.names}
    pieces += [varint(len(content.stages)), *(_stage(stage, number) for stage in content.stages)]
    data = b"".join(pieces)
    return data + _CHECKSUM.pack(zlib.crc32(data))


def _tensor(part: ArchivedTensor, value_type: StoredType) -> Iterator[bytes]:
    """Encode names, type, shape, type of the values, arms, positions, values."""
    tensor = part.tensor.detach().cpu()
    whole = tensor.dtype != torch.float32 or tensor.dim() < 2
    stored = "float32" if whole else value_type
    yield varint(len(part.names)) + b"".join(map(_text, part.names))
    yield bytes([_DTYPES.index(str(tensor.dtype).removeprefix("torch.")), tensor.dim()]) + _numbers(*tensor.shape)
    yield bytes([_VALUE_TYPES.index(stored)]) + _numbers(*(part.block or (0, 0)))
    flat = tensor.reshape(-1)
    if tensor.is_floating_point():
        bits = _spread(_picked(flat != 0, tensor.shape, part.block), tensor.shape, part.block)
        yield write_positions(_picked(bits, tensor.shape, part.block).numpy(), _grid(tensor.shape, part.block))
        flat = flat[bits]
    else:
        yield write_positions(torch.ones(len(flat), dtype=torch.bool).numpy(), tensor.shape)
    if whole:
        yield raw(flat)
    else:
        format = FORMATS[stored]
        short = format.nearest(flat, None, "linf")
        if not bool(format.values(short).isfinite().all()):
            raise OverflowError(f"'{part.names[0]}' has values beyond those of {stored}")
        yield from format.write(format.tensors(short))


def _grid(shape: Sequence[int], block: ArmBlock | None) -> tuple[int, ...]:
    return tuple(shape) if block is None else (shape[0] // block[0], shape[1] // block[1])


def _picked(bits: Tensor, shape: Sequence[int], block: ArmBlock | None) -> Tensor:
    """Return the arms that have one of the links `bits [n]`."""
    if block is None:
        return bits
    arms = torch.zeros(math.prod(_grid(shape, block)), dtype=torch.bool)
    arms[places(shape, block)[bits]] = True
    return arms


def _spread(arms: Tensor, shape: Sequence[int], block: ArmBlock | None) -> Tensor:
    """Return the links `[n]` of arms."""
    return arms if block is None else arms[places(shape, block)]


def _stage(stage: Stage, number: Mapping[str, int]) -> bytes:
    """Encode kind, ReLU, source, other source, and the kind's own fields."""

    def at(name: str | None) -> int:
        return 0 if name is None else 1 + number[name]

    kind, more = 0, b""
    match stage.part:
        case InputPart():
            more = bytes([stage.wide])
        case LinksPart() as p:
            kind = 1
            more = _numbers(at(p.weight), at(p.bias), *p.kernel, *p.stride, *p.padding, *p.dilation, p.groups)
        case NormPart() as p:
            kind, more = 2, _numbers(*map(at, (p.gamma, p.beta, p.mean, p.variance)), p.groups) + struct.pack("<d", p.eps)
        case SumPart() | ReluPart():
            kind = 3
        case PoolPart() as p:
            kind, more = 4, _numbers(*p.window, *p.stride, *p.padding) + bytes([p.mean, p.with_padding])
        case MeanPart():
            kind = 5
        case FlattenPart():
            kind = 6
        case _:
            raise TypeError(f"no operation for {stage.part}")
    return bytes([kind, stage.relu]) + _numbers(max(stage.source, 0), 0 if stage.other is None else 1 + stage.other) + more


def _numbers(*numbers: int) -> bytes:
    return b"".join(map(varint, numbers))


def _text(text: str) -> bytes:
    data = text.encode()
    return varint(len(data)) + data


@dataclass(frozen=True)
class OpenedArchive:
    """An archive with a valid checksum, read up to its description."""

    about: dict[str, Any]
    input_shape: tuple[int, ...]
    outputs: int
    rest: memoryview

    @staticmethod
    def of(data: bytes) -> OpenedArchive:
        """Read the description; a `WireError` if `write` cannot have made the bytes."""
        if len(data) < len(MAGIC) + 1 + _CHECKSUM.size or not data.startswith(MAGIC):
            raise WireError("this is no archive of a model")
        if data[len(MAGIC)] != VERSION:
            raise WireError(f"format version {data[len(MAGIC)]} is not known here (ours is {VERSION})")
        if zlib.crc32(data[: -_CHECKSUM.size]) != _CHECKSUM.unpack(data[-_CHECKSUM.size :])[0]:
            raise WireError("the checksum is wrong: the file is damaged")
        reader = Reader(memoryview(data)[len(MAGIC) + 1 : -_CHECKSUM.size])
        try:
            about = json.loads(_read_text(reader))
        except (ValueError, RecursionError) as error:
            raise WireError("its description is no JSON") from error
        if not isinstance(about, dict):
            raise WireError("its description is no JSON object")
        shape = tuple(reader.varint(_MOST) for _ in range(reader.varint(8)))
        outputs = reader.varint(_MOST)
        reader.take(8 * reader.varint(reader.left // 8))
        return OpenedArchive(about, shape, outputs, reader.take(reader.left).data)

    def tensors(self, wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the state dict of a model whose tensors have these shapes; other shapes are refused."""
        reader, found = Reader(self.rest), dict[str, Tensor]()
        for _ in range(reader.varint(reader.left)):
            names = tuple(_read_text(reader) for _ in range(reader.varint(reader.left)))
            like = wanted.get(names[0]) if names else None
            if like is None:
                raise WireError(f"the model has no tensor {names[:1]}")
            tensor = _read_tensor(reader, names[0], like)
            for name in names:
                if name not in wanted or wanted[name].shape != tensor.shape or name in found:
                    raise WireError(f"the model has no such tensor '{name}', or twice")
                found[name] = tensor
        if missing := [name for name in wanted if name not in found]:
            raise WireError(f"tensor '{missing[0]}' is missing")
        return found


def _read_tensor(reader: Reader, name: str, like: Tensor) -> Tensor:
    dtype = reader.byte()
    shape = tuple(reader.varint(_MOST) for _ in range(reader.byte()))
    stored = reader.byte()
    if dtype >= len(_DTYPES) or stored >= len(_VALUE_TYPES):
        raise WireError(f"tensor '{name}' is of a type that is not known")
    kind: torch.dtype = getattr(torch, _DTYPES[dtype])
    if shape != tuple(like.shape) or kind != like.dtype:
        raise WireError(f"tensor '{name}' is {_DTYPES[dtype]} of shape {shape}; the model's is {like.dtype} of {tuple(like.shape)}")
    sides = reader.varint(_MOST), reader.varint(_MOST)
    block = None if sides == (0, 0) else sides
    if block is not None and (len(shape) < 2 or not all(sides) or shape[0] % sides[0] or shape[1] % sides[1]):
        raise WireError(f"tensor '{name}' has arms that do not divide it")
    bits = _spread(torch.from_numpy(read_positions(reader, _grid(shape, block))), shape, block)
    count = int(bits.count_nonzero())
    if kind == torch.float32:
        format = FORMATS[_VALUE_TYPES[stored]]
        values = format.values(format.of(format.read(reader, count, None), None)).float()
    else:
        values = reader.tensor(count, kind)
    flat = torch.zeros(len(bits), dtype=kind)
    flat[bits] = values
    return flat.view(shape)


def _read_text(reader: Reader) -> str:
    try:
        return bytes(reader.take(reader.varint(reader.left))).decode()
    except UnicodeDecodeError as error:
        raise WireError("a text is no UTF-8") from error
