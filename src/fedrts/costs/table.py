"""What a round costs a client: bytes, FLOPs and memory, in three accountings that are never mixed (see docs/cost.md).

`paper` reproduces the published tables, `rules` is what the paper's text says, `measured` is what this package sends, computes and
holds. All three derive from the exchanges that a method declares.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedrts import config, data
from fedrts.client.privacy import Repeatable
from fedrts.costs.estimate import SAMPLES, Estimate
from fedrts.costs.inputs import MORE, without_data
from fedrts.errors import InputError
from fedrts.methods.base import Method
from fedrts.runs.build import build_model, put_together

ACCOUNTINGS = {
    "paper": "reproduces the published tables: uniform density, a bitmap at every density, 4-byte values, index cost of t = 0; memory is "
    "three copies of the model; a batch's forward pass counts batch² · MAC",
    "rules": "the paper's text: each layer dense, bitmap, coordinates or CSR by its own density; memory is three such copies; a batch's "
    "forward pass counts batch · MAC",
    "measured": "what this package does: lengths of encoded messages, MACs at the layers' densities over the samples seen, tensors that a "
    "client holds with the activations of one batch",
}
"""The accountings, and what each counts."""


PUBLISHED, STRICT = "as published", "strictly"


HOLDER, FRESH = "has mask", "fresh"


@dataclass(frozen=True)
class Row:
    """What one round costs one client in one accounting."""

    accounting: str
    round: str
    case: str
    """What tells rows of one round apart: `as published` or `strictly`; a client that `has mask` or a `fresh` one; else empty."""
    download_bytes: float
    upload_bytes: float
    flops: float
    memory_bytes: float
    memory_on_mask_bytes: float | None = None
    """Measured: what the same tensors would take if weights, gradient and optimiser state were stored on the mask alone."""
    memory_parts: Mapping[str, int] | None = None

    @property
    def megabytes(self) -> float:
        """Both ways, in 10⁶ bytes."""
        return (self.download_bytes + self.upload_bytes) / 1e6

    def as_flat_dict(self) -> dict[str, Any]:
        """Without the parts of the memory: one line of a table."""
        return {name: value for name, value in vars(self).items() if name != "memory_parts"}


@dataclass(frozen=True)
class Cost:
    """Everything that `cost` found, and for what."""

    model: str
    method: str
    density: float
    parameters: int
    links: int
    macs: float
    """Of the dense model's forward pass, per sample."""
    input_shape: tuple[int, ...]
    classes: int
    samples: int
    epochs: int
    batch_size: int
    rows: tuple[Row, ...] = field(default=())

    def row(self, accounting: str, round: str, case: str | None = None) -> Row:
        """The row of an accounting and a round; the first where no case is named."""
        for row in self.rows:
            if (row.accounting, row.round) == (accounting, round) and case in (None, row.case):
                return row
        raise KeyError(f"no row {accounting} · {round} · {case or 'any case'}")

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "accountings": ACCOUNTINGS}


def cost(
    experiment: str | Path | None = None,
    *,
    model: str | nn.Module | None = None,
    method: Method | str | None = None,
    input_shape: Sequence[int] | None = None,
    classes: int | None = None,
    samples: int | None = None,
    exact: bool = False,
    data_dir: str | Path | None = None,
    **keywords: Any,
) -> Cost:
    """Bytes, FLOPs and memory per client of the set-up (where there is one), an inner and an outer round.

    `model`, `method` and other keywords are those of `run`. Inputs are those of `data` where it is named, else of `input_shape` and
    `classes`, else those of the paper that the model reads. `samples` is what the client holds: by default its share of the data, or
    500. Measured messages come from one step on two samples; `exact` lets the client work through all its samples instead.
    """
    layers = [] if experiment is None else [config.from_file(experiment)]
    named, options = config.from_method(method, keywords)
    module = model if isinstance(model, nn.Module) else None
    layers += [config.from_keywords({**keywords, **named, "model": model if module is None else config.CUSTOM}), options]
    return of_settings(layers, module, input_shape, classes, samples, exact, data_dir)


def of_settings(
    layers: Sequence[config.Settings],
    module: nn.Module | None = None,
    input_shape: Sequence[int] | None = None,
    classes: int | None = None,
    samples: int | None = None,
    exact: bool = False,
    data_dir: str | Path | None = None,
) -> Cost:
    """`cost` of settings, of which later ones override earlier ones."""
    given: dict[str, Any] = {}
    for layer in layers:
        given = config.merged(given, layer)
    if samples is not None and samples < 1:
        raise InputError(f"samples must be at least 1 (got {samples})")
    wanted = samples or SAMPLES
    if input_shape is None and ("data" in given or given.get("model", "auto") == "auto"):
        if classes is not None:
            raise InputError("classes are counted from the data: name either the data or --input-shape and --classes")
        experiment = config.resolve(given, _HERE)
        held = data.load(experiment.data, experiment.data_options, data_dir)
        wanted = samples or max(1, len(held.y) // experiment.clients.total)
        if exact and wanted > len(held.y):
            raise InputError(f"samples = {wanted:,} is more than the {len(held.y):,} that '{experiment.data}' has for training")
        module = copy.deepcopy(module) if module is not None else build_model(experiment, held.input_shape, held.classes)
    else:
        experiment, module, held = without_data(given, module, input_shape, classes, wanted if exact else MORE)
    run = put_together(experiment, module, held, [torch.arange(wanted)], noise=Repeatable)
    return Estimate(run, wanted, exact).cost()


_HERE = {"device": "cpu"}
