"""Durable state: atomic, checksummed, never pickled; the last two are kept.

A checkpoint is one safetensors file whose name carries its round and the checksum of its bytes. There is no RNG state:
every random number is a function of the seed and the round.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from fedrts.errors import InputError, note, reason
from fedrts.files import NewerError, explained, require_known, require_plain, write_atomically
from fedrts.methods.contract import State
from fedrts.runs import file_schema
from fedrts.sparse.mask import Mask

FORMAT = 1
"""Format of a checkpoint; raised where earlier versions could not read it any more."""


KEPT = 2


_DAMAGED = ".damaged"


_TEMPORARY = ".writing.tmp"
"""One name for all checkpoints: what a killed process left is overwritten by the next."""


_SHARE_OF_TIME = 0.05


_NAME = re.compile(r"(\d{8})-([0-9a-f]{32})\.safetensors")


@dataclass(frozen=True)
class Saved:
    """A state with everything else that a run needs to continue from it."""

    state: State
    next_round: int
    facts: dict[str, Any]
    """The experiment it belongs to and the lengths of the logs at that moment."""
    ledger: dict[str, Tensor] = field(default_factory=dict)
    """What the server knows of its clients, see `ClientRecords.tensors`."""


def save(folder: Path, saved: Saved) -> None:
    """Write a checkpoint and remove all but the last two."""
    state = saved.state
    tensors = {"values": state.values, "mask": state.mask.bits}
    tensors |= {f"memory.{name}": tensor for name, tensor in state.memory.items()}
    tensors |= {f"ledger.{name}": tensor for name, tensor in saved.ledger.items()}
    facts = {**saved.facts, "format": FORMAT, "next_round": saved.next_round, "sizes": list(state.mask.sizes)}
    host = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    if len({tensor.untyped_storage().data_ptr() for tensor in host.values() if tensor.numel()}) < len(host):
        host = {name: tensor.clone() for name, tensor in host.items()}  # the format wants tensors that share no memory
    data = safetensors.torch.save(host, metadata={"fedrts": json.dumps(facts)})
    with explained(folder):
        folder.mkdir(exist_ok=True)
    write_atomically(folder / f"{saved.next_round:08d}-{_digest(data)}.safetensors", data, _TEMPORARY)
    for old in _files(folder)[KEPT:]:
        try:
            old.unlink(missing_ok=True)
        except OSError as error:  # the new one is safe
            note(f"cannot remove old checkpoints from {folder}: {error.strerror}; they stay, and take space")


def load(
    folder: Path, device: torch.device | str = "cpu", repair: bool = False, check: Callable[[Saved], None] = lambda saved: None
) -> Saved | None:
    """The newest undamaged checkpoint; None if there never was one. A damaged pair is an error, one damaged file a note.

    `repair` puts damaged files out of the way, so that they do not count as one of the last two; only who writes to the
    folder may ask for it. What `check` raises is damage too: a right checksum does not make a checkpoint a good one.
    """
    damaged = list(folder.glob(f"*{_DAMAGED}"))
    for file in _files(folder):
        require_plain(file)
        try:
            data = file.read_bytes()
        except OSError as error:
            raise InputError(f"cannot read the checkpoint {file}: {error.strerror}") from error
        match = _NAME.fullmatch(file.name)
        try:
            if match is None or _digest(data) != match[2]:
                raise ValueError("wrong checksum")
            saved = _parsed(data, device)
            check(saved)
            return saved
        except NewerError as error:
            raise NewerError(f"{file.parent}: {error}") from error
        except (ValueError, LookupError, TypeError, AttributeError, RuntimeError, safetensors.SafetensorError) as error:
            note(f"checkpoint {file.name} is damaged ({reason(error)}): it does not count")
            damaged.append(file)
            if repair:
                with explained(file):
                    file.rename(file.with_name(file.name + _DAMAGED))
    if damaged:
        raise InputError(f"all checkpoints in {folder} are damaged: restore one from a backup, or delete the folder to start at round 0")
    return None


def _parsed(data: bytes, device: torch.device | str) -> Saved:
    tensors = safetensors.torch.load(data)
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    facts = json.loads(header["__metadata__"]["fedrts"])
    require_known(facts.pop("format", None), FORMAT, "the newest checkpoint")
    file_schema.check(file_schema.CheckpointHeader, facts, "its header")
    memory, ledger = (
        {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        for prefix in ("memory.", "ledger.")
    )
    values, bits, sizes = tensors["values"], tensors["mask"], facts.pop("sizes")
    if bits.dtype != torch.bool or bits.shape != (sum(sizes),):
        raise ValueError(f"its mask is {bits.dtype} {list(bits.shape)}, and layers have {sum(sizes)} links")
    if not values.is_floating_point() or values.dim() != 1 or len(values) < int(bits.sum()):
        raise ValueError(f"its values are {values.dtype} {list(values.shape)} for {int(bits.sum())} active links")
    state = State(values, Mask(bits, sizes), memory).to(device)
    return Saved(state, facts.pop("next_round"), facts, ledger)


def oldest(folder: Path) -> int:
    """Return the first round that may be played again, judging by the oldest kept checkpoint."""
    matches = (_NAME.fullmatch(file.name) for file in _files(folder))
    return min((int(match[1]) for match in matches if match), default=0)


def _files(folder: Path) -> list[Path]:
    """Return checkpoint files, newest first."""
    return sorted((file for file in folder.glob("*.safetensors") if _NAME.fullmatch(file.name)), reverse=True)


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


@dataclass
class Pace:
    """When the next checkpoint is due: every N rounds, every N seconds, or as often as 5 % of the time allows."""

    every: int | str
    clock: Callable[[], float] = time.monotonic
    _last: float = field(default=float("-inf"), init=False)
    _took: float = field(default=0.0, init=False)

    def is_due(self, rounds_done: int) -> bool:
        if isinstance(self.every, int):
            return rounds_done % self.every == 0
        pause = self._took * (1 / _SHARE_OF_TIME - 1) if self.every == "auto" else float(self.every.removesuffix("s"))
        return self.clock() - self._last >= pause

    def timed(self, write: Callable[[], None]) -> None:
        started = self.clock()
        write()
        self._last = self.clock()
        self._took = self._last - started
