"""Who holds what: the rows of a data set divided among clients, reproducible from a key."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fedrts.errors import InputError
from fedrts.sparse import random

_REDRAWS = 100


def divide(kind: str, labels: Tensor, clients: int, alpha: float, min_size: int, key: int) -> list[Tensor]:
    """The row numbers of every client: disjoint and complete, each client with at least `min_size` rows."""
    rows = len(labels)
    if kind == "dirichlet" and (labels.dim() != 1 or labels.is_floating_point()):
        raise InputError("clients.partition = 'dirichlet' needs one label per sample, which this data set does not have: use 'iid'")
    if clients * max(min_size, 1) > rows:
        raise InputError(
            f"clients.total = {clients} with clients.min_size = {min_size} needs {clients * max(min_size, 1):,} training samples; "
            f"there are {rows:,}: lower one of them"
        )
    if kind == "iid":
        return [part.sort().values for part in random.permutation(key, rows).tensor_split(clients)]
    return _dirichlet(labels.cpu().numpy(), clients, alpha, min_size, np.random.default_rng(random.seed(key)))


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
