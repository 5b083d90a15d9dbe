"""Tables: named columns encoded as numbers, the same way for all clients, and the files that hold them.

table = read(Path("patients.csv"))
encoding = Encoding.of([table], targets=("outcome",))
x, y = encoding.encoded(table)                # float32 [rows, columns], and labels or numbers
"""

from __future__ import annotations

import csv
import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from numbers import Number
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedrts.errors import InputError, optional, reason
from fedrts.files import require_plain

MOST_CATEGORIES = 1000
"""Words of one column: each becomes a column of its own."""
MOST_CLASSES = 20
"""Different whole numbers in a target up to which they are taken for classes, where nothing is said."""
_PARQUET = b"PAR1"
"""With which every such file begins."""
_MISSING = {"", "na", "n/a", "nan", "null", "none"}
"""Words that stand for a value that is not there."""


@dataclass(frozen=True)
class Columns:
    """Columns of equal length by name."""

    columns: Mapping[str, np.ndarray]
    where: str
    """For errors: the file, or the argument."""

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    def column(self, name: str, key: str) -> np.ndarray:
        """Return a column; raise if it is missing."""
        if name not in self.columns:
            raise InputError(f"{self.where} has no column '{name}' for {key}: there is {', '.join(self.columns)}")
        return self.columns[name]

    def without(self, *names: str) -> Columns:
        """Return the other columns."""
        return Columns({name: array for name, array in self.columns.items() if name not in names}, self.where)

    def check(self) -> None:
        """Check that no value is missing, and that all are numbers or words."""
        for name, array in self.columns.items():
            check_filled(self.where, name, array)

    def rows(self, chosen: np.ndarray, where: str | None = None) -> Columns:
        """Return some rows, by a mask or by their numbers."""
        return Columns({name: array[chosen] for name, array in self.columns.items()}, where or self.where)

    def owners(self, column: str) -> tuple[tuple[str, ...], np.ndarray]:
        """Return the sorted values of a client column, and the index of every row's value."""
        array = self.column(column, "client")
        check_filled(self.where, column, array)
        names, owners = np.unique(array.astype(str) if array.dtype == object else array, return_inverse=True)
        return tuple(map(str, names)), owners


@dataclass(frozen=True)
class Encoding:
    """How columns become numbers: numbers stay, words are one-hot encoded."""

    categories: Mapping[str, tuple[str, ...] | None]
    """The words of every input column in order; None: it holds numbers."""
    targets: tuple[str, ...]
    classes: tuple[str, ...] | None
    """The values of the target in order, where it is a label."""
    whole: bool = False
    """Do targets of whole numbers stay such?"""

    @staticmethod
    def of(
        tables: Sequence[Columns],
        targets: Sequence[str],
        task: str | None = None,
        given: Mapping[str, Sequence[Any]] | None = None,
        as_given: bool = False,
    ) -> Encoding:
        """Build the encoding of all tables; `task` says whether the target is a label, otherwise its values do. `given` are known words.

        `as_given`: a target of numbers stays what it is, whatever its values.
        """
        first = tables[0]
        for table in tables:
            if set(table.columns) != set(first.columns):
                odd = sorted(set(table.columns) ^ set(first.columns))[0]
                raise InputError(f"{table.where} and {first.where} do not both have the column '{odd}': give all clients the same columns")
            table.check()
        for target in targets:
            first.column(target, "target")
        inputs = [name for name in first.columns if name not in targets]
        if not inputs:
            raise InputError(f"{first.where} has no column beside its target: there is nothing to predict from")
        if unknown := sorted(set(given or {}) - {*inputs, *targets}):
            raise InputError(f"categories name the column '{unknown[0]}', which {first.where} does not have")
        categories = {name: _words(tables, name, (given or {}).get(name)) for name in inputs}
        as_given = as_given and all(_is_number(table.columns[name]) for table in tables for name in targets)
        classes = None if as_given else _classes(tables, targets, task, (given or {}).get(targets[0]))
        return Encoding(categories, tuple(targets), classes, as_given)

    @property
    def width(self) -> int:
        """Number of input columns."""
        return sum(1 if words is None else len(words) for words in self.categories.values())

    @property
    def numeric(self) -> Tensor:
        """Which input columns are numbers `[width]`, not categories."""
        return torch.tensor([words is None for words in self.categories.values() for _ in words or (None,)])

    def inputs(self, table: Columns) -> Tensor:
        """Return inputs `[n, width]`; the table may have other columns too."""
        parts = []
        for name, words in self.categories.items():
            array = table.column(name, "the model")
            if words is None:
                parts.append(_numbers(table.where, name, array)[:, None])
            else:
                parts.append(np.eye(len(words), dtype=np.float32)[_places(table.where, name, array, words)])
        return torch.from_numpy(np.concatenate(parts, axis=1))

    def encoded(self, table: Columns) -> tuple[Tensor, Tensor]:
        """Return inputs `[n, width]` and targets: labels `[n]`, or numbers `[n]` or `[n, k]`."""
        x = self.inputs(table)
        if self.classes is not None:
            name = self.targets[0]
            return x, torch.from_numpy(_places(table.where, name, table.columns[name], self.classes))
        columns = [_numbers(table.where, name, table.columns[name], self.whole) for name in self.targets]
        return x, torch.from_numpy(columns[0] if len(columns) == 1 else np.stack(columns, axis=1))


def check_filled(where: str, name: str, array: np.ndarray, several: bool = False) -> None:
    """A missing value is refused with its row, counted from 1 without the heading; so are values that are neither numbers nor words.

    `several`: a row may hold several numbers.
    """
    if array.dtype.kind == "f":
        missing = np.isnan(array)
        if not missing.any() and not several:
            _check_finite(where, name, array)
    elif array.dtype.kind in "OUS":
        kinds = (str, bool, np.bool_, Number, *((list, np.ndarray) if several else ()))
        if (odd := next((value for value in array if not isinstance(value, kinds) and not _is_missing(value)), None)) is not None:
            many, time = isinstance(odd, list | tuple | dict | set | np.ndarray), isinstance(odd, date | timedelta)
            remedy = "make it columns of one value each" if many else "make it numbers or words, or leave it out"
            kind = "times" if time else f"a {type(odd).__name__} in each row"
            raise InputError(f"{where}: the column '{name}' holds {kind}: {remedy}")
        missing = np.array([_is_missing(value) for value in array], dtype=bool)
    elif array.dtype.kind in "mM":
        raise InputError(f"{where}: the column '{name}' holds times: make it numbers or words, or leave it out")
    elif array.dtype.kind not in "biu":
        raise InputError(f"{where}: the column '{name}' holds values of type {array.dtype}: make it numbers or words, or leave it out")
    else:
        return
    if missing.any():
        row = int(np.flatnonzero(missing)[0]) + 1
        more = int(missing.sum()) - 1
        word = str(array[row - 1]).strip() if array.dtype.kind in "OUS" and isinstance(array[row - 1], str) else ""
        raise InputError(
            f"{where}: row {row:,} has no value in the column '{name}'{f' (nor have {more:,} others)' if more else ''}: fill it in, or "
            f"leave out the row or the column{f'; the word {word!r} counts as missing, so write another if it is a value' if word else ''}"
        )


def _is_missing(value: Any) -> bool:
    """Whether a value stands for none: None, NaN, pandas' NA and NaT, or a word such as "NA"."""
    if isinstance(value, str):
        return value.strip().lower() in _MISSING
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return True
    return isinstance(value, Number) and value != value


def as_numbers(array: np.ndarray) -> np.ndarray:
    """Return a column of objects that are all numbers, or missing, as one of numbers."""
    if array.dtype != object or not all(map(_is_missing_or_number, array)):
        return array
    return np.array([np.nan if _is_missing(value) else value for value in array], dtype=np.float64)


def _is_missing_or_number(value: Any) -> bool:
    return not isinstance(value, str) and (_is_missing(value) or (isinstance(value, Number) and not isinstance(value, complex)))


def _is_number(array: np.ndarray) -> bool:
    return array.dtype.kind in "biuf"


def _text(array: np.ndarray) -> np.ndarray:
    """Convert values to words; whole numbers look alike whatever their type."""
    if array.dtype.kind == "f" and bool((array == np.floor(array)).all()):
        array = array.astype(np.int64)
    if array.dtype.kind == "b":
        array = array.astype(np.int64)
    return array.astype(str)


def _words(tables: Sequence[Columns], name: str, given: Sequence[Any] | None) -> tuple[str, ...] | None:
    """Return the words of an input column in all tables; None if it holds numbers."""
    if given is not None:
        return tuple(map(str, given))
    arrays = [table.columns[name] for table in tables]
    if all(map(_is_number, arrays)):
        return None
    found = sorted(set().union(*(set(_text(array).tolist()) for array in arrays)))
    if len(found) > MOST_CATEGORIES:
        raise InputError(
            f"{tables[0].where}: the column '{name}' has {len(found):,} different words, more than {MOST_CATEGORIES:,}: leave it out"
        )
    return tuple(found)


def _classes(tables: Sequence[Columns], targets: Sequence[str], task: str | None, given: Sequence[Any] | None) -> tuple[str, ...] | None:
    """Return the values of a label target; None if targets are numbers."""
    if len(targets) > 1 or task in ("regression", "multilabel"):
        return None
    if given is not None:
        return tuple(map(str, given))
    arrays = [table.columns[targets[0]] for table in tables]
    found = set().union(*(set(_text(array).tolist()) for array in arrays))
    numbers = all(map(_is_number, arrays))
    whole = numbers and all(bool((array == np.floor(array)).all()) for array in arrays)
    if task is None and numbers and not (whole and len(found) <= MOST_CLASSES):
        return None
    if len(found) > MOST_CATEGORIES:
        raise InputError(
            f"{tables[0].where}: the target '{targets[0]}' has {len(found):,} different values, more than {MOST_CATEGORIES:,} classes: "
            "is it a number (task = 'regression')?"
        )
    return tuple(sorted(found, key=float) if whole else sorted(found))


def _places(where: str, name: str, array: np.ndarray, words: Sequence[str]) -> np.ndarray:
    """Return the index of every value among the words `[n]`, int64."""
    known = {word: place for place, word in enumerate(words)}
    text = _text(array).tolist()
    for row, word in enumerate(text, 1):
        if word not in known:
            raise InputError(f"{where}: row {row:,} has '{word}' in the column '{name}', which is none of {', '.join(words[:10])}")
    return np.array([known[word] for word in text], dtype=np.int64)


def _numbers(where: str, name: str, array: np.ndarray, whole: bool = False) -> np.ndarray:
    """A column as float32 `[n]`; where `whole` numbers may stay, those as int64."""
    if not _is_number(array):
        raise InputError(f"{where}: the column '{name}' holds words, and numbers are wanted: is it a class (task = 'classification')?")
    if whole and array.dtype.kind != "f":
        return array.astype(np.int64)
    with np.errstate(over="ignore"):
        found = array.astype(np.float32)
    _check_finite(where, name, found)
    return found


def _check_finite(where: str, name: str, array: np.ndarray) -> None:
    if not np.isfinite(array).all():
        row = int(np.flatnonzero(~np.isfinite(array))[0]) + 1
        raise InputError(f"{where}: row {row:,} has no finite number in the column '{name}': correct it, or leave out the row")


# -- files ----------------------------------------------------------------------------------------------------------


def read(path: Path) -> Columns:
    """Read a CSV or Parquet file, recognised by its first bytes; read again only when the file changes."""
    require_plain(path)
    try:
        status = os.stat(path)
    except OSError as error:
        raise InputError(f"there is no file {path}: --data csv:PATH or parquet:PATH names one") from error
    return _read(path, status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=2)
def _read(path: Path, *stamp: int) -> Columns:
    try:
        with open(path, "rb") as file:
            columnar = file.read(len(_PARQUET)) == _PARQUET
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}; --data csv:PATH or parquet:PATH names a file") from error
    return Columns(_parquet(path) if columnar else _csv(path), str(path))


def _csv(path: Path) -> dict[str, np.ndarray]:
    """Parse comma-separated columns with a heading; a column that holds only numbers becomes numbers."""
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            lines = csv.reader(file, strict=True)
            heading = next(lines, None)
            rows = list(lines)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path} is no readable CSV file in UTF-8: {reason(error)}") from error
    if not heading or not rows:
        raise InputError(f"{path} has no rows: a first line names the columns, and every other line is a row")
    heading = [name.strip() for name in heading]
    if other := next((sign for sign in (";", "\t", "|") if len(heading) == 1 and sign in heading[0]), None):
        raise InputError(f"{path} has {other!r} between its columns: save it with commas")
    if len(set(heading)) < len(heading):
        raise InputError(f"{path} has two columns '{next(name for name in heading if heading.count(name) > 1)}': rename one of them")
    rows = [row for row in rows if row]  # an empty line at the end
    for number, row in enumerate(rows, 1):
        if len(row) != len(heading):
            raise InputError(f"{path}: row {number:,} has {len(row)} values, the heading names {len(heading)} columns")
    return {name: _typed([value.strip() for value in values]) for name, values in zip(heading, zip(*rows, strict=True), strict=True)}


def _typed(values: list[str]) -> np.ndarray:
    """Return numbers if all values are numbers or missing, otherwise words."""
    try:
        numbers = [np.nan if value.lower() in _MISSING else float(value) for value in values]
    except ValueError:
        return np.array(values, dtype=object)
    array = np.array(numbers)
    whole = bool(np.isfinite(array).all() and (array == np.floor(array)).all() and (np.abs(array) < 2**53).all())
    return array.astype(np.int64) if whole else array


def _parquet(path: Path) -> dict[str, np.ndarray]:
    parquet = optional("pyarrow.parquet", "parquet")
    try:
        table = parquet.ParquetFile(path).read()
        return {name: table.column(name).to_numpy() for name in table.column_names}
    except Exception as error:  # pyarrow has classes of its own for every kind
        raise InputError(f"{path} is no readable Parquet file: {reason(error)}") from error
