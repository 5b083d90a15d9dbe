"""Fused parts of a model: ReLU, sums and the part that feeds them become one operation."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from fedrts.programs.parts import (
    Extent,
    FlattenPart,
    InputPart,
    KnownPart,
    LinksPart,
    MeanPart,
    NormPart,
    PoolPart,
    ReluPart,
    SumPart,
    UnknownPartError,
)

NOWHERE = -1


@dataclass
class Stage:
    """Parts that compute together, and their output."""

    part: KnownPart
    shape: Extent
    source: int
    """The stage whose value it takes."""
    other: int | None = None
    """The stage whose value is added."""
    relu: bool = False
    border: int = 0

    @property
    def wide(self) -> bool:
        return len(self.shape) == 1


def fused(parts: Sequence[KnownPart]) -> list[Stage]:
    """Return stages in the order of computation: ReLU and sums join the part before them."""
    readers = Counter(place for part in parts for place in part.inputs)
    stages: list[Stage] = []
    value: dict[int, int] = {}
    """The stage that gives each part's value."""
    waiting: dict[int, NormPart] = {}
    """Norms that a sum will join."""

    def add(stage: Stage) -> int:
        stages.append(stage)
        return len(stages) - 1

    def settle(place: int) -> int:
        if place in waiting:
            norm = waiting.pop(place)
            value[place] = add(Stage(norm, _form(stages, norm, value[norm.inputs[0]]), value[norm.inputs[0]]))
        return value[place]

    def joins_a_sum(place: int) -> bool:
        return readers[place] == 1 and any(isinstance(part, SumPart) and place in part.inputs for part in parts)

    for place, part in enumerate(parts):
        if isinstance(part, InputPart):
            flat = len(part.shape) == 1 or all(isinstance(other, FlattenPart) for other in parts if place in other.inputs)
            shape = (math.prod(part.shape),) if flat else part.shape
            if len(shape) not in (1, 3):
                raise UnknownPartError(f"inputs of shape {list(part.shape)}")
            value[place] = add(Stage(part, shape, NOWHERE))
            continue
        if isinstance(part, NormPart) and joins_a_sum(place):
            settle(part.inputs[0])
            waiting[place] = part
            continue
        if isinstance(part, SumPart):
            norm_at = next((source for source in part.inputs if source in waiting), None)
            if norm_at is not None and part.inputs[0] != part.inputs[1]:
                norm = waiting.pop(norm_at)
                other = settle(next(source for source in part.inputs if source != norm_at))
                source = value[norm.inputs[0]]
                value[place] = add(Stage(norm, _form(stages, norm, source), source, other))
            else:
                first, second = (settle(source) for source in part.inputs)
                value[place] = add(Stage(part, stages[first].shape, first, second))
            if stages[-1].other is not None and stages[stages[-1].other].wide != stages[-1].wide:
                raise UnknownPartError("a sum of features and images")
            continue
        source = settle(part.inputs[0])
        before = stages[source]
        if isinstance(part, ReluPart):
            if readers[part.inputs[0]] == 1 and not before.relu and isinstance(before.part, LinksPart | NormPart | SumPart):
                before.relu, value[place] = True, source
            else:
                value[place] = add(Stage(part, before.shape, source, relu=True))
        elif isinstance(part, FlattenPart | MeanPart) and before.wide:  # of one position
            value[place] = source
        else:
            value[place] = add(Stage(part, _form(stages, part, source), source))
    for stage in stages:
        if isinstance(stage.part, LinksPart):
            stages[stage.source].border = max(stages[stage.source].border, *stage.part.padding)
    return stages


def _form(stages: Sequence[Stage], part: KnownPart, source: int) -> Extent:
    """Return the shape of a stage's value as the kernels hold it; values with one position are features."""
    wide = stages[source].wide
    if isinstance(part, LinksPart) and wide and (part.kernel, part.padding) != ((1, 1), (0, 0)):
        raise UnknownPartError("a convolution with a window after the image has become features")
    if isinstance(part, NormPart) and part.groups and wide:
        raise UnknownPartError("GroupNorm of features")
    if isinstance(part, PoolPart) and wide:
        raise UnknownPartError("pooling after the image has become features")
    if isinstance(part, MeanPart | FlattenPart) or wide:
        return (math.prod(part.shape),)
    return part.shape
