"""Checks of received values in two halves: numbers measured where the tensors are, and verdicts on them here.

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
"""Judges the numbers of a check, one argument each: returns the fault, or None."""


@dataclass(frozen=True)
class Check:
    """Numbers, still on their device, and the verdict on them."""

    verdict: Verdict
    numbers: Tensor | None = None
    """Numbers of any shape and type; None: the verdict needs none."""
    measures: str | None = None
    """Under which its first number is told on, for whoever compares messages."""


@dataclass(frozen=True)
class Finding:
    """The result of one message's checks."""

    fault: str | None = None
    """The first thing that is wrong; None if nothing."""
    measured: Mapping[str, float] = field(default_factory=dict)


def failed(reason: str) -> Check:
    """Return a check that fails without measuring; nothing after it is looked at."""
    return Check(lambda: reason)


def finite(values: Tensor, reason: str) -> Check:
    """Check for NaN and infinity: a sum would keep them. float64 holds the sum of any number of float32."""
    return Check(lambda total: None if math.isfinite(total) else reason, values.sum(dtype=torch.float64))


def at_least(least: float, values: Tensor, reason: str) -> Check:
    """Check a lower bound of all `values`, of which there is at least one."""
    return Check(lambda lowest: None if lowest >= least else reason, values.amin())


def within(most: float, values: Tensor, reason: str) -> Check:
    """Check that no magnitude among `values`, of which there is at least one, exceeds `most`."""
    return Check(lambda lowest, highest: None if lowest >= -most and highest <= most else reason, torch.stack(values.aminmax()))


def none_of(bits: Tensor, reason: str) -> Check:
    """Check that none of the `bits` is set."""
    return Check(lambda one: reason if one else None, bits.any())


def faults(groups: Sequence[Sequence[Check]]) -> list[str | None]:
    """Return the first fault in each of several groups of checks."""
    return [finding.fault for finding in findings(groups)]


def findings(groups: Sequence[Sequence[Check]]) -> list[Finding]:
    """Return the findings of several groups of checks, with one transfer from the device."""
    held = iter(fetched([check.numbers for group in groups for check in group if check.numbers is not None]))
    return [_finding([(check, [] if check.numbers is None else next(held)) for check in group]) for group in groups]


def _finding(checked: Sequence[tuple[Check, list[float]]]) -> Finding:
    reasons = (check.verdict(*numbers) for check, numbers in checked)
    return Finding(
        next((reason for reason in reasons if reason is not None), None),
        {check.measures: numbers[0] for check, numbers in checked if check.measures is not None},
    )


def fetched(tensors: Sequence[Tensor]) -> list[list[float]]:
    """Return the contents of small tensors as flat lists, with one copy from the device per number type."""
    of_type: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        of_type.setdefault(tensor.dtype, []).append(tensor.reshape(-1))
    numbers = {dtype: iter(torch.cat(some).tolist()) for dtype, some in of_type.items()}
    return [[next(numbers[tensor.dtype]) for _ in range(tensor.numel())] for tensor in tensors]
