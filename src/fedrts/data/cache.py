"""Decoded once: arrays as .npy files under the folder of data sets, read back memory-mapped.

A cache belongs to the exact files it was made from (names, sizes, times of change); when they change it is made anew.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedrts.data.digests import mapped
from fedrts.errors import InputError, note
from fedrts.files import check_mode

Make = Callable[[str, tuple[int, ...], Any], np.ndarray]
"""(name, shape, dtype) → an array to be filled."""

_VERSION = 2
"""Version of what decoders write: raise it when one of them changes."""


def cached(folder: Path, name: str, sources: Iterable[str | Path], decode: Callable[[Make], None]) -> dict[str, Tensor]:
    """The arrays that `decode` fills, of which `sources` are the files.

    Processes that want the same arrays wait for the first to decode them. Where the folder cannot be written they are decoded into memory.
    """
    ready = folder / ".cache" / f"{name}-{_fingerprint(folder, sources)}"
    if (found := _read(ready)) is not None:
        return found
    store = _Store(ready.with_name(f".{name}.tmp"))
    with contextlib.ExitStack() as stack:
        try:
            ready.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(_locked(ready.with_name(f".{name}.lock")))
        except OSError as error:
            store.failure = error
        if (found := _read(ready)) is not None:  # made while this process waited
            return found
        shutil.rmtree(store.path, ignore_errors=True)
        try:
            decode(store.make)
            if store.failure is None:
                store.keep(ready)
                return _read(ready) or {}
        finally:
            shutil.rmtree(store.path, ignore_errors=True)
    note(f"cannot cache '{name}' in {ready.parent}: {store.failure.strerror}; it is decoded anew every time")
    return {key: torch.from_numpy(array) for key, array in store.arrays.items()}


class _Store:
    """Arrays in files of a temporary folder, or in memory if that failed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.arrays: dict[str, np.ndarray] = {}
        self.failure: OSError | None = None

    def make(self, name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        self.arrays[name] = self._mapped(name, shape, dtype) if self.failure is None else _in_memory(name, shape, dtype)
        return self.arrays[name]

    def _mapped(self, name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        try:
            self.path.mkdir(exist_ok=True)
            needed = math.prod(shape) * np.dtype(dtype).itemsize
            if needed > shutil.disk_usage(self.path).free:  # asking for it would fill the disk before it fails
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            file = self.path / f"{name}.npy"
            array = np.lib.format.open_memmap(file, mode="w+", dtype=dtype, shape=shape)
            with open(file, "r+b") as opened:  # a full disk shows here, not as a fatal signal when the array is filled
                os.posix_fallocate(opened.fileno(), 0, file.stat().st_size)
        except OSError as error:
            self.failure = error
            return _in_memory(name, shape, dtype)
        return array

    def keep(self, ready: Path) -> None:
        """Move the completed files to their place, and delete those made from older sources."""
        for array in self.arrays.values():
            array.flush()  # type: ignore[attr-defined]
        self.arrays.clear()
        name = ready.name.rpartition("-")[0]
        for old in ready.parent.glob(f"{name}-*"):
            if old.name.rpartition("-")[0] == name:
                shutil.rmtree(old, ignore_errors=True)
        os.rename(self.path, ready)


def _in_memory(name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    try:
        return np.empty(shape, dtype)
    except (MemoryError, ValueError) as error:
        size = math.prod(shape) * np.dtype(dtype).itemsize / 1e9
        raise InputError(f"'{name}' takes {size:,.0f} GB, which neither disk nor memory have: lower data_options, or free space") from error


def _read(ready: Path) -> dict[str, Tensor] | None:
    """Memory-map the arrays of a cache; None if it is missing or damaged."""
    try:
        files = sorted(ready.glob("*.npy"))
        return {file.stem: mapped(file) for file in files} or None
    except (OSError, ValueError, EOFError):
        return None


def _fingerprint(folder: Path, sources: Iterable[str | Path]) -> str:
    digest = hashlib.blake2b(str(_VERSION).encode(), digest_size=8)
    root = os.path.abspath(folder)
    for source in sources:
        try:
            status = os.stat(source)
        except OSError as error:
            raise InputError(f"cannot read {source}: {error.strerror}") from error
        check_mode(source, status.st_mode)
        path = os.path.abspath(source)
        name = path[len(root) + 1 :] if path.startswith(root + os.sep) else path
        digest.update(f"{name}\0{status.st_size}\0{status.st_mtime_ns}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path, "ab") as file:
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        except ImportError:  # not on Windows: two processes may then decode the same
            pass
        yield
