"""How important an active link is: scores by which links are ranked inside their layer.

A score is a function of the weights `[..., A]`, or of the weights and the mean squared gradients `[..., A]` of the local steps; in the
second case the squares are uploaded too. One's own comes by import path.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import cast

from torch import Tensor

from fedrts.errors import InputError, nearest
from fedrts.registry import import_path

Score = Callable[..., Tensor]


def magnitude(weights: Tensor) -> Tensor:
    """|w|: the paper's score."""
    return weights.abs()


def fisher(weights: Tensor, squares: Tensor) -> Tensor:
    """w²·F with the diagonal F of the empirical Fisher information: the loss change when the link goes, to second order."""
    return weights.square() * squares


SCORES: dict[str, Score] = {"magnitude": magnitude, "fisher": fisher}


def get(name: str) -> Score:
    """Return the score of a name or import path `pkg.module:name`."""
    if name in SCORES:
        return SCORES[name]
    if ":" not in name:
        raise InputError(f"there is no score '{name}'{nearest(name, SCORES)}; one's own is an import path pkg.module:name")
    return cast(Score, import_path(name, "score"))


def needs_squares(score: Score) -> bool:
    """Whether this score uses squared gradients, its second required argument."""
    try:
        parameters = inspect.signature(score).parameters.values()
    except ValueError:  # a builtin, such as torch.abs
        return False
    required = [p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(required) > 1
