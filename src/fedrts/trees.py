"""Batches as trees: one tensor, or arbitrarily nested tuples and dictionaries of tensors.

batch = {"tokens": tokens, "mask": mask}      # tensors [rows, …]
at(batch, torch.tensor([3, 1]))               # the same with two rows
called(module, batch)                         # module(tokens=…, mask=…)

A leaf need not be a tensor: whatever has a length, takes row numbers in brackets and is `opened` into tensors at the end will do
(`fedrts.data.ragged`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_map

Tensors = Any
"""A tensor, or a tuple or dictionary of trees. All tensors have the rows as leading axis."""


@runtime_checkable
class Closed(Protocol):
    """Rows that become tensors only when a batch is made."""

    def opened(self) -> Tensors:
        """Return the rows as tensors."""
        ...


def leaves(tree: Tensors) -> list[Tensor]:
    """Return all tensors of a tree, in order."""
    return [tree] if isinstance(tree, Tensor) else tree_leaves(tree)


def mapped(function: Callable[..., Any], tree: Tensors, *others: Tensors) -> Tensors:
    """Apply `function` to every leaf of the tree."""
    return function(tree, *others) if isinstance(tree, Tensor) else tree_map(function, tree, *others)


def named(name: str, tree: Tensors) -> dict[str, Any]:
    """Return leaves by name: `x`, or `x['tokens']` and so on."""
    return {f"{name}{keystr(path)}": leaf for path, leaf in tree_flatten_with_path(tree)[0]}


def count(tree: Tensors) -> int:
    """The number of rows."""
    return len(leaves(tree)[0])


def at(tree: Tensors, rows: Any) -> Tensors:
    """Return some rows of a tree: by a tensor of row numbers, a slice, or one row number."""
    return mapped(lambda leaf: leaf[rows], tree)


def opened(tree: Tensors) -> Tensors:
    """Return the tree with all leaves opened into tensors."""
    return tree if isinstance(tree, Tensor) else tree_map(lambda leaf: leaf.opened() if isinstance(leaf, Closed) else leaf, tree)


def split(tree: Tensors, size: int) -> Iterator[Tensors]:
    """Yield `size` rows at a time."""
    for start in range(0, count(tree), size):
        yield at(tree, slice(start, start + size))


def joined(parts: Sequence[Tensors]) -> Tensors:
    """Join trees of one form; numbers without an axis become rows."""
    return mapped(lambda *some: torch.cat([torch.atleast_1d(part) for part in some]) if isinstance(some[0], Tensor) else some[0], *parts)


def plain(value: Any) -> Tensors:
    """Convert a collate function's result to a tree: mappings to dictionaries, lists to tuples, arrays to tensors; the rest stays."""
    if isinstance(value, Mapping):
        return {str(key): plain(part) for key, part in value.items()}
    if isinstance(value, tuple | list):
        parts = [plain(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return torch.from_numpy(value) if isinstance(value, np.ndarray) and value.dtype.kind in "biuf" else value


def called(module: nn.Module, x: Tensors) -> Any:
    """The output of a module: a tuple goes to `forward` by position, a dictionary by name.

    A `forward` that takes neither, but one argument, gets it whole.
    """
    if isinstance(x, Tensor):
        return module(x)
    if not by_name(module, x):
        return module(x)
    return module(**x) if isinstance(x, dict) else module(*x)


def by_name(module: nn.Module, x: Tensors) -> bool:
    """Whether `forward` takes the parts of a dictionary by name, or of a tuple by position; otherwise it is given the whole."""
    signature = inspect.signature(module.forward)
    positions, names = ((), x) if isinstance(x, dict) else (x, {})
    return _takes(signature, *positions, **names) or not _takes(signature, x)


def _takes(signature: inspect.Signature, *positions: Any, **names: Any) -> bool:
    try:
        signature.bind(*positions, **names)
    except TypeError:
        return False
    return True


def answer(output: Any) -> Any:
    """Return the part of an output that the built-in losses and metrics use: its `logits` if it has them, otherwise itself."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping) and "logits" in output:
        return output["logits"]
    return getattr(output, "logits", output)
