"""The inputs that a cost is computed for: real data, or random inputs of the paper's sizes."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from fedrts import config
from fedrts.config import Experiment
from fedrts.data.contract import Data
from fedrts.errors import InputError, reason
from fedrts.runs.build import build_model
from fedrts.sparse.mode import training
from fedrts.tasks import Classification, Language

HERE = {"device": "cpu"}
SAMPLES = 500
"""Samples of a client without a data set: CIFAR-10 among 100 clients."""
FEW, MORE = 2, 4
"""Samples of a rehearsal, and of the second one by which activations are extrapolated to a batch."""


@dataclass(frozen=True)
class Inputs:
    """Inputs that a model may read if no data set is named."""

    shape: tuple[int, ...]
    classes: int
    kinds: tuple[str, ...] = ("numbers", "tokens")
    settings: config.Tree = field(default_factory=dict)


PAPER_INPUTS = (
    Inputs((3, 32, 32), 10, ("numbers",)),
    Inputs((256,), 50_257, ("tokens",), {"train": {"batch_size": 16}}),
)
"""CIFAR-10's images and TinyStories' tokens."""


def without_data(
    given: config.Tree, own: nn.Module | None, shape: Sequence[int] | None, classes: int | None, count: int
) -> tuple[Experiment, nn.Module, Data]:
    """Return the experiment, its model and random inputs: of the given shape, or the first of the paper's that the model reads."""
    if min([1 if classes is None else classes, *(shape or ())]) < 1:
        raise InputError("the input shape and the number of classes must be at least 1 each")
    offered = PAPER_INPUTS if shape is None else (Inputs(tuple(shape), PAPER_INPUTS[0].classes),)
    refusals: list[InputError] = []
    for inputs in offered:
        experiment = config.resolve(inputs.settings, given, HERE, {"data": config.CUSTOM, "data_options": {}})
        inputs = replace(inputs, classes=classes or inputs.classes)
        try:
            module = copy.deepcopy(own) if own is not None else build_model(experiment, inputs.shape, inputs.classes)
            return experiment, module, random_data(module, inputs, count)
        except InputError as error:
            refusals.append(error)
    if len(refusals) == 1:
        raise refusals[0]
    raise InputError(f"{refusals[0]}; nor does it read tokens: say what it reads by --data, or by --input-shape and --classes")


def random_data(module: nn.Module, inputs: Inputs, count: int) -> Data:
    """Return `count` random samples of the first kind that the model reads, with targets that fit its output."""
    count = max(count, 2 * MORE)  # of which small batches are measured too
    generator, size, classes = torch.Generator().manual_seed(0), (count, *inputs.shape), inputs.classes
    reasons = []
    for kind in inputs.kinds:
        x = torch.randint(classes, size, generator=generator) if kind == "tokens" else torch.randn(size, generator=generator)
        try:
            with training(module, False), torch.no_grad():
                output = module(x[:2])
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            reasons.append(reason(error))
            continue
        if not isinstance(output, Tensor):
            raise InputError(f"the model returns {type(output).__name__}: it must return one tensor")
        if output.dim() == 2:
            return Data(x, torch.randint(output.shape[1], (count,), generator=generator), x[:1], x[:1], classes)
        if output.dim() == 3:
            y = torch.randint(output.shape[2], (count, output.shape[1]), generator=generator)
            return Data(x, y, x[:1], y[:1], classes, Language())
        squares = Classification(criterion=lambda output, target: output.square().mean())
        return Data(x, torch.zeros(count), x[:1], x[:1], classes, squares)
    raise InputError(f"the model cannot read inputs of shape {list(inputs.shape)}: {reasons[0]}")
