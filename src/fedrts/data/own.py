"""The user's own data: any map-style datasets, made resident once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset, default_collate

from fedrts.data.contract import Data, parted
from fedrts.data.holdings import Holdings
from fedrts.data.images import statistics
from fedrts.data.pixels import Augment, Measured
from fedrts.errors import InputError, reason
from fedrts.tasks import Task


def listed(clients: Iterable[Dataset[Any]]) -> list[Dataset[Any]]:
    """The clients' datasets; one dataset is not the list of them, though it has items."""
    if isinstance(clients, Dataset | Mapping | Tensor) or _is_frame(clients) or not isinstance(clients, Iterable):
        raise InputError(f"clients is one {type(clients).__name__}: give a list of datasets, one for each client")
    found = list(clients)
    if not found:
        raise InputError("clients is empty: give one dataset per client")
    return found


def federate(clients: Sequence[Dataset[Any]], test: Dataset[Any], task: Task) -> tuple[Data, Holdings]:
    """One `Data` with the rows of all clients one after the other, and every client's row numbers."""
    pairs = [_arrays(dataset, f"clients[{index}]") for index, dataset in enumerate(clients)]
    test_x, test_y = _arrays(test, "test")
    try:
        x, y = (torch.cat([pair[side] for pair in pairs]) for side in (0, 1))
    except RuntimeError as error:
        raise InputError(f"all clients' inputs, and their targets, must have one shape: {reason(error)}") from error
    rows = Holdings.cut(torch.arange(len(y)), [len(pair[1]) for pair in pairs])
    integer = not y.is_floating_point()
    classes = int(max(y.max(), test_y.max())) + 1 if integer and y.numel() else 0
    return Data(x, y, test_x, test_y, classes=classes, task=task), rows


def _arrays(dataset: Dataset[Any], where: str) -> tuple[Tensor, Tensor]:
    try:
        length = len(dataset)  # type: ignore[arg-type]
        if _is_frame(dataset):
            raise InputError(
                f"{where} is a DataFrame, not a dataset: give torch.utils.data.TensorDataset(torch.tensor(frame[inputs].values, "
                "dtype=torch.float32), torch.tensor(frame[target].values))"
            )
    except TypeError as error:
        raise InputError(f"{where} must be a map-style dataset, which has a length and items: {error}") from error
    if length == 0:
        raise InputError(f"{where} is empty: every dataset needs at least one sample")
    if isinstance(dataset, TensorDataset) and len(dataset.tensors) == 2:
        return dataset.tensors[0], dataset.tensors[1]
    try:
        x, y = default_collate([dataset[index] for index in range(length)])
    except Exception as error:  # whatever a user's own dataset raises
        raise InputError(f"{where} must give (input, target) pairs of equal shapes: {type(error).__name__}: {reason(error)}") from error
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        raise InputError(f"{where} must give one tensor as input and one as target, not {type(x).__name__} and {type(y).__name__}")
    return x, y


def _is_frame(given: object) -> bool:
    """Is it a table of pandas or polars? Neither need be installed."""
    return type(given).__name__ == "DataFrame"


def with_test_share(held: Data, share: float) -> Data:
    """`held` with a random `share` of its training rows, the same in every run, as its test set; of 0 there is none."""
    if share == 0 and not isinstance(share, bool):
        return replace(held, test_x=held.x[:0], test_y=held.y[:0])
    rest, test = parted(len(held.y), share, "test")
    return replace(held, x=held.x[rest], y=held.y[rest], test_x=held.x[test], test_y=held.y[test])


def normalised(held: Data, augment: Augment) -> Data:
    """Images `held` as a model reads them, by the mean and standard deviation of the training rows alone."""
    return replace(held, view=Measured.of(*statistics(held.x), augment))
