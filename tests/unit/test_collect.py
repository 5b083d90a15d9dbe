"""Replies that came together: measured at once, judged one by one, on the message that came."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fedrts.client.order import Failure, Order
from fedrts.engines.batched import BatchedEngine
from fedrts.methods.contract import State
from fedrts.methods.fedavg import FedAvg
from fedrts.server.collect import LATE, Question, add_up
from fedrts.wire.fields import Selection

CLIENTS = 12


class Looks(TorchDispatchMode):
    """Counts what waits for a device: numbers taken out of tensors, and selections whose length only the device knows."""

    def __init__(self):
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += func._overloadpacket.__name__ in ("_local_scalar_dense", "nonzero", "masked_select")
        return func(*args, **(kwargs or {}))


@contextmanager
def looks(monkeypatch) -> Iterator[Looks]:
    """Counts lists made of tensors too: no operation tells of those."""
    mode, tolist = Looks(), torch.Tensor.tolist

    def counted(tensor):
        mode.number += 1
        return tolist(tensor)

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "tolist", counted)
        with mode:
            yield mode


def batched(toy, method="fedavg", model="mlp", clients=CLIENTS, **keywords):
    engine = {"name": "batched", "slots": clients, "workers": 1}
    run = toy(method, model, clients={"total": clients, "per_round": clients}, engine=engine, **keywords)
    assert isinstance(run.plan.engine, BatchedEngine)
    return run


def question_of(run, index=1, number=0, **changes):
    state = run.method.begin(run.setup)
    current = run.plan.round(index, state.mask, number)
    order = Order.of(run.plan.exchanges(current)[number], current, run.layout, state, 0)
    samples = dict(enumerate(run.plan.samples))
    question = Question(order, State(state.values, state.mask), run.method, run.plan.guard, samples, list(samples), len(samples))
    return replace(question, **changes)


def outcome(found):
    means = found.sums.mean()
    return (found.counted, found.rejected, found.blamed, found.missing, found.upload_bytes, found.flops), dict(means)


def same(a, b):
    (facts, means), (others, theirs) = outcome(a), outcome(b)
    return facts == others and means.keys() == theirs.keys() and all(torch.equal(means[name], theirs[name]) for name in means)


@pytest.mark.parametrize(
    ("method", "model", "index", "options"),
    [
        ("fedavg", "mlp", 1, {}),
        ("fedavg", "cnn", 1, {"guard": {"reducer": "clip"}}),
        ("fedrts", "cnn", 1, {}),
        ("fedrts", "cnn", 0, {}),
        ("fedtiny", "mlp", 0, {"method_options": {"abns": False}}),
        ("feddst", "cnn", 0, {}),
        ("fedpaq", "mlp", 1, {}),
    ],
)
def test_how_often_a_device_is_waited_for_does_not_follow_the_clients(toy, monkeypatch, method, model, index, options):
    found = []
    for clients in (3, 9):
        run = batched(toy, method, model, clients, **options)
        question = question_of(run, index)
        replies = list(run.plan.engine.run(question.order, question.asked))
        with looks(monkeypatch) as mode:
            assert len(add_up(question, replies).counted) == clients
        found.append(mode.number)
    assert found[0] == found[1] <= 8, found


@pytest.mark.parametrize(("method", "index"), [("fedavg", 1), ("fedrts", 0), ("feddst", 0), ("prunefl", 0)])
def test_the_sums_are_those_of_replies_one_by_one(toy, method, index):
    run = batched(toy, method, "cnn", 5)
    question = question_of(run, index)
    replies = list(run.plan.engine.run(question.order, question.asked))
    assert [reply.more for reply in replies] == [True] * 4 + [False]
    assert same(add_up(question, replies), add_up(question, [replace(reply, more=False) for reply in replies]))


def test_it_is_the_message_that_came_which_is_judged(toy):
    """Somebody changes replies after the engine made them."""
    run = batched(toy, "fedrts", "cnn", 6)
    question = question_of(run, 0)
    replies = list(run.plan.engine.run(question.order, question.asked))
    honest = add_up(question, [reply for reply in replies if reply.client not in (1, 3, 4)])
    votes = replies[3].message["votes"]
    changed = list(replies)
    changed[1] = replace(replies[1], message={**replies[1].message, "weights": replies[1].message["weights"] * torch.nan})
    changed[3] = replace(replies[3], message={**replies[3].message, "votes": Selection(votes.indices.flip(0), votes.size)})
    changed[4] = Failure(4, "out of memory", more=True)
    found = add_up(question, changed)
    assert found.rejected == [
        {"client": 1, "reason": "'weights' is not finite"},
        {"client": 3, "reason": "links are named twice or out of order"},
        {"client": 4, "reason": "out of memory"},
    ]
    assert found.counted == [0, 2, 5]
    assert all(torch.equal(a, b) for a, b in zip(found.sums.mean().values(), honest.sums.mean().values(), strict=True))


def test_the_first_ones_count(toy):
    run = batched(toy, clients=6)
    question = question_of(run, wanted=4)
    replies = list(run.plan.engine.run(question.order, question.asked))
    found = add_up(question, replies)
    assert found.counted == [0, 1, 2, 3]
    assert same(found, add_up(question, replies[:4]))


def test_late_ones_do_not(toy):
    run = batched(toy, clients=6)
    now = time.monotonic()
    question = question_of(run, due=now + 100)
    replies = [replace(reply, at=now + 50 * reply.client) for reply in run.plan.engine.run(question.order, question.asked)]
    found = add_up(question, replies)
    assert found.counted == [0, 1, 2]
    assert found.missing == dict.fromkeys([3, 4, 5], LATE)


def test_no_reply_waits_for_one_that_is_not_there(toy):
    run = toy("fedavg", clients={"total": 4, "per_round": 4})
    question = question_of(run)
    counted: list[None] = []

    class Watched(FedAvg):
        def contribution(self, message, state, round):
            counted.append(None)
            return message

    def one_by_one():
        for place, reply in enumerate(run.plan.engine.run(question.order, question.asked)):
            assert len(counted) == place
            yield reply

    add_up(replace(question, method=Watched()), one_by_one())
    assert len(counted) == 4
