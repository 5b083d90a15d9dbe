"""What a round costs a client in bytes, FLOPs and memory, in three accountings that are never mixed (see docs/cost.md).

`paper` reproduces the published tables, `rules` is what the paper's text says, `measured` is what this package sends, computes and
holds. All three derive from the exchanges that a method declares.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedrts import config, data
from fedrts.client.privacy import Repeatable
from fedrts.costs.estimate import Estimate
from fedrts.costs.inputs import HERE, MORE, SAMPLES, without_data
from fedrts.costs.table import Cost
from fedrts.data.contract import Data
from fedrts.errors import InputError
from fedrts.methods.base import Method
from fedrts.runs.build import build_model, put_together


def cost(
    experiment: str | Path | None = None,
    *,
    model: str | nn.Module | None = None,
    method: Method | str | None = None,
    input_shape: Sequence[int] | None = None,
    classes: int | None = None,
    samples: int | None = None,
    exact: bool = False,
    step: bool = False,
    data_dir: str | Path | None = None,
    **keywords: Any,
) -> Cost:
    """Return bytes, FLOPs and memory per client of the set-up (if there is one), an inner and an outer round.

    `model`, `method` and other keywords are those of `run`. Inputs are those of `data` where it is named, else of `input_shape` and
    `classes`, else those of the paper that the model reads. `samples` is what the client holds: by default its share of the data, or
    500. Measured messages come from one step on two samples; `exact` lets the client work through all its samples instead.
    `step` times one step of the client on this machine, and measures the memory that it adds, in dense and sparse kernels.
    """
    layers = [] if experiment is None else [config.from_file(experiment)]
    named, options = config.from_method(method, keywords)
    module = model if isinstance(model, nn.Module) else None
    layers += [config.from_keywords({**keywords, **named, "model": model if module is None else config.CUSTOM}), options]
    return of_settings(layers, module, input_shape, classes, samples, exact, data_dir, step)


def of_settings(
    layers: Sequence[config.Tree],
    module: nn.Module | None = None,
    input_shape: Sequence[int] | None = None,
    classes: int | None = None,
    samples: int | None = None,
    exact: bool = False,
    data_dir: str | Path | None = None,
    step: bool = False,
) -> Cost:
    """Return the `cost` of settings; later layers override earlier ones."""
    experiment, module, held, wanted = posed(config.combined(*layers), module, input_shape, classes, samples, exact, data_dir)
    run = put_together(experiment, module, held, [torch.arange(wanted)], noise=Repeatable)
    return Estimate(run, wanted, exact, step).cost()


def posed(
    given: config.Tree,
    module: nn.Module | None = None,
    input_shape: Sequence[int] | None = None,
    classes: int | None = None,
    samples: int | None = None,
    exact: bool = False,
    data_dir: str | Path | None = None,
) -> tuple[config.Experiment, nn.Module, Data, int]:
    """Build the problem that settings describe: experiment, model, data (or random inputs), and one client's samples."""
    if samples is not None and samples < 1:
        raise InputError(f"samples must be at least 1 (got {samples})")
    wanted = samples or SAMPLES
    if input_shape is None and ("data" in given or given.get("model", "auto") == "auto"):
        if classes is not None:
            raise InputError("classes are counted from the data: name either the data or --input-shape and --classes")
        experiment = config.resolve(given, HERE)
        held = data.load(experiment.data, experiment.data_options, data_dir)
        wanted = samples or max(1, held.samples // experiment.clients.total)
        if exact and wanted > held.samples:
            raise InputError(f"samples = {wanted:,} is more than the {held.samples:,} that '{experiment.data}' has for training")
        module = copy.deepcopy(module) if module is not None else build_model(experiment, held.input_shape, held.classes)
    else:
        experiment, module, held = without_data(given, module, input_shape, classes, wanted if exact else MORE)
    return experiment, module, held, wanted
