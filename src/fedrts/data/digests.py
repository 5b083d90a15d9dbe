"""Digests of arrays, computed once; those of file-backed arrays are kept beside the files while these do not change."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

_FILE = "digests.json"
_BLOCK = 2**26
"""Bytes at a time that are brought into order, or back from a device."""


@dataclass(frozen=True)
class _FilePart:
    """The part of a file that holds one tensor's array."""

    file: Path
    name: str
    """Which part: where it begins, and its sizes, steps and type."""


_files: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Whole arrays → the files that they are mapped from."""
_parts: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Copies elsewhere of parts of them → `_FilePart`."""


def mapped(file: Path) -> Tensor:
    """Map the array of a .npy file copy-on-write: torch asks for writable arrays, and writes never reach the file."""
    tensor = torch.from_numpy(np.load(file, mmap_mode="c", allow_pickle=False))
    _files[tensor] = file
    return tensor


def seen_as(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """View the same bytes as values of another type."""
    seen = tensor.view(dtype)
    if tensor in _files:
        _files[seen] = _files[tensor]
    return seen


def same_content(tensor: Tensor, copy: Tensor) -> Tensor:
    """Record that `copy` holds what `tensor` holds."""
    if copy is not tensor and (part := _part(tensor)) is not None:
        _parts[copy] = part
    return copy


def digest_of(tensor: Tensor) -> str:
    """Return a digest of a tensor's values in their order."""
    part = _part(tensor)
    if part is None:
        return _computed(tensor)
    known, stamp = _read(part.file)
    if part.name not in known:
        known[part.name] = _computed(tensor)
        _write(part.file, known, stamp)
    return known[part.name]


def _computed(tensor: Tensor) -> str:
    digest = hashlib.sha256()  # for which processors have instructions: twice as fast as others
    rows = max(1, _BLOCK * len(tensor) // max(1, tensor.numel() * tensor.element_size())) if tensor.dim() else 1
    for block in tensor.split(rows) if tensor.dim() and tensor.numel() else [tensor]:
        if block.numel():
            array: Any = block.cpu().contiguous().view(-1).view(torch.uint8).numpy()
            digest.update(array)
    return digest.hexdigest()[:32]


def _part(tensor: Tensor) -> _FilePart | None:
    """Return the part of a file that a tensor is, or was copied from."""
    if tensor in _parts:
        found: _FilePart = _parts[tensor]
        return found
    whole = tensor if tensor._base is None else tensor._base
    if whole not in _files:
        return None
    return _FilePart(_files[whole], repr((tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), str(tensor.dtype))))


def _read(file: Path) -> tuple[dict[str, str], list[int]]:
    """Read the digests of parts of a file computed since it last changed, and when that was."""
    status = os.stat(file)
    stamp = [status.st_size, status.st_mtime_ns]
    entry: Any = _content(file).get(file.name)
    if isinstance(entry, dict) and entry.get("stamp") == stamp and isinstance(entry.get("digests"), dict):
        return dict(entry["digests"]), stamp
    return {}, stamp


def _write(file: Path, digests: dict[str, str], stamp: list[int]) -> None:
    """Write digests if possible; otherwise they are computed again next time."""
    content = _content(file) | {file.name: {"stamp": stamp, "digests": digests}}
    temporary = file.with_name(f".{_FILE}.{os.getpid()}.tmp")
    with contextlib.suppress(OSError):
        temporary.write_text(json.dumps(content, indent=1), "utf-8")
        os.replace(temporary, file.with_name(_FILE))


def _content(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.with_name(_FILE).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
