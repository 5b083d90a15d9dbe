"""A model for clients that hold an earlier one: the changes of every broadcast since then."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedrts.sparse.cost import Book
from fedrts.wire.checks import Check, failed
from fedrts.wire.errors import WireError
from fedrts.wire.fields.contract import Frame, Payload, Steps, carried
from fedrts.wire.fields.largest import Largest
from fedrts.wire.packing import Reader, raw

_WHOLE = 255
"""The number of steps where none travel, but the model."""


@dataclass(frozen=True)
class Missed:
    """The dense model `of` that all clients share, as the steps that a client lacks: one for each broadcast since its last.

    A client without the model, or for whom that is less, gets all of it. The sender's tensors have the steps of the last `KEPT`
    broadcasts as `step_0`, `step_1`, … `[KEPT, …]`, newest last, and how many there are as `steps`.
    """

    step: Largest
    of: str = "public"
    KEPT: ClassVar[int] = 32

    def begun(self, model: Tensor, frame: Frame) -> dict[str, Tensor]:
        """Return the tensors of a sender that has broadcast only this model `[n]`."""
        empty = self.step.tensors(self.step.take({self.step.of: model}, frame))
        rings = {f"step_{place}": torch.zeros(self.KEPT, *part.shape, dtype=part.dtype) for place, part in enumerate(empty)}
        return {self.of: model.clone(), "steps": torch.tensor([0]), **{name: ring.to(model.device) for name, ring in rings.items()}}

    def advanced(self, tensors: Mapping[str, Tensor], model: Tensor, frame: Frame) -> dict[str, Tensor]:
        """Return the same tensors one broadcast later: a step towards this model."""
        frame = _from(tensors[self.of], frame)
        step = self.step.take({self.step.of: model}, frame)
        rings = {}
        for place, part in enumerate(self.step.tensors(step)):
            name = f"step_{place}"
            rings[name] = torch.cat([tensors[name][1:], part[None].to(tensors[name].device)])
        return {self.of: self.step.open(step, frame), "steps": (tensors["steps"] + 1).clamp(max=self.KEPT), **rings}

    def take(self, tensors: Mapping[str, Tensor], frame: Frame) -> Steps:
        count = int(tensors["steps"])
        rings = [tensors[name] for name in sorted(tensors) if name.startswith("step_")]
        steps = (self.step.of_tensors([ring[place] for ring in rings], frame) for place in range(self.KEPT - count, self.KEPT))
        return Steps(tensors[self.of].clone(), tuple(steps))

    def open(self, payload: Payload, frame: Frame) -> Tensor:
        """Return the model; if it came as steps, starting from the one that `frame` has as reference."""
        series = carried(payload, Steps)
        if series.whole is not None:
            return series.whole
        if frame.reference is None:
            raise WireError("steps lead nowhere without the model that they start from")
        model = frame.reference
        for step in series.steps:
            model = self.step.open(step, _from(model, frame))
        return model

    def put(self, payload: Payload, frame: Frame) -> Tensor:
        return self.open(payload, frame).clone()

    def write(self, payload: Payload, frame: Frame) -> Iterator[bytes]:
        sent = self._sent(carried(payload, Steps), frame)
        yield bytes([_WHOLE if sent.whole is not None else len(sent.steps)])
        if sent.whole is not None:
            yield raw(sent.whole)
        for step in sent.steps:
            yield from self.step.write(step, frame)

    def read(self, reader: Reader, frame: Frame) -> Steps:
        count = reader.byte()
        if count == _WHOLE:
            return Steps(reader.tensor(frame.layout.length, frame.dtype).to(frame.mask.bits.device), ())
        if count > self.KEPT:
            raise WireError(f"{count} steps where there are at most {self.KEPT}")
        return Steps(None, tuple(self.step.read(reader, frame) for _ in range(count)))

    def size(self, payload: Payload, frame: Frame) -> int:
        sent = self._sent(carried(payload, Steps), frame)
        return 1 + (self._whole(frame) if sent.whole is not None else self._of_steps(sent, frame))

    def most(self, frame: Frame) -> int:
        return 1 + self._whole(frame)

    def checks(self, payload: Payload, frame: Frame) -> Iterator[Check]:
        yield failed(f"'{self.of}' is for downloads")

    def charged(self, book: Book) -> float:
        return self.step.charged(book)

    def _sent(self, series: Steps, frame: Frame) -> Steps:
        """Return what travels to a receiver that missed this many broadcasts: the steps or the whole model, whichever is shorter."""
        if series.whole is None:
            return series
        if frame.missed is not None and frame.missed <= len(series.steps):
            steps = Steps(None, series.steps[len(series.steps) - frame.missed :])
            if self._of_steps(steps, frame) < self._whole(frame):
                return steps
        return Steps(series.whole, ())

    def _of_steps(self, series: Steps, frame: Frame) -> int:
        return sum(self.step.size(step, frame) for step in series.steps)

    def _whole(self, frame: Frame) -> int:
        return frame.layout.length * frame.dtype.itemsize


def _from(model: Tensor, frame: Frame) -> Frame:
    """Return the frame of a step that starts from this model."""
    return Frame(frame.layout, frame.mask, frame.dtype, reference=model)
