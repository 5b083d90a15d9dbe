"""Common normalisation: every site tells mean and deviation of its channels once, and all read their images by the common ones."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from fedrts.data.contract import Data
from fedrts.data.images import statistics
from fedrts.data.pixels import Measured
from fedrts.errors import InputError
from fedrts.files import write_atomically
from fedrts.wire.errors import WireError

FILE = "normalisation.json"
_CHANNELS = 1024


@dataclass(frozen=True)
class Normalisation:
    """Mean and standard deviation of every channel, in [0, 1]."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    @staticmethod
    def measured(held: Data) -> Normalisation | None:
        """That of a site's training rows; None where inputs are not normalised by what the rows are like."""
        if not isinstance(held.view, Measured):
            return None
        mean, std = statistics(held.x.cpu())
        return Normalisation(tuple(mean), tuple(std))

    @staticmethod
    def told(numbers: object) -> Normalisation | None:
        """What the other side tells: all means, then all deviations; None if it tells nothing, a `WireError` if it is nonsense."""
        if numbers is None or numbers == []:
            return None
        fine = isinstance(numbers, list) and all(type(number) is float and math.isfinite(number) for number in numbers)
        if not isinstance(numbers, list) or not fine or len(numbers) % 2 or len(numbers) > 2 * _CHANNELS:
            raise WireError("its statistics of inputs are no list of means and deviations")
        half = len(numbers) // 2
        if not all(0 <= number <= 1 for number in numbers) or not all(numbers[half:]):
            raise WireError("its statistics of inputs are none of images: means and deviations lie between 0 and 1")
        return Normalisation(tuple(numbers[:half]), tuple(numbers[half:]))

    @property
    def numbers(self) -> list[float]:
        """As it travels."""
        return [*self.mean, *self.std]

    def applied(self, held: Data) -> Data:
        """The data as a model reads it by these statistics, where it is read by statistics at all."""
        if not isinstance(held.view, Measured):
            return held
        if len(self.mean) != held.input_shape[0]:
            raise WireError(f"common statistics of {len(self.mean)} channels, where the data here has {held.input_shape[0]}")
        return replace(held, view=held.view.normalised_by(self.mean, self.std))


def common(parts: Iterable[tuple[int, Normalisation]]) -> Normalisation | None:
    """The statistics of all samples together, from those of each site with so many samples; None if nobody told any."""
    told = list(parts)
    if not told:
        return None
    if len({len(part.mean) for _, part in told}) > 1:
        raise InputError("the sites' images have different numbers of channels: they cannot train one model")
    total = sum(samples for samples, _ in told)

    def averaged(values: Iterable[Sequence[float]]) -> list[float]:
        weighted = zip((samples for samples, _ in told), values, strict=True)
        return [sum(column) / total for column in zip(*([samples * value for value in row] for samples, row in weighted), strict=True)]

    mean = averaged(part.mean for _, part in told)
    square = averaged([s * s + m * m for s, m in zip(part.std, part.mean, strict=True)] for _, part in told)
    std = [math.sqrt(max(second - first * first, 0.0)) or 1.0 for first, second in zip(mean, square, strict=True)]
    return Normalisation(tuple(mean), tuple(std))


def settled(folder: Path | None, parts: Iterable[tuple[int, Normalisation]]) -> Normalisation | None:
    """The normalisation of a run: the one in its folder, else the common one, which stays from then on."""
    file = None if folder is None else folder / FILE
    if file is not None and file.exists():
        try:
            return TypeAdapter(Normalisation).validate_json(file.read_bytes())
        except ValidationError as error:
            raise InputError(f"{file} is damaged: {error.errors()[0]['msg']}; restore it from a backup") from error
    found = common(parts)
    if file is not None and found is not None:
        write_atomically(file, json.dumps(asdict(found), indent=2).encode() + b"\n")
    return found
