"""Kernels that compute only the active links of a sparse model, on a CPU: a C library behind ctypes.

    library = fedrts_kernels.load()            # an OSError where nothing was compiled
    library.isas                               # ("portable", "avx2", "avx512"), the best last
    library.run("avx2", program, context)      # a program of `structures.Operation`s

`fedrts` assembles the programs (fedrts.programs). A model that was exported with `fedrts export --format sparse` needs nothing else:

    model = fedrts_kernels.Model(Path("model.frts").read_bytes())
    outputs = model(x)

and `PROGRAM` predicts with it where there is no Python at all.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import Array, byref, c_int64, sizeof
from functools import cache
from pathlib import Path

from fedrts_kernels import build, model
from fedrts_kernels.build import ISAS, LIBRARY
from fedrts_kernels.model import Model as Model
from fedrts_kernels.structures import Context, Operation

__version__ = "0.1.0"
ABI = 4
FILE = Path(os.environ.get("FEDRTS_KERNELS_LIBRARY") or Path(__file__).resolve().parent / LIBRARY)
"""The library; the environment may name another build of it, such as one with sanitizers."""
PROGRAM = FILE.with_name(build.PROGRAM)
"""The program, beside the library."""

_WRONG = {1: "an operation is not known", 2: "a label is no class of the model", 3: "this processor lacks the instruction set"}


class Library:
    """The compiled library."""

    def __init__(self, file: Path) -> None:
        self._library = ctypes.CDLL(str(file))
        names = ("fedrts_abi", "fedrts_size_of_operation", "fedrts_size_of_context", "fedrts_has", "fedrts_run")
        for name in names:
            getattr(self._library, name).restype = c_int64
        self._library.fedrts_has.argtypes = [c_int64]
        self._library.fedrts_run.argtypes = [c_int64, ctypes.c_void_p, c_int64, ctypes.c_void_p]
        sizes = (self._library.fedrts_abi(), self._library.fedrts_size_of_operation(), self._library.fedrts_size_of_context())
        if sizes != (ABI, sizeof(Operation), sizeof(Context)):
            raise OSError(f"{file} is of another version: build it again with python -m fedrts_kernels")
        model.declare(self._library)
        self.functions = self._library
        """C functions for models (`model.h`)."""
        self.isas: tuple[str, ...] = tuple(isa for number, isa in enumerate(ISAS) if self._library.fedrts_has(number))
        """The instruction sets of this processor, the best last."""

    def run(self, isa: str, program: Array[Operation], context: Context) -> None:
        """Run a program; other threads go on meanwhile."""
        wrong = self._library.fedrts_run(list(ISAS).index(isa), program, len(program), byref(context))
        if wrong:
            raise ValueError(_WRONG[wrong])


@cache
def load(file: Path = FILE) -> Library:
    """The library; an `OSError` where there is none, or one of another version."""
    return Library(file)
