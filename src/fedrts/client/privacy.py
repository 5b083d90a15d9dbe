"""Protection of an upload before it leaves: clipping and noise on values, randomised response on index sets.

Local protection: the guarantee is against the server itself, between any two data sets that the client might hold
(docs/security.md has the proofs).
"""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, Protocol

import numpy as np
import pydantic
import torch
from torch import Tensor

from fedrts.errors import InputError
from fedrts.tables import Number, Table
from fedrts.wire.fields import Field, Frame, Indices, Message, Selection, Values, carried


class Draws(Protocol):
    """A source of the random numbers that protection needs."""

    def gaussian(self, count: int) -> np.ndarray:
        """Draw this many independent numbers from N(0, 1)."""
        ...

    def place(self, probabilities: np.ndarray) -> int:
        """Draw an index `i` with probability `probabilities[i]`; they sum to 1."""
        ...

    def subset(self, items: np.ndarray, count: int) -> np.ndarray:
        """Draw so many of the `items`, every subset with equal probability."""
        ...


Noise = Callable[[int], Draws]
"""The source for a message with this key: `Unpredictable`, or `Repeatable` where a simulation asks for that."""


class Unpredictable:
    """The operating system's cryptographic generator. Nobody can repeat its numbers; it ignores the key."""

    def __init__(self, key: int = 0) -> None: ...

    def gaussian(self, count: int) -> np.ndarray:
        """Draw by the Box–Muller transform."""
        half = (count + 1) // 2
        radius, angle = np.sqrt(-2 * np.log1p(-_uniform(half))), 2 * math.pi * _uniform(half)
        return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]

    def place(self, probabilities: np.ndarray) -> int:
        """Draw by the inverse of the distribution function."""
        upto = np.cumsum(probabilities)
        return int(np.searchsorted(upto, float(_uniform(1)[0]) * upto[-1], side="right"))

    def subset(self, items: np.ndarray, count: int) -> np.ndarray:
        """Take the items with the smallest of as many random numbers."""
        return items[np.argsort(_words(len(items)))[:count]]


class Repeatable:
    """numpy's PCG64 seeded by the key, so that simulations repeat exactly. It offers no protection against anyone who knows the seed."""

    def __init__(self, key: int) -> None:
        self._key = key

    @cached_property
    def _rng(self) -> np.random.Generator:
        return np.random.default_rng(self._key)

    def gaussian(self, count: int) -> np.ndarray:
        return self._rng.standard_normal(count)

    def place(self, probabilities: np.ndarray) -> int:
        return int(self._rng.choice(len(probabilities), p=probabilities))

    def subset(self, items: np.ndarray, count: int) -> np.ndarray:
        return self._rng.choice(items, count, replace=False)


def _words(count: int) -> np.ndarray:
    """Draw random 64-bit numbers."""
    return np.frombuffer(os.urandom(8 * count), np.uint64)


def _uniform(count: int) -> np.ndarray:
    """Draw multiples of 2⁻⁵³ in [0, 1)."""
    return (_words(count) >> np.uint64(11)) * 2.0**-53


class Protection(Table):
    """How clients protect their uploads (docs/security.md); off by default."""

    clip: Number = pydantic.Field(0.0, ge=0, description="clip a client's update to this norm; 0: off")
    noise: Number = pydantic.Field(
        0.0, ge=0, description="standard deviation of the Gaussian noise on every value, in units of clip; 0: off"
    )
    index_epsilon: Number = pydantic.Field(0.0, ge=0, description="ε of randomised response on the index sets of a message; 0: off")
    delta: Number = pydantic.Field(1e-5, gt=0, lt=1, description="δ at which the ε of the noise is stated")

    @pydantic.model_validator(mode="after")
    def _bounded(self) -> Protection:
        if self.noise and not self.clip:
            raise ValueError("privacy.noise needs privacy.clip: noise hides only what is bounded")
        return self

    @property
    def on(self) -> bool:
        """Whether any protection is on."""
        return any(mechanism.on(self) for mechanism in MECHANISMS)

    def check(self, fields: Mapping[str, Field], frame: Frame, limited: bool = False) -> None:
        """Check that an upload of these fields may leave a client. With noise, or a `limited` ε, all of it must be protected."""
        if not (limited or any(mechanism.promises(self) for mechanism in MECHANISMS)):
            return
        for name, entry in fields.items():
            if not any(mechanism.covers(name, entry) for mechanism in MECHANISMS):
                raise InputError(f"[privacy]: this method uploads '{name}' too, for which there is no protection: choose another method")
        if (limited or self.noise) and frame.statistics:
            raise InputError("[privacy]: the model's BatchNorm statistics would travel unprotected: use a model without (norm = 'group')")

    def message(self, fields: Mapping[str, Field], tensors: Mapping[str, Tensor], frame: Frame, draws: Draws) -> Message:
        """Return the upload of a client's `tensors`, protected with random numbers from `draws`."""
        if self.on:
            self.check(fields, frame)
        active = [mechanism for mechanism in MECHANISMS if mechanism.on(self)]
        for mechanism in active:
            tensors = mechanism.before(self, fields, tensors, frame, draws)
        message: Message = {name: entry.take(tensors, frame) for name, entry in fields.items()}
        for mechanism in active:
            message = mechanism.after(self, fields, message, frame, draws)
        return message


class Mechanism(ABC):
    """One way to protect a part of uploads, set by keys of the table `[privacy]`; an entry of `MECHANISMS`."""

    part: Literal["values", "indices"]
    """The messages that it protects."""

    @abstractmethod
    def on(self, table: Protection) -> bool:
        """Whether it is switched on."""

    @abstractmethod
    def promises(self, table: Protection) -> bool:
        """Whether it bounds what a message reveals."""

    @abstractmethod
    def one_message(self, table: Protection) -> Account:
        """The privacy cost of one message, if it bounds it."""

    @abstractmethod
    def covers(self, name: str, entry: Field) -> bool:
        """Whether it can protect this field of an upload."""

    def before(
        self, table: Protection, fields: Mapping[str, Field], tensors: Mapping[str, Tensor], frame: Frame, draws: Draws
    ) -> Mapping[str, Tensor]:
        """Protect a client's tensors before an upload of these fields is made from them."""
        return tensors

    def after(self, table: Protection, fields: Mapping[str, Field], message: Message, frame: Frame, draws: Draws) -> Message:
        """Protect an upload of these fields before it leaves."""
        return message


class Blur(Mechanism):
    """Clip the weights' update at C and add Gaussian noise: W_received + clip(ΔW) + N(0, (zC)²). Statistics are unchanged."""

    part = "values"

    def on(self, table: Protection) -> bool:
        return bool(table.clip)

    def promises(self, table: Protection) -> bool:
        return bool(table.noise)

    def one_message(self, table: Protection) -> Account:
        """Two data sets change a clipped update by at most 2C: a Gaussian mechanism with μ = 2/z."""
        mu = 2 / table.noise
        return Account(square=mu * mu)

    def covers(self, name: str, entry: Field) -> bool:
        return name == "weights" and isinstance(entry, Values) and entry.on == "mask"

    def before(
        self, table: Protection, fields: Mapping[str, Field], tensors: Mapping[str, Tensor], frame: Frame, draws: Draws
    ) -> Mapping[str, Tensor]:
        """Protect weights `[A + n − P]` if they travel on the sent mask, otherwise `[n]`."""
        if "weights" not in fields:
            return tensors
        field, weights, received = fields["weights"], tensors["weights"], tensors["received"]
        if isinstance(field, Values) and field.on == "mask":
            weights, received = frame.mask.compact(weights), frame.mask.compact(received)
        kept = len(weights) - frame.statistics
        update = clipped(weights[:kept].double() - received[:kept].double(), table.clip)
        if table.noise:
            drawn = draws.gaussian(kept) * (table.noise * table.clip)
            update += torch.from_numpy(drawn).to(update.device)
        return {**tensors, "weights": torch.cat([(received[:kept].double() + update).to(weights.dtype), weights[kept:]])}


class RandomisedResponse(Mechanism):
    """Randomised response on every layer's index set; the index sets of a message share ε equally, and so do their layers."""

    part = "indices"

    def on(self, table: Protection) -> bool:
        return bool(table.index_epsilon)

    def promises(self, table: Protection) -> bool:
        return bool(table.index_epsilon)

    def one_message(self, table: Protection) -> Account:
        return Account(indices=table.index_epsilon)

    def covers(self, name: str, entry: Field) -> bool:
        return isinstance(entry, Indices) and not entry.values

    def after(self, table: Protection, fields: Mapping[str, Field], message: Message, frame: Frame, draws: Draws) -> Message:
        chosen = {name: entry for name, entry in fields.items() if isinstance(entry, Indices)}
        epsilon = table.index_epsilon / max(len(chosen), 1)
        responded = {
            name: self._responded(carried(message[name], Selection), entry, frame, epsilon, draws) for name, entry in chosen.items()
        }
        return message | responded

    def _responded(self, selection: Selection, field: Indices, frame: Frame, epsilon: float, draws: Draws) -> Selection:
        mask, named = frame.mask.arms, field.named(frame)
        inactive = (~mask.bits).cpu()
        asked = sum(k > 0 for k in named)
        start, place, found = 0, 0, []
        for size, k in zip(mask.sizes, named, strict=True):
            candidates = inactive[start : start + size].nonzero().squeeze(-1).numpy() + start
            true = selection.indices[place : place + k].cpu().numpy()
            if k:
                found.append(respond(true, candidates, epsilon / asked, draws))
            start, place = start + size, place + k
        indices = np.concatenate(found) if found else np.zeros(0, np.int64)
        return replace(selection, indices=torch.from_numpy(indices).to(selection.indices.device))


MECHANISMS: tuple[Mechanism, ...] = (Blur(), RandomisedResponse())


def clipped(update: Tensor, bound: float) -> Tensor:
    """Scale `update` down to a norm of at most `bound`; a non-finite update becomes all zeros."""
    norm = float(torch.linalg.vector_norm(update))
    if not math.isfinite(norm):
        return torch.zeros_like(update)
    return update * min(1.0, bound / max(norm, 1e-300))


@dataclass(frozen=True)
class Response:
    """Randomised response on sets: the distribution P(overlap = o) of the k true indices among the k of m that are sent.

    A set Y is sent with probability ∝ e^ε if it has at least τ of the true indices, else ∝ 1. By symmetry the normaliser is the
    same for every true set, so that no Y is more than e^ε times likelier under one true set than under another.
    """

    first: int
    """Least possible overlap: max(0, 2k − m)."""
    probabilities: np.ndarray
    threshold: int
    """τ: chosen so that the expected overlap is largest."""

    @staticmethod
    def of(k: int, m: int, epsilon: float) -> Response:
        """Return the mechanism for sets of `k` out of `m`."""
        from scipy.special import gammaln

        first = max(0, 2 * k - m)
        overlap = np.arange(first, k + 1)
        log_choose = (
            gammaln(k + 1) - gammaln(overlap + 1) - gammaln(k - overlap + 1) + gammaln(m - k + 1) - gammaln(k - overlap + 1)
        ) - gammaln(m - 2 * k + overlap + 1)
        uniform = np.exp(log_choose - log_choose.max())
        uniform /= uniform.sum()
        above = np.cumsum(uniform[::-1])[::-1]  # P(overlap ≥ τ) without any preference
        gained = np.cumsum((uniform * overlap)[::-1])[::-1]
        boost = math.expm1(min(epsilon, 700.0))
        expected = ((uniform * overlap).sum() + boost * gained) / (1 + boost * above)
        best = int(expected.argmax())
        weights = uniform * np.where(np.arange(len(overlap)) >= best, 1 + boost, 1.0)
        return Response(first, weights / weights.sum(), first + best)

    @property
    def expected(self) -> float:
        """The mean number of true indices that are sent."""
        return float((self.probabilities * np.arange(self.first, self.first + len(self.probabilities))).sum())


def respond(true: np.ndarray, candidates: np.ndarray, epsilon: float, draws: Draws) -> np.ndarray:
    """Draw as many `candidates` as there are `true` ones, in ascending order; the draw is ε-indistinguishable between true sets."""
    k, m = len(true), len(candidates)
    response = Response.of(k, m, epsilon)
    overlap = response.first + draws.place(response.probabilities)
    others = np.setdiff1d(candidates, true, assume_unique=True)
    chosen = [draws.subset(true, overlap), draws.subset(others, k - overlap)]
    return np.sort(np.concatenate(chosen))


def gaussian_delta(epsilon: float, mu: float) -> float:
    """Return the smallest δ for which N(0, 1) and N(μ, 1) are (ε, δ)-indistinguishable (Balle and Wang 2018, Theorem 5)."""
    from scipy.special import log_ndtr

    first, second = log_ndtr(mu / 2 - epsilon / mu), epsilon + log_ndtr(-mu / 2 - epsilon / mu)
    return float(-math.exp(first) * math.expm1(min(second - first, 0.0)))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Return the smallest ε for a δ, by bisection of the analytic Gaussian mechanism."""
    if mu <= 0 or mu == math.inf:
        return max(mu, 0.0)
    low, high = 0.0, 1.0
    if gaussian_delta(low, mu) <= delta:
        return 0.0
    while gaussian_delta(high, mu) > delta:
        low, high = high, 2 * high
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (low, middle) if gaussian_delta(middle, mu) <= delta else (middle, high)
    return high


def countable(fields: Mapping[str, Field]) -> tuple[int, int]:
    """Count an upload of these fields as a message of values (or none) and one of index sets (or none)."""
    return int("weights" in fields), int(any(isinstance(entry, Indices) for entry in fields.values()))


@dataclass(frozen=True)
class Account:
    """The total privacy cost of messages, whatever their protection; infinite means unbounded.

    Several Gaussian mechanisms together are one with μ² = Σ μ_i², exactly. Index sets add up.
    """

    square: float = 0.0
    """μ² of all values."""
    indices: float = 0.0
    """ε of all index sets."""

    @staticmethod
    def of(protection: Protection, values: int, indices: int) -> Account:
        """Return the account of this many messages of values and this many of index sets."""
        total = Account()
        for part, unbounded, messages in (("values", Account(square=math.inf), values), ("indices", Account(indices=math.inf), indices)):
            bounds = (some.one_message(protection) for some in MECHANISMS if some.part == part and some.promises(protection))
            total += next(bounds, unbounded).times(messages) if messages else Account()
        return total

    def times(self, messages: int) -> Account:
        """Return the account of this many messages like this one."""
        return Account(self.square * messages, self.indices * messages)

    def __add__(self, other: Account) -> Account:
        return Account(self.square + other.square, self.indices + other.indices)

    def either(self, other: Account) -> Account:
        """Return a bound on each of two accounts of different data."""
        return Account(max(self.square, other.square), max(self.indices, other.indices))

    def values(self, delta: float) -> float:
        """Return the ε of all values, for a δ."""
        return gaussian_epsilon(math.sqrt(self.square), delta)

    def epsilon(self, delta: float) -> float:
        """Return the ε of everything together, for a δ."""
        return self.values(delta) + self.indices


def spent(protection: Protection, values: int, indices: int) -> dict[str, float | None]:
    """Return the ε spent on this many messages of values and this many of index sets; None: unbounded."""
    account, delta = Account.of(protection, values, indices), protection.delta
    parts = {"values": account.values(delta), "indices": account.indices, "total": account.epsilon(delta)}
    return {**{name: epsilon if math.isfinite(epsilon) else None for name, epsilon in parts.items()}, "delta": delta}
