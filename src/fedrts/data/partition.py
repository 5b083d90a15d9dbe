"""Partitions: the rows of a data set divided among clients, reproducible from a key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from fedrts.data.holdings import Holdings
from fedrts.errors import InputError, note
from fedrts.sparse import random

Partition = Literal["dirichlet", "quantity", "iid", "shards", "column", "sites"]
SITES: Partition = "sites"
"""Nothing is divided: clients are sites with data of their own, which the server never sees."""

BY_COLUMN: Partition = "column"
"""The data say whose every row is: a column of a table does."""

_REDRAWS = 100


def by_owner(owners: Tensor, clients: int, names: Sequence[str] = ()) -> Holdings:
    """Return the row numbers of every client if the data say who owns each row `[n]`."""
    known = len(names) or int(owners.max()) + 1
    if known != clients:
        raise InputError(f"clients.total = {clients}, and the data name {known} clients: leave it out")
    counts = torch.bincount(owners, minlength=clients)
    if not bool(counts.all()):
        empty = int((counts == 0).nonzero()[0])
        called = f"'{names[empty]}'" if names else str(empty)
        raise InputError(f"client {called} has no training row: lower data_options.test, or leave out the client's rows")
    return Holdings.cut(owners.argsort(stable=True), counts.tolist())


def divide(kind: str, labels: Tensor, clients: int, alpha: float, min_size: int, key: int, classes_per_client: int = 2) -> Holdings:
    """The row numbers of every client: disjoint and complete, each client with at least `min_size` rows.

    `dirichlet` skews labels and `quantity` sizes, the more the lower `alpha`; `shards` gives a client `classes_per_client` labels.
    """
    assert kind in get_args(Partition), kind
    if kind == BY_COLUMN:
        raise InputError(
            f"clients.partition = '{BY_COLUMN}' needs data that say whose a row is: csv: and parquet: do by data_options.client"
        )
    if kind == SITES:
        return Holdings.cut(torch.zeros(0, dtype=torch.int64), [0] * clients)  # how many samples each has they say themselves
    rows = len(labels)
    if kind in ("dirichlet", "shards") and (labels.dim() != 1 or labels.is_floating_point()):
        raise InputError(
            f"clients.partition = '{kind}' needs one label per sample, which this data set does not have: use 'iid' or 'quantity'"
        )
    if kind == "quantity" and 0 < rows // clients < min_size:
        note(f"{rows:,} samples give each of {clients} clients at least {rows // clients}, not clients.min_size = {min_size}")
        min_size = rows // clients
    if clients * max(min_size, 1) > rows:
        raise InputError(
            f"clients.total = {clients} with clients.min_size = {min_size} needs {clients * max(min_size, 1):,} training samples; "
            f"there are {rows:,}: lower one of them"
        )
    if kind == "iid":
        sizes = torch.full((clients,), rows // clients) + (torch.arange(clients) < rows % clients)
        owner = torch.repeat_interleave(torch.arange(clients), sizes)
        return Holdings.cut((owner * rows + random.permutation(key, rows)).sort().values % rows, sizes.tolist())
    rng = np.random.default_rng(random.seed(key))
    if kind == "quantity":
        return Holdings.cut(random.permutation(key, rows), _sizes(rows, clients, alpha, min_size, rng))
    if kind == "shards":
        return Holdings.of(_shards(labels.cpu().numpy(), clients, classes_per_client, min_size, rng))
    return Holdings.of(_dirichlet(labels.cpu().numpy(), clients, alpha, min_size, rng))


def _sizes(rows: int, clients: int, alpha: float, min_size: int, rng: np.random.Generator) -> list[int]:
    """Quantity skew: everyone gets `min_size`; the rest is divided by a draw q ~ Dir(α·1_N), remainders to the largest fractions."""
    draw = rng.dirichlet(np.full(clients, alpha))
    if not np.isclose(draw.sum(), 1):
        raise InputError(f"clients.alpha = {alpha:g} is beyond what a Dirichlet draw can take: choose one nearer to 1")
    share = draw * (rows - clients * min_size)
    sizes = np.floor(share).astype(np.int64) + min_size
    sizes[np.argsort(np.floor(share) - share, kind="stable")[: rows - sizes.sum()]] += 1
    result: list[int] = sizes.tolist()
    return result


def _shards(labels: np.ndarray, clients: int, each: int, min_size: int, rng: np.random.Generator) -> list[Tensor]:
    """Few labels per client: in random order, clients take the `each` labels of which a holder would get most, in equal shares."""
    kinds, counts = np.unique(labels, return_counts=True)
    if not each <= len(kinds) <= clients * each:
        raise InputError(
            f"clients.classes_per_client = {each} for {clients} clients: it must not exceed the {len(kinds)} classes of the data, "
            f"and clients times it must reach them all"
        )
    holders: list[list[int]] = [[] for _ in kinds]
    for client in rng.permutation(clients):
        number = np.array([len(some) for some in holders])
        order = np.lexsort((rng.random(len(kinds)), -counts / (number + 1), number > 0))  # first what nobody holds yet
        for kind in order[:each]:
            holders[kind].append(int(client))
    parts: list[list[np.ndarray]] = [[] for _ in range(clients)]
    for kind, some in zip(kinds, holders, strict=True):
        members = rng.permutation(np.flatnonzero(labels == kind))
        for client, chunk in zip(some, np.array_split(members, len(some)), strict=True):
            parts[client].append(chunk)
    smallest = min(sum(map(len, chunks)) for chunks in parts)
    if smallest < max(min_size, 1):
        raise InputError(
            f"clients.partition = 'shards' leaves a client with {smallest} samples, clients.min_size = {min_size}: "
            "lower it or clients.total, or raise clients.classes_per_client"
        )
    return [torch.from_numpy(rng.permutation(np.concatenate(chunks))) for chunks in parts]


def _dirichlet(labels: np.ndarray, clients: int, alpha: float, min_size: int, rng: np.random.Generator) -> list[Tensor]:
    """Label skew: each class is cut by a draw q ~ Dir(α·1_N) over the clients that hold less than the average.

    The whole draw is repeated until every client has `min_size` rows; lower α is more heterogeneous.
    """
    rows = len(labels)
    for _ in range(_REDRAWS):
        parts: list[list[np.ndarray]] = [[] for _ in range(clients)]
        held = np.zeros(clients, dtype=np.int64)
        complete = True
        for label in np.unique(labels):
            members = rng.permutation(np.flatnonzero(labels == label))
            share = rng.dirichlet(np.full(clients, alpha)) * (held < rows / clients)
            if not np.isfinite(total := share.sum()) or total <= 0:
                complete = False
                break
            cuts = np.floor(np.cumsum(share / total) * len(members)).astype(np.int64)[:-1]
            for client, chunk in enumerate(np.split(members, cuts)):
                parts[client].append(chunk)
                held[client] += len(chunk)
        if complete and held.min() >= min_size:
            return [torch.from_numpy(rng.permutation(np.concatenate(chunks))) for chunks in parts]
    raise InputError(
        f"no Dirichlet partition with clients.alpha = {alpha:g} gives each of {clients} clients {min_size} samples "
        f"({_REDRAWS} draws): raise clients.alpha, or lower clients.total or clients.min_size"
    )
