"""The server's orders to clients, and their replies."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from fedrts.errors import blaming
from fedrts.methods.contract import Exchange, Round, State
from fedrts.sparse.layout import Layout
from fedrts.sparse.mask import Mask
from fedrts.wire.fields import RESIDUAL, Frame, Message, Payload, Steps, carried, changed
from fedrts.wire.packing import raw

DRIFT = "server_drift"
"""What the last round's movement `[n]` is called among all that a run remembers."""


@dataclass(frozen=True)
class Order:
    """What the server asks of clients in one exchange, the same for all."""

    exchange: Exchange
    round: Round
    frame: Frame
    sent: Message
    values: Tensor | None = None
    """The server's own weights on the mask, which may be more precise than what it sends."""
    residuals: Mapping[int, Tensor] = field(default_factory=dict)
    """What earlier uploads of each client have not told, in a simulation; a client without one has told everything."""
    kept: Mapping[int, int] = field(default_factory=dict)
    """The name under which each client elsewhere keeps that of its last upload that counted; one without a name has told everything."""
    held: Mapping[int, Mask | None] = field(default_factory=dict)
    """The mask that each client holds before its download, as far as the server knows."""
    missed: Mapping[int, int | None] = field(default_factory=dict)
    """How many broadcasts each client lacks, with this one; None: it never had one."""
    drift: Tensor | None = None
    """How the last round moved the weights on the mask, where the server remembers it."""

    @staticmethod
    def of(exchange: Exchange, round: Round, layout: Layout, state: State, key: int) -> Order:
        """Make the order of a server in `state`; `key` determines how the values that it sends are rounded."""
        frame = Frame(layout, state.mask, state.values.dtype, key)
        tensors = {"weights": state.values, **state.memory}
        sent = {name: entry.take(tensors, frame) for name, entry in exchange.down.items()}
        drift = state.memory.get(DRIFT)
        return Order(exchange, round, frame, sent, state.values, drift=None if drift is None else state.mask.compact(drift))

    def blaming(self, *clients: int) -> AbstractContextManager[None]:
        """Add the round and the client (or the clients that work side by side) to errors raised inside."""
        when = "set-up" if self.round.index < 0 else f"round {self.round.index}"
        return blaming(f"{when}, {'one of ' if len(clients) > 1 else ''}{called(clients)}")

    @cached_property
    def reference(self) -> Tensor | None:
        """The weights on the mask as clients receive them, if they are sent."""
        down = self.exchange.down.get("weights")
        return None if down is None else carried(down.open(self.sent["weights"], self.frame), Tensor)

    @cached_property
    def model_name(self) -> str | None:
        """A name for the model as clients receive it, if it is sent as steps from an earlier one; otherwise None."""
        return fingerprint(self.reference) if self.reference is not None and any(map(in_steps, self.sent.values())) else None

    @cached_property
    def reference_norm(self) -> float:
        """The norm ‖W‖ of the parameters as clients receive them."""
        if self.reference is None:
            return 0.0
        parameters = self.reference[: len(self.reference) - self.frame.statistics]
        return float(torch.linalg.vector_norm(parameters, dtype=torch.float64))

    @cached_property
    def variances(self) -> Tensor:
        """Positions of the variances among a model's statistics: `[v]`."""
        places = [torch.arange(span.start, span.stop) for span in self.frame.layout.variances()]
        return torch.cat([torch.zeros(0, dtype=torch.int64), *places]).to(self.frame.mask.bits.device)

    def residual(self, client: int, weights: Tensor) -> dict[str, Tensor]:
        """Return the residual of a client with these `weights [n]`, as one of its tensors; empty without error feedback."""
        if self.exchange.fed_back is None:
            return {}
        zero = weights.new_zeros(self.frame.layout.parameters)
        return {RESIDUAL: self.residuals[client].to(weights.device) if client in self.residuals else zero}

    def left(self, message: Message, tensors: Mapping[str, Tensor]) -> Tensor | None:
        """Return what a client remembers after uploading this message of its `tensors`."""
        fed_back = self.exchange.fed_back
        return None if fed_back is None else fed_back.left(message["weights"], tensors, self.upload_frame())

    def upload_frame(self, key: int = 0) -> Frame:
        """Return what both sides know about an upload; only the client has the `key` of its rounding."""
        return replace(self._uploading, key=key) if key else self._uploading

    @cached_property
    def _uploading(self) -> Frame:
        return replace(self.frame, key=0, reference=self.reference)

    @cached_property
    def opening_frame(self) -> Frame:
        """The frame in which the server opens an upload: changes apply to its own precise weights, W ← W + Σ p_k Q(ΔW_k)."""
        return replace(self.frame, reference=self.values if self.reference is not None else None)


def in_steps(payload: Payload) -> bool:
    """Whether this model is for clients that may hold an earlier one."""
    return isinstance(payload, Steps)


def fingerprint(tensor: Tensor) -> str:
    """Return a fingerprint of these exact bits."""
    return hashlib.blake2b(raw(tensor), digest_size=16).hexdigest()


def digest_of(weights: Tensor, mask: Mask) -> bytes:
    """Return the SHA-256 of a model, for receivers who do not trust its sender: shorter fingerprints can be made to collide."""
    return hashlib.sha256(mask.packed().tobytes() + raw(weights)).digest()


def called(clients: Sequence[int], most: int = 20) -> str:
    """Return `client 3` or `clients 1, 4, 7`, with at most `most` numbers."""
    numbers = ", ".join([*map(str, clients[:most]), *(["…"] if len(clients) > most else [])])
    return f"client{'s' if len(clients) > 1 else ''} {numbers}"


@dataclass(frozen=True)
class Reply:
    """A client's reply to an exchange, untrusted until the guard has checked it."""

    client: int
    round: int
    exchange: int
    samples: int
    """n_k: the weight of this client in every mean."""
    message: Message
    flops: float = 0.0
    loss: float = float("nan")
    """Mean training loss over the client's steps (NaN if it made none)."""
    size: int | None = None
    """Bytes that really came, where they did."""
    resent: int = 0
    """Bytes of a second download, to a client that turned out to lack the mask."""
    at: float | None = None
    """When it came (`time.monotonic`), where that is not now."""
    left: Tensor | None = None
    """What the client remembers of its change because it did not travel, if this reply counts (`Exchange.fed_back`)."""
    kept: int | None = None
    """The name under which a client elsewhere keeps that."""
    more: bool = False
    """The next reply is there too: whoever looks at this one may look at both together."""


@dataclass(frozen=True)
class Replies:
    """The replies of clients that worked side by side, as one: tensors of the message have the clients as leading axis.

    A single client's `Reply` is a view of it, made where one is wanted.
    """

    clients: Sequence[int]
    round: int
    exchange: int
    samples: Sequence[int]
    """n_k of each."""
    message: Message
    flops: Sequence[float]
    losses: Tensor
    """Mean training loss of each over its steps `[clients]` (NaN if it made none)."""
    left: Tensor | None = None
    """What each remembers of its change because it did not travel `[clients, N_all]`."""
    more: bool = False
    """See `Reply`."""

    def __len__(self) -> int:
        return len(self.clients)

    def one(self, place: int, more: bool = False) -> Reply:
        """Return the reply of one client."""
        return Reply(
            self.clients[place],
            self.round,
            self.exchange,
            self.samples[place],
            {name: changed(payload, lambda tensor: tensor[place]) for name, payload in self.message.items()},
            self.flops[place],
            float(self.losses[place]),
            left=None if self.left is None else self.left[place],
            more=more,
        )

    def some(self, places: Sequence[int]) -> Replies:
        """Return the replies of some of the clients; all of them are what is there, unchanged."""
        if len(places) == len(self):
            return self
        at = torch.tensor(places, dtype=torch.int64).to(self.losses.device, non_blocking=True)
        return replace(
            self,
            clients=[self.clients[place] for place in places],
            samples=[self.samples[place] for place in places],
            message={name: changed(payload, lambda tensor: tensor.index_select(0, at)) for name, payload in self.message.items()},
            flops=[self.flops[place] for place in places],
            losses=self.losses[at],
            left=None if self.left is None else self.left[at],
        )

    def __iter__(self) -> Iterator[Reply]:
        """Yield every client's reply."""
        told = replace(self, losses=self.losses.cpu())
        return (told.one(place, self.more or place + 1 < len(self)) for place in range(len(self)))


@dataclass(frozen=True)
class Failure:
    """The reason why there is no usable reply."""

    client: int
    reason: str
    excused: bool = False
    """The server itself found that nothing came, or nothing in time. Whatever a client says, it is no excuse."""
    resent: int = 0
    at: float | None = None
    more: bool = False
    """See `Reply`."""
