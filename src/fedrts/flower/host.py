"""The decisions of a site's owner."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedrts.errors import InputError

ANY = "any"
"""Consent to whatever comes: for trials, where the server is one's own."""


@dataclass(frozen=True)
class Limits:
    """Limits on what an experiment may ask of a site; 0: no limit."""

    min_samples: int = 32
    """Rows that take part in every update of a client at least."""
    min_batch: int = 8
    """Rows of every batch at least: some uploads are made of one, and a large learning rate can make any depend on one alone."""
    max_epochs: int = 100
    max_parameters: int = 100_000_000
    max_memory: int = 0
    """Bytes."""


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
    accept: Collection[str] = ()
    """Digests of experiments that the owner consents to, or their first characters; `ANY`: to all."""
    limits: Limits = field(default_factory=Limits)
    state: Path | None = None
    """The folder of what the site remembers (see `state.Records`); None: it forgets."""
    dry_run: bool = False
    """Only look at what an experiment asks for, and take no part."""
    peers: Collection[bytes] | None = None
    """Public keys (PEM) of the nodes with which this one sums in secret; None: those that the server names."""
    keep_statistics: bool = False
    """Tell nobody mean and deviation of the images' channels."""

    def consents(self, digest: str) -> bool:
        """Whether the owner accepted this experiment."""
        return any(given == ANY or digest.startswith(given.lower()) for given in self.accept)


def digest_prefix(text: str) -> str:
    """Parse the value of --accept."""
    if text != ANY and not re.fullmatch(r"[0-9a-fA-F]{8,64}", text):
        raise InputError(f"--accept {text}: give at least 8 characters of an experiment's digest (--dry-run shows it), or `{ANY}`")
    return text.lower()


def memory_size(text: str) -> int:
    """Parse the value of --max-memory into bytes: 4GB, 500MB."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?", text.strip(), re.IGNORECASE)
    if found is None:
        raise InputError(f"--max-memory {text}: give a size such as 4GB or 500MB")
    return int(float(found[1]) * 1000 ** " KMGT".index(found[2].upper() or " "))
