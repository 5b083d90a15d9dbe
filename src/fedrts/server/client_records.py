"""What the server must remember about its clients: masks held, requests, rejections, lateness, departures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from fedrts.client.privacy import countable
from fedrts.server.guard import Guard, Lateness, Strikes
from fedrts.server.mask_memory import MaskMemory
from fedrts.server.outliers import Suspicion
from fedrts.sparse.mask import Mask
from fedrts.wire.fields import Field


@dataclass
class ClientRecords:
    """Records that are kept in addition to a run's state, and in its checkpoints."""

    traffic: MaskMemory
    strikes: Strikes
    lateness: Lateness
    large: Suspicion
    messages: int = 0
    """Downloads and uploads so far that dense averaging would have needed too."""
    uploads: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Messages of values and of index sets that each client was asked for so far, whatever became of them."""

    departed: dict[int, int] = field(default_factory=dict)
    """The round from which on a client takes part no more."""
    residuals: dict[int, Tensor] = field(default_factory=dict)
    """What the uploads of simulated clients that counted have not told: `[N_all]` each, in main memory. Others' clients keep their own."""

    kept: dict[int, int] = field(default_factory=dict)
    """The names under which clients elsewhere keep theirs: of the last upload of each that counted."""

    cancelled: dict[int, Tensor] = field(default_factory=dict)
    """The units that each client cancelled, and on which clients have not agreed since: bool `[U]`."""

    def cancel(self, found: Mapping[int, Tensor], agreed: Tensor) -> None:
        """Record a round: the units that clients cancelled in it, and those on which they `agreed`, bool `[U]` each."""
        units = {client: earlier & ~agreed for client, earlier in self.cancelled.items()}
        for client, more in found.items():
            units[client] = more | units.get(client, torch.zeros_like(more))
        left = torch.stack([*units.values(), torch.zeros_like(agreed)]).any(1).tolist()
        self.cancelled = {client: some for (client, some), any in zip(units.items(), left, strict=False) if any}

    def remember(self, left: Mapping[int, Tensor], kept: Mapping[int, int] | None = None) -> None:
        """Record an applied round: clients whose replies counted keep their residuals, or keep them under these names."""
        self.residuals |= {client: residual.cpu() for client, residual in left.items()}
        self.kept |= kept or {}

    def count(self, clients: Iterable[int], fields: Mapping[str, Field]) -> None:
        """Record that `clients` were asked for an upload of these fields."""
        values, indices = countable(fields)
        for client in clients:
            before = self.uploads.get(client, (0, 0))
            self.uploads[client] = (before[0] + values, before[1] + indices)

    @staticmethod
    def of(guard: Guard) -> ClientRecords:
        return ClientRecords(MaskMemory(), Strikes(guard.strikes), Lateness(guard.strikes), Suspicion(guard.strikes))

    def tensors(self) -> dict[str, Tensor]:
        """Return everything as tensors: masks as packed bits, clients as numbers."""
        names = list(self.traffic.masks)
        holds = [(client, names.index(name)) for client, name in self.traffic.holds.items()]
        packed = [mask.packed() for mask in self.traffic.masks.values()]
        told = (
            {}
            if not self.residuals
            else {
                "residuals": torch.stack(list(self.residuals.values())),
                "residual_clients": torch.tensor(list(self.residuals), dtype=torch.int64),
            }
        )
        if self.cancelled:
            told |= {"cancelled": torch.stack(list(self.cancelled.values())).cpu(), "cancelling": torch.tensor(list(self.cancelled))}
        if self.kept:
            told["kept"] = torch.tensor(list(self.kept.items()), dtype=torch.int64)
        return told | {
            "messages": torch.tensor([self.messages]),
            "holds": torch.tensor(holds, dtype=torch.int64).reshape(-1, 2),
            "rounds": torch.tensor(list(self.traffic.rounds.items()), dtype=torch.int64).reshape(-1, 2),
            "strikes": torch.tensor(list(self.strikes.counts.items()), dtype=torch.int64).reshape(-1, 2),
            "large": torch.tensor(list(self.large.weights.items()), dtype=torch.float64).reshape(-1, 2),
            "uploads": torch.tensor([(client, *counts) for client, counts in self.uploads.items()], dtype=torch.int64).reshape(-1, 3),
            "late": torch.tensor(
                [(client, count, self.lateness.again.get(client, 0)) for client, count in self.lateness.counts.items()], dtype=torch.int64
            ).reshape(-1, 3),
            "departed": torch.tensor(list(self.departed.items()), dtype=torch.int64).reshape(-1, 2),
            "masks": torch.from_numpy(np.stack(packed) if packed else np.zeros((0, 0), np.uint8)),
        }

    @staticmethod
    def restored(tensors: Mapping[str, Tensor], sizes: Sequence[int], guard: Guard, device: torch.device | str) -> ClientRecords:
        """Restore the records from `tensors`."""
        ledger = ClientRecords.of(guard)
        ledger.messages = int(tensors["messages"])
        for packed in tensors["masks"].numpy():
            mask = Mask.unpacked(packed, sizes).to(device)
            ledger.traffic.masks[mask.fingerprint] = mask
        names = list(ledger.traffic.masks)
        for client, number in tensors["holds"].tolist():
            ledger.traffic.holds[client] = names[number]
        ledger.traffic.rounds.update(dict(tensors.get("rounds", torch.zeros(0, 2, dtype=torch.int64)).tolist()))
        ledger.strikes.counts.update(dict(tensors["strikes"].tolist()))
        ledger.large.weights.update({int(client): weight for client, weight in tensors.get("large", torch.zeros(0, 2)).tolist()})
        counts = tensors.get("uploads", torch.zeros(0, 3, dtype=torch.int64))
        ledger.uploads = {client: (values, indices) for client, values, indices in counts.tolist()}
        for client, late, again in tensors.get("late", torch.zeros(0, 3, dtype=torch.int64)).tolist():
            ledger.lateness.counts[client] = late
            if again:
                ledger.lateness.again[client] = again
        if "cancelled" in tensors:
            ledger.cancelled = dict(zip(tensors["cancelling"].tolist(), tensors["cancelled"].to(device), strict=True))
        if "residuals" in tensors:
            ledger.residuals = dict(zip(tensors["residual_clients"].tolist(), tensors["residuals"], strict=True))
        ledger.kept.update(dict(tensors.get("kept", torch.zeros(0, 2, dtype=torch.int64)).tolist()))
        ledger.departed.update(dict(tensors.get("departed", torch.zeros(0, 2, dtype=torch.int64)).tolist()))
        return ledger
