"""The rows of every client, for any number of clients, in two tensors instead of one object per client."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import overload

import torch
from torch import Tensor


class Holdings(Sequence[Tensor]):
    """The row numbers of all clients in one tensor: client c holds `rows[bounds[c]:bounds[c + 1]]`."""

    def __init__(self, rows: Tensor, bounds: Tensor) -> None:
        self.rows, self.bounds = rows, bounds

    @staticmethod
    def cut(rows: Tensor, sizes: Iterable[int]) -> Holdings:
        """Divide `rows [n]` in order: the first client gets `sizes[0]` of them, and so on."""
        bounds = torch.as_tensor(sizes if isinstance(sizes, Sequence) else list(sizes), dtype=torch.int64).cumsum(0)
        return Holdings(rows, torch.cat([bounds.new_zeros(1), bounds]))

    @staticmethod
    def of(parts: Sequence[Tensor]) -> Holdings:
        """Build holdings from one tensor of row numbers per client."""
        if isinstance(parts, Holdings):
            return parts
        return Holdings.cut(torch.cat([part.cpu() for part in parts]), [len(part) for part in parts])

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @overload
    def __getitem__(self, client: int) -> Tensor: ...
    @overload
    def __getitem__(self, client: slice) -> list[Tensor]: ...
    def __getitem__(self, client: int | slice) -> Tensor | list[Tensor]:
        if isinstance(client, slice):
            return [self[index] for index in range(*client.indices(len(self)))]
        edges = self.bounds.numpy()
        count = len(edges) - 1
        if not -count <= client < count:
            raise IndexError(f"client {client} of {count}")
        return self.rows[edges[client % count] : edges[client % count + 1]]

    def __iter__(self) -> Iterator[Tensor]:
        return (self[client] for client in range(len(self)))

    @cached_property
    def sizes(self) -> array[int]:
        """n_k of every client, as eight-byte integers."""
        return array("q", self.bounds.diff().numpy().tobytes())

    @property
    def largest(self) -> int:
        """The number of rows of the largest client."""
        return int(self.bounds.diff().max())
