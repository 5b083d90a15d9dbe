"""Stages of a model, a mask and a batch size as a program: operations, an index of the active links, and places in an arena.

Sixteen samples lie innermost, so that one active link is one multiplication of vectors. Images are `[blocks, height, channels, width, 16]`
with a border of zeros in place of padding; features are "wide": the blocks of 16 samples lie along the width (see `kernels.h`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from ctypes import Array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedrts.errors import InputError
from fedrts.programs.index import LANES, Index, Linked, Numbers
from fedrts.programs.parts import Extent, FlattenPart, LinksPart, MeanPart, NormPart, PoolPart, ReluPart, SumPart
from fedrts.programs.stages import NOWHERE, Stage

if TYPE_CHECKING:
    from fedrts_kernels.structures import Operation, Tensor


@dataclass(frozen=True)
class Criterion:
    """The loss of a batch."""

    squares: bool = False
    """The mean squared error; otherwise cross-entropy."""
    smoothing: float = 0.0


@dataclass(frozen=True)
class Descent:
    """Gradient-descent steps that the program takes itself."""

    momentum: float = 0.0
    decay: float = 0.0
    proximal: float = 0.0
    clip: float = 0.0


@dataclass(frozen=True)
class Places:
    """Where a model's tensors are in the vector of active weights, dense parameters and buffers (`Mask.compact`)."""

    starts: Mapping[str, int]
    bits: Mapping[str, NDArray[np.bool_]]
    """The masks of prunable tensors that are not full."""
    grouped: frozenset[str]
    """Tensors whose links are active with all positions of their channels, or not at all."""
    shapes: Mapping[str, Extent]
    parameters: int
    length: int

    def start(self, name: str | None) -> int:
        return NOWHERE if name is None else self.starts[name]


@dataclass
class Arena:
    """Memory for tensors. Places of one form are reused, so that unwritten parts, the borders, stay 0."""

    floats: int = 0
    spare: dict[tuple[int, ...], list[int]] = field(default_factory=lambda: defaultdict(list))

    def take(self, *form: int) -> int:
        """Reserve a place for `[form]` floats."""
        at = self.floats
        self.floats += -(-math.prod(form) // LANES) * LANES
        return at

    def tensor(self, form: tuple[int, ...]) -> int:
        """Reserve a place for a tensor of the form (blocks, height, channels, width, border)."""
        if self.spare[form]:
            return self.spare[form].pop()
        blocks, height, channels, width, border = form
        return self.take(blocks, height + 2 * border, channels, width + 2 * border, LANES)


@dataclass(frozen=True)
class LinkPlan:
    """A program for one mask and one batch size; threads share it, each with its own arena."""

    program: Array[Operation]
    index: Numbers
    arena: int
    """Floats."""
    samples: int
    outputs: int
    evaluates: bool


class Planner:
    """Builds one plan."""

    def __init__(self, stages: Sequence[Stage], places: Places, samples: int) -> None:
        from fedrts_kernels import structures

        self.c, self.stages, self.places, self.samples = structures, stages, places, samples
        self.operations: list[Operation] = []
        self.index = Index(samples)
        self.blocks = self.index.blocks
        self.arena = Arena()
        self.scratch = 0
        """Floats at the end of the arena that any operation may use: their number depends on the mask, all other places do not."""
        self.linked: dict[int, Linked] = {}
        self.saved: dict[int, int] = {}
        """What norms keep for the backward pass."""
        self.moments: dict[int, int] = {}
        """Statistics that links count for the norm behind them."""
        self.sums = self.arena.take(max(stage.shape[0] for stage in stages), 2, LANES)
        """One place for the sums of any layer: they are used at once."""

    # ---- places ----

    def tensor(self, shape: Extent, border: int = 0) -> Tensor:
        """Reserve a new tensor in the arena."""
        wide = len(shape) == 1
        form = (1, 1, shape[0], self.blocks, 0) if wide else (self.blocks, shape[1], shape[0], shape[2], border)
        return self.c.Tensor(self.arena.tensor(form), *form)

    def free(self, tensor: Tensor) -> None:
        """Release a place for later tensors."""
        form = (tensor.blocks, tensor.height, tensor.channels, tensor.width, tensor.border)
        self.arena.spare[form].append(tensor.at)

    def nothing(self) -> Tensor:
        return self.c.Tensor(NOWHERE)

    def emit(self, kind: type[Any], **fields: Any) -> None:
        self.operations.append(self.c.Operation.of(kind(**fields)))

    def origin(self, tensor: Tensor) -> int:
        """Return where the first position of a tensor's first channel is."""
        return int(tensor.at + tensor.border * (tensor.channels * (tensor.width + 2 * tensor.border) + 1) * LANES)

    def strides(self, tensor: Tensor) -> tuple[int, int, int]:
        """Return the floats from one block, row and channel to the next."""
        channel = (tensor.width + 2 * tensor.border) * LANES
        row = tensor.channels * channel
        return (tensor.height + 2 * tensor.border) * row, row, channel

    # ---- forward ----

    def forward(self, training: bool) -> list[Tensor]:
        """Emit the stages and return their values. Values that the backward pass does not need free their memory."""
        values: list[Tensor] = []
        last_reader = {
            source: place for place, stage in enumerate(self.stages) for source in (stage.source, stage.other) if source is not None
        }
        for place, stage in enumerate(self.stages):
            values.append(self.tensor(stage.shape, stage.border))
            self._emit(place, values, training)
            if not training:
                for source, reader in last_reader.items():
                    if reader == place and source >= 0:
                        self.free(values[source])
        return values

    def _feeds_batch_norm_alone(self, place: int) -> bool:
        readers = [stage for stage in self.stages if place in (stage.source, stage.other)]
        return len(readers) == 1 and isinstance(readers[0].part, NormPart) and not readers[0].part.groups and readers[0].source == place

    def _emit(self, place: int, values: list[Tensor], training: bool) -> None:
        stage, c, out = self.stages[place], self.c, values[place]
        part = stage.part
        source = values[stage.source] if stage.source >= 0 else None
        other = self.nothing() if stage.other is None else values[stage.other]
        if source is None:
            self.emit(c.Input, out=out, wide=stage.wide)
            return
        match part:
            case LinksPart():
                linked = self.linked[place] = self._link(place, part, training)
                in_block, in_row, _ = self.strides(source)
                out_block, out_row, out_channel = self.strides(out)
                sy, sx = (1, 1) if stage.wide else part.stride
                counts = training and not stage.wide and self._feeds_batch_norm_alone(place)
                self.emit(
                    c.Gather,
                    blocks=out.blocks, rows=out.height, cols=out.width, outs=out.channels,
                    in_=self.origin(source), in_block=in_block, in_row=sy * in_row, in_col=sx * LANES,
                    out=self.origin(out), out_block=out_block, out_channel=out_channel, out_row=out_row, out_col=LANES,
                    groups=linked.groups, starts=linked.starts, offsets=linked.offsets,
                    values=self.places.start(part.weight), bias=self.places.start(part.bias),
                    statistics=self._moments(place) if counts else NOWHERE, relu=stage.relu, window=linked.window,
                )  # fmt: skip
            case NormPart():
                if training and not part.groups and self.samples * math.prod(stage.shape[1:]) == 1:
                    raise InputError("BatchNorm has no statistics of one sample: use batches of at least 2")
                self.emit(
                    c.Norm,
                    in_=source, out=out, shortcut=other, **self._norm_fields(place, part, out),
                    running_mean=self.places.start(part.mean), running_var=self.places.start(part.variance),
                    counted=stage.source in self.moments,
                    relu=stage.relu, wide=stage.wide, training=training, eps=part.eps, momentum=part.momentum,
                )  # fmt: skip
            case SumPart() | ReluPart():
                self.emit(c.Sum, first=source, second=other, out=out, relu=stage.relu)
            case PoolPart():
                self.emit(c.Pool, in_=source, out=out, **_window(part))
            case MeanPart() | FlattenPart():
                self.emit(c.Flatten, in_=source, out=out, mean=isinstance(part, MeanPart))
            case _:
                raise TypeError(f"no operation for {part}")

    def _link(self, place: int, part: LinksPart, backward: bool) -> Linked:
        stage = self.stages[place]
        outs, bits = self.places.shapes[part.weight][0], self.places.bits.get(part.weight)
        return self.index.link(stage, self.stages[stage.source], outs, bits, backward, part.weight in self.places.grouped)

    def _moments(self, place: int) -> int:
        self.moments[place] = self.arena.take(self.stages[place].shape[0], 2, LANES)
        return self.moments[place]

    def _norm_fields(self, place: int, part: NormPart, out: Tensor) -> dict[str, int]:
        if place not in self.saved:
            self.saved[place] = self.arena.take(2 * out.blocks * part.groups * LANES if part.groups else 4 * out.channels)
        return {
            "gamma": self.places.start(part.gamma),
            "beta": self.places.start(part.beta),
            "statistics": self.moments.get(self.stages[place].source, self.sums),
            "saved": self.saved[place],
            "groups": part.groups,
        }

    # ---- backward ----

    def backward(self, values: list[Tensor], loss: Criterion) -> None:
        """Emit the loss and the gradients of all parameters."""
        needed = self._trained()
        slopes: dict[int, Tensor] = {}
        last = len(self.stages) - 1
        slope, _ = self._slope(last, slopes)
        self.emit(self.c.Loss, in_=values[last], to=slope, squares=loss.squares, smoothing=loss.smoothing)
        for place in range(last, 0, -1):
            if place in slopes:
                self._emit_back(place, values, slopes, needed)

    def _trained(self) -> set[int]:
        """Return the stages whose value depends on a parameter."""
        found: set[int] = set()
        for place, stage in enumerate(self.stages):
            own = isinstance(stage.part, LinksPart) or (isinstance(stage.part, NormPart) and (stage.part.gamma or stage.part.beta))
            if own or stage.source in found or stage.other in found:
                found.add(place)
        return found

    def _slope(self, place: int, slopes: dict[int, Tensor]) -> tuple[Tensor, bool]:
        """Return where the gradient of a stage's value goes, and whether to add to an existing one."""
        if place in slopes:
            return slopes[place], True
        stage = self.stages[place]
        bare = isinstance(stage.part, LinksPart) and not stage.relu
        slopes[place] = self.tensor(stage.shape, self.linked[place].border if bare else 0)
        return slopes[place], False

    def _emit_back(self, place: int, values: list[Tensor], slopes: dict[int, Tensor], needed: set[int]) -> None:
        stage, c, slope = self.stages[place], self.c, slopes.pop(place)
        part = stage.part
        kept = False
        match part:
            case LinksPart():
                self._links_back(place, values, slope, slopes, needed)
                return
            case NormPart():
                to, add = self._slope(stage.source, slopes)
                shortcut = stage.other is not None
                self.emit(
                    c.NormBack,
                    slope=slope, output=values[place] if shortcut and stage.relu else self.nothing(), in_=values[stage.source], to=to,
                    **self._norm_fields(place, part, values[place]), relu=stage.relu, wide=stage.wide, add=add, eps=part.eps,
                )  # fmt: skip
                if stage.other is not None and stage.other in needed:
                    kept = self._hand_on(slope, None, stage.other, slopes)
            case SumPart() | ReluPart():
                gate = values[place] if stage.relu else None
                targets = [source for source in (stage.source, stage.other) if source is not None and source in needed]
                for target in targets:
                    kept = self._hand_on(slope, gate, target, slopes, may_keep=target == targets[-1] and gate is None) or kept
            case PoolPart() if stage.source in needed:
                to, add = self._slope(stage.source, slopes)
                self.emit(c.PoolBack, slope=slope, out=values[place], in_=values[stage.source], to=to, **_window(part), add=add)
            case MeanPart() | FlattenPart() if stage.source in needed:
                to, add = self._slope(stage.source, slopes)
                self.emit(c.Flatten, in_=to, out=slope, mean=isinstance(part, MeanPart), back=True, add=add)
        if not kept:
            self.free(slope)

    def _hand_on(self, slope: Tensor, gate: Tensor | None, target: int, slopes: dict[int, Tensor], may_keep: bool = True) -> bool:
        """Pass a sum's gradient to its terms; if a term has no gradient yet and the same form, reuse the tensor."""
        stage = self.stages[target]
        if may_keep and gate is None and target not in slopes and not (isinstance(stage.part, LinksPart) and not stage.relu):
            slopes[target] = slope
            return True
        to, add = self._slope(target, slopes)
        self.emit(self.c.ReluBack, slope=slope, output=gate or self.nothing(), to=to, bias=NOWHERE, add=add)
        return False

    def _links_back(self, place: int, values: list[Tensor], slope: Tensor, slopes: dict[int, Tensor], needed: set[int]) -> None:
        stage, c, linked = self.stages[place], self.c, self.linked[place]
        part, source = stage.part, values[stage.source]
        assert isinstance(part, LinksPart)
        bias = self.places.start(part.bias)
        if stage.relu:
            bare = self.tensor(stage.shape, linked.border)
            self.emit(c.ReluBack, slope=slope, output=values[place], to=bare, bias=bias, scratch=self.sums)
            self.free(slope)
            slope = bare
        elif part.bias is not None:
            self.emit(c.ReluBack, slope=slope, output=self.nothing(), to=self.nothing(), bias=bias, scratch=self.sums)
        in_block, in_row, _ = self.strides(source)
        block, row, channel = self.strides(slope)
        sy, sx = (1, 1) if stage.wide else part.stride
        weight = self.places.start(part.weight)
        self.scratch = max(self.scratch, linked.largest * LANES, linked.ordered)
        self.emit(
            c.Weight,
            blocks=slope.blocks, rows=slope.height, cols=slope.width, outs=slope.channels,
            in_=self.origin(source), in_block=in_block, in_row=sy * in_row, in_col=sx * LANES,
            slope=self.origin(slope), slope_block=block, slope_channel=channel, slope_row=row,
            groups=linked.groups, starts=linked.starts, offsets=linked.offsets, scratch=NOWHERE, gradient=weight,
            window=linked.window,
        )  # fmt: skip
        if stage.source in needed:
            to, add = self._slope(stage.source, slopes)
            to_block, to_row, to_channel = self.strides(to)
            self.emit(c.Permute, links=linked.ordered, values=weight, order=linked.order, out=NOWHERE)
            for a, b, rows, cols, groups, starts, offsets, begin in linked.phases:
                self.emit(
                    c.Gather,
                    blocks=to.blocks, rows=rows, cols=cols, outs=to.channels,
                    in_=self.origin(slope), in_block=block, in_row=row, in_col=LANES,
                    out=self.origin(to) + a * to_row + b * LANES, out_block=to_block, out_channel=to_channel,
                    out_row=sy * to_row, out_col=sx * LANES,
                    groups=groups, starts=starts, offsets=offsets, values=begin, bias=NOWHERE, statistics=NOWHERE,
                    values_in_arena=True, add=add, window=linked.window,
                )  # fmt: skip
        self.free(slope)

    # ---- the whole ----

    def plan(self, evaluates: bool = False) -> LinkPlan:
        """Return the plan of everything emitted."""
        base = self.arena.floats
        for operation in self.operations:
            match self.c.KINDS[operation.kind]:
                case self.c.Weight:
                    operation.as_.Weight.scratch = base
                case self.c.Permute:
                    operation.as_.Permute.out = base
                case self.c.Gather if operation.as_.Gather.values_in_arena:
                    operation.as_.Gather.values += base
        program = (self.c.Operation * len(self.operations))(*self.operations)
        return LinkPlan(program, self.index.whole(), base + self.scratch, self.samples, self.stages[-1].shape[0], evaluates)


def trained(stages: Sequence[Stage], places: Places, samples: int, loss: Criterion, descent: Descent | None) -> LinkPlan:
    """Return the program of a training step (without `descent`: of a gradient) on batches of this many samples."""
    planner = Planner(stages, places, samples)
    values = planner.forward(training=True)
    planner.emit(planner.c.Output, in_=values[-1])
    planner.backward(values, loss)
    if descent is not None:
        planner.emit(planner.c.Descent, parameters=places.parameters, **vars(descent))
    return planner.plan()


def evaluated(stages: Sequence[Stage], places: Places, samples: int) -> LinkPlan:
    """Return the program for evaluation outputs."""
    planner = Planner(stages, places, samples)
    values = planner.forward(training=False)
    planner.emit(planner.c.Output, in_=values[-1])
    return planner.plan(evaluates=True)


def _window(part: PoolPart) -> dict[str, int]:
    (height, width), (down, across), (above, left) = part.window, part.stride, part.padding
    sizes = {"height": height, "width": width, "down": down, "across": across, "above": above, "left": left}
    return sizes | {"mean": part.mean, "with_padding": part.with_padding}
