"""Your own arrays: a NumPy .npz file with x, y and, if there is a test set, x_test, y_test."""

from __future__ import annotations

import lzma
import math
import zipfile
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedrts.data import register
from fedrts.data.contract import Data, Recipe
from fedrts.data.own import normalised, with_test_share
from fedrts.data.pixels import Augment
from fedrts.errors import InputError
from fedrts.files import check_expansion, require_plain

_DAMAGE = (OSError, ValueError, EOFError, TypeError, AttributeError, RuntimeError)
"""What numpy and zipfile raise on it, beside errors of their own."""
NAMES = ("x", "y", "x_test", "y_test")
RECIPE = Recipe(settings={"eval": {"every": 1}})


@register("npz:PATH", RECIPE)
def npz(path: Path, augment: Augment = False, test: float = 0.2) -> Data:
    """Your own arrays: x, y (labels from 0), and x_test, y_test or the share `test` of the rows; uint8 are images, normalised."""
    arrays = _read(path)
    x, y = _inputs(path, arrays, "x"), _labels(path, arrays, "y")
    given = "x_test" in arrays or "y_test" in arrays
    test_x, test_y = (_inputs(path, arrays, "x_test"), _labels(path, arrays, "y_test")) if given else (x[:0], y[:0])
    for inputs, labels, name in ((x, y, "x"), (test_x, test_y, "x_test")):
        if len(inputs) != len(labels):
            raise InputError(f"{path}: {name} has {len(inputs):,} rows, its labels are {len(labels):,}: they must be as many")
    if test_x.shape[1:] != x.shape[1:] or test_x.dtype != x.dtype:
        raise InputError(f"{path}: x has rows {tuple(x.shape[1:])} of {x.dtype}, x_test {tuple(test_x.shape[1:])} of {test_x.dtype}")
    if augment and x.dtype != torch.uint8:
        raise InputError(f"{path}: data_options.augment is for images, and x is no uint8 array of images")
    held = Data(x, y, test_x, test_y, classes=int(max(y.max(), test_y.max() if given else 0)) + 1)
    held = held if given else with_test_share(held, test)
    return normalised(held, augment) if x.dtype == torch.uint8 else held


def _read(path: Path) -> dict[str, np.ndarray]:
    require_plain(path)
    try:
        _check_sizes(path)
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in NAMES if name in file}
    except FileNotFoundError as error:
        raise InputError(f"there is no file {path}: --data npz:PATH names a NumPy .npz file with x and y") from error
    except MemoryError as error:
        raise InputError(f"the arrays of {path} do not fit into memory: give fewer rows, or smaller types") from error
    except InputError:
        raise
    except (*_DAMAGE, zlib.error, lzma.LZMAError, zipfile.BadZipFile) as error:
        raise InputError(f"{path} is no .npz file of plain arrays: {error}") from error


def _check_sizes(path: Path) -> None:
    """Check before expanding that every array is as long as its header says, and that all together stay within the limit."""
    with zipfile.ZipFile(path) as archive:
        members = [info for info in archive.infolist() if info.filename.removesuffix(".npy") in NAMES]
        check_expansion(path, path.stat().st_size, sum(info.file_size for info in members), "save it with numpy.savez, uncompressed")
        for info in members:
            with archive.open(info) as file:
                major, _ = np.lib.format.read_magic(file)
                read = np.lib.format.read_array_header_1_0 if major == 1 else np.lib.format.read_array_header_2_0
                shape, _, dtype = read(file)
                claimed, there = math.prod(shape) * dtype.itemsize, info.file_size - file.tell()
            if claimed != there and not dtype.hasobject:
                raise InputError(f"{path}: the header of {info.filename} claims {claimed:,} bytes and {there:,} follow: it is damaged")


def _inputs(path: Path, arrays: dict[str, np.ndarray], name: str) -> Tensor:
    """Return images `[n, c, h, w]` (uint8; `[n, h, w]` and `[n, h, w, c]` are converted), or rows of numbers, float32 or int64."""
    array = _present(path, arrays, name)
    if array.dtype == np.uint8:
        if array.ndim == 3:
            array = array[:, None]
        elif array.ndim == 4 and array.shape[1] not in (1, 3) and array.shape[3] in (1, 3):
            array = array.transpose(0, 3, 1, 2)
        if array.ndim != 4:
            raise InputError(f"{path}: {name} is uint8 of shape {array.shape}; images are [n, h, w], [n, c, h, w] or [n, h, w, c]")
        return torch.from_numpy(np.ascontiguousarray(array))
    if not (np.issubdtype(array.dtype, np.floating) or np.issubdtype(array.dtype, np.integer)) or array.ndim < 2:
        raise InputError(f"{path}: {name} is {array.dtype} of shape {array.shape}; it must be numbers, one row a sample")
    with np.errstate(over="ignore"):
        array = array.astype(np.float32 if np.issubdtype(array.dtype, np.floating) else np.int64)
    if not np.isfinite(array).all():
        raise InputError(f"{path}: {name} holds values that are not finite in float32: remove or replace them")
    return torch.from_numpy(array)


def _labels(path: Path, arrays: dict[str, np.ndarray], name: str) -> Tensor:
    array = _present(path, arrays, name)
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer) or array.min() < 0 or array.max() > np.iinfo(np.int32).max:
        raise InputError(f"{path}: {name} is {array.dtype} of shape {array.shape}; it must be one whole number from 0 per sample")
    return torch.from_numpy(array.astype(np.int64))


def _present(path: Path, arrays: dict[str, np.ndarray], name: str) -> np.ndarray:
    if name not in arrays or len(arrays[name].shape) == 0 or len(arrays[name]) == 0:
        raise InputError(
            f"{path}: {name} is {'empty' if name in arrays else 'missing'}; it takes x and y, and x_test with y_test or neither"
        )
    return arrays[name]
