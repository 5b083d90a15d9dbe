"""Replies that break stock averaging: each is rejected, the round completes, and the model is that without the client."""

import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

import fedrts
from fedrts.api import playing
from fedrts.client.envelope import decode_reply, encode_reply
from fedrts.client.order import Failure, Order, Reply
from fedrts.engines.serial import SerialEngine
from fedrts.errors import InputError, Note
from fedrts.methods.contract import State
from fedrts.observe import Silent
from fedrts.server import rounds
from fedrts.server.aggregate import Sums
from fedrts.server.client_records import ClientRecords
from fedrts.server.collect import Question, add_up
from fedrts.server.engine import Engine
from fedrts.server.guard import Guard, faults, findings
from fedrts.server.reducers import Clipped, Sorted, reduction
from fedrts.wire.errors import WireError
from fedrts.wire.fields import Selection, changed
from helping import as_one, ask, order_of, tensors_of

ATTACKER = 2


@dataclass
class Tampered:
    """An engine between whose clients and server somebody sits: `tamper(reply, order)` says what arrives instead of a reply."""

    engine: Engine
    tamper: Callable[[Any, Order], Iterable[Reply | Failure]]
    attackers: tuple[int, ...] = (ATTACKER,)

    def run(self, order, clients):
        for reply in self.engine.run(order, clients):
            if reply.client in self.attackers:
                yield from self.tamper(reply, order)
            else:
                yield reply

    def evaluate(self, state):
        return self.engine.evaluate(state)


def with_weights(change):
    """Replace the weights of a reply."""

    def tamper(reply, order):
        weights = reply.message["weights"].clone()
        return [replace(reply, message={**reply.message, "weights": change(weights)})]

    return tamper


def with_votes(change):
    def tamper(reply, order):
        votes = reply.message["votes"]
        return [replace(reply, message={**reply.message, "votes": Selection(change(votes.indices.clone(), order), votes.size)})]

    return tamper


def poked(value):
    def change(weights):
        weights[5] = value
        return weights

    return change


def as_bytes(change):
    """Send the reply as bytes, and change these on their way."""

    def tamper(reply, order):
        data = bytearray(encode_reply(reply, order))
        try:
            return [decode_reply(bytes(change(data)), order)]
        except WireError as error:
            return [Failure(reply.client, str(error))]

    return tamper


def flipped(data):
    data[len(data) // 2] ^= 16
    return data


def put(indices, at, value):
    indices[at] = value
    return indices


def active_link(indices, order):
    return torch.cat([indices[:-1], order.frame.mask.active[:1]]).sort().values


ATTACKS = {
    "NaN": (with_weights(poked(float("nan"))), "not finite"),
    "infinity": (with_weights(poked(float("inf"))), "not finite"),
    "1e30": (with_weights(poked(1e30)), "above the bound"),
    "all times a million": (with_weights(lambda w: w * 1e6), "above the bound"),
    "statistics of 1e30": (with_weights(lambda w: torch.cat([w[:-1], torch.tensor([1e30])])), "guard.statistic_bound"),
    "a negative variance": (with_weights(lambda w: torch.cat([w[:-1], torch.tensor([-5.0])])), "negative variance"),
    "another layout": (with_weights(lambda w: w[:-1]), "asked for"),
    "values outside the mask": (with_weights(lambda w: torch.cat([w, torch.ones(40)])), "asked for"),
    "float64": (with_weights(lambda w: w.double()), "asked for"),
    "no tensor": (lambda reply, order: [replace(reply, message={**reply.message, "weights": "zeros"})], "not of the type"),
    "a field too few": (lambda reply, order: [replace(reply, message={"weights": reply.message["weights"]})], "fields"),
    "a field too many": (lambda reply, order: [replace(reply, message={**reply.message, "gift": torch.ones(3)})], "fields"),
    "another round": (lambda reply, order: [replace(reply, round=reply.round + 1)], "a reply to round 1"),
    "another exchange": (lambda reply, order: [replace(reply, exchange=1)], "exchange 1"),
    "a negative weight": (lambda reply, order: [replace(reply, samples=-reply.samples)], "samples where the client has"),
    "an inflated weight": (lambda reply, order: [replace(reply, samples=10**6)], "1000000 samples"),
    "a stranger": (lambda reply, order: [replace(reply, client=77)], "not asked"),
    "votes out of range": (with_votes(lambda i, order: put(i, -1, 10**9)), "does not exist"),
    "negative votes": (with_votes(lambda i, order: put(i, 0, -1)), "does not exist"),
    "repeated votes": (with_votes(lambda i, order: put(i, 1, int(i[0]))), "twice or out of order"),
    "votes for active links": (with_votes(active_link), "active link|layers have|twice"),
    "too many votes": (with_votes(lambda i, order: order.frame.mask.inactive), "links are named"),
    "votes for one layer alone": (with_votes(lambda i, order: order.frame.mask.inactive[: len(i)]), "layers have"),
    "truncated": (as_bytes(lambda data: data[:-9]), "checksum|missing|short"),
    "bit-flipped": (as_bytes(flipped), "checksum"),
    "empty": (as_bytes(lambda data: b""), "too short"),
    "zeros": (as_bytes(lambda data: bytes(len(data))), "no fedrts message"),
    "a failure": (lambda reply, order: [Failure(reply.client, "out of memory")], "out of memory"),
}


NOBODY_IS_BLAMED = ("another round", "another exchange", "a stranger")
"""Anybody could have sent these in the client's name, or they were on their way for long."""


def plan_of(run, tamper, attackers=(ATTACKER,), **guard):
    return replace(run.plan, engine=Tampered(run.plan.engine, tamper, attackers), guard=run.plan.guard.model_copy(update=guard))


@pytest.fixture
def run(toy):
    return toy("fedrts", "cnn", clients={"total": 5, "per_round": 5})


@pytest.fixture
def without(run):
    """The round as it is when the attacker says nothing."""
    plan = plan_of(run, lambda reply, order: [])
    return rounds.play_round(plan, run.method.begin(run.setup), 0).state


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_bad_reply_is_rejected_and_changes_nothing(run, without, attack):
    tamper, reason = ATTACKS[attack]
    ledger = ClientRecords.of(run.plan.guard)
    played = rounds.play_round(plan_of(run, tamper), run.method.begin(run.setup), 0, ledger)
    (rejected,) = played.record.rejected
    assert re.search(reason, rejected["reason"]), rejected
    assert played.record.clients == [0, 1, 3, 4]
    assert torch.equal(played.state.weights, without.weights)
    assert played.state.mask == without.mask
    assert all(torch.equal(played.state[name], without[name]) for name in without.memory)
    assert ledger.strikes.counts == ({} if attack in NOBODY_IS_BLAMED else {ATTACKER: 1})


def test_bad_replies_that_are_measured_together_get_the_reasons_that_they_get_alone(run):
    state = run.method.begin(run.setup)
    order = order_of(run, run.method.exchanges(run.plan.round(0, state.mask))[0], state, 0)
    honest = list(run.plan.engine.run(order, range(5)))
    samples = dict(enumerate(run.plan.samples))
    bad = [reply for tamper, _ in ATTACKS.values() for reply in tamper(honest[ATTACKER], order)]
    mixed = [reply for pair in zip(bad, honest * 6, strict=False) for reply in pair]
    alone = [faults([reply], order, run.plan.guard, samples)[0] for reply in mixed]
    assert faults(mixed, order, run.plan.guard, samples) == alone
    assert alone[1::2] == [None] * len(bad)
    assert sum(reason is not None for reason in alone[::2]) == sum(isinstance(reply, Reply) for reply in bad) - 2  # another round, exchange


OTHERS: list[tuple[str, str, int, dict[str, Any]]] = [
    ("fedrts", "cnn", 0, {}),
    ("fedavg", "mlp", 1, {"value_type": "int8"}),
    ("fedavg", "cnn", 1, {"value_type": "float16"}),
    ("prunefl", "cnn", 0, {}),
    ("fedmef", "mlp", 0, {}),
    ("fedrts", "cnn", 0, {"guard": {"reducer": "clip"}}),
]


def changed_at(name, at, value):
    """One number of a field is another, if the field has such a number."""

    def tamper(reply, order):
        place = iter(range(10))

        def change(tensor):
            if next(place) != at or not len(tensor):
                return tensor
            poked = tensor.clone()
            poked[len(tensor) // 2] = value if tensor.is_floating_point() else int(np.nan_to_num(np.clip(value, -128, 127)))
            return poked

        return [replace(reply, message={**reply.message, name: changed(reply.message[name], change)})] if name in reply.message else []

    return tamper


def parameters_times(factor):
    """All parameters are multiplied, statistics are not."""

    def tamper(reply, order):
        weights = reply.message["weights"].clone()
        weights[: len(weights) - order.frame.statistics] *= factor
        return [replace(reply, message={**reply.message, "weights": weights})]

    return tamper


def in_two_ways(tamper, other):
    return lambda reply, order: [last for first in tamper(reply, order) for last in other(first, order)]


SPOILED: list[tuple[Any, str]] = [attack for name, attack in ATTACKS.items() if name not in NOBODY_IS_BLAMED]
"""Ways to spoil a reply, and what is said of that by the guard of `fedrts` with a cnn."""
SPOILED += [
    (in_two_ways(ATTACKS["NaN"][0], ATTACKS["repeated votes"][0]), "'weights' is not finite"),
    (in_two_ways(ATTACKS["1e30"][0], ATTACKS["an inflated weight"][0]), "1000000 samples"),
    (parameters_times(-1), "undoes the model"),
    (parameters_times(1000), "above the bound"),
]
SPOILED += [(changed_at("weights", at, value), "") for at in range(3) for value in (-128, 127, 1e4, float("nan"), float("-inf"))]
SPOILED += [(changed_at(name, at, value), "") for name in ("squares", "growth") for at in range(2) for value in (float("nan"), 1e30, -7)]


@pytest.mark.parametrize(("method", "model", "index", "options"), OTHERS)
def test_among_replies_that_are_one_a_bad_one_gets_the_reason_that_it_gets_alone(toy, method, model, index, options):
    run = toy(method, model, clients={"total": 5, "per_round": 5}, **options)
    state = run.method.begin(run.setup)
    order = order_of(run, run.plan.exchanges(run.plan.round(index, state.mask))[0], state, index)
    honest = list(run.plan.engine.run(order, range(5)))
    samples = dict(enumerate(run.plan.samples))
    question = Question(order, State(state.values, state.mask), run.method, run.plan.guard, samples, list(range(5)), 5)
    assert findings([as_one(honest)], order, run.plan.guard, samples)[0].faults == {}
    bad, said = [], []
    for tamper, reason in SPOILED:
        try:
            found = [reply for reply in tamper(honest[ATTACKER], order) if isinstance(reply, Reply) and alike(reply, honest[0])]
            bad += found
            said += [reason] * len(found)
        except (KeyError, AttributeError, TypeError):  # an attack on what this method does not send
            continue
    assert len(bad) >= 15
    alone = [faults([reply], order, run.plan.guard, samples)[0] for reply in bad]
    assert sum(reason is not None for reason in alone) >= 8
    if (method, options) == ("fedrts", {}):
        assert [(reason, fault) for reason, fault in zip(said, alone, strict=True) if not re.search(reason, str(fault))] == []
    crowd = [reply for one in bad for reply in (one, honest[0], honest[4])]
    (of_crowd,) = findings([as_one(crowd)], order, run.plan.guard, samples)
    assert of_crowd.faults == {3 * place: fault for place, fault in enumerate(alone) if fault is not None}
    for reply, fault in zip(bad, alone, strict=True):
        among = [*honest[:ATTACKER], reply, *honest[ATTACKER + 1 :]]
        (whole,) = findings([as_one(among)], order, run.plan.guard, samples)
        several = findings(among, order, run.plan.guard, samples)
        assert whole.faults == ({} if fault is None else {ATTACKER: fault})
        assert [whole.faults.get(place) for place in range(5)] == [its.faults.get(0) for its in several]
        for name, sizes in whole.measured.items():
            assert sizes == pytest.approx([its.measured[name][0] for its in several], rel=1e-5, nan_ok=True)
        together, in_turn = add_up(question, [as_one(among)]), add_up(question, among)
        assert (together.counted, together.rejected, together.blamed) == (in_turn.counted, in_turn.rejected, in_turn.blamed)
        if fault is not None:
            assert together.rejected == [{"client": ATTACKER, "reason": fault}]
            means = in_turn.sums.mean()
            assert all(torch.equal(mean, means[name]) for name, mean in together.sums.mean().items())


def alike(reply, other):
    """Whether two replies can be one: the same fields in tensors of the same shapes."""
    forms = [{name: [(t.shape, t.dtype) for t in tensors_of(payload)] for name, payload in one.message.items()} for one in (reply, other)]
    return forms[0] == forms[1]


@pytest.mark.parametrize("again", ["duplicate", "replay"])
def test_a_second_reply_of_a_client_does_not_count(run, again):
    state = run.method.begin(run.setup)
    honest = rounds.play_round(run.plan, state, 0)

    def twice(reply, order):
        return [reply, reply] if again == "duplicate" else [reply, replace(reply, round=-1)]

    ledger = ClientRecords.of(run.plan.guard)
    played = rounds.play_round(plan_of(run, twice, attackers=(0,)), state, 0, ledger)
    assert ledger.strikes.counts == {}
    assert [entry["client"] for entry in played.record.rejected] == [0]
    assert played.record.clients == [0, 1, 2, 3, 4]
    assert torch.equal(played.state.weights, honest.state.weights)


def test_honest_replies_survive_the_wire(run):
    state = run.method.begin(run.setup)
    played = rounds.play_round(plan_of(run, as_bytes(lambda data: data), attackers=range(5)), state, 0)
    honest = rounds.play_round(run.plan, state, 0)
    assert played.record.rejected == []
    assert torch.equal(played.state.weights, honest.state.weights)
    assert played.record.upload_bytes == honest.record.upload_bytes


def test_repeated_offenders_are_asked_no_more(toy):
    run = toy("fedrts", "mlp", rounds=20, clients={"total": 5, "per_round": 4})
    plan = plan_of(run, ATTACKS["NaN"][0])
    ledger = ClientRecords.of(plan.guard)
    with pytest.warns(Note, match="client 2 is asked no more"):
        records = [played.record for played in rounds.play(plan, run.method.begin(run.setup), -1, ledger)]
    bad = [record.round for record in records if record.rejected]
    assert len(bad) == 3
    assert ledger.strikes.quarantined == {ATTACKER}
    assert all(ATTACKER not in plan.sample(index, 0, ledger.strikes.quarantined) for index in range(bad[-1] + 1, 20))
    assert all(len(record.clients) == 4 for record in records if record.round > bad[-1])


@pytest.mark.filterwarnings("ignore::fedrts.errors.Note")
def test_the_ledger_survives_its_tensors(run):
    ledger = ClientRecords.of(run.plan.guard)
    state = run.method.begin(run.setup)
    for index in (0, 1, 3):
        state = rounds.play_round(plan_of(run, ATTACKS["NaN"][0]), state, index, ledger).state
    again = ClientRecords.restored(ledger.tensors(), state.mask.sizes, run.plan.guard, "cpu")
    assert again.strikes.counts == ledger.strikes.counts == {ATTACKER: 3}
    assert again.traffic.holds == ledger.traffic.holds
    assert again.messages == ledger.messages == 3 * (5 + 4)
    earlier = {name: tensor for name, tensor in ledger.tensors().items() if name != "uploads"}
    assert ClientRecords.restored(earlier, state.mask.sizes, run.plan.guard, "cpu").uploads == {}
    assert again.uploads == ledger.uploads == dict.fromkeys(range(5), (3, 2))
    assert list(again.traffic.masks) == list(ledger.traffic.masks)
    assert all(again.traffic.masks[name] == mask for name, mask in ledger.traffic.masks.items())


def test_below_the_quorum_others_are_asked_and_nothing_is_half_applied(toy):
    run = toy("fedrts", "mlp", clients={"total": 5, "per_round": 2})
    bad = set(run.plan.sample(0)) - {min(run.plan.sample(0))}
    plan = plan_of(run, ATTACKS["NaN"][0], attackers=tuple(bad), quorum=1.0)
    state = run.method.begin(run.setup)
    ledger = ClientRecords.of(plan.guard)
    played = rounds.play_round(plan, state, 0, ledger)
    assert played.record.rejected
    assert not set(played.record.clients) & bad
    attempts = [set(plan.sample(0, attempt)) for attempt in range(5)]
    asked = attempts[: attempts.index(set(played.record.clients)) + 1]
    assert ledger.uploads == {client: (times,) * 2 for client in range(5) if (times := sum(client in clients for clients in asked))}
    assert set(played.record.clients) == next(clients for clients in attempts if not clients & bad)
    direct = rounds._attempt(
        run.plan, state, 0, attempts.index(set(played.record.clients)), ClientRecords.of(plan.guard), rounds.Record(0, True, []), set()
    )
    assert direct is not None
    assert torch.equal(direct[0].weights, played.state.weights)


@pytest.mark.filterwarnings("ignore::fedrts.errors.Note")
def test_a_round_that_never_succeeds_stops_the_run_and_says_why(toy):
    run = toy("fedrts", "mlp")
    plan = plan_of(run, ATTACKS["NaN"][0], attackers=range(5))
    state = run.method.begin(run.setup)
    with pytest.raises(InputError, match=r"round 0: fewer than 1 usable replies in 5 attempts .*not finite.*resume") as caught:
        rounds.play_round(plan, state, 0)
    assert "\n" not in str(caught.value)


def with_numbers(name, value):
    """The attacker's other numbers, all of them replaced."""

    def tamper(reply, order):
        if name not in reply.message:
            return [reply]
        payload = reply.message[name]
        if isinstance(payload, Selection):
            assert payload.values is not None
            changed = replace(payload, values=payload.values * 0 + value)
        else:
            changed = payload * 0 + value
        return [replace(reply, message={**reply.message, name: changed})]

    return tamper


@pytest.mark.parametrize(
    ("method", "index", "name"),
    [("snip", -1, "gradient"), ("grasp", -1, "curvature"), ("fedtiny", -1, "losses"), ("prunefl", 0, "squares"), ("fedmef", 0, "growth")],
)
def test_numbers_beyond_any_gradient_are_rejected(toy, method, index, name):
    run = toy(method, clients={"total": 5, "per_round": 5})
    state = run.method.begin(run.setup)
    played = rounds.play_round(plan_of(run, with_numbers(name, 1e30)), state, index)
    (rejected,) = played.record.rejected
    assert rejected["reason"] == f"'{name}' has numbers above guard.value_bound = 1e+09"
    assert rounds.play_round(plan_of(run, with_numbers(name, 1e8)), state, index).record.rejected == []
    strict = plan_of(run, with_numbers(name, 1e3), value_bound=100.0)
    assert [entry["client"] for entry in rounds.play_round(strict, state, index).record.rejected] == [ATTACKER]


def test_a_reducer_that_a_method_cannot_have_is_refused_before_the_first_round(toy):
    run = toy("feddst", guard={"reducer": "median"}, topology={"first_outer": 5, "interval": 5, "end": 6})
    with pytest.raises(InputError, match="masks of their own"):
        playing.check_uploads(run, run.method.begin(run.setup))
    playing.check_uploads(toy("fedrts", guard={"reducer": "median"}), run.method.begin(run.setup))


def test_over_selection_takes_the_first_replies_and_fills_gaps(toy):
    run = toy("random", "mlp", clients={"total": 5, "per_round": 2})
    plan = plan_of(run, lambda reply, order: [], attackers=(), over_select=1.0)
    asked = plan.sample(4)
    assert len(asked) == 4
    state = run.method.begin(run.setup)
    assert rounds.play_round(plan, state, 4).record.clients == sorted(asked[:2])
    gap = plan_of(run, lambda reply, order: [], attackers=(asked[0],), over_select=1.0)
    assert rounds.play_round(gap, state, 4).record.clients == sorted(asked[1:3])


def test_replies_after_the_deadline_are_late(run, monkeypatch):
    clock = iter(np.arange(0, 1000, 1.0))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    played = rounds.play_round(replace(run.plan, guard=Guard(deadline=3.5)), run.method.begin(run.setup), 1)
    assert played.record.clients == [0, 1, 2]
    assert [entry["reason"] for entry in played.record.rejected] == ["late", "late"]


def test_dropouts_are_those_of_the_seed_and_only_cost_their_download(run):
    plan = replace(run.plan, dropout=0.5)
    state = run.method.begin(run.setup)
    index = next(t for t in range(1, 50) if sum(plan.drops_out(t, 0, client) for client in range(5)) == 2)
    played = rounds.play_round(plan, state, index)
    gone = [client for client in range(5) if plan.drops_out(index, 0, client)]
    assert [entry["client"] for entry in played.record.rejected] == gone
    assert {entry["reason"] for entry in played.record.rejected} == {"dropped out"}
    whole = rounds.play_round(run.plan, state, index)
    assert played.record.download_bytes == whole.record.download_bytes
    assert played.record.upload_bytes < whole.record.upload_bytes
    rate = np.mean([plan.drops_out(t, 0, client) for t in range(400) for client in range(5)])
    assert rate == pytest.approx(0.5, abs=0.05)


# -- robust means, and how far one client or a few can move things -----------------------------------------------------------------


def test_trimmed_mean_and_median_are_per_coordinate():
    replies = torch.tensor([[1.0, 50.0], [2.0, -7.0], [3.0, 8.0], [4.0, 9.0], [1e6, 10.0]])

    def reduced(trim, rows=replies):
        reduction = Sorted(trim)
        for row in rows:
            reduction.add(row, 1)
        return reduction.result().tolist()

    assert reduced(0.5) == [3.0, 9.0]
    assert reduced(0.2) == [3.0, 9.0]
    assert reduced(0.5, replies[:4]) == [2.5, 8.5]
    assert reduced(0.0, replies[:3]) == pytest.approx([2.0, 17.0])


@pytest.mark.parametrize("reducer", ["clip", "trimmed_mean", "median"])
def test_an_attacker_who_scales_by_a_thousand_is_contained(toy, reducer):
    run = toy("random", "mlp", clients={"total": 5, "per_round": 5})
    state = run.method.begin(run.setup)
    reference = state.values

    def scaled(weights):
        return reference + 1000 * (weights - reference)

    free = {"median_bound": 1e9, "undo_bound": 1e9}
    guard = {"reducer": reducer, "norm_bound": 0.05 if reducer == "clip" else 1e9, "trim": 0.2}
    plan = plan_of(run, with_weights(scaled), **guard, **free)
    honest = rounds.play_round(replace(plan, engine=run.plan.engine), state, 1).state
    attacked = rounds.play_round(plan, state, 1).state
    moved = float((attacked.values - honest.values).double().norm())
    if reducer == "clip":
        share = run.plan.samples[ATTACKER] / sum(run.plan.samples)
        bound = 2 * share * plan.guard.bound(float(reference.norm()))  # from one end of the ball to the other
    else:
        updates = [reply.message["weights"] for reply in helping_replies(run, state)]
        spread = torch.stack(updates).max(0).values - torch.stack(updates).min(0).values
        bound = float(spread.double().norm())  # the result stays between honest values
    assert 0 < moved <= bound
    plain = rounds.play_round(replace(plan, guard=plan.guard.model_copy(update={"reducer": "mean", "norm_bound": 1e9})), state, 1).state
    assert float((plain.values - honest.values).double().norm()) > 10 * moved, "the plain mean is carried away"


def helping_replies(run, state):
    (exchange,) = run.method.exchanges(run.plan.round(1, state.mask))
    return [reply for reply in ask(run, exchange, state, 1, list(range(5))) if isinstance(reply, Reply)]


def test_clipping_leaves_small_updates_alone():
    reference = torch.randn(50)
    clipped = Clipped(reference, 40, bound=10.0)
    update = torch.randn(50) * 0.1
    clipped.add(reference + update, 7)
    torch.testing.assert_close(clipped.result(), reference + update)


def test_clipping_scales_statistics_with_the_update_and_is_told_by_the_update_alone():
    reference = torch.zeros(5)
    for told, factor in ((torch.tensor([3.0, 4.0, 0.0, 8.0, -2.0]), 0.5), (torch.tensor([1.0, 0.0, 0.0, 1e6, 1e6]), 1.0)):
        clipped = Clipped(reference, 3, bound=2.5)
        clipped.add(told, 1)
        torch.testing.assert_close(clipped.result(), factor * told)


def test_three_colluders_move_the_posterior_by_no_more_than_their_share(toy):
    """X moves by at most (1 − γ)·(sum of the colluders' capped shares), α and β by λ times that."""
    run = toy("fedrts", "mlp", clients={"total": 6, "per_round": 6}, method_options={"gamma": 0.5})
    engine = run.plan.engine
    parts = torch.arange(120).split([60, 30, 10, 10, 5, 5])  # the colluders hold most of the data
    engine.rows = list(parts)
    run = replace(run, plan=replace(run.plan, samples=[len(part) for part in parts]))
    state = run.method.begin(run.setup)
    colluders, share = (0, 1, 2), 0.2

    def vote_together(reply, order):
        mask, k = order.frame.mask, order.exchange.up["votes"].k
        picks, start = [], 0
        for size, count in zip(mask.sizes, k, strict=True):
            off = (~mask.bits[start : start + size]).nonzero().squeeze(-1)[:count] + start
            picks.append(off)
            start += size
        return [replace(reply, message={**reply.message, "votes": Selection(torch.cat(picks), len(mask.bits))})]

    guard = {"max_share": share}
    plan = plan_of(run, vote_together, attackers=colluders, **guard)
    honest = rounds.play_round(replace(plan, engine=run.plan.engine), state, 0).state
    attacked = rounds.play_round(plan, state, 0).state
    bound = 10.0 * (1 - 0.5) * len(colluders) * share
    moved = (attacked["alpha"] - honest["alpha"]).abs().max()
    assert 0 < float(moved) <= bound + 1e-4
    uncapped = replace(plan, guard=plan.guard.model_copy(update={"max_share": 1.0}))
    free = rounds.play_round(uncapped, state, 0).state
    honest_free = rounds.play_round(replace(uncapped, engine=engine), state, 0).state
    assert float((free["alpha"] - honest_free["alpha"]).abs().max()) > bound, "without the cap they do more"
    assert float((attacked["beta"] - honest["beta"]).abs().max()) <= bound + 1e-4


@pytest.mark.parametrize(
    ("samples", "share", "expected"),
    [
        ([100, 1, 1, 1], 1.0, [100, 1, 1, 1]),
        ([100, 30, 30, 30], 0.25, [30, 30, 30, 30]),
        ([100, 10, 10, 10], 0.5, [30, 10, 10, 10]),
        ([7, 7], 0.1, [1, 1]),
    ],
)
def test_shares_are_capped_exactly(samples, share, expected):
    capped = Guard(max_share=share).weights(dict(enumerate(samples)))
    assert list(capped.values()) == expected


def test_claims_are_cut_to_a_multiple_of_the_rounds_median():
    claims = dict(enumerate([100, 80, 120, 10**9]))
    assert Guard(max_claim=10.0).weights(claims) == {0: 100, 1: 80, 2: 120, 3: 1100}
    assert Guard().weights(claims) == claims
    assert Guard(max_claim=10.0, max_share=0.5).weights(claims) == {0: 100, 1: 80, 2: 120, 3: 300}


def test_every_mean_has_the_capped_weight_and_samples_are_counted_whole():
    sums = Sums()
    sums.add({"x": torch.tensor([1.0]), "flag": torch.tensor([True])}, 90, 10)
    sums.add({"x": torch.tensor([0.0]), "flag": torch.tensor([False])}, 10, 10)
    assert sums.mean()["x"].tolist() == pytest.approx([0.5])
    assert sums.mean()["flag"].tolist() == pytest.approx([0.5])
    assert sums.mean().samples == 100


# -- honest accounts -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"guard": {"over_select": 1.0}, "clients": {"total": 5, "per_round": 2}},
        {"guard": {"quorum": 0.7, "attempts": 50}, "clients": {"total": 5, "per_round": 3, "dropout": 0.4}},
    ],
)
def test_dense_averaging_sends_what_dense_averaging_sends(settings, tmp_path):
    """However many are asked, vanish or are asked again: the ratio of a dense run is 1, up to headers."""
    base: dict[str, Any] = {"data": "toy_images", "model": "mlp", "method": "fedavg", "rounds": 6, "train": {"epochs": 1, "lr": 0.1}}
    base["recipe"] = "paper"  # values as they are
    base["clients"] = {"total": 5, "per_round": 3, "partition": "iid", "min_size": 1}
    result = fedrts.run(**{**base, **settings, "clients": {**base["clients"], **settings.get("clients", {})}}, out=str(tmp_path / "run"))
    assert result.summary["comm_ratio"] == pytest.approx(1.0, abs=0.002)


@pytest.mark.parametrize("kind", ["float16", "int8", "int6"])
def test_the_server_keeps_its_precision(toy, kind):
    """Many updates far below the resolution of what travels still add up."""
    run = toy("fedavg", "mlp", value_type=kind, train={"lr": 1e-5, "epochs": 1}, rounds=40, clients={"total": 5, "per_round": 5})
    exact = toy("fedavg", "mlp", train={"lr": 1e-5, "epochs": 1}, rounds=40, clients={"total": 5, "per_round": 5})
    first = run.method.begin(run.setup).values
    ends = [list(rounds.play(which.plan, which.method.begin(which.setup), -1))[-1].state.values for which in (run, exact)]
    moved = [(end - first).double() for end in ends]
    assert float((moved[0] - moved[1]).norm() / moved[1].norm()) < 0.05


def test_a_stopped_run_can_be_mended_and_resumed(tmp_path):
    common: dict[str, Any] = {
        "recipe": "paper",
        "data": "toy_images",
        "model": "mlp",
        "method": "random",
        "rounds": 5,
        "density": 0.5,
        "train": {"epochs": 1},
        "seed": 3,
    }
    clients = {"total": 5, "per_round": 4, "partition": "iid", "min_size": 1, "dropout": 0.7}
    with pytest.raises(InputError, match="resume"):
        fedrts.run(**common, clients=clients, guard={"quorum": 1.0, "attempts": 1}, out=str(tmp_path / "run"))
    file = tmp_path / "run" / "experiment.toml"
    file.write_text(file.read_text("utf-8").replace("quorum = 1.0", "quorum = 0.1").replace("attempts = 1", "attempts = 50"), "utf-8")
    assert len(fedrts.resume(tmp_path / "run").history) == 5


def test_an_update_is_judged_by_its_size_and_not_by_the_models(run):
    state = run.method.begin(run.setup)
    played = rounds.play_round(replace(run.plan, guard=Guard(norm_bound=0.9)), state, 1)
    assert played.record.rejected == []


@pytest.mark.parametrize(("reducer", "trim", "expected"), [("median", 0.2, 2.0), ("trimmed_mean", 0.2, 10 / 3), ("trimmed_mean", 0.4, 2.0)])
def test_a_reducer_is_the_one_that_was_asked_for(run, reducer, trim, expected):
    state = run.method.begin(run.setup)
    order = order_of(run, run.method.exchanges(run.plan.round(1, state.mask))[0], state, 1)
    found = reduction(Guard(reducer=reducer, trim=trim), order)
    assert found is not None
    for value in (7.0, 0.0, 100.0, 2.0, 1.0):
        found.add(torch.full((3,), value), 1)
    assert found.result().tolist() == pytest.approx([expected] * 3)


@pytest.mark.parametrize(("norm", "bound"), [(0.0, 3.0), (0.7, 3.0), (1.0, 3.0), (1.5, 4.5), (8.0, 24.0)])
def test_the_bound_of_an_update_is_a_multiple_of_the_models_norm_and_at_least_of_one(norm, bound):
    assert Guard(norm_bound=3.0).bound(norm) == pytest.approx(bound)


def test_another_attempt_is_another_throw(run):
    plan = replace(run.plan, dropout=0.5)
    throws = [[plan.drops_out(1, attempt, client) for client in range(5)] for attempt in range(6)]
    assert len({tuple(throw) for throw in throws}) > 1


@pytest.mark.filterwarnings("ignore::fedrts.errors.Note")
def test_who_misbehaved_is_remembered_over_a_restart(tmp_path, monkeypatch):
    """A run in which one client always answers NaN, whole and interrupted: the same history, quarantine and bytes included."""
    honest = SerialEngine.run

    def poisoned(self, order, clients):
        yield from Tampered(self_proxy(self, honest), ATTACKS["NaN"][0]).run(order, clients)

    monkeypatch.setattr(SerialEngine, "run", poisoned)

    class Stop(Exception):
        pass

    class Stopper(Silent):
        def played(self, record):
            if record.round == 5:
                raise Stop

    common: dict[str, Any] = {
        "recipe": "paper",
        "data": "toy_images",
        "model": "mlp",
        "method": "fedrts",
        "density": 0.5,
        "rounds": 12,
        "engine": "serial",
        "train": {"epochs": 1},
    }
    common |= {"clients": {"total": 5, "per_round": 4, "partition": "iid", "min_size": 1}, "checkpoint": {"every": 1}}
    whole = fedrts.run(**common, out=str(tmp_path / "whole"))
    with pytest.raises(Stop):
        fedrts.run(**common, out=str(tmp_path / "cut"), observer=Stopper())
    resumed = fedrts.resume(tmp_path / "cut")
    assert [{**line, "seconds": 0} for line in resumed.history] == [{**line, "seconds": 0} for line in whole.history]
    assert resumed.summary["comm_ratio"] == whole.summary["comm_ratio"]
    assert whole.summary["rejected_replies"] == 3


def self_proxy(engine, run):
    """`engine` with its honest `run`."""
    return type("Honest", (), {"run": lambda _, order, clients: run(engine, order, clients)})()


@pytest.mark.parametrize(("value", "reason"), [(-1.0, "negative variance"), (1e12, "guard.statistic_bound")])
def test_statistics_of_candidates_are_checked_too(toy, value, reason):
    run = toy("fedtiny", "cnn")
    state = run.method.begin(run.setup)
    exchange = run.method.exchanges(run.plan.round(-1, state.mask))[0]
    order = order_of(run, exchange, state, -1)
    (reply,) = run.plan.engine.run(order, [1])
    samples = dict(enumerate(run.plan.samples))
    assert faults([reply], order, run.plan.guard, samples) == [None]
    statistics = reply.message["statistics"].clone()
    last = run.layout.length - run.layout.parameters  # of the first candidate, whose last statistics are a variance
    statistics[last - 1] = value
    (fault,) = faults([replace(reply, message={"statistics": statistics})], order, run.plan.guard, samples)
    assert fault is not None
    assert reason in fault
