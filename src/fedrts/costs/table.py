"""The table of costs: one row per accounting, round and case."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

ACCOUNTINGS = {
    "paper": "reproduces the published tables: uniform density, a bitmap at every density, 4-byte values, index cost of t = 0; memory is "
    "three copies of the model; a batch's forward pass counts batch² · MAC",
    "rules": "the paper's text: each layer dense, bitmap, coordinates or CSR by its own density; memory is three such copies; a batch's "
    "forward pass counts batch · MAC",
    "measured": "what this package does: lengths of encoded messages (where they depend on the values, those of a first step, which is an "
    "estimate), MACs at the layers' densities over the samples seen, tensors that a "
    "client holds with the activations of one batch",
}
"""The accountings, and what each counts."""
PUBLISHED, STRICT = "as published", "strictly"
HOLDER, FRESH = "has mask", "fresh"


@dataclass(frozen=True)
class Row:
    """The cost of one round for one client in one accounting."""

    accounting: str
    round: str
    case: str
    """What tells rows of one round apart: `as published` or `strictly`; a client that `has mask` or a `fresh` one; else empty."""
    download_bytes: float
    upload_bytes: float
    flops: float
    memory_bytes: float
    memory_on_mask_bytes: float | None = None
    """Measured: what the same tensors would take if weights, gradient and optimiser state were stored on the mask alone."""
    memory_parts: Mapping[str, int] | None = None

    @property
    def megabytes(self) -> float:
        """Bytes both ways, in units of 10⁶ bytes."""
        return (self.download_bytes + self.upload_bytes) / 1e6

    def as_flat_dict(self) -> dict[str, Any]:
        """Return one line of a table, without the parts of the memory."""
        return {name: value for name, value in vars(self).items() if name != "memory_parts"}


@dataclass(frozen=True)
class TimedStep:
    """A step of a client on a whole batch, run on this machine; download and upload are divided among its steps."""

    kernel: str
    """`dense`, or `sparse` with its instruction set."""
    milliseconds: float
    added_bytes: int | None
    """The most that it adds to the memory of the process; None where the system does not say."""


@dataclass(frozen=True)
class Cost:
    """Everything that `cost` found, and for what."""

    model: str
    method: str
    density: float
    parameters: int
    links: int
    macs: float
    """MACs of the dense model's forward pass, per sample."""
    input_shape: tuple[int, ...]
    classes: int
    samples: int
    epochs: int
    batch_size: int
    rows: tuple[Row, ...] = field(default=())
    density_start: float | None = None
    """Density of the first rounds, which the rows describe, if the density falls."""
    steps: tuple[TimedStep, ...] = ()
    """Steps of an inner round, measured on this machine on request."""

    def row(self, accounting: str, round: str, case: str | None = None) -> Row:
        """Return the row of an accounting and a round; the first one if no case is named."""
        for row in self.rows:
            if (row.accounting, row.round) == (accounting, round) and case in (None, row.case):
                return row
        raise KeyError(f"no row {accounting} · {round} · {case or 'any case'}")

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "accountings": ACCOUNTINGS}
