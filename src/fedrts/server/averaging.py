"""The average of late models: one more vector at the server, which clients never see and which costs no bytes.

tail: the mean of the models after each of the last rounds
ema:  A ← A + (1 − decay)·(W − A) after every round, from the first model on
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, assert_never

import torch
from torch import Tensor

from fedrts.methods.contract import State
from fedrts.sparse.mask import Mask

AverageName = Literal["off", "tail", "ema"]

_MEMORY = "average"
"""What the average is called among all that a run remembers."""


@dataclass(frozen=True)
class LateAverage:
    """Which models enter the average of a run, and with which weight."""

    name: AverageName = "off"
    rounds: int = 1
    """All rounds of the run."""
    share: float = 0.4
    """Share of the rounds in the tail, counted from the end."""
    decay: float = 0.9
    """Decay of the exponential average per round."""

    def entering(self, index: int) -> float:
        """Return the weight of the model after a round. 0: no average yet; 1: it begins with this model."""
        match self.name:
            case "off":
                return 0.0
            case "tail":
                first = self.rounds - max(1, math.ceil(self.share * self.rounds - 1e-9))
                return 1 / (index - first + 1) if index >= first else 0.0
            case "ema":
                return 1 - self.decay if index > 0 else 1.0
            case _:
                assert_never(self.name)

    def enter(self, before: State, after: State, index: int) -> State:
        """Return the state `after` a round, with its model added to the average in the state `before`."""
        share = self.entering(index)
        if share == 0:
            return after
        past = before.memory.get(_MEMORY)
        if past is None or share == 1:
            return after.remember(**{_MEMORY: after.values})
        if after.mask is not before.mask and after.mask != before.mask:
            past = _moved(past, before.mask, after)
        return after.remember(**{_MEMORY: torch.lerp(past, after.values, share)})


def _moved(past: Tensor, old: Mask, after: State) -> Tensor:
    """Convert an average from the mask `old` to the new mask; newly active links begin with their weight."""
    joined = torch.zeros(len(old.bits) + len(past) - old.number, dtype=torch.bool, device=past.device)
    joined[: len(old.bits)] = after.mask.bits & ~old.bits
    return torch.where(after.mask.compact(joined), after.values, after.mask.compact(old.expand(past)))


def average_of(state: State) -> State | None:
    """Return the average so far, as its own state; None if there is none."""
    values = state.memory.get(_MEMORY)
    return None if values is None else State(values, state.mask)
