"""What holds for every registered method; a new one is covered by being registered."""

import dataclasses
from dataclasses import replace
from typing import Any

import pytest
import torch

from fedrts import methods
from fedrts.client.envelope import decode_reply, encode_reply
from fedrts.methods.contract import Rewire
from fedrts.server import rounds
from fedrts.server.aggregate import Sums
from fedrts.server.guard import faults
from fedrts.server.rounds import Plan
from fedrts.sparse import budget, random
from fedrts.sparse.mask import Mask
from fedrts.wire import codec
from fedrts.wire.codec import Header, Kind
from fedrts.wire.fields import OnOwnMask, Steps, Values
from fedrts.wire.value_types import FORMATS
from helping import ask, order_of

MODELS = ("mlp", "cnn", "tiny_gpt")
SAME_AS_DENSE: dict[str, dict[str, Any]] = {"fedtiny": {"abns": False}, "fedtopk": {"share": 1.0, "share_down": 1.0}}
"""Options under which a method equals dense averaging at density 1, where its defaults do not."""
SHORT = [type for type, format in FORMATS.items() if not format.lossless]
ROUNDED = {"fedpaq": 0.02}
"""Methods whose messages are rounded, and how far that takes the weights of a short run."""


def ready(run):
    """The state with which round 0 starts, after the set-up if there is one."""
    state = run.method.begin(run.setup)
    if run.method.exchanges(run.plan.round(-1, state.mask)):
        state = rounds.play_round(run.plan, state, -1).state
    return state


def played(run):
    """The states before every round and after the last, and the records of the rounds."""
    states, records = [ready(run)], []
    for step in rounds.play(run.plan, states[0], 0):
        states.append(step.state)
        records.append(step.record)
    return states, records


@pytest.fixture(params=methods.names())
def method(request):
    return request.param


@pytest.mark.parametrize("model", MODELS)
def test_budgets_hold_and_only_outer_rounds_change_the_mask(toy, method, model):
    run = toy(method, model)
    states, records = played(run)
    layout, dense = run.layout, run.method.dense
    kept = layout.links if dense else budget.links_to_keep(layout, 0.5)
    begun = states[0].mask.counts
    assert sum(begun) == kept
    assert [r.round for r in records if r.outer] == [0, 3]
    for before, after, record in zip(states, states[1:], records, strict=False):
        assert after.mask.counts == begun
        assert record.density <= (1.0 if dense else 0.5)
        assert after.weights[: layout.links][~after.mask.bits].count_nonzero() == 0
        assert torch.isfinite(after.weights).all()
        if not record.outer:
            assert after.mask == before.mask
            assert record.links_changed == 0
        assert record.links_changed == int((after.mask.bits & ~before.mask.bits).sum()) / after.mask.number


@pytest.mark.parametrize("train", [{"momentum": 0.9, "weight_decay": 0.01}, {"optimizer": "adam", "lr": 0.01}])
def test_clients_train_and_stay_exactly_zero_outside_the_mask(toy, method, train):
    run = toy(method, "cnn", train=train)
    state = ready(run)
    for exchange in run.method.exchanges(run.plan.round(0, state.mask)):
        own = {"own": OnOwnMask()} if any(isinstance(step, Rewire) for step in exchange.steps) else {}
        whole = replace(exchange, up={"weights": Values(on="all"), **own})
        for reply in ask(run, whole, state, 0, [0, 1]):
            weights = reply.message["weights"]
            mask = reply.message["own"].mask if own else state.mask
            assert mask.counts == state.mask.counts
            assert weights[: run.layout.links][~mask.bits].count_nonzero() == 0
            assert not torch.equal(weights, state.weights)


@pytest.mark.parametrize("model", MODELS)
def test_at_density_one_every_method_is_dense_averaging(toy, method, model):
    reference, _ = played(toy("fedavg", model))
    states, _ = played(toy(method, model, density=1.0, method_options=SAME_AS_DENSE.get(method, {})))
    assert states[-1].mask.is_full
    close: dict[str, Any] = {"rtol": 0.0, "atol": ROUNDED[method]} if method in ROUNDED else {}
    torch.testing.assert_close(states[-1].weights, reference[-1].weights, **close)


def test_the_same_seed_gives_the_same_bits_and_another_does_not(toy, method):
    (first, records), (second, again), (other, _) = (played(toy(method, "cnn", seed=seed)) for seed in (3, 3, 4))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a.weights, b.weights)
        assert a.mask == b.mask
        assert all(torch.equal(a[name], b[name]) for name in a.memory)
    strip = [{**r.as_dict(), "seconds": 0} for r in records]
    assert strip == [{**r.as_dict(), "seconds": 0} for r in again]
    assert not torch.equal(first[-1].weights, other[-1].weights)


def test_all_methods_see_the_same_clients_and_start_from_the_same_weights(toy, method):
    reference, ours = toy("fedavg"), toy(method)
    assert torch.equal(reference.setup.weights, ours.setup.weights)
    assert [reference.plan.sample(t) for t in range(7)] == [ours.plan.sample(t) for t in range(7)]


def test_the_order_of_clients_does_not_matter(toy, method, monkeypatch):
    run = toy(method, "cnn")
    state = ready(run)
    forwards = rounds.play_round(run.plan, state, 0).state
    sample = Plan.sample
    monkeypatch.setattr(Plan, "sample", lambda *arguments: sample(*arguments)[::-1])
    backwards = rounds.play_round(run.plan, state, 0).state
    torch.testing.assert_close(forwards.weights, backwards.weights, rtol=1e-6, atol=1e-7)
    assert forwards.mask == backwards.mask


def test_a_round_leaves_the_state_before_it_as_it_was(toy, method):
    run = toy(method)
    state = ready(run)
    copies = {"values": state.values.clone(), **{name: tensor.clone() for name, tensor in state.memory.items()}}
    rounds.play_round(run.plan, state, 0)
    assert torch.equal(state.values, copies["values"])
    assert all(torch.equal(state[name], copies[name]) for name in state.memory)


def test_traffic_is_the_length_of_encoded_messages(toy, method):
    run = toy(method, "cnn")
    state = ready(run)
    record = rounds.play_round(run.plan, state, 0).record
    up = down = 0
    for exchange in run.method.exchanges(run.plan.round(0, state.mask)):
        order = order_of(run, exchange, state, 0)
        for reply in run.plan.engine.run(order, record.clients):
            up += len(encode_reply(reply, order))
            header = Header(Kind.DOWNLOAD, bytes.fromhex(run.layout.fingerprint), state.mask.fingerprint, 0, 0, reply.client)
            down += len(codec.encode(header, exchange.down, order.sent, order.frame))
    assert (record.upload_bytes, record.download_bytes) == (up, down)


def same(a, b):
    """Are two payloads equal, bit for bit?"""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, Mask):
        return a == b
    if dataclasses.is_dataclass(a):
        return type(a) is type(b) and all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    return a == b


@pytest.mark.parametrize(("index", "type"), [(-1, "float32"), (1, "float32"), (3, "float32"), *((3, type) for type in SHORT)])
def test_messages_survive_the_wire_and_the_guard(toy, method, index, type):
    run = toy(method, "cnn", wire={"value_type": type})
    before = run.method.begin(run.setup)
    for step in rounds.play(replace(run.plan, rounds=index), before, -1):
        before = step.state
    samples = dict(enumerate(run.plan.samples))
    for number, exchange in enumerate(run.plan.exchanges(run.plan.round(index, before.mask))):
        order, sums = order_of(run, exchange, before, index, number), Sums()
        for reply in run.plan.engine.run(order, [0, 3]):
            again = decode_reply(encode_reply(reply, order), order)
            assert all(same(again.message[name], reply.message[name]) for name in exchange.up)
            assert faults([again], order, run.plan.guard, samples) == [None]
            opened = {name: entry.open(again.message[name], order.upload_frame()) for name, entry in exchange.up.items()}
            sums.add(run.method.contribution(opened, before, order.round), again.samples)
        header = Header(Kind.DOWNLOAD, bytes.fromhex(run.layout.fingerprint), before.mask.fingerprint, index, 0, 0)
        _, mask, reader = codec.open_download(codec.encode(header, exchange.down, order.sent, order.frame), run.layout, None)
        assert mask == before.mask
        received = codec.read_fields(reader, exchange.down, order.frame)
        sent = {name: replace(payload, steps=()) if isinstance(payload, Steps) else payload for name, payload in order.sent.items()}
        assert all(same(received[name], sent[name]) for name in exchange.down)
        before = run.method.update(before, sums.mean(), order.round, lambda purpose: random.key(purpose))
