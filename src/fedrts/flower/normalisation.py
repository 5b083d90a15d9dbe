"""Common normalisation: every site sends its channels' mean and deviation once, and all normalise with the common ones."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
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
MIXED = "the sites' images have different numbers of channels: they cannot train one model"
MOST_CHANNELS = 1024


@dataclass(frozen=True)
class Normalisation:
    """Mean and standard deviation of every channel, in [0, 1]."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    @staticmethod
    def measured(held: Data) -> Normalisation | None:
        """Return the statistics of a site's training rows; None if inputs are not normalised by them."""
        if not isinstance(held.view, Measured):
            return None
        mean, std = statistics(held.x.cpu())
        return Normalisation(tuple(mean), tuple(std))

    @staticmethod
    def told(numbers: object) -> Normalisation | None:
        """Parse the other side's statistics: all means, then all deviations; None if it sends none, a `WireError` if invalid."""
        if numbers is None or numbers == []:
            return None
        fine = isinstance(numbers, list) and all(type(number) is float and math.isfinite(number) for number in numbers)
        if not isinstance(numbers, list) or not fine or len(numbers) % 2 or len(numbers) > 2 * MOST_CHANNELS:
            raise WireError("its statistics of inputs are no list of means and deviations")
        half = len(numbers) // 2
        if not all(0 <= number <= 1 for number in numbers) or not all(numbers[half:]):
            raise WireError("its statistics of inputs are none of images: means and deviations lie between 0 and 1")
        return Normalisation(tuple(numbers[:half]), tuple(numbers[half:]))

    @property
    def numbers(self) -> list[float]:
        """Return it in the form in which it travels."""
        return [*self.mean, *self.std]

    @property
    def moments(self) -> list[float]:
        """Return means of all channels, then of their squares, which sites sum in secret. A deviation of 1 means none."""
        return [*self.mean, *(m * m + (s * s if s < 1 else 0.0) for m, s in zip(self.mean, self.std, strict=True))]

    @staticmethod
    def of_moments(moments: Sequence[float]) -> Normalisation:
        """The inverse of `moments`; rounding may have led slightly out of the range."""
        half = len(moments) // 2
        mean = [min(max(first, 0.0), 1.0) for first in moments[:half]]
        std = [math.sqrt(max(second - first * first, 0.0)) or 1.0 for first, second in zip(mean, moments[half:], strict=True)]
        return Normalisation(tuple(mean), tuple(min(deviation, 1.0) for deviation in std))

    def applied(self, held: Data) -> Data:
        """Return the data normalised by these statistics, if it is normalised at all."""
        if not isinstance(held.view, Measured):
            return held
        if len(self.mean) != held.input_shape[0]:
            raise WireError(f"common statistics of {len(self.mean)} channels, where the data here has {held.input_shape[0]}")
        return replace(held, view=held.view.normalised_by(self.mean, self.std))


def common(parts: Iterable[tuple[int, Normalisation]]) -> Normalisation | None:
    """Combine the statistics of sites with this many samples; None if no site sent any."""
    told = list(parts)
    if not told:
        return None
    if len({len(part.mean) for _, part in told}) > 1:
        raise InputError(MIXED)
    total = sum(samples for samples, _ in told)

    def averaged(values: Iterable[Sequence[float]]) -> list[float]:
        weighted = zip((samples for samples, _ in told), values, strict=True)
        return [sum(column) / total for column in zip(*([samples * value for value in row] for samples, row in weighted), strict=True)]

    mean = averaged(part.mean for _, part in told)
    square = averaged([s * s + m * m for s, m in zip(part.std, part.mean, strict=True)] for _, part in told)
    std = [math.sqrt(max(second - first * first, 0.0)) or 1.0 for first, second in zip(mean, square, strict=True)]
    return Normalisation(tuple(mean), tuple(std))


def settled(folder: Path | None, asked: Callable[[], Normalisation | None]) -> Normalisation | None:
    """Return the normalisation of a run: the one in its folder, else the sites' when `asked`, which is then kept."""
    file = None if folder is None else folder / FILE
    if file is not None and file.exists():
        try:
            return TypeAdapter(Normalisation).validate_json(file.read_bytes())
        except ValidationError as error:
            raise InputError(f"{file} is damaged: {error.errors()[0]['msg']}; restore it from a backup") from error
    found = asked()
    if file is not None and found is not None:
        write_atomically(file, json.dumps(asdict(found), indent=2).encode() + b"\n")
    return found
