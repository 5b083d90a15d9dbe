"""What a site's clients remember between rounds: the residuals of their uploads, and the last model received.

A client learns from the next order whether its upload counted: the order names the memory to continue from. A reply that was refused,
late or lost is never named: its client goes on from the memory before, as if it had not been asked. A server that went back to an
earlier round names an earlier memory, of which some are kept. Names are of the contents, so that no other is taken for it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import safetensors
import safetensors.torch
from torch import Tensor

from fedrts.client.order import fingerprint
from fedrts.files import explained, write_privately

KEPT = 4
"""Memories of a client before the one that counted last: as far as a server may go back."""

_ENTRY = re.compile(r"client-(-?\d+)-(\d+)-(-?\d+)-(\d+)")
_MODEL = re.compile(r"model-(-?\d+)-([0-9a-f]+)")
_SUFFIX = ".safetensors"


@dataclass
class Shelf:
    """Tensors by name, in a folder that outlasts the process, or in memory if there is none."""

    path: Path | None = None
    held: dict[str, Tensor] = field(default_factory=dict)

    def put(self, name: str, tensor: Tensor) -> None:
        """Store a tensor; it is on disk when this returns."""
        if self.path is None:
            self.held[name] = tensor.cpu().clone()
            return
        with explained(self.path):
            self.path.mkdir(mode=0o700, exist_ok=True)
        write_privately(self.path / f"{name}{_SUFFIX}", safetensors.torch.save({"tensor": tensor.cpu().contiguous()}))

    def get(self, name: str) -> Tensor | None:
        """Return the tensor of a name; None if it is missing or damaged."""
        if self.path is None:
            return self.held.get(name)
        try:
            return safetensors.torch.load((self.path / f"{name}{_SUFFIX}").read_bytes())["tensor"]
        except (OSError, KeyError, safetensors.SafetensorError):
            return None

    def drop(self, name: str) -> None:
        self.held.pop(name, None)
        if self.path is not None:
            with explained(self.path):
                (self.path / f"{name}{_SUFFIX}").unlink(missing_ok=True)

    def __iter__(self) -> Iterator[str]:
        names = self.held if self.path is None else (file.name.removesuffix(_SUFFIX) for file in self.path.glob(f"*{_SUFFIX}"))
        return iter(list(names))


@dataclass(frozen=True, order=True)
class _Entry:
    """A memory of a client."""

    place: int
    """In the order in which they were made."""
    client: int
    round: int
    name: int

    @property
    def file(self) -> str:
        return f"client-{self.client}-{self.place}-{self.round}-{self.name}"


@dataclass
class Memories:
    """The memories of a site's clients, and the last model that was sent as steps."""

    shelf: Shelf
    named: Callable[[Tensor], int]
    """Names a memory by its contents, in a way that tells nobody else of them."""

    def of(self, client: int) -> list[_Entry]:
        """Return a client's memories, oldest first."""
        found = (tuple(map(int, match.groups())) for name in self.shelf if (match := _ENTRY.fullmatch(name)))
        return sorted(_Entry(place, owner, index, name) for owner, place, index, name in found if owner == client)

    def recalled(self, client: int, round: int, name: int | None) -> Tensor | None:
        """Return the memory `[N_all]` that the server names with an order of this round; None if there is no such memory.

        What cannot be named any more is forgotten: what is newer and did not count, and all but a few of the older ones.
        """
        entries = self.of(client)
        counted = next((entry for entry in reversed(entries) if entry.name == name), None)
        if counted is not None:
            before = [entry for entry in entries if entry < counted]
        else:  # a name that was never ours, or is lost: the server may come back to another one
            before = [entry for entry in entries if entry.round < round] if name is not None else []
        recent = [entry for entry in entries if entry.round == round and entry not in before]  # an earlier attempt, or exchange
        kept = {*before[-KEPT:], counted, *recent[-KEPT:]}
        for entry in entries:
            if entry not in kept:
                self.shelf.drop(entry.file)
        left = None if counted is None else self.shelf.get(counted.file)
        return left if left is not None and self.named(left) == name else None

    def keep(self, client: int, round: int, left: Tensor) -> int:
        """Keep the residual of an upload that is about to leave; return its name."""
        entries, name = self.of(client), self.named(left)
        entry = _Entry(max((entry.place for entry in entries), default=0) + 1, client, round, name)
        self.shelf.put(entry.file, left)
        for same in entries:
            if same.name == name:
                self.shelf.drop(same.file)
        return name

    def model(self) -> tuple[int, Tensor] | None:
        """Return the round of the last model received, and the model `[n]`."""
        for file in self.shelf:
            if (match := _MODEL.fullmatch(file)) and (model := self.shelf.get(file)) is not None:
                return int(match[1]), model
        return None

    def keep_model(self, round: int, model: Tensor) -> None:
        """Store a received model in place of the last."""
        now = f"model-{round}-{fingerprint(model)}"
        if now not in set(self.shelf):
            self.shelf.put(now, model)
        for file in self.shelf:
            if _MODEL.fullmatch(file) and file != now:
                self.shelf.drop(file)
