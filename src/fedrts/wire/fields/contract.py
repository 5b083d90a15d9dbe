"""The interface of a message's fields, their payloads, and what both sides of a message know."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from fedrts.sparse.cost import Book
from fedrts.sparse.layout import Layout
from fedrts.sparse.mask import Mask
from fedrts.wire.checks import Check
from fedrts.wire.packing import Reader
from fedrts.wire.quantise import Quantised


@dataclass(frozen=True)
class Selection:
    """Some of `size` links: ascending `indices [..., q]`, with their `values [..., q]` where those travel too."""

    indices: Tensor
    size: int
    values: Tensor | None = None

    @property
    def names(self) -> Selection:
        """The same links without their values."""
        return Selection(self.indices, self.size)


@dataclass(frozen=True)
class Short:
    """Values in a shorter type, and the statistics behind them as they are."""

    values: Tensor | Quantised
    statistics: Tensor


@dataclass(frozen=True)
class OwnValues:
    """Values on a mask of the sender's own."""

    mask: Mask
    values: Tensor | Short


@dataclass(frozen=True)
class Steps:
    """The current model, and the changes that led to it."""

    whole: Tensor | None
    """`[n]`; None for a receiver that holds an earlier one, and gets what changed since."""
    steps: tuple[OwnValues, ...]
    """The last ones, in the order of time."""


Payload = Tensor | Selection | Short | OwnValues | Steps
"""What travels as one field."""
Message = dict[str, Payload]
PayloadKind = TypeVar("PayloadKind", Tensor, Selection, Short, OwnValues, Steps)


def carried(payload: Payload, kind: type[PayloadKind]) -> PayloadKind:
    """The payload of a field that carries this kind. Another is a mistake of ours: what others sent was checked before."""
    if not isinstance(payload, kind):
        raise TypeError(f"{type(payload).__name__} in a field that carries {kind.__name__}")
    return payload


def changed(payload: Payload, change: Callable[[Tensor], Tensor]) -> Payload:
    """Return a payload with each of its tensors changed, such as those of one client out of several clients' payload."""
    match payload:
        case Tensor():
            return change(payload)
        case Selection():
            return replace(payload, indices=change(payload.indices), values=None if payload.values is None else change(payload.values))
        case Short(Quantised() as values):
            shorter = replace(values, levels=change(values.levels), scales=change(values.scales))
            return Short(shorter, change(payload.statistics))
        case Short(Tensor() as values):
            return Short(change(values), change(payload.statistics))
    raise TypeError(f"{type(payload).__name__} is of one client alone")


def own_shape(tensor: Tensor, clients: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of one client's part of a tensor with this leading axis; the whole shape if the axis is another."""
    shape = tuple(tensor.shape)
    return shape[len(clients) :] if shape[: len(clients)] == clients else shape


@dataclass(frozen=True)
class Frame:
    """What sender and receiver of a message both know."""

    layout: Layout
    mask: Mask
    dtype: torch.dtype = torch.float32
    """Type of the model's weights."""
    key: int = 0
    """Key of stochastic rounding."""
    keys: Tensor | None = None
    """The keys of several clients side by side `[clients]`, as `sparse.random` takes them."""
    reference: Tensor | None = None
    """The weights on the mask `[A + n − P]` as the client received them: quantised uploads are changes from these."""

    missed: int | None = None
    """How many broadcasts there were since the receiver's last one, with this one; None where it had none."""

    @property
    def on_mask(self) -> int:
        """A model's values on the mask: `A + n − P`."""
        return self.mask.number + self.layout.length - self.layout.links

    @property
    def statistics(self) -> int:
        """How many of a model's values, the last ones, are buffers; these are never quantised."""
        return self.layout.length - self.layout.parameters


RESIDUAL = "residual"
"""The client's tensor `[N_all]` of what its uploads so far have not told."""


def owed(change: Tensor, tensors: Mapping[str, Tensor], frame: Frame) -> Tensor:
    """A `change [A + N_all − P]` of the parameters on the mask with what earlier uploads left of theirs, but for links off the mask."""
    return change + frame.mask.compact(tensors[RESIDUAL]) if RESIDUAL in tensors else change


class Field(Protocol):
    """One entry of a message."""

    def take(self, tensors: Mapping[str, Tensor], frame: Frame) -> Payload:
        """The payload, from a sender's tensors by name."""
        ...

    def open(self, payload: Payload, frame: Frame) -> Payload:
        """Return the meaning of a payload: a tensor or a `Selection`."""
        ...

    def put(self, payload: Payload, frame: Frame) -> Tensor:
        """The receiver's own tensor of a payload."""
        ...

    def write(self, payload: Payload, frame: Frame) -> Iterator[bytes]:
        """The payload as bytes, piece by piece."""
        ...

    def read(self, reader: Reader, frame: Frame) -> Payload:
        """The payload again; a `WireError` where the bytes can be none."""
        ...

    def size(self, payload: Payload, frame: Frame) -> int:
        """Exactly the number of bytes that `write` gives."""
        ...

    def most(self, frame: Frame) -> int:
        """No payload is longer: what need not be read at all."""
        ...

    def checks(self, payload: Payload, frame: Frame) -> Iterator[Check]:
        """Return the checks of a received payload; a failed check that needs no numbers is the last one."""
        ...

    def charged(self, book: Book) -> float:
        """Bytes by one of the accountings on paper."""
        ...


@runtime_checkable
class SideBySide(Protocol):
    """A field in which the payloads of several clients can be one: their tensors have the clients as leading axis.

    All that it does with tensors and payloads it does along the last axis.
    """

    def checks(self, payload: Payload, frame: Frame, clients: tuple[int, ...] = ()) -> Iterator[Check]:
        """Return the checks of a received payload or, with a leading axis of so many `clients`, of all of theirs."""
        ...

    def sizes(self, payload: Payload, frame: Frame) -> Sequence[int]:
        """Return the `size` of the payload of each of several clients."""
        ...


@runtime_checkable
class FeedsBack(Protocol):
    """A field of an upload whose sender may remember what it left out."""

    @property
    def feedback(self) -> bool:
        """Whether it does."""
        ...

    def left(self, payload: Payload, tensors: Mapping[str, Tensor], frame: Frame) -> Tensor:
        """Return the next residual `[N_all]`: the change plus the last residual, minus the payload; 0 off the mask."""
        ...
