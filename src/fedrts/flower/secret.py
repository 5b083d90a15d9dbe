"""The engine whose server learns sums alone: five messages to every client of a round, of which one is its order.

    keys → shares → order and words → list of survivors → shares that open

Who is lost on the way costs the round its own words at most, as long as t clients stay (`secure.participant`, `secure.opener`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fedrts.client.order import Failure, fingerprint
from fedrts.client.summing import SumForm
from fedrts.errors import InputError
from fedrts.flower.engine import Errand, FlowerEngine
from fedrts.flower.fleet import LOST
from fedrts.flower.messages import SUM
from fedrts.flower.openings import Opened, Openings
from fedrts.secure.call import FEWEST, Call, Invited, joined, parted
from fedrts.secure.errors import SecureError
from fedrts.secure.opener import Opener
from fedrts.secure.participant import STEPS
from fedrts.secure.shamir import SHARE
from fedrts.server.aggregate import RingSums
from fedrts.server.collect import UNREACHABLE, Question, Tally

_APART = 100
"""Steps of a sum take other times than exchanges: they are told apart by such numbers."""
_PEER = 2 * SHARE + 64
"""Bytes that a client says of one peer, in any step."""
_ITSELF = 2**10

Take = Callable[[int, bytes], None]


@dataclass
class SumStep(Errand):
    """One step of a sum, for all clients that are still in it: messages by client, and with the words their orders."""

    step: str = ""
    messages: dict[int, bytes] = field(default_factory=dict)
    longest: int = 0
    with_order: bool = False

    def _blob(self, client: int, first: bool = False) -> bytes:
        own = self.messages[client]
        return joined([own, super()._blob(client, first)]) if self.with_order else own

    @property
    def _most(self) -> int:
        return self.longest


@dataclass
class SecretEngine(FlowerEngine):
    """Runs secure sums with the clients of a fleet."""

    digest: str = ""
    """Of the experiment, to which the sites' owners agreed."""
    threshold: int = 0
    openings: Openings = field(default_factory=lambda: Openings(None))

    def answer(self, question: Question) -> Tally:
        """The sum of a round's clients, opened once and kept before it is used; an empty tally where there are too few."""
        assert question.order.values is not None
        index, model = question.order.round.index, fingerprint(question.order.values)
        known = self.openings.opened(index, model)
        if known is not None:
            return self.tally(question, known)
        return _Sum(self, question, model).played()

    def tally(self, question: Question, opened: Opened) -> Tally:
        """What an opened sum comes to."""
        assert question.summing is not None
        form = question.summing.form(question.order, question.method, opened.invited)
        if opened.form != form.digest(question.order).hex():
            raise InputError(f"the opened sum of round {opened.round} is of another model or mask: restore the run's checkpoints")
        sums = RingSums(form, question.order, question.most_samples)
        sums.add(opened.words, len(opened.clients), sum(self.samples[client] for client in opened.clients))
        rows = torch.zeros(())
        flops = sum(
            self.bench.flops(question.order, self.bench.job(question.order, client, rows.expand(self.samples[client])))
            for client in opened.clients
        )
        return Tally(sums, list(opened.clients), upload_bytes=opened.upload_bytes, flops=flops)


@dataclass
class _Sum:
    """One attempt at the sum of a round."""

    engine: SecretEngine
    question: Question
    model: str
    missing: dict[int, str] = field(default_factory=dict)
    rejected: list[dict[str, Any]] = field(default_factory=list)
    blamed: list[int] = field(default_factory=list)
    up: int = 0
    down: int = 0

    def played(self) -> Tally:
        engine, question = self.engine, self.question
        index = question.order.round.index
        opened = None
        for sum in (self._resumed, self._summed):
            try:
                opened = opened or sum()
            except SecureError as error:
                engine.fleet.say(f"{LOST}: no sum of round {index}: {error}")
        if opened is None:
            tally = Tally(question.sums())
        else:
            engine.openings.keep(opened)
            tally = engine.tally(question, opened)
        tally.blamed, tally.resent_bytes = self.blamed, self.down
        tally.missing = {client: reason for client, reason in self.missing.items() if client not in tally.counted}
        tally.rejected = [entry for entry in self.rejected if entry["client"] not in tally.counted]
        return tally

    def _summed(self) -> Opened | None:
        """All steps, from a fresh call."""
        engine, question = self.engine, self.question
        clients = list(question.asked)
        SumStep(engine, question.order, clients).gathered()
        called = self._call(clients)
        if called is None:
            return None
        call, form = called
        opener = Opener(call, form.ring)
        here = self._step(0, dict.fromkeys(call.members, call.encoded), opener.advertised)
        adverts = opener.adverts()
        self._step(1, dict.fromkeys(here, adverts), opener.shared)
        words = form.ring.size + _ITSELF
        self._step(2, {client: opener.deal(client) for client in opener.sharing}, opener.masked, longest=words)
        survivors = opener.survivors()
        self._step(3, dict.fromkeys(opener.counted, survivors), opener.endorsed)
        opener.endorsements()  # or there are too few, and nobody is asked to reveal anything
        engine.openings.begin(question.order.round.index, joined([self.model.encode(), opener.saved()]))
        return self._opened(opener)

    def _resumed(self) -> Opened | None:
        """An opening that had begun when the server stopped: the same shares are asked for again."""
        begun = self.engine.openings.begun(self.question.order.round.index)
        if begun is None:
            return None
        model, saved = parted(begun)
        call = Opener.call_of(saved)
        assert self.question.summing is not None
        form = self.question.summing.form(self.question.order, self.question.method, len(call.roster))
        if model != self.model.encode() or call.form != form.digest(self.question.order):
            raise SecureError("an opening had begun, of another model")
        return self._opened(Opener.restored(saved, form.ring))

    def _opened(self, opener: Opener) -> Opened:
        self._step(4, dict.fromkeys(opener.signed, opener.endorsements()), opener.revealed)
        words = opener.opened()
        index, call = self.question.order.round.index, opener.call
        return Opened(index, self.model, call.form.hex(), tuple(opener.counted), len(call.roster), self.up, words)

    def _call(self, clients: list[int]) -> tuple[Call, SumForm] | None:
        """Whom we call: all that are here; None where these are too few."""
        engine, question, order = self.engine, self.question, self.question.order
        keys = {client: engine.fleet.public_key(client) for client in clients}
        invited = tuple(Invited(client, engine.samples[client], key) for client, key in sorted(keys.items()) if key is not None)
        self.missing |= {client: UNREACHABLE for client, key in keys.items() if key is None}
        if len(invited) < max(FEWEST, engine.threshold):
            return None
        assert question.summing is not None
        form = question.summing.form(order, question.method, len(invited))
        attempt = engine.openings.next_attempt(order.round.index)
        run, most = bytes.fromhex(engine.digest), question.most_samples
        return Call(run, order.round.index, attempt, engine.threshold, invited, most, form.digest(order)), form

    def _step(self, number: int, messages: dict[int, bytes], take: Take, longest: int = 0) -> list[int]:
        """Send a step's messages; who has answered as it should."""
        order = self.question.order
        if not longest:
            order = replace(order, round=replace(order.round, exchange=_APART + number))
            longest = _ITSELF + _PEER * len(messages)
            self.down += sum(map(len, messages.values()))
        step = SumStep(self.engine, order, sorted(messages), step=STEPS[number], messages=messages, longest=longest)
        step.with_order = number == 2
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
        """Who is lost after its words came is in the sum all the same."""
        self.down += failure.resent
        if failure.excused:
            self.missing[failure.client] = failure.reason
        else:
            self.rejected.append({"client": failure.client, "reason": failure.reason})
