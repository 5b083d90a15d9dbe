"""The average of late models: one more vector at the server. Clients never see it, so it costs no byte.

tail: the mean of the models after each of the last rounds
ema:  A ← A + (1 − decay)·(W − A) after every round, from the first model on
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from fedrts.methods.contract import State
from fedrts.sparse.mask import Mask

AverageName = Literal["off", "tail", "ema"]
Entering = Callable[[int], float]
"""The share with which the model after a round enters the average. 0: there is none yet; 1: it begins with this model."""

_MEMORY = "average"
"""What the average is called among all that a run remembers."""


def entering(name: AverageName, rounds: int, share: float, decay: float) -> Entering:
    """How models enter the average of a run that was planned for so many `rounds`."""
    first = rounds - max(1, math.ceil(share * rounds - 1e-9))
    kinds: dict[AverageName, Entering] = {
        "off": lambda index: 0.0,
        "tail": lambda index: 1 / (index - first + 1) if index >= first else 0.0,
        "ema": lambda index: 1 - decay if index > 0 else float(index == 0),
    }
    return kinds[name]


def averaged(before: State, after: State, share: float) -> State:
    """`after` with its weights entered into the average that `before` remembers."""
    if share == 0:
        return after
    past = before.memory.get(_MEMORY)
    if past is None or share == 1:
        return after.remember(**{_MEMORY: after.values})
    if after.mask != before.mask:
        past = _moved(past, before.mask, after)
    return after.remember(**{_MEMORY: torch.lerp(past, after.values, share)})


def _moved(past: Tensor, old: Mask, after: State) -> Tensor:
    """An average on the mask `old` as one on the new mask; links that were not active before begin with their weight."""
    joined = torch.zeros(len(past) - old.number + len(old.bits), dtype=torch.bool, device=past.device)
    joined[: len(old.bits)] = after.mask.bits & ~old.bits
    return torch.where(after.mask.compact(joined), after.values, after.mask.compact(old.expand(past)))


def average_of(state: State) -> State | None:
    """The average of the models so far, as a state of its own; None where there is none."""
    values = state.memory.get(_MEMORY)
    return None if values is None else State(values, state.mask)
