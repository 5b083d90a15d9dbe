"""Your own table: a CSV or Parquet file with a target column and, optionally, a client column."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedrts.data import register
from fedrts.data.contract import Data, Recipe
from fedrts.data.own import with_test_share
from fedrts.data.partition import BY_COLUMN
from fedrts.data.tabular import Columns, Encoding, read
from fedrts.errors import InputError
from fedrts.tasks import Task, named

_SETTINGS: dict[str, Any] = {
    "rounds": 30,
    "density": 0.3,
    "clients": {"total": 10, "per_round": 5, "min_size": 1, "partition": "quantity", "alpha": 1.0},
    "train": {"lr": 0.1, "epochs": 2, "batch_size": 16, "clip": 1.0},
    "eval": {"every": 1},
}


@dataclass(frozen=True)
class Standardised:
    """Columns standardised by their mean and standard deviation."""

    mean: Tensor
    scale: Tensor
    encoding: Encoding = field(compare=False)
    """How the columns became numbers before that."""
    numbers = 0

    def of(self, rows: Columns) -> Tensor:
        """Return the inputs `[n, width]` of further rows, which need neither a target nor a client."""
        asked = Columns({name: rows.column(name, "the model") for name in self.encoding.categories}, rows.where)
        asked.check()
        return self.inputs(self.encoding.inputs(asked))

    def inputs(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.scale

    def targets(self, y: Tensor) -> Tensor:
        return y

    def augment(self, x: Tensor, u: Tensor) -> Tensor:
        return self.inputs(x)

    def to(self, device: torch.device | str) -> Standardised:
        return replace(self, mean=self.mean.to(device), scale=self.scale.to(device))


def recipe(path: Path, options: Mapping[str, Any]) -> Recipe:
    """Return the defaults of a table: its clients are those of the client column, if it has one."""
    settings = dict(_SETTINGS)
    column = options.get("client")
    if isinstance(column, str):
        total = len(read(path).owners(column)[0])
        settings["clients"] = {"total": total, "per_round": min(10, total), "min_size": 1, "partition": BY_COLUMN}
    return Recipe("tabular", settings)


@register("csv:PATH", recipe)
@register("parquet:PATH", recipe)
def table(
    path: Path,
    target: str | Sequence[str] = (),
    client: str | None = None,
    task: str | None = None,
    drop: str | Sequence[str] = (),
    categories: Mapping[str, Sequence[Any]] | None = None,
    units: Sequence[float] = (),
    test: float = 0.2,
) -> Data:
    """Your own table, a CSV (with a heading) or Parquet file: columns `target` to predict, `client` for the owner, `drop` to leave out."""
    rows = read(path)
    targets = _names("target", target)
    if not targets:
        raise InputError(f"{rows.where} needs data_options.target, the column to predict: there is {', '.join(rows.columns)}")
    if task is not None:
        named.tasks.get(task)
    if categories is not None and not (isinstance(categories, Mapping) and all(isinstance(words, list) for words in categories.values())):
        raise InputError('data_options.categories must be a table of lists, such as {sex = ["f", "m"]}')
    if client in targets:
        raise InputError(f"data_options.target and data_options.client are both '{client}': whose a row is cannot be predicted from itself")
    names, owners = rows.owners(client) if client is not None else ((), None)
    for name in (dropped := _names("drop", drop)):
        rows.column(name, "data_options.drop")
    rows = rows.without(*dropped, *([client] if client is not None else []))
    encoding = Encoding.of([rows], targets, task, categories)
    x, y = encoding.encoded(rows)
    held = Data(x, y, x[:0], y[:0], classes=0, owners=None if owners is None else torch.from_numpy(owners), owner_names=names)
    held = with_test_share(held, test)
    if encoding.classes is not None:
        task, classes = task or "classification", len(encoding.classes)
    else:
        zeros_and_ones = held.y.dim() == 2 and bool(((held.y == 0) | (held.y == 1)).all())
        task, classes = task or ("multilabel" if zeros_and_ones else "regression"), len(targets)
    mean, scale = held.x.mean(0), held.x.std(0, correction=0)
    plain = ~encoding.numeric | (scale == 0)
    view = Standardised(torch.where(encoding.numeric, mean, 0.0), torch.where(plain, 1.0, scale), encoding)
    return replace(held, classes=classes, task=_task(task, held.y, units), view=view)


def _task(name: str, y: Tensor, units: Sequence[float]) -> Task:
    """Return the task of a name; `units` are the centre and scale of a target, for sites that must share them."""
    if not units:
        return named.made(name, y)
    numbers = isinstance(units, list | tuple) and all(isinstance(number, int | float) for number in units)
    if not numbers or len(units) != 2 or not units[1] > 0 or y.dim() != 1 or not y.is_floating_point():
        raise InputError(
            f"data_options.units are the mean and deviation of a regression's one target, such as [152.0, 77.0] (got {units!r})"
        )
    return named.Regression(centre=(float(units[0]),), scale=(float(units[1]),))


def _names(option: str, given: object) -> list[str]:
    """Return column names from a list, or from comma-separated words."""
    names = given.split(",") if isinstance(given, str) else given
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise InputError(f"data_options.{option} must be the name of a column, or a list of them (got {given!r})")
    return [name.strip() for name in names if name.strip()]
