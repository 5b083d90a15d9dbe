"""The user's own data, loaded once: datasets, iterables, DataLoaders, arrays, tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    default_collate,
)
from torch.utils.data._utils.collate import default_convert

from fedrts import trees
from fedrts.data.contract import Data, parted
from fedrts.data.holdings import Holdings
from fedrts.data.images import statistics
from fedrts.data.pixels import Augment, Measured
from fedrts.data.ragged import Collate, Ragged, Samples, joined
from fedrts.data.tabular import Columns, Encoding, as_numbers, check_filled
from fedrts.errors import InputError, note, reason
from fedrts.tasks import Task
from fedrts.trees import Tensors

MOST_ROWS = 1_000_000
"""Most samples of an iterable dataset, which is read once into rows and may be endless."""
TARGETS = ("labels", "label", "target", "targets", "y")
"""Under which a dictionary has its target, if nothing else is said."""
_PRECISIONS = (torch.float32, torch.float64)
_SIGNED = {torch.uint16: torch.int32, torch.uint32: torch.int64, torch.uint64: torch.int64}
_TRIED = 256
"""Rows that a collate function is tried on one by one."""


@dataclass(frozen=True)
class Reading:
    """How to read the user's data."""

    client: str | None = None
    """The column that says whose a row is, where one table holds all clients."""
    target: str | Sequence[str] | None = None
    """The column or columns of a table, or the names in a dictionary, that are to be predicted."""
    collate: Collate | None = None
    """Samples → a batch."""
    whole: bool = False
    """The loss takes whole batches, so that there need be no target."""
    task: str | None = None
    """The task's name, where it has one: a table's target is then what it needs."""
    as_given: bool = False
    """Does a loss of one's own see a table's numbers as they are? Otherwise few whole numbers are taken for labels."""

    def __post_init__(self) -> None:
        names = (self.target,) if isinstance(self.target, str | None) else self.target
        if not isinstance(names, list | tuple) or not all(isinstance(name, str | None) for name in names):
            raise InputError(f"target = {self.target!r}: give the name of a column, or a list of names, as text")

    @property
    def targets(self) -> tuple[str, ...]:
        return () if self.target is None else (self.target,) if isinstance(self.target, str) else tuple(self.target)


@dataclass(frozen=True)
class BatchForm:
    """How a batch splits into inputs and targets, and how these are put together again."""

    kind: str
    """`pair`: (inputs, target); `flat`: (input, …, target); `named`: a dictionary; `alone`: no target."""
    targets: tuple[str, ...] = ()

    @staticmethod
    def of(batch: Tensors, reading: Reading, where: str) -> BatchForm:
        """Find the form of a batch."""
        if isinstance(batch, tuple) and len(batch) > 1 and not reading.targets:
            return BatchForm("pair" if len(batch) == 2 else "flat")
        if isinstance(batch, dict):
            if missing := [name for name in reading.targets if name not in batch]:
                raise InputError(f"{where} has no '{missing[0]}' for target=: there is {', '.join(batch)}")
            names = reading.targets or next(((name,) for name in TARGETS if name in batch), ())
            if names and len(names) < len(batch):
                return BatchForm("named", names)
        elif reading.targets:
            raise InputError(f"target = {reading.target!r} is for tables and dictionaries, and {where} gives no names: leave it out")
        if not any(isinstance(leaf, Tensor) for leaf in trees.leaves(batch)):
            raise InputError(f"{where}: a batch holds no tensors, it is a {type(batch).__name__}: what does the collate_fn return?")
        if not reading.whole:
            what = f"dictionaries of {', '.join(batch)}" if isinstance(batch, dict) else "no target"
            raise InputError(
                f"{where} gives {what}: a sample is (input, target), or a dictionary of which target= names the target, unless the loss "
                "takes (model, batch)"
            )
        return BatchForm("alone")

    def halves(self, batch: Tensors) -> tuple[Tensors, Tensors]:
        """Return inputs and targets of a batch; without a target it is `[rows, 0]`."""
        if self.kind == "pair":
            return batch[0], batch[1]
        if self.kind == "flat":
            return tuple(batch[:-1]), batch[-1]
        if self.kind == "alone":
            return batch, torch.empty(trees.count(batch), 0)
        x = {name: part for name, part in batch.items() if name not in self.targets}
        y = batch[self.targets[0]] if len(self.targets) == 1 else {name: batch[name] for name in self.targets}
        return x, y

    def __call__(self, x: Tensors, y: Tensors) -> Tensors:
        """Put the halves of a batch together again."""
        if self.kind == "named":
            return {**x, **(y if len(self.targets) > 1 else {self.targets[0]: y})}
        if self.kind == "alone":
            return x
        return (x, y) if self.kind == "pair" else (*x, y)


@dataclass(frozen=True)
class Piece:
    """The rows of one dataset: samples to collate, a batch of all of them, or a table."""

    where: str
    samples: list[Any] | None = None
    batch: Tensors = None
    table: Columns | None = None
    collate: Collate | None = None
    left_out: tuple[str, ...] = ()
    """Columns of text, which no model reads."""


@dataclass(frozen=True)
class OwnData:
    """The given data, read."""

    data: Data
    rows: Holdings
    form: BatchForm


def listed(clients: Any, client: str | None = None) -> tuple[list[Any], tuple[str, ...]]:
    """Return the clients' datasets and their names, if any; a single dataset is not a list of datasets, although it has items."""
    if type(clients).__name__ == "DatasetDict":
        raise InputError("clients is a DatasetDict of splits: give one of them, with client= for the column that says whose a row is")
    if client is not None:
        if not isinstance(client, str):
            raise InputError(f"client = {client!r}: give the name of a column, as text")
        return _by_column(clients, client)
    single = isinstance(clients, Dataset | Tensor | np.ndarray | DataLoader) or _is_hub(clients)
    if _is_frame(clients) or _is_hub(clients):
        raise InputError(
            f"clients is one {type(clients).__name__}: say with client= which column names the client, or give a list of datasets, one "
            "for each client"
        )
    if isinstance(clients, Mapping):
        found, names = list(clients.values()), tuple(map(str, clients))
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise InputError(f"two clients have the name '{twice}': give each its own")
    elif single or not isinstance(clients, Iterable) or isinstance(clients, str):
        raise InputError(f"clients is one {type(clients).__name__}: give a list of datasets, one for each client")
    else:
        found, names = list(clients), ()
    if not found:
        raise InputError("clients is empty: give one dataset per client")
    return found, names


def _by_column(clients: Any, column: str) -> tuple[list[Any], tuple[str, ...]]:
    """Split one table by the client column: the rows of every client, in the order of their names."""
    table = columns_of(clients, "clients") if _is_table(clients) else None
    if table is None:
        raise InputError(f"client = '{column}' is for one table with all clients' rows: clients is a {type(clients).__name__}")
    _filled(table, "clients")
    if not _is_hub(clients):
        table.check()  # here, where a row has the number that its owner knows it by
    names, owners = table.owners(column)
    rest = table.without(column)
    if _is_hub(clients):
        kept = clients.remove_columns([column])
        return [kept.select(np.flatnonzero(owners == place)) for place in range(len(names))], names
    return [rest.rows(owners == place, f"client '{name}'") for place, name in enumerate(names)], names


def federate(clients: Sequence[Any], test: Any, task: Task, reading: Reading | None = None, names: tuple[str, ...] = ()) -> OwnData:
    """Return one `Data` with the rows of all clients in sequence, and every client's row numbers.

    `test` is a dataset like the clients', or the share of every client's rows that is held out.
    """
    reading = reading or Reading()
    share = test if isinstance(test, float | int) else None
    if share is not None and not 0 < share < 1:
        raise InputError(f"test = {share!r}: give a dataset, or the share of the clients' rows that is held out, between 0 and 1")
    parts = [_read(dataset, f"clients[{index}]", reading) for index, dataset in enumerate(clients)]
    parts += [] if share is not None else [_read(test, "test", reading)]
    _note_ignored([*clients, test])
    if words := list(dict.fromkeys(name for part in parts for name in part.left_out)):
        note(f"columns of text are left out: {', '.join(words)}; tokenise or encode them first if a model is to read them")
    form, pairs, why = _paired(parts, reading)
    held = pairs if share is not None else pairs[:-1]
    try:
        x, y = (joined([pair[half] for pair in held]) for half in (0, 1))
    except (RuntimeError, ValueError) as error:
        raise InputError(f"all clients' inputs, and their targets, must have one shape: {reason(error)}") from error
    if odd := next((part.where for part, pair in zip(parts, pairs, strict=True) if not _finite(pair[0])), None):
        note(f"{odd} has inputs that are not finite (NaN or infinite): a model that lets them through learns nothing")
    sizes = [trees.count(pair[1]) for pair in held]
    test_x, test_y = pairs[-1] if share is None else (trees.at(half, slice(0, 0)) for half in (x, y))
    owners = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    data = Data(x, y, test_x, test_y, classes=0, task=task, owners=owners, owner_names=names, apart=why)
    if share is not None:
        rest, out = parted(data.samples, float(share), "test")
        data = replace(data.only(rest), test_x=trees.at(x, out), test_y=trees.at(y, out))
        sizes = torch.bincount(owners[rest], minlength=len(sizes)).tolist()
        if not all(sizes):
            raise InputError(f"test = {share:g} leaves clients[{sizes.index(0)}] without a row: lower it, or leave that client out")
    return OwnData(replace(data, classes=_classes(data)), Holdings.cut(torch.arange(sum(sizes)), sizes), form)


def _finite(tree: Tensors) -> bool:
    return all(bool(leaf.isfinite().all()) for leaf in trees.leaves(tree) if isinstance(leaf, Tensor) and leaf.is_floating_point())


def _classes(data: Data) -> int:
    """Return the number of labels if targets are whole numbers."""
    if not all(isinstance(y, Tensor) and y.numel() and not y.is_floating_point() for y in (data.y, data.test_y)):
        return 0
    return int(max(data.y.max(), data.test_y.max())) + 1


# -- one dataset ----------------------------------------------------------------------------------------------------


def _read(dataset: Any, where: str, reading: Reading) -> Piece:
    """Read the rows of a dataset of any kind."""
    collate = reading.collate
    if isinstance(dataset, DataLoader):
        own = dataset.collate_fn
        collate = collate or (None if own in (default_collate, default_convert) else own)
        dataset = _rows_of(dataset)
    owner = () if reading.client is None else (reading.client,)  # a test set may have that column too
    of_client = bool(owner) and isinstance(dataset, Mapping) and _is_arrays(dataset)
    if isinstance(dataset, Columns) or _is_frame(dataset) or of_client:
        if not reading.targets:
            raise InputError(f"{where} is a table: name the column that is to be predicted (or a list of columns) with target=")
        table = dataset if isinstance(dataset, Columns) else columns_of(dataset, where).without(*owner)
        return Piece(where, table=_filled(table, where))
    if isinstance(dataset, tuple) and any(map(_is_frame, dataset)):
        raise InputError(f"{where} is a table and its target apart: make the target a column of the table, and name it with target=")
    if collate is None:
        if _is_hub(dataset) and dataset.format["type"] != "custom":
            return _columns(_filled(columns_of(dataset, where).without(*owner), where), where, reading)
        if isinstance(dataset, TensorDataset) and type(dataset).__getitem__ is TensorDataset.__getitem__:
            return Piece(where, batch=_filled(_tensors(tuple(dataset.tensors), where), where))
        if _is_arrays(dataset):
            return Piece(where, batch=_filled(_tensors(dataset, where), where))
    samples = _samples(dataset, where)
    return Piece(where, samples=samples if collate is not None else list(map(_vectors, samples)), collate=collate)


def _rows_of(loader: DataLoader[Any]) -> Any:
    """Return a DataLoader's dataset, or the part of it that its sampler chooses; an order has no meaning here."""
    sampler = getattr(loader, "sampler", None)
    return Subset(loader.dataset, list(sampler.indices)) if isinstance(sampler, SubsetRandomSampler) else loader.dataset


def _vectors(sample: Any) -> Any:
    """Return a sample in which lists of numbers, such as those of a tokenizer, are tensors; `default_collate` takes them apart."""

    def vector(part: Any) -> Any:
        return torch.tensor(part) if isinstance(part, list) and part and _is_numbers(part) else part

    if isinstance(sample, Mapping):
        return {name: vector(part) for name, part in sample.items()}
    return tuple(map(vector, sample)) if type(sample) is tuple else sample


def _is_numbers(part: Any) -> bool:
    """Whether it is a number, or a list of such lists of equal lengths."""
    if isinstance(part, list):
        return all(map(_is_numbers, part)) and len({len(inner) if isinstance(inner, list) else -1 for inner in part}) == 1
    return isinstance(part, bool | int | float)


def _samples(dataset: Any, where: str) -> list[Any]:
    """Read all samples of a map-style dataset, or of an iterable one, which is read once."""
    try:
        if hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__") and not isinstance(dataset, Mapping):
            found = [dataset[index] for index in range(len(dataset))]
        elif isinstance(dataset, Iterable) and not isinstance(dataset, Mapping | str):
            found = list(islice(dataset, MOST_ROWS + 1))
        else:
            raise InputError(
                f"{where} is a {type(dataset).__name__}: give a map-style dataset (a length and items), an iterable one, a DataLoader, a "
                "table or arrays"
            )
    except InputError:
        raise
    except Exception as error:  # whatever a user's own dataset raises
        raise InputError(f"{where} must give samples: {type(error).__name__}: {reason(error)}") from error
    if len(found) > MOST_ROWS:
        raise InputError(
            f"{where} is an iterable of more than {MOST_ROWS:,} samples, and it would be read into memory: give a map-style dataset, or "
            f"the first of them, itertools.islice(…, {MOST_ROWS})"
        )
    filled: list[Any] = _filled(found, where)
    return filled


def _filled(rows: Any, where: str) -> Any:
    if not (trees.count(rows) if isinstance(rows, tuple | dict) else len(rows)):
        raise InputError(f"{where} is empty: every dataset needs at least one sample")
    return rows


def _is_frame(given: object) -> bool:
    """Whether it is a table of pandas or polars; neither need be installed."""
    return type(given).__name__ == "DataFrame"


def _is_hub(given: object) -> bool:
    """Whether it is a `datasets.Dataset` (that package need not be installed): it has a length, columns and features."""
    return all(hasattr(given, name) for name in ("__len__", "column_names", "features", "remove_columns")) and not isinstance(given, dict)


def _is_arrays(given: object) -> bool:
    """Whether it is (inputs, targets) or a dictionary with arrays of all rows, rather than samples."""
    arrays = tree_leaves(given) if isinstance(given, tuple | dict) else []
    return bool(arrays) and all(isinstance(array, np.ndarray | Tensor) and array.ndim > 0 for array in arrays)


def _is_table(given: object) -> bool:
    return _is_frame(given) or _is_hub(given) or (isinstance(given, Mapping) and _is_arrays(dict(given)))


def columns_of(given: Any, where: str) -> Columns:
    """Return the columns of a frame, of a `datasets.Dataset` or of a dictionary of arrays."""
    if _is_hub(given):
        found = given.with_format("numpy")[:]
        return Columns({name: np.asarray(found[name]) for name in given.column_names}, where)
    if isinstance(given, Mapping):
        return Columns({str(name): np.asarray(array) for name, array in given.items()}, where)
    names = [str(name) for name in given.columns]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise InputError(f"{where} has two columns '{twice}': rename one of them")
    return Columns({str(name): as_numbers(given[name].to_numpy()) for name in given.columns}, where)


def _tensors(arrays: Any, where: str) -> Tensors:
    """Convert arrays to tensors, and double to single precision, as models have it; of unsigned types PyTorch has little but the names."""

    def tensor(array: Any) -> Tensor:
        if isinstance(array, Tensor):
            return array.to(_SIGNED.get(array.dtype, array.dtype))
        if array.dtype.kind not in "biuf":
            raise InputError(f"{where}: an array must hold numbers, and holds {array.dtype}: encode it (words as numbers from 0)")
        if array.dtype.kind == "f" and array.dtype.itemsize >= 8:
            array = array.astype(np.float32)
        found = torch.from_numpy(np.ascontiguousarray(array, array.dtype.newbyteorder("=")))
        return found.to(_SIGNED.get(found.dtype, found.dtype))

    return tree_map(tensor, arrays)


def _columns(table: Columns, where: str, reading: Reading) -> Piece:
    """Return the columns of numbers, by name."""
    objects = {name: array for name, array in table.columns.items() if array.dtype.kind not in "biuf"}
    words = tuple(name for name, array in objects.items() if array.dtype.kind in "US" or isinstance(array[0], str))
    numbers = table.without(*words)
    for name, array in numbers.columns.items():
        if array.ndim == 1 or array.dtype == object:
            check_filled(where, name, array, several=True)
        if name in objects:
            raise InputError(f"{where}: the rows of column '{name}' differ in length: give a collate_fn that pads them")
    named = [name for name in reading.targets or TARGETS if name in table.columns]
    if (reading.targets or not any(name in numbers.columns for name in named)) and (odd := next((n for n in named if n in words), None)):
        raise InputError(f"{where}: the target '{odd}' holds words: number its classes (with class_encode_column of datasets)")
    if not numbers.columns:
        raise InputError(f"{where} has no column of numbers: tokenise its text first, or give a collate_fn")
    return Piece(where, batch=_tensors(dict(numbers.columns), where), left_out=words)


def _note_ignored(given: Sequence[Any]) -> None:
    """Note once which settings of DataLoaders have no effect here."""
    loaders = [dataset for dataset in given if isinstance(dataset, DataLoader)]
    if not loaders:
        return
    says: dict[str, Callable[[Any], bool]] = {
        "batch_size": lambda loader: loader.batch_size not in (None, 1),
        "shuffle or sampler": lambda loader: (
            not isinstance(getattr(loader, "sampler", None), SequentialSampler | SubsetRandomSampler | None)
        ),
        "batch_sampler": lambda loader: (
            loader.batch_sampler is not None and (loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler)
        ),
        "drop_last": lambda loader: loader.drop_last,
        "num_workers": lambda loader: loader.num_workers > 0,
        "worker_init_fn": lambda loader: loader.worker_init_fn is not None,
        "generator": lambda loader: loader.generator is not None,
    }
    ignored = [what for what, said in says.items() if any(map(said, loaders))]
    if ignored:
        note(
            f"of the DataLoaders their dataset and collate_fn are used, not {', '.join(ignored)}: clients shuffle their own rows and train "
            "on batches of train.batch_size"
        )


# -- all of them ----------------------------------------------------------------------------------------------------


def _paired(parts: Sequence[Piece], reading: Reading) -> tuple[BatchForm, list[tuple[Tensors, Tensors]], str | None]:
    """Return inputs and targets of every part, and why they are not tensors if they are not."""
    tables = [part.table for part in parts if part.table is not None]
    if tables:
        if len(tables) < len(parts):
            raise InputError("some of the clients' data (and test) are tables, and others are not: give all in one way")
        encoding = Encoding.of(tables, reading.targets, reading.task, as_given=reading.as_given)
        return BatchForm("pair"), [encoding.encoded(table) for table in tables], None
    samples = [part for part in parts if part.samples is not None]
    own = next((part.collate for part in samples if part.collate is not None), None)
    if own is not None and any(part.collate is not None and part.collate != own for part in samples):
        raise InputError("the clients' DataLoaders (and test's) have different collate_fns: give all the same one, or collate_fn=")
    form: BatchForm | None = None
    pairs: list[tuple[Tensors, Tensors]] = []
    why = None
    for part in parts:
        batch = part.batch if part.samples is None else _collated(part, own)
        form = form or BatchForm.of(batch, reading, part.where)
        if own is None:
            _check_tensors(batch, part.where)
        elif why is None and part.samples is not None:
            why = _depends(part.samples, own, batch)
        pairs.append(_told_apart(form, batch, part.where))
        if own is None:
            _check_alike(pairs, part.where, parts[0].where)
    assert form is not None
    if why is None and own is not None and len({_shapes(pair) for pair in pairs}) > 1:
        why = _NOT_BY_ROW
    if why is not None and own is not None:
        if any(part.samples is None for part in parts):
            raise InputError(f"{why}: give all clients' data (and test) as datasets of samples")
        source = Samples([sample for part in parts for sample in part.samples or []], own, form.halves)
        each = torch.arange(len(source.samples)).split([len(part.samples or []) for part in parts])
        pairs = [(Ragged(source, rows, 0), Ragged(source, rows, 1)) for rows in each]
    return form, pairs, why


_NOT_BY_ROW = "the collate_fn makes a batch of more than one row after the other (does it pad to the longest?)"


def _shapes(pair: tuple[Tensors, Tensors]) -> tuple[Any, ...]:
    return tuple(
        (name, tuple(leaf.shape[1:])) for half, tree in zip("xy", pair, strict=True) for name, leaf in trees.named(half, tree).items()
    )


def _check_alike(pairs: Sequence[tuple[Tensors, Tensors]], where: str, first: str) -> None:
    """Have the last rows the parts and shapes of the first ones?"""
    ours, theirs = (dict(_shapes(pair)) for pair in (pairs[-1], pairs[0]))
    for name in [*theirs, *ours]:
        if ours.get(name) != theirs.get(name):
            has, wanted = ("none" if shapes.get(name) is None else f"shape {list(shapes[name])}" for shapes in (ours, theirs))
            raise InputError(
                f"{where} has another form than {first}: {_part(name)} has {has} there and {wanted} here, and all rows must have one shape"
            )


def _part(name: str) -> str:
    half, place = name[0], name[1:]
    return f"the {'input' if half == 'x' else 'target'}{f' {place}' if place else ''}"


def _told_apart(form: BatchForm, batch: Tensors, where: str) -> tuple[Tensors, Tensors]:
    try:
        return form.halves(batch)
    except (TypeError, KeyError, IndexError, AttributeError) as error:
        raise InputError(f"{where} has samples of another form than the first client's: {reason(error)}") from error


def _collated(part: Piece, own: Collate | None) -> Tensors:
    """Collate all samples of a part into one batch."""
    try:
        return trees.plain((own or default_collate)(list(part.samples or [])))
    except Exception as error:  # whatever a user's own dataset or function raises
        kind = "a collate_fn that takes them" if own is None else "samples that its collate_fn takes"
        raise InputError(
            f"{part.where} must give (input, target) pairs or dictionaries of equal shapes, or {kind}: "
            f"{type(error).__name__}: {reason(error)}"
        ) from error


def _check_tensors(batch: Tensors, where: str) -> None:
    """Check that everything in a batch is a tensor with the same number of rows."""
    for name, leaf in trees.named("", batch).items():
        if not isinstance(leaf, Tensor):
            raise InputError(
                f"{where}: {f'the part {name} of a sample' if name else 'a sample'} must be numbers, and is {type(leaf).__name__}: encode "
                "it, or give a collate_fn"
            )
    if len({leaf.shape[0] if leaf.dim() else 0 for leaf in trees.leaves(batch)}) > 1:
        raise InputError(f"{where}: its parts have different numbers of rows")


def _depends(samples: Sequence[Any], collate: Collate, whole: Tensors) -> str | None:
    """Return why batches cannot be gathered from one batch of all samples; None: each row is the same as on its own."""
    rows = torch.linspace(0, len(samples) - 1, min(_TRIED, len(samples))).long().tolist()
    try:
        for row in rows:
            alone = trees.plain(collate([samples[row]]))
            if not _alike(alone, trees.at(whole, slice(row, row + 1))):
                return _NOT_BY_ROW
    except Exception:  # a function that takes no single sample, or a batch that has no rows
        return _NOT_BY_ROW
    return None if all(leaf.shape[0] == len(samples) for leaf in trees.leaves(whole)) else _NOT_BY_ROW


def _alike(first: Tensors, second: Tensors) -> bool:
    one, other = trees.named("", first), trees.named("", second)
    return one.keys() == other.keys() and all(
        isinstance(a, Tensor) and isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
        for a, b in zip(one.values(), other.values(), strict=True)
    )


def in_precision_of(module: nn.Module, held: Data) -> Data:
    """`held` with inputs of single or double precision as the module's parameters are."""
    kinds = {parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()}
    if len(kinds) != 1 or not kinds <= set(_PRECISIONS):
        return held
    (kind,) = kinds

    def cast(leaf: Any) -> Any:
        return leaf.to(kind) if isinstance(leaf, Tensor) and leaf.dtype in _PRECISIONS else leaf

    return replace(held, x=trees.mapped(cast, held.x), test_x=trees.mapped(cast, held.test_x))


def with_test_share(held: Data, share: float) -> Data:
    """Move a random `share` of the training rows of `held`, the same in every run, to its test set; with 0 there is none."""
    if share == 0 and not isinstance(share, bool):
        return replace(held, test_x=held.x[:0], test_y=held.y[:0])
    rest, test = parted(held.samples, share, "test")
    return replace(held.only(rest), test_x=held.x[test], test_y=held.y[test])


def normalised(held: Data, augment: Augment) -> Data:
    """Normalise the images `held` by the mean and standard deviation of the training rows alone."""
    return replace(held, view=Measured.of(*statistics(held.x), augment))
