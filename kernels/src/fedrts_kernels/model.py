"""A model of `fedrts export --format sparse`, in the kernels: needs neither PyTorch nor fedrts.

    model = Model(Path("model.frts").read_bytes())     # a ValueError says what is wrong with them
    outputs = model(x)                                 # any buffer of float32 [n, *model.input_shape] → array("f") of [n, model.outputs]

With NumPy, `numpy.asarray(model(x)).reshape(len(x), -1)`. A model belongs to one thread at a time.
"""

from __future__ import annotations

import weakref
from array import array
from ctypes import c_char, c_char_p, c_int64, c_void_p, create_string_buffer
from typing import TYPE_CHECKING, Any

from fedrts_kernels.build import ISAS

if TYPE_CHECKING:
    from fedrts_kernels import Library

_ROOM_FOR_WHY = 160
_INPUT_SIZE, _OUTPUTS, _CHANNELS, _WEIGHTS, _ACTIVE, _OPERATIONS, _RANK, _SHAPE = range(8)


class Model:
    """What an archive's model predicts, on the best instruction set of this processor unless another is named."""

    def __init__(self, data: bytes, isa: str | None = None, library: Library | None = None) -> None:
        from fedrts_kernels import load

        library = library or load()
        self._c = library.functions
        self._isa = list(ISAS).index(isa or library.isas[-1])
        why = create_string_buffer(_ROOM_FOR_WHY)
        self._at = self._c.fedrts_open(data, len(data), why)
        if not self._at:
            raise ValueError(why.value.decode(errors="replace"))
        weakref.finalize(self, self._c.fedrts_close, self._at)
        self.input_shape = tuple(self._fact(_SHAPE + side) for side in range(self._fact(_RANK)))
        self.outputs = self._fact(_OUTPUTS)
        self.weights, self.active = self._fact(_WEIGHTS), self._fact(_ACTIVE)
        """All weights of matrices and convolutions, and those that are there."""

    def __call__(self, x: Any) -> array[float]:
        """Outputs of inputs as the model reads them: any contiguous buffer of float32."""
        view = memoryview(x)
        size = 4 * self._fact(_INPUT_SIZE)
        if view.format != "f" or not view.c_contiguous or view.nbytes % size:
            raise ValueError(f"inputs must be contiguous float32 [n, {', '.join(map(str, self.input_shape))}]")
        samples = view.nbytes // size
        found = array("f", bytes(4 * samples * self.outputs))
        if samples:
            held = c_char * view.nbytes
            inputs = held.from_buffer_copy(view) if view.readonly else held.from_buffer(view)
            wrong = self._c.fedrts_predict(self._at, self._isa, inputs, samples, found.buffer_info()[0])
            if wrong:
                raise ValueError("there is not enough memory for the activations" if wrong == 4 else "the kernels cannot run it")
        return found

    def _fact(self, which: int) -> int:
        return int(self._c.fedrts_fact(self._at, which))


def declare(library: Any) -> None:
    """Types of the functions of `model.h`."""
    library.fedrts_open.restype, library.fedrts_open.argtypes = c_void_p, [c_char_p, c_int64, c_char_p]
    library.fedrts_close.restype, library.fedrts_close.argtypes = None, [c_void_p]
    library.fedrts_predict.restype, library.fedrts_predict.argtypes = c_int64, [c_void_p, c_int64, c_void_p, c_int64, c_void_p]
    library.fedrts_fact.restype, library.fedrts_fact.argtypes = c_int64, [c_void_p, c_int64]
