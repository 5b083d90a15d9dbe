"""What the owner of a site decides."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Host:
    """A site before it knows any experiment."""

    data: str | None = None
    """Its data set; None: the experiment's."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of its own data set."""
    clients: Sequence[int] = ()
    """Parts of the experiment's division that it stands for; none: all of its data is one client."""
    data_dir: str | None = None
    device: str = "auto"
    allowed: Collection[str] = ()
    """Import paths that an experiment may name."""
    epsilon: float | None = None
    """The ε that this site gives away at most; None: as much as the experiment takes."""
    delta: float = 1e-5
    """The δ for which it counts ε: its own, whatever an experiment says."""
    keep_statistics: bool = False
    """Tell nobody mean and deviation of the images' channels."""
