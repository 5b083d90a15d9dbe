"""Replies of clients that worked side by side: as one they are judged and added up as they are one by one."""

from __future__ import annotations

from dataclasses import replace
from operator import itemgetter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fedrts.client.order import Failure, Order, Replies, Reply
from fedrts.client.workbench import Workbench
from fedrts.engines import batched
from fedrts.engines.batched import BatchedEngine
from fedrts.errors import InputError
from fedrts.methods.contract import State
from fedrts.methods.fedavg import FedAvg
from fedrts.server import aggregate
from fedrts.server.aggregate import Sums
from fedrts.server.collect import Question, Tally, add_up
from fedrts.server.engine import arrivals
from fedrts.wire.fields import Message, Selection, changed
from helping import as_one, tensors_of

CLIENTS = 6
CASES: list[tuple[str, str, int, dict[str, Any]]] = [
    ("fedavg", "mlp", 1, {}),
    ("fedavg", "cnn", 1, {"value_type": "float16"}),
    ("fedavg", "cnn", 1, {"guard": {"reducer": "clip"}}),
    ("fedavg", "mlp", 1, {"guard": {"reducer": "median", "max_share": 0.2}}),
    ("fedrts", "cnn", 0, {}),
    ("fedrts", "cnn", 1, {"value_type": "int8"}),
    ("fedrts", "mlp", 0, {"value_type": "int4"}),
    ("fedrts", "mlp", 1, {"value_type": "int2", "wire": {"feedback": True}}),
    ("fedrts", "cnn", 0, {"topology": {"unit": "kernel"}}),
    ("fedrts", "mlp", 1, {"method_options": {"score": "fisher", "scope": "global"}}),
    ("fedrts_early", "cnn", 0, {}),
    ("fedtiny", "mlp", 0, {"method_options": {"abns": False}}),
    ("fedmef", "mlp", 0, {}),
    ("prunefl", "cnn", 0, {}),
    ("fedpaq", "mlp", 1, {"method_options": {"granularity": "channel"}}),
]


def question_of(toy, method, model, index, clients=CLIENTS, workers=1, **options) -> tuple[BatchedEngine, Question]:
    engine = {"name": "batched", "slots": clients, "workers": workers}
    run = toy(method, model, clients={"total": clients, "per_round": clients}, engine=engine, **options)
    state = run.method.begin(run.setup)
    current = run.plan.round(index, state.mask)
    order = Order.of(run.plan.exchanges(current)[0], current, run.layout, state, 0)
    samples = dict(enumerate(run.plan.samples))
    known = State(state.values, state.mask)
    return run.plan.engine, Question(order, known, run.method, run.plan.guard, samples, list(samples), len(samples))


def assert_same(found: Tally, expected: Tally, exact: bool = True) -> None:
    assert (found.counted, found.rejected, found.blamed, found.missing) == (
        expected.counted,
        expected.rejected,
        expected.blamed,
        expected.missing,
    )
    assert (found.upload_bytes, found.flops) == (expected.upload_bytes, expected.flops)
    means, others = found.sums.mean(), expected.sums.mean()
    assert means.keys() == others.keys()
    assert (means.clients, means.samples) == (others.clients, others.samples)
    for name, mean in means.items():
        if exact:
            assert torch.equal(mean, others[name]), name
        else:
            torch.testing.assert_close(mean, others[name], rtol=1e-6, atol=1e-7)
    for ours, theirs in ((found.words, expected.words), (found.left, expected.left)):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(tensor, theirs[client]) for client, tensor in ours.items())
    assert found.measured.keys() == expected.measured.keys()
    for name, sizes in found.measured.items():
        assert sizes == pytest.approx(expected.measured[name], rel=1e-5)


@pytest.mark.parametrize(("method", "model", "index", "options"), CASES)
def test_as_one_they_give_what_they_give_one_by_one(toy, monkeypatch, method, model, index, options):
    engine, question = question_of(toy, method, model, index, **options)
    (whole,) = arrivals(engine, question.order, question.asked)
    assert isinstance(whole, Replies)
    assert not whole.more
    with monkeypatch.context() as patch:
        patch.setattr(Workbench, "uploads", lambda *_: None)  # every client makes its own message
        single = list(arrivals(engine, question.order, question.asked))
    assert all(isinstance(reply, Reply) for reply in single)
    for one, reply in zip(single, whole, strict=True):
        assert (one.client, one.samples, one.flops, one.loss, one.more) == (  # type: ignore[union-attr]
            reply.client,
            reply.samples,
            reply.flops,
            pytest.approx(reply.loss),
            reply.more,
        )
        assert one.message.keys() == reply.message.keys()  # type: ignore[union-attr]
        for name, payload in reply.message.items():
            theirs = tensors_of(one.message[name])  # type: ignore[union-attr]
            assert all(torch.equal(a, b) for a, b in zip(tensors_of(payload), theirs, strict=True)), name
    assert_same(add_up(question, [whole]), add_up(question, single))


class Operations(TorchDispatchMode):
    """Counts operations on tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("method", "model", "index", "options"), CASES)
def test_where_starting_an_operation_is_dear_nothing_is_done_client_by_client(toy, monkeypatch, method, model, index, options):
    """As on a GPU, where a product with the weights takes the place of adding one client after the other."""
    travelling = options.get("value_type") in ("int4", "int2")  # the bytes of each upload are counted, which follow its numbers
    done = []
    for clients in (3, CLIENTS):
        engine, question = question_of(toy, method, model, index, clients, **options)
        (whole,) = arrivals(engine, question.order, question.asked)
        expected = add_up(question, [whole])
        with monkeypatch.context() as patch:
            patch.setattr(aggregate, "_IN_TURN", set())
            with Operations() as operations:
                found = add_up(question, [whole])
            assert_same(found, expected, exact=False)
        done.append(operations.number)
    if not travelling and "guard" not in options:
        assert done[0] == done[1]


def test_they_come_in_parts_that_fit_a_cache(toy, monkeypatch):
    engine, question = question_of(toy, "fedrts", "cnn", 0)
    (whole,) = arrivals(engine, question.order, question.asked)
    monkeypatch.setattr(batched, "_AT_ONCE", {"cpu": 2 * engine.bench.layout.length + 1})
    parts = list(arrivals(engine, question.order, question.asked))
    assert [(list(part.clients), part.more) for part in parts] == [([0, 1], True), ([2, 3], True), ([4, 5], False)]  # type: ignore[union-attr]
    assert_same(add_up(question, parts), add_up(question, [whole]))


@pytest.mark.parametrize(
    ("options", "workers"),
    [({"privacy": {"clip": 1.0, "noise": 0.1}, "method": "fedavg"}, 1), ({"method": "feddst"}, 1), ({"method": "fedavg"}, 2)],
)
def test_whose_message_is_their_own_comes_alone(toy, options, workers):
    """Noise of one's own, a mask of one's own, or a thread of one's own: these keep their order."""
    engine, question = question_of(toy, options.pop("method"), "mlp", 0, workers=workers, **options)
    found = list(arrivals(engine, question.order, question.asked))
    assert [reply.client for reply in found] == question.asked  # type: ignore[union-attr]
    assert add_up(question, found).counted == question.asked


def test_the_first_ones_count(toy):
    engine, question = question_of(toy, "fedrts", "mlp", 0)
    (whole,) = arrivals(engine, question.order, question.asked)
    assert isinstance(whole, Replies)
    bad = replace(whole, samples=[number + (place in (1, 5)) for place, number in enumerate(whole.samples)])
    question = replace(question, wanted=3)
    found = add_up(question, [bad])
    assert found.counted == [0, 2, 3]
    assert [entry["client"] for entry in found.rejected] == [1], "nobody looks at those after the last one that is wanted"
    assert_same(found, add_up(question, list(bad)))


def test_replies_that_nobody_asked_for_are_dropped_one_by_one(toy):
    engine, question = question_of(toy, "fedrts", "mlp", 0)
    (whole,) = arrivals(engine, question.order, question.asked)
    assert isinstance(whole, Replies)
    for odd in (
        replace(whole, clients=[0, 1, 77, 3, 4, 5]),
        replace(whole, clients=[0, 1, 1, 3, 4, 5], samples=[*whole.samples[:2], whole.samples[1], *whole.samples[3:]]),
        replace(whole, round=7),
        replace(whole, exchange=1),
    ):
        found = add_up(question, [odd])
        assert found.rejected
        assert_same(found, add_up(question, list(odd)))
    twice = add_up(question, [whole.some([0, 2]), Failure(1, "out of memory"), whole])
    assert twice.counted == [0, 2, 1, 3, 4, 5]
    assert [entry["client"] for entry in twice.rejected] == [1, 0, 2]


@pytest.mark.parametrize(
    ("first", "said"),
    [
        (lambda weights: weights[0], r"'first' has the shape .* 6 clients"),
        (lambda weights: weights[:7], "'first' of Mistaken is not the same for several clients"),
        (lambda weights: weights - weights.mean(0), "'first' of Mistaken is not the same for several clients"),
    ],
)
def test_a_method_that_takes_clients_for_another_axis_is_refused(toy, first, said):
    engine, question = question_of(toy, "fedavg", "mlp", 1)
    (whole,) = arrivals(engine, question.order, question.asked)
    assert isinstance(whole, Replies)

    class Mistaken(FedAvg):
        def contribution(self, message, state, round):
            return {**message, "first": first(message["weights"])}

    with pytest.raises(InputError, match=f"{said}.*last.*--engine serial"):
        add_up(replace(question, method=Mistaken()), [whole])
    assert add_up(replace(question, method=Mistaken()), list(whole)).counted == question.asked


def test_sums_of_several_have_the_bits_of_sums_one_after_the_other():
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(7, 100_000, generator=generator) * 10.0 ** torch.randint(-6, 6, (7, 100_000), generator=generator)
    indices = torch.stack([torch.randperm(50, generator=generator)[:20].sort().values for _ in range(7)])
    chosen, weights = Selection(indices, 50, torch.randn(7, 20, generator=generator)), [3, 2**31 - 1, 5, 17, 2**20 + 1, 1, 999]
    message: Message = {"x": values, "flags": values > 0, "g": chosen, "votes": Selection(indices, 50)}
    together, in_turn = Sums(), Sums()
    together.add_together(message, weights, weights)
    for place, weight in enumerate(weights):
        in_turn.add({name: changed(payload, itemgetter(place)) for name, payload in message.items()}, weight)
    means = in_turn.mean()
    assert all(torch.equal(mean, means[name]) for name, mean in together.mean().items())
    exact = (values.double() * torch.tensor(weights)[:, None]).sum(0) / sum(weights)
    torch.testing.assert_close(means["x"], exact.float())


def test_of_several_the_place_is_told_and_the_rest_is_one(toy):
    engine, question = question_of(toy, "fedrts", "mlp", 0)
    (whole,) = arrivals(engine, question.order, question.asked)
    assert isinstance(whole, Replies)
    again = as_one(list(whole))
    for name, payload in again.message.items():
        assert all(torch.equal(a, b) for a, b in zip(tensors_of(payload), tensors_of(whole.message[name]), strict=True))
    some = whole.some([4, 1])
    assert (some.clients, some.samples) == ([4, 1], [whole.samples[4], whole.samples[1]])
    assert torch.equal(tensors_of(some.message["votes"])[0][0], tensors_of(whole.one(4).message["votes"])[0])
