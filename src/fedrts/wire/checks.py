"""What is wrong with something that was sent, in two halves: numbers measured where its tensors are, and verdicts on them here.

To look at a number on a device is to wait for the device. A check only names the numbers that it needs, so that the checks of any
number of messages wait together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

Verdict = Callable[..., str | None]
"""Of the numbers of a check, one argument each: what they say against it; None if nothing."""


@dataclass(frozen=True)
class Check:
    """A few numbers, still where they were measured, and the verdict on them."""

    verdict: Verdict
    numbers: Tensor | None = None
    """Of any shape and type; None: the verdict needs none."""
    measures: str | None = None
    """Under which its first number is told on, for whoever compares messages."""


@dataclass(frozen=True)
class Finding:
    """What the checks of one message came to."""

    fault: str | None = None
    """The first thing that is wrong; None if nothing."""
    measured: Mapping[str, float] = field(default_factory=dict)


def failed(reason: str) -> Check:
    """What is known to be wrong without measuring; nothing that follows it is looked at."""
    return Check(lambda: reason)


def finite(values: Tensor, reason: str) -> Check:
    """No NaN, no infinity: a sum keeps them, and float64 holds that of any number of float32."""
    return Check(lambda total: None if math.isfinite(total) else reason, values.sum(dtype=torch.float64))


def at_least(least: float, values: Tensor, reason: str) -> Check:
    """All of `values`, of which there is one at least."""
    return Check(lambda lowest: None if lowest >= least else reason, values.amin())


def within(most: float, values: Tensor, reason: str) -> Check:
    """No magnitude among `values`, of which there is one at least, is larger than `most`."""
    return Check(lambda lowest, highest: None if lowest >= -most and highest <= most else reason, torch.stack(values.aminmax()))


def none_of(bits: Tensor, reason: str) -> Check:
    """None of the `bits` is set."""
    return Check(lambda one: reason if one else None, bits.any())


def faults(groups: Sequence[Sequence[Check]]) -> list[str | None]:
    """The first thing that is wrong in each of several groups of checks."""
    return [finding.fault for finding in findings(groups)]


def findings(groups: Sequence[Sequence[Check]]) -> list[Finding]:
    """What each of several groups of checks came to; their numbers come from the device together."""
    held = iter(fetched([check.numbers for group in groups for check in group if check.numbers is not None]))
    return [_finding([(check, [] if check.numbers is None else next(held)) for check in group]) for group in groups]


def _finding(checked: Sequence[tuple[Check, list[float]]]) -> Finding:
    reasons = (check.verdict(*numbers) for check, numbers in checked)
    return Finding(
        next((reason for reason in reasons if reason is not None), None),
        {check.measures: numbers[0] for check, numbers in checked if check.measures is not None},
    )


def fetched(tensors: Sequence[Tensor]) -> list[list[float]]:
    """What small tensors hold, each as a flat list: one copy from the device for every type of numbers among them."""
    of_type: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        of_type.setdefault(tensor.dtype, []).append(tensor.reshape(-1))
    numbers = {dtype: iter(torch.cat(some).tolist()) for dtype, some in of_type.items()}
    return [[next(numbers[tensor.dtype]) for _ in range(tensor.numel())] for tensor in tensors]
