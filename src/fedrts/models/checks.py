"""Checks before a model is built: each mistake is one line that names the key and the remedy."""

from __future__ import annotations

from collections.abc import Iterable

from fedrts.errors import InputError


def images(model: str, input_shape: tuple[int, ...]) -> int:
    """Return the channels of inputs `[channels, height, width]`."""
    if len(input_shape) != 3 or min(input_shape) < 1:
        raise InputError(
            f"model '{model}' reads images [channels, height, width], not inputs of shape {input_shape}: choose another --model"
        )
    return input_shape[0]


def tokens(model: str, input_shape: tuple[int, ...]) -> int:
    """Return the length of inputs `[time]`."""
    if len(input_shape) != 1 or min(input_shape) < 1:
        raise InputError(f"model '{model}' reads sequences of tokens [time], not inputs of shape {input_shape}: choose another --model")
    return input_shape[0]


def one_of(option: str, value: object, known: Iterable[object]) -> None:
    """Check that the option's value is among the known ones."""
    values = list(known)
    if value not in values:
        raise InputError(f"model_options.{option} must be {' or '.join(map(repr, values))} (got {value!r})")


def counts(**options: int) -> None:
    """Check that these options are whole numbers of at least 1."""
    for option, value in options.items():
        if type(value) is not int or value < 1:
            raise InputError(f"model_options.{option} must be a whole number ≥ 1 (got {value!r})")
