"""Checks of received values in two halves: numbers measured where the tensors are, and verdicts on them here.

To look at a number on a device is to wait for the device. A check only names the numbers that it needs, so that the checks of any
number of messages wait together. A check is of one message, or of the messages of several clients whose tensors have the clients as
leading axis: what is measured and what is wrong are found for all of them at once, and a reason is only worded for those at fault.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import torch
from torch import Tensor

Measurements = np.ndarray
"""What a check measured, float64 `[clients, m]`."""


@dataclass(frozen=True)
class Check:
    """Measurements, still on their device, and what is wrong with them."""

    wrong: Callable[[Measurements], np.ndarray]
    """Which clients' numbers are wrong: `[clients, m]` → bool `[clients]`."""
    reason: Callable[..., str]
    """The fault in words, of the numbers of one client that are wrong: an argument each."""
    numbers: Tensor | None = None
    """`[…]` or `[clients, …]` of any type that float64 can tell apart where it matters; None: the fault is certain."""
    measures: str | None = None
    """Under which its first number is told on, for whoever compares messages."""


@dataclass(frozen=True)
class Findings:
    """The result of the checks of one message or of several clients' messages."""

    faults: Mapping[int, str] = field(default_factory=dict)
    """The first thing that is wrong with each message at fault, by its place."""
    measured: Mapping[str, list[float]] = field(default_factory=dict)
    """What was measured of every message, by name."""

    def of(self, places: Sequence[int]) -> Findings:
        """Return the findings of some of the messages, which then have the places 0, 1, …"""
        faults = {place: self.faults[was] for place, was in enumerate(places) if was in self.faults}
        return Findings(faults, {name: [numbers[place] for place in places] for name, numbers in self.measured.items()})


def failed(reason: str) -> Check:
    """Return a check that fails without measuring; nothing after it is looked at."""
    return Check(lambda numbers: np.ones(len(numbers), np.bool_), lambda *_: reason)


def measuring(numbers: Tensor, name: str) -> Check:
    """Return a check that never fails: its `numbers` are told on."""
    return Check(lambda numbers: np.zeros(len(numbers), np.bool_), lambda *_: "", numbers, name)


def finite(values: Tensor, reason: str) -> Check:
    """Check for NaN and infinity: a sum would keep them. float64 holds the sum of any number of float32."""
    return Check(lambda total: ~np.isfinite(total[:, 0]), lambda _: reason, values.sum(-1, dtype=torch.float64))


def at_least(least: float, values: Tensor, reason: str) -> Check:
    """Check a lower bound of all `values [..., m]`, m ≥ 1."""
    return Check(lambda lowest: ~(lowest[:, 0] >= least), lambda _: reason, values.amin(-1))


def within(most: float, values: Tensor, reason: str) -> Check:
    """Check that no magnitude among `values [..., m]`, m ≥ 1, exceeds `most`."""
    extremes = torch.stack(values.aminmax(dim=-1), dim=-1)
    return Check(lambda ends: ~((ends[:, 0] >= -most) & (ends[:, 1] <= most)), lambda *_: reason, extremes)


def none_of(bits: Tensor, reason: str) -> Check:
    """Check that none of the `bits [..., m]` is set."""
    return Check(lambda one: one[:, 0] != 0, lambda _: reason, bits.any(-1))


def faults(groups: Sequence[Sequence[Check]]) -> list[str | None]:
    """Return the first fault of each of several messages, given their checks."""
    return [found.faults.get(0) for found in findings(groups, [1] * len(groups))]


def findings(groups: Sequence[Sequence[Check]], clients: Sequence[int]) -> list[Findings]:
    """Return the findings of several groups of checks, each of so many clients' messages, with one transfer from the device."""
    held = iter(fetched([check.numbers for group in groups for check in group if check.numbers is not None]))
    found = []
    for group, many in zip(groups, clients, strict=True):
        nothing = np.zeros((many, 0))
        checked = [(check, nothing if check.numbers is None else np.array(next(held)).reshape(many, -1)) for check in group]
        with np.errstate(invalid="ignore"):  # numbers of what has already failed a check may be none
            faults = _faults(checked)
        found.append(Findings(faults, {check.measures: of[:, 0].tolist() for check, of in checked if check.measures is not None}))
    return found


def _faults(checked: Sequence[tuple[Check, Measurements]]) -> dict[int, str]:
    """Return the reason of the first check that each message at fault fails, by its place."""
    faults: dict[int, str] = {}
    for check, numbers in checked:
        for place in np.flatnonzero(check.wrong(numbers)).tolist():
            if place not in faults:
                faults[place] = check.reason(*numbers[place].tolist())
    return faults


def fetched(tensors: Sequence[Tensor]) -> list[list[float]]:
    """Return the contents of small tensors as flat lists, with one copy from the device."""
    of_type: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        of_type.setdefault(tensor.dtype, []).append(tensor.detach().reshape(-1))
    joined = {dtype: torch.cat(some).to(torch.float64) for dtype, some in of_type.items()}
    told = iter(torch.cat(list(joined.values())).tolist() if joined else [])
    numbers = {dtype: iter(list(islice(told, len(some)))) for dtype, some in joined.items()}
    return [list(islice(numbers[tensor.dtype], tensor.numel())) for tensor in tensors]
