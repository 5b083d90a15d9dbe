"""The structures of `kernels.h`, field by field; the library says how large its own are, and `load` compares."""

from __future__ import annotations

from ctypes import Structure, Union, c_double, c_int64, c_void_p

LANES = 16


def _numbers(names: str) -> list[tuple[str, type]]:
    return [(name, c_int64) for name in names.split()]


def _reals(names: str) -> list[tuple[str, type]]:
    return [(name, c_double) for name in names.split()]


class Tensor(Structure):
    """Where a tensor is in the arena, and its form; `at < 0`: there is none."""

    _fields_ = _numbers("at blocks height channels width border")


def _tensors(names: str) -> list[tuple[str, type]]:
    return [(name, Tensor) for name in names.split()]


class Gather(Structure):
    _fields_ = _numbers(
        "blocks rows cols outs in_ in_block in_row in_col out out_block out_channel out_row out_col "
        "groups starts offsets values bias statistics values_in_arena relu add window"
    )


class Weight(Structure):
    _fields_ = _numbers(
        "blocks rows cols outs in_ in_block in_row in_col slope slope_block slope_channel slope_row "
        "groups starts offsets scratch gradient window"
    )


class Permute(Structure):
    _fields_ = _numbers("links values order out")


class Norm(Structure):
    _fields_ = [
        *_tensors("in_ out shortcut"),
        *_numbers("gamma beta running_mean running_var statistics saved groups counted relu wide training"),
        *_reals("eps momentum"),
    ]


class NormBack(Structure):
    _fields_ = [*_tensors("slope output in_ to"), *_numbers("gamma beta statistics saved groups relu wide add"), *_reals("eps")]


class ReluBack(Structure):
    _fields_ = [*_tensors("slope output to"), *_numbers("bias add scratch")]


class Sum(Structure):
    _fields_ = [*_tensors("first second out"), *_numbers("relu")]


class Pool(Structure):
    _fields_ = [*_tensors("in_ out"), *_numbers("height width down across above left mean with_padding")]


class PoolBack(Structure):
    _fields_ = [*_tensors("slope out in_ to"), *_numbers("height width down across above left mean with_padding add")]


class Flatten(Structure):
    _fields_ = [*_tensors("in_ out"), *_numbers("mean back add")]


class Input(Structure):
    _fields_ = [*_tensors("out"), *_numbers("wide")]


class Output(Structure):
    _fields_ = _tensors("in_")


class Loss(Structure):
    _fields_ = [*_tensors("in_ to"), *_numbers("squares"), *_reals("smoothing")]


class Descent(Structure):
    _fields_ = [*_numbers("parameters"), *_reals("momentum decay proximal clip")]


KINDS: tuple[type[Structure], ...] = (
    Gather,
    Weight,
    Permute,
    Norm,
    NormBack,
    ReluBack,
    Sum,
    Pool,
    PoolBack,
    Flatten,
    Input,
    Output,
    Loss,
    Descent,
)
"""In the order of their numbers."""


class _Any(Union):
    _fields_ = [(kind.__name__, kind) for kind in KINDS]


class Operation(Structure):
    """One operation of a program."""

    _fields_ = [("kind", c_int64), ("as_", _Any)]

    @staticmethod
    def of(part: Structure) -> Operation:
        operation = Operation(kind=KINDS.index(type(part)))
        setattr(operation.as_, type(part).__name__, part)
        return operation


class Context(Structure):
    """The memory that a program works on; pointers are addresses of arrays that the caller keeps alive."""

    _fields_ = [
        *((name, c_void_p) for name in ["arena", "weights", "gradient", "index", "source", "rows", "targets"]),
        *_numbers("size samples steps"),
        *((name, c_void_p) for name in ["rates", "velocity", "received", "free", "losses", "outputs"]),
    ]
