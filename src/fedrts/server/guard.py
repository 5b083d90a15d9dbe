"""Checks before a client's reply touches a sum, and the record of clients that are no longer asked."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedrts.client.order import Failure, Order, Replies, Reply
from fedrts.errors import InputError, note
from fedrts.server import reducers
from fedrts.server.outliers import STATISTICS, UPDATE
from fedrts.tables import Named, Number, Table
from fedrts.wire import checks
from fedrts.wire.checks import Check, Findings, Measurements, failed, measuring
from fedrts.wire.fields import Field as WireField
from fedrts.wire.fields import Frame, Message, OwnValues, Payload, Selection, SideBySide, Values, carried

QUORUM = 0.3
"""Share of a round's clients that must send a usable reply, by default."""


SITES_CLAIM = 10.0
"""How many medians of a round's sample counts a site may claim, by default."""


_ROUNDING = 1e-9
"""0.55 of 100 clients are 55, whatever floating point says."""


_BACKWARDS = 0.25
"""Cosine below which an update does not count as going back along the model: noise for privacy is large, but has no direction."""


_LONGEST_REST = 6
"""At most 2^6 rounds go by before a client that was late is asked again."""


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "robust": {"reducer": "aligned", "trim": 0.25, "max_share": 0.15},  # what benchmarks/hostile.py supports
}
"""Guards by one word."""


class Guard(Table):
    """The rules under which clients' replies count."""

    quorum: Number | None = Field(
        None, gt=0, le=1, description="share of a round's clients that must send a usable reply; default: 0.3; for sites: 1"
    )
    over_select: Number = Field(0.0, ge=0, le=10, description="share of extra clients to ask")
    deadline: Number = Field(0.0, ge=0, description="seconds after which a round's replies are too late; 0: never")
    attempts: int = Field(5, ge=1, description="attempts at a round, each with other clients, before the run stops")
    norm_bound: Number = Field(100.0, gt=0, description="largest update, as a multiple of max(norm of the model, 1)")
    undo_bound: Number = Field(
        0.5, gt=0, description="largest step of an update against the model's own direction, as a multiple of max(norm of the model, 1)"
    )
    median_bound: Number = Field(
        12.0, gt=1, description="update size above which the round is repeated without the client, as a multiple of the round's median"
    )
    large_bound: Number = Field(
        3.0,
        gt=1,
        description="update size that counts as large, as a multiple of the round's median; several within a few rounds put the client out",
    )
    reducer: Annotated[str, Named(reducers.reducers)] = Field(
        "mean",
        description="reducer of the weights: mean, clip (at norm_bound), trimmed_mean, median, geometric_median, aligned, centred_clip, "
        "krum, multi_krum",
    )
    mixing: Annotated[str, Named(reducers.mixings)] = Field(
        "none",
        description="mixing of the updates before they are reduced: none, bucketing (means of random pairs), nearest (means of neighbours)",
    )
    trim: Number = Field(
        0.2,
        ge=0,
        lt=0.5,
        description="share of clients that may be hostile: trimmed_mean cuts it off at each end; aligned, krum and nearest leave it out",
    )
    vote_trim: Number = Field(0.0, ge=0, lt=0.5, description="share of votes and indicators to cut off at each end")
    statistic_bound: Number = Field(1e9, gt=0, description="largest allowed BatchNorm statistic; unnormalised inputs may need more")
    value_bound: Number = Field(1e9, gt=0, description="largest allowed number in other uploads: gradients, squares, losses")
    max_share: Number = Field(1.0, gt=0, le=1, description="largest share of one client in any mean")
    max_claim: Number | None = Field(
        None, ge=1, description="limit on one client's sample count, as a multiple of the round's median; default: none; for sites: 10"
    )
    strikes: int = Field(3, ge=1, description="rejected replies after which a client is no longer asked")

    @staticmethod
    def preset(name: str) -> Mapping[str, Any]:
        """Expand a guard named by one word: `guard = "robust"`."""
        if name not in PRESETS:
            raise InputError(f"guard must be a table of keys, or {' or '.join(map(repr, PRESETS))} (got {name!r})")
        return PRESETS[name]

    def needed(self, per_round: int) -> int:
        """Return the number of usable replies below which a round is repeated with other clients."""
        return max(1, math.ceil((QUORUM if self.quorum is None else self.quorum) * per_round - _ROUNDING))

    def asked(self, per_round: int) -> int:
        """Return the number of clients to ask; the first replies count."""
        return math.ceil(per_round * (1 + self.over_select) - _ROUNDING)

    def bound(self, norm: float) -> float:
        """Return the largest norm of an update to weights of a `norm`; larger ones are rejected, or scaled down by the reducer."""
        return self.norm_bound * max(norm, 1.0)

    def claims(self, samples: Mapping[int, int]) -> Mapping[int, int]:
        """n_k, cut to `max_claim` medians."""
        if self.max_claim is None or not samples:
            return samples
        most = max(1, int(self.max_claim * statistics.median(samples.values())))
        return {client: min(claimed, most) for client, claimed in samples.items()}

    def weights(self, samples: Mapping[int, int]) -> dict[int, int]:
        """n_k, cut to `max_claim` medians, and so that no client has more than `max_share` of their sum.

        With fewer clients than 1/max_share all have equal ones.
        """
        samples = self.claims(samples)
        weights = sorted(samples.values())
        if self.max_share >= 1 or not weights:
            return dict(samples)
        low, high = 1, weights[-1]  # the largest cap c with c ≤ max_share · Σ min(n, c)
        while low < high:
            cap = (low + high + 1) // 2
            fits = cap <= self.max_share * sum(min(weight, cap) for weight in weights)
            low, high = (cap, high) if fits else (low, cap - 1)
        return {client: min(weight, low) for client, weight in samples.items()}


@dataclass
class Strikes:
    """The number of rounds in which each client's reply was rejected."""

    limit: int
    counts: dict[int, int] = field(default_factory=dict)
    _last: dict[int, int] = field(default_factory=dict)

    def add(self, client: int, round_index: int) -> None:
        """Add at most one strike per client and round."""
        if self._last.get(client) == round_index:
            return
        self._last[client] = round_index
        self.counts[client] = self.counts.get(client, 0) + 1
        if self.counts[client] == self.limit:
            note(f"client {client} is asked no more: {self.limit} of its replies were rejected", "rejected", client=client)

    def quarantine(self, client: int, reason: str) -> None:
        """Stop asking a client, however few of its replies were rejected."""
        self.counts[client] = self.limit
        note(f"client {client} is asked no more: {reason}", "rejected", client=client)

    @property
    def quarantined(self) -> set[int]:
        return {client for client, count in self.counts.items() if count >= self.limit}


@dataclass
class Lateness:
    """Clients that are late repeatedly: each time they are skipped for twice as many rounds."""

    limit: int
    """Late rounds in a row after which a client is asked less often."""
    counts: dict[int, int] = field(default_factory=dict)
    """Late rounds in a row, by client."""
    again: dict[int, int] = field(default_factory=dict)
    """The round from which on a client is asked again."""
    _last: dict[int, int] = field(default_factory=dict)

    def add(self, client: int, round_index: int) -> bool:
        """Record a late client, at most once per round; return whether it will now be asked less often."""
        if self._last.get(client) != round_index:
            self._last[client] = round_index
            self.counts[client] = count = self.counts.get(client, 0) + 1
            if count >= self.limit:
                rounds = 2 ** min(count - self.limit, _LONGEST_REST)
                self.again[client] = round_index + 1 + rounds
                words = f"client {client} was late in {count} rounds in a row: where the quorum allows, {rounds} go without it"
                note(words, "late", round=round_index, client=client)
        return client in self.again

    def clear(self, client: int) -> None:
        """Record that a client replied in time."""
        self.counts.pop(client, None)
        self.again.pop(client, None)

    def resting(self, round_index: int) -> set[int]:
        """Return the clients that are not asked in a round."""
        return {client for client, again in self.again.items() if round_index < again}


@dataclass(frozen=True)
class Rejection:
    """Why a reply does not count, and whether that counts against its client."""

    reason: str
    blamed: bool


def judge(
    reply: Reply | Failure, fault: str | None, order: Order, samples: Mapping[int, int], counted: Collection[int]
) -> Rejection | None:
    """Return None if a reply with this `fault` may count. `samples`: n_k of the clients asked; `counted`: clients whose replies count."""
    if isinstance(reply, Failure):
        return Rejection(reply.reason, blamed=reply.client in samples and reply.client not in counted)
    if (reason := stray(reply, order, samples, counted)) is not None:
        return Rejection(reason, blamed=False)
    return None if fault is None else Rejection(fault, blamed=True)


def stray(reply: Reply, order: Order, samples: Mapping[int, int], answered: Collection[int]) -> str | None:
    """Return why a reply does not belong to this order (late, doubled, replayed, misaddressed): it is dropped, and nobody is blamed."""
    if reply.client not in samples:
        return "this client was not asked"
    if reply.client in answered:
        return "a second reply of the same client"
    if (reply.round, reply.exchange) != (order.round.index, order.round.exchange):
        return f"a reply to round {reply.round}, exchange {reply.exchange}"
    return None


def faults(replies: Sequence[Reply | Failure], order: Order, guard: Guard, samples: Mapping[int, int]) -> list[str | None]:
    """Return the fault of each of several replies to `order`; None if there is none. `samples`: n_k as known here."""
    return [found.faults.get(0) for found in findings(replies, order, guard, samples)]


def findings(
    replies: Sequence[Reply | Failure | Replies], order: Order, guard: Guard, samples: Mapping[int, int], *, bounded: bool = True
) -> list[Findings]:
    """What is wrong with each of several replies to `order`, and how large they are, measured together.

    Not `bounded`: clients clip what they send themselves, and say nothing of weights that are not finite.
    """
    listed = [[] if isinstance(reply, Failure) else list(_checks(reply, order, guard, samples, bounded)) for reply in replies]
    return checks.findings(listed, [len(reply) if isinstance(reply, Replies) else 1 for reply in replies])


def _checks(reply: Reply | Replies, order: Order, guard: Guard, samples: Mapping[int, int], bounded: bool) -> Iterator[Check]:
    """Yield the checks of a reply, or those of several as one."""
    up, clients = order.exchange.up, (len(reply),) if isinstance(reply, Replies) else ()
    told, asked = (reply.samples, reply.clients) if isinstance(reply, Replies) else ([reply.samples], [reply.client])
    if told != (held := [samples.get(client) for client in asked]):
        yield _of_samples(told, held, order.frame.mask.bits.device)
    if reply.message.keys() != up.keys():
        yield failed(f"fields {sorted(reply.message)} where {sorted(up)} were asked for")
        return
    for name, entry in up.items():
        for check in _of_field(entry, reply.message[name], order.frame, clients):
            if bounded or check.numbers is None or not isinstance(entry, Values):
                yield check
            if check.numbers is None:  # it failed: nothing else can be measured
                return
    if bounded:
        yield from _bounds(reply.message, order, guard)


def _of_samples(told: Sequence[int], held: Sequence[int | None], device: torch.device) -> Check:
    """Compare what clients say of their numbers of samples with what is known; None: nothing is."""
    numbers = torch.tensor([(said, math.nan if known is None else known) for said, known in zip(told, held, strict=True)], device=device)
    return Check(lambda pairs: pairs[:, 0] != pairs[:, 1], _unequal, numbers.double())


def _unequal(told: float, held: float) -> str:
    return f"{int(told)} samples where the client has {None if math.isnan(held) else int(held)}"


def _of_field(entry: WireField, payload: Payload, frame: Frame, clients: tuple[int, ...]) -> Iterator[Check]:
    if not clients:
        return entry.checks(payload, frame)
    assert isinstance(entry, SideBySide)  # of other fields nobody makes one message for several
    return entry.checks(payload, frame, clients)


def _bounds(message: Message, order: Order, guard: Guard) -> Iterator[Check]:
    """Check for values that are too large or impossible for BatchNorm; `message` has the right fields and shapes.

    Measurements are compared along the last axis: clients that send one message are another.
    """
    for name, entry in order.exchange.up.items():
        payload = message[name]
        if isinstance(entry, Values) and entry.on == "statistics":
            yield from _of_statistics(carried(payload, Tensor).unflatten(-1, (entry.copies, -1)), order, guard)
        elif name != "weights" and (numbers := _numbers(payload)) is not None and numbers.shape[-1]:
            largest, bound = torch.linalg.vector_norm(numbers, ord=torch.inf, dim=-1), guard.value_bound
            yield Check(partial(_above, bound), partial(_of_size, name, bound), largest)
    if "weights" not in order.exchange.up or order.reference is None:
        return
    frame = order.upload_frame()
    opened, reference = order.exchange.up["weights"].open(message["weights"], frame), order.reference
    if isinstance(opened, OwnValues):  # compared where the client's own mask has links
        reference = opened.mask.compact(frame.mask.expand(reference))
        opened = opened.values
    weights = carried(opened, Tensor)
    parameters = weights.shape[-1] - frame.statistics
    if frame.statistics:
        yield from _of_statistics(weights[..., None, parameters:], order, guard)
    if not reducers.get(guard.reducer).bounds_updates:
        update, norm = weights[..., :parameters] - reference[:parameters], order.reference_norm
        size = torch.linalg.vector_norm(update, dim=-1)
        yield Check(partial(_above, guard.bound(norm)), partial(_too_large, guard.bound(norm)), size, UPDATE.name)
        along = torch.stack([size, update @ reference[:parameters]], dim=-1)
        yield Check(partial(_undone, guard.undo_bound, norm), partial(_undoes, guard.undo_bound, norm), along)


def _numbers(payload: Payload) -> Tensor | None:
    """Return the numbers of an upload that has any, as they are."""
    numbers = payload.values if isinstance(payload, Selection) else payload
    return numbers if isinstance(numbers, Tensor) and numbers.is_floating_point() else None


def _above(bound: float, sizes: Measurements) -> np.ndarray:
    """Return which sizes `[clients, 1]` are above the bound."""
    above: np.ndarray = sizes[:, 0] > bound
    return above


def _of_size(name: str, bound: float, largest: float) -> str:
    return f"'{name}' has numbers above guard.value_bound = {bound:g}"


def _too_large(bound: float, size: float) -> str:
    return f"an update of norm {size:.3g}, above the bound of {bound:.3g}"


def _undone(undo_bound: float, norm: float, updates: Measurements) -> np.ndarray:
    """Return which updates go too far back: by their sizes, and their products with the sent model of a `norm`, `[clients, 2]`."""
    size, along = updates[:, 0], updates[:, 1]
    far = np.maximum(undo_bound * max(norm, 1.0), _BACKWARDS * size) * norm
    return np.asarray(-along > far)


def _undoes(undo_bound: float, norm: float, size: float, along: float) -> str:
    return f"an update that undoes the model: {-along / norm / max(norm, 1.0):.3g} of it, above guard.undo_bound = {undo_bound:g}"


def _of_statistics(statistics: Tensor, order: Order, guard: Guard) -> Iterator[Check]:
    """Check every row of `statistics [..., copies, s]` for values that are impossible for BatchNorm, and measure how far they moved."""
    if not statistics.shape[-1]:
        return
    largest, bound = torch.linalg.vector_norm(statistics, ord=torch.inf, dim=-1), guard.statistic_bound
    least = statistics[..., order.variances].amin(-1) if len(order.variances) else torch.zeros_like(largest)
    yield Check(partial(_impossible, bound), partial(_why_impossible, bound), torch.stack([least, largest], dim=-1))
    if order.reference is not None:
        sent = order.reference[len(order.reference) - statistics.shape[-1] :].expand(statistics.shape[-2:])
        moved = torch.linalg.vector_norm(statistics - sent, dim=(-2, -1)) / torch.linalg.vector_norm(sent).clamp(min=1e-9)
        yield measuring(moved, STATISTICS.name)


def _impossible(bound: float, extremes: Measurements) -> np.ndarray:
    """Return for whom a smallest variance or a largest statistic, which are columns by turns, cannot be."""
    return np.asarray((extremes[:, ::2] < 0).any(1) | (extremes[:, 1::2] > bound).any(1))


def _why_impossible(bound: float, *extremes: float) -> str:
    """Return what is wrong with the first row of which something is."""
    least = next(least for least, largest in zip(extremes[::2], extremes[1::2], strict=True) if least < 0 or largest > bound)
    return "a negative variance" if least < 0 else f"statistics above guard.statistic_bound = {bound:g}"
