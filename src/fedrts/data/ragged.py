"""Rows that do not fit one tensor: they stay as they are, and a collate function makes batches of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fedrts import trees
from fedrts.trees import Tensors

Collate = Callable[[list[Any]], Any]
Halves = Callable[[Any], tuple[Tensors, Tensors]]
"""A collated batch → its inputs and its targets."""


class Samples:
    """Samples, and the function that makes a batch of them."""

    def __init__(self, samples: Sequence[Any], collate: Collate, halves: Halves) -> None:
        self.samples, self.collate, self.halves = samples, collate, halves
        self._last: tuple[Any, tuple[Tensors, Tensors]] | None = None

    @cached_property
    def digest(self) -> str:
        """A digest of all samples."""
        found = hashlib.blake2b(digest_size=16)
        for leaf in tree_leaves([trees.plain(sample) for sample in self.samples]):
            content = (
                leaf.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if isinstance(leaf, Tensor) else repr(leaf).encode()
            )
            found.update(repr((type(leaf).__name__, list(getattr(leaf, "shape", ())), len(content))).encode() + content)
        return found.hexdigest()

    def batch(self, rows: tuple[int, ...], device: torch.device | str) -> tuple[Tensors, Tensors]:
        """Return inputs and targets of some samples; both halves of one request come from the same batch."""
        key = (rows, str(device))
        if self._last is None or self._last[0] != key:
            pair = self.halves(trees.plain(self.collate([self.samples[row] for row in rows])))
            self._last = key, (_moved(pair[0], device), _moved(pair[1], device))
        return self._last[1]


def _moved(tree: Tensors, device: torch.device | str) -> Tensors:
    """Return a tree with its tensors on a device; a batch may hold anything else beside them, such as lengths."""
    return trees.mapped(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, tree)


@dataclass(frozen=True)
class Ragged:
    """Inputs or targets (`half` 0 or 1) of some rows of a source."""

    source: Samples
    rows: Tensor
    half: int
    device: torch.device | str = "cpu"

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, rows: Any) -> Ragged:
        if isinstance(rows, Tensor):
            rows = rows.cpu()
        return replace(self, rows=self.rows[rows])

    @property
    def digest(self) -> str:
        """A digest of the samples."""
        return self.source.digest

    def opened(self) -> Tensors:
        """Return a batch of all rows."""
        return self.source.batch(tuple(self.rows.tolist()), self.device)[self.half]

    def to(self, device: torch.device | str) -> Ragged:
        return replace(self, device=device)


def joined(parts: Sequence[Tensors]) -> Tensors:
    """Join rows: trees of tensors, or parts of one source."""
    first = parts[0]
    if isinstance(first, Ragged):
        return replace(first, rows=torch.cat([part.rows for part in parts]))
    return trees.joined(parts)
