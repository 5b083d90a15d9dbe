"""The engine whose server learns only sums: five messages to every client of a round, one of which is its order.

    keys → shares → order and words → list of survivors → shares that open

A client that drops out costs the round at most its own words, as long as t clients stay (`secure.participant`, `secure.opener`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from fedrts.client.figures import FigureForm
from fedrts.client.order import Failure, Order, fingerprint
from fedrts.errors import InputError
from fedrts.flower.confidant import bound, judged
from fedrts.flower.engine import Errand, FlowerEngine
from fedrts.flower.messages import SUM
from fedrts.flower.normalisation import MIXED, Normalisation
from fedrts.flower.openings import Opened, Openings
from fedrts.logs import LOST, warning
from fedrts.methods.contract import Exchange
from fedrts.secure.call import FEWEST, METRICS, STATISTICS, UPDATE, Call, Invited, joined, parted
from fedrts.secure.errors import SecureError
from fedrts.secure.opener import Opener
from fedrts.secure.participant import STEPS
from fedrts.secure.ring import Ring
from fedrts.secure.settings import SecureSums
from fedrts.secure.shamir import SHARE
from fedrts.server.aggregate import RingSums
from fedrts.server.collect import LATE, UNASKED, UNREACHABLE, Question, Tally
from fedrts.server.engine import Figures
from fedrts.sparse.mask import Mask
from fedrts.wire.fields import Frame

if TYPE_CHECKING:
    from fedrts.server.rounds import Plan

_APART = 100
"""Steps of a sum take other times than exchanges: they are told apart by such numbers."""
_PEER = 2 * SHARE + 64
"""Bytes that a client says of one peer, in any step."""
_ITSELF = 2**10

Take = Callable[[int, bytes], None]


@dataclass
class SumStep(Errand):
    """One step of a sum for all remaining clients: messages by client and, with the words, their orders."""

    step: str = ""
    messages: dict[int, bytes] = field(default_factory=dict)
    longest: int = 0
    with_order: bool = False
    has_order: bool = True

    def _blob(self, client: int, first: bool = False) -> bytes:
        own = self.messages[client]
        if not self.with_order:
            return own
        return joined([own, super()._blob(client, first) if self.has_order else b""])

    @property
    def first(self) -> bool:
        return self.step == STEPS[0]

    @property
    def _most(self) -> int:
        return self.longest


@dataclass(frozen=True)
class Subject:
    """What is summed, over which clients, and what the words mean."""

    purpose: bytes
    order: Order
    """What clients do for their words; of statistics it only says in which round."""
    samples: Mapping[int, int]
    """What the part of every client that is asked counts for."""
    most_samples: int
    model: str
    """Names the weights that the sum belongs to."""
    form: Callable[[int], tuple[Ring, bytes]]
    """The words of this many clients, and the digest of what they mean."""

    def counted(self, known: Opened) -> Opened:
        """Return an opened sum with the samples that stand for it now."""
        return replace(known, samples=sum(self.samples[client] for client in known.clients), most_samples=self.most_samples)


@dataclass
class SecretEngine(FlowerEngine):
    """Run secure sums with the clients of a fleet."""

    digest: str = ""
    """Digest of the experiment that the sites' owners accepted."""
    table: SecureSums = field(default_factory=SecureSums)
    per_round: int = 0
    openings: Openings = field(default_factory=lambda: Openings(None))

    def answer(self, question: Question) -> Tally:
        """Return the sum of a round's clients, opened once and stored before use; an empty tally if there are too few."""
        order = question.order
        assert question.summing is not None
        assert order.values is not None
        summing = question.summing

        def form(clients: int) -> tuple[Ring, bytes]:
            found = summing.form(order, question.method, clients)
            return found.ring, self.bound(found.digest(order))

        samples = {client: self.samples[client] for client in question.asked}
        attempt = self.attempt(Subject(UPDATE, order, samples, question.most_samples, fingerprint(order.values), form))
        return self._tally(question, attempt)

    def _tally(self, question: Question, attempt: Attempt) -> Tally:
        """Return the result of an attempt at a round's sum."""
        opened, order = attempt.opened, question.order
        if opened is None:
            tally = Tally(question.sums())
        else:
            assert question.summing is not None
            sums = RingSums(question.summing.form(order, question.method, opened.invited), order, opened.most_samples)
            sums.add(opened.words, len(opened.clients), opened.samples)
            rows = torch.zeros(())
            flops = sum(
                self.bench.flops(order, self.bench.job(order, client, rows.expand(self.samples[client]))) for client in opened.clients
            )
            tally = Tally(sums, list(opened.clients), upload_bytes=opened.upload_bytes, flops=flops)
        tally.blamed, tally.resent_bytes = attempt.blamed, attempt.down
        tally.missing = {client: reason for client, reason in attempt.missing.items() if client not in tally.counted}
        tally.rejected = [entry for entry in attempt.rejected if entry["client"] not in tally.counted]
        return tally

    def figures(self, order: Order, samples: Mapping[int, int], form: Callable[[int], FigureForm]) -> Figures:
        """Return the clients' metrics of the order's model, each on this many `samples`."""
        assert order.values is not None
        return self._figures(METRICS, order, samples, form, fingerprint(order.values), judged(order))

    def statistics(self, plan: Plan, channels: Mapping[int, int]) -> Normalisation | None:
        """Return the common image statistics of all clients with this many `channels`; None if there are too few."""
        if len(set(channels.values())) > 1:
            raise InputError(MIXED)
        mask = Mask.full(plan.layout.sizes)
        order = Order(Exchange({}, (), {}), plan.round(0, mask, _APART - 1), Frame(plan.layout, mask, self.bench.dtype), {})
        samples = {client: self.samples[client] for client in channels}
        form = partial(FigureForm.of_channels, max(channels.values(), default=0))
        found = self._figures(STATISTICS, order, samples, form, "", "")
        moments = list(found.means.values())
        return Normalisation.of_moments(moments) if moments and all(map(math.isfinite, moments)) else None

    def _figures(
        self, purpose: bytes, order: Order, samples: Mapping[int, int], form: Callable[[int], FigureForm], model: str, about: str
    ) -> Figures:
        most = max(samples.values(), default=0)
        attempt = self.attempt(Subject(purpose, order, samples, most, model, lambda n: (form(n).ring, self.bound(form(n).digest(about)))))
        opened = attempt.opened
        lost = {entry["client"]: entry["reason"] for entry in attempt.rejected} | attempt.missing
        if opened is None:
            told = lost or dict.fromkeys(samples, UNASKED)
            return Figures({}, (), told, attempt.down)
        means = form(opened.invited).means(opened.words, len(opened.clients), opened.samples, opened.most_samples)
        missing = {client: lost.get(client, LATE) for client in samples if client not in opened.clients}
        return Figures(means, opened.clients, missing, attempt.down + opened.upload_bytes, opened.samples)

    def attempt(self, subject: Subject) -> Attempt:
        """Return the sum of a subject: the one opened before, or one new attempt at it."""
        found = Attempt(self, subject)
        known = self.openings.opened(subject.order.round.index, subject.model, subject.purpose)
        if known is None:
            found.play()
        elif known.form != subject.form(known.invited)[1].hex():
            raise InputError(f"the opened sum of round {known.round} is of another model or mask: restore the run's checkpoints")
        else:
            found.opened = known if known.samples else subject.counted(known)
        return found

    def bound(self, form: bytes) -> bytes:
        """Return what a call fixes about its words, see `confidant.bound`."""
        return bound(form, self.facts.get("normalisation", []))


@dataclass
class Attempt:
    """One attempt at a sum."""

    engine: SecretEngine
    subject: Subject
    opened: Opened | None = None
    missing: dict[int, str] = field(default_factory=dict)
    rejected: list[dict[str, Any]] = field(default_factory=list)
    blamed: list[int] = field(default_factory=list)
    revealed: set[int] = field(default_factory=set)
    """Who has helped with an opening of this sum that did not come to its end: they help with no other."""
    up: int = 0
    down: int = 0

    @property
    def round(self) -> int:
        return self.subject.order.round.index

    def play(self) -> None:
        """Continue an unfinished opening, or start a new one; the opened sum is on disk before it is used."""
        engine = self.engine
        for sum in (self._resumed, self._summed):
            try:
                self.opened = self.opened or sum()
            except SecureError as error:
                words = f"{LOST}: no sum of round {self.round}{self._what}: {error}"
                engine.fleet.say(warning("lost", words, round=self.round))
        if self.opened is not None:
            engine.openings.keep(self.opened)

    @property
    def _what(self) -> str:
        return "" if self.subject.purpose == UPDATE else f"'s {self.subject.purpose.decode()}"

    def _summed(self) -> Opened | None:
        """Run all steps, from a new call."""
        engine, subject = self.engine, self.subject
        clients = list(subject.samples)
        SumStep(engine, subject.order, clients).gathered()
        called = self._call(clients)
        if called is None:
            return None
        call, ring = called
        opener = Opener(call, ring)
        here = self._step(0, dict.fromkeys(call.members, call.encoded), opener.advertised)
        adverts = opener.adverts()
        self._step(1, dict.fromkeys(here, adverts), opener.shared)
        words = ring.size + _ITSELF
        self._step(2, {client: opener.deal(client) for client in opener.sharing}, opener.masked, longest=words)
        survivors = opener.survivors()
        self._quorate(len(opener.counted))
        self._step(3, dict.fromkeys(opener.counted, survivors), opener.endorsed)
        opener.endorsements()  # or there are too few, and nobody is asked to reveal anything
        engine.openings.begin(self.round, joined([subject.model.encode(), opener.saved()]), subject.purpose)
        return self._opening(opener)

    def _quorate(self, survivors: int) -> None:
        """Check that the round counts with so many clients: once their sum is open, it cannot be repeated with more."""
        needed = self.engine.needed(self.engine.fleet.departed)
        if self.subject.purpose == UPDATE and survivors < needed:
            raise SecureError(f"{survivors} masked updates where guard.quorum wants {needed}")

    def _resumed(self) -> Opened | None:
        """Continue an opening that had begun when the server stopped: ask for the same shares again."""
        begun = self.engine.openings.begun(self.round, self.subject.purpose)
        if begun is None:
            return None
        model, saved = parted(begun)
        call = Opener.call_of(saved)
        ring, form = self.subject.form(len(call.roster))
        if model != self.subject.model.encode() or call.form != form:
            raise SecureError("an opening had begun, of another model")
        return self._opening(Opener.restored(saved, ring))

    def _opening(self, opener: Opener) -> Opened:
        self._step(4, dict.fromkeys(opener.signed, opener.endorsements()), opener.revealed)
        call, clients, purpose = opener.call, tuple(opener.counted), self.subject.purpose.decode()
        self.revealed |= set(opener.opening)
        samples = sum(call.members[client].samples for client in clients)
        own = (self.round, self.subject.model, call.form.hex(), clients, len(call.roster), self.up)
        return Opened(*own, opener.opened(), purpose, samples, call.most_samples)

    def _call(self, clients: list[int]) -> tuple[Call, Ring] | None:
        """Return the clients to call: all that are connected; None if there are too few."""
        engine, subject = self.engine, self.subject
        said = f"it has helped to open round {self.round}, and helps with no other opening of it"
        self.rejected += [{"client": client, "reason": said} for client in clients if client in self.revealed]
        keys = {client: engine.fleet.public_key(client) for client in clients if client not in self.revealed}
        invited = tuple(Invited(client, subject.samples[client], key) for client, key in sorted(keys.items()) if key is not None)
        self.missing |= {client: UNREACHABLE for client, key in keys.items() if key is None}
        threshold = engine.table.least(len(invited), engine.per_round)
        if len(invited) < max(FEWEST, threshold):
            return None
        ring, form = subject.form(len(invited))
        attempt = engine.openings.next_attempt(self.round, subject.purpose)
        run = bytes.fromhex(engine.digest)
        return Call(run, self.round, attempt, threshold, invited, subject.most_samples, form, subject.purpose), ring

    def _step(self, number: int, messages: dict[int, bytes], take: Take, longest: int = 0) -> list[int]:
        """Send a step's messages; return who replied properly."""
        order = self.subject.order
        if not longest:
            order = replace(order, round=replace(order.round, exchange=_APART + number))
            longest = _ITSELF + _PEER * len(messages)
            self.down += sum(map(len, messages.values()))
        step = SumStep(self.engine, order, sorted(messages), step=STEPS[number], messages=messages, longest=longest)
        step.with_order = number == 2
        step.has_order = self.subject.purpose != STATISTICS
        step.more_facts = {SUM: STEPS[number]}
        here = []
        for client, outcome in step.heard():
            if isinstance(outcome, Failure):
                self._lost(outcome)
                continue
            data = outcome.read()
            self.up += len(data)
            try:
                take(client, data)
            except SecureError as error:
                self.blamed.append(client)
                self.rejected.append({"client": client, "reason": str(error)})
                continue
            here.append(client)
        return here

    def _lost(self, failure: Failure) -> None:
        """Handle lost clients: those lost after their words arrived still count in the sum."""
        self.down += failure.resent
        if failure.excused:
            self.missing[failure.client] = failure.reason
        else:
            self.rejected.append({"client": failure.client, "reason": failure.reason})
