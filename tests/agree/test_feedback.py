"""Error feedback: what an upload does not tell is told later, and nothing is told twice."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import fedrts
from fedrts.client.order import Order
from fedrts.errors import InputError
from fedrts.server import rounds
from fedrts.server.client_records import ClientRecords
from fedrts.server.guard import Guard
from fedrts.testing.agreement import agree, both, unequal
from fedrts.wire.quantise import Quantised
from helping import order_of

FED = {"value_type": "int4", "feedback": True}
SHORT = ("float16", "int8", "int6", "int4", "int2")


def told(order, reply):
    """How far a reply moves the parameters on the mask."""
    parameters = len(order.reference) - order.frame.statistics
    opened = order.exchange.up["weights"].open(reply.message["weights"], replace(order.upload_frame(), reference=0 * order.reference))
    return opened[:parameters].double()


@pytest.mark.parametrize("type", SHORT)
@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_what_was_sent_and_what_is_left_are_all_that_changed(toy, type, model):
    """Σ sent + e = Σ ΔW over the rounds of a client, on a mask that stays."""
    run = toy("random", model, wire={"value_type": type, "feedback": True}, clients={"total": 2, "per_round": 2})
    state = run.method.begin(run.setup)
    residuals: dict[int, torch.Tensor] = {}
    sent = changed = 0.0
    for index in range(4):
        (exchange,) = run.plan.exchanges(run.plan.round(index, state.mask))
        order = replace(order_of(run, exchange, state, index), residuals=residuals)
        (reply,) = run.plan.engine.run(order, [1])
        whole = replace(exchange, up=run.method.exchanges(order.round)[0].up)
        (free,) = run.plan.engine.run(replace(order, exchange=whole), [1])
        parameters = len(order.reference) - order.frame.statistics
        changed = changed + (free.message["weights"] - order.reference)[:parameters].double()
        sent = sent + told(order, reply)
        residuals = {1: reply.left}
        state = state.with_values(order.exchange.up["weights"].open(reply.message["weights"], order.opening_frame))
    left = state.mask.compact(residuals[1]).double()
    torch.testing.assert_close(sent + left, changed, rtol=0, atol=1e-6)
    assert float(left.norm()) > 0
    assert residuals[1][: run.layout.links][~state.mask.bits].count_nonzero() == 0


def test_a_round_sends_the_change_with_what_was_left(toy):
    """By hand: Q(ΔW + e) of the nearest levels."""
    run = toy("random", "mlp", wire=FED)
    state = run.method.begin(run.setup)
    (exchange,) = run.plan.exchanges(run.plan.round(0, state.mask))
    e = torch.linspace(-1e-2, 1e-2, run.layout.parameters)
    order = replace(order_of(run, exchange, state, 0), residuals={2: e})
    (reply,) = run.plan.engine.run(order, [2])
    (free,) = run.plan.engine.run(replace(order, exchange=replace(exchange, up=run.method.exchanges(order.round)[0].up)), [2])
    expected = Quantised.nearest(free.message["weights"] - order.reference + state.mask.compact(e), top=7)
    found = reply.message["weights"].values
    assert torch.equal(found.levels, expected.levels)
    assert torch.equal(found.scales, expected.scales)


@pytest.mark.parametrize("top", [1, 7, 127])
def test_rounding_to_the_nearest_is_contractive(top):
    """‖Q(x) − x‖ < ‖x‖, which rounding at random is not at two bits."""
    x = torch.randn(1000, generator=torch.Generator().manual_seed(3))
    lost = float((Quantised.nearest(x, top=top).values() - x).norm() / x.norm())
    at_random = float((Quantised.of(x, 5, top=top).values() - x).norm() / x.norm())
    assert lost < at_random
    assert lost < {1: 0.5, 7: 0.15, 127: 0.01}[top]
    assert top > 1 or at_random > 1
    assert Quantised.nearest(torch.zeros(3), top=top).values().tolist() == [0, 0, 0]


@pytest.mark.parametrize("groups", [None, (100, 156, 44)])
def test_no_tried_scale_loses_less(groups):
    x = torch.randn(300, generator=torch.Generator().manual_seed(4))
    found = Quantised.nearest(x, groups, top=1)
    for part, scale in zip(x.split(list(groups or (256, 44))), found.scales.tolist(), strict=True):
        lost = {s: float(((part / s).round().clamp(-1, 1) * s - part).norm()) for s in float(part.abs().max()) * torch.arange(2, 9).div(8)}
        best = min(lost, key=lost.__getitem__)
        assert scale == pytest.approx(float(best), rel=1e-6)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("method", ["fedtopk", "random", "fedrts"])
def test_engines_agree(method):
    agree(*both(unequal(method, "cnn", wire={} if method == "fedtopk" else {"value_type": "int8", "feedback": True})))


def test_a_link_that_leaves_the_mask_is_forgotten(toy):
    run = toy("random", "mlp", wire=FED)
    state = run.method.begin(run.setup)
    (exchange,) = run.plan.exchanges(run.plan.round(0, state.mask))
    off = ~state.mask.bits
    strange = torch.zeros(run.layout.parameters)
    strange[: run.layout.links][off] = 100.0
    replies = [
        next(run.plan.engine.run(replace(order_of(run, exchange, state, 0), residuals=residuals), [0])) for residuals in ({}, {0: strange})
    ]
    assert torch.equal(replies[0].left, replies[1].left)


@pytest.mark.filterwarnings("ignore::fedrts.errors.Note")
@pytest.mark.parametrize("method", ["fedtopk", "random"])
def test_only_clients_that_counted_remember(toy, monkeypatch, method):
    """A rejected reply leaves the residual as it was; so does a round that is not applied."""
    run = toy(method, "mlp", clients={"total": 3, "per_round": 3}, wire={} if method == "fedtopk" else FED)
    state, ledger = run.method.begin(run.setup), ClientRecords.of(run.plan.guard)
    state = rounds.play_round(run.plan, state, 0, ledger).state
    assert sorted(ledger.residuals) == [0, 1, 2]
    before = {client: residual.clone() for client, residual in ledger.residuals.items()}
    engine, bad = run.plan.engine.run, {1}
    monkeypatch.setattr(run.plan.engine, "run", lambda *asked: (replace(r, samples=r.samples + (r.client in bad)) for r in engine(*asked)))
    rounds.play_round(run.plan, state, 1, ledger)
    assert torch.equal(ledger.residuals[1], before[1])
    assert not torch.equal(ledger.residuals[0], before[0])
    bad, before = {0, 1}, dict(ledger.residuals)
    guard = Guard(quorum=1.0, attempts=2)
    monkeypatch.setattr(run.plan.engine, "run", lambda *asked: (replace(r, samples=r.samples + (r.client in bad)) for r in engine(*asked)))
    with pytest.raises(rounds.TooFewError):
        rounds.play_round(replace(run.plan, guard=guard), state, 2, ledger)
    assert all(ledger.residuals[client] is before[client] for client in before)


def test_the_next_round_goes_on_from_what_was_left(toy):
    run = toy("random", "mlp", clients={"total": 3, "per_round": 3}, wire={"value_type": "int2", "feedback": True})
    ledger = ClientRecords.of(run.plan.guard)
    state = rounds.play_round(run.plan, run.method.begin(run.setup), 0, ledger).state
    (exchange,) = run.plan.exchanges(run.plan.round(1, state.mask))
    order = Order.of(exchange, run.plan.round(1, state.mask), run.layout, state, run.plan.key(1, "rounding 0"))
    replies = run.plan.engine.run(replace(order, residuals=dict(ledger.residuals)), [0, 1, 2])
    expected = {reply.client: reply.left for reply in replies}
    rounds.play_round(run.plan, state, 1, ledger)
    assert all(torch.equal(ledger.residuals[client], left) for client, left in expected.items())


def test_residuals_survive_a_checkpoint():
    ledger = ClientRecords.of(Guard())
    assert "residuals" not in ledger.tensors()
    ledger.remember({4: torch.arange(3.0), 1: torch.ones(3)})
    again = ClientRecords.restored(ledger.tensors(), (2,), Guard(), "cpu")
    assert {client: residual.tolist() for client, residual in again.residuals.items()} == {4: [0, 1, 2], 1: [1, 1, 1]}


@pytest.mark.parametrize("settings", [{"method": "fedtopk"}, {"method": "fedrts", "wire": FED}])
def test_a_run_goes_on_to_the_same_bits(tmp_path, settings):
    """Stopped after three rounds and resumed, as if it had never been stopped."""
    small: dict[str, Any] = {
        "data": "digits",
        "clients": {"total": 4, "per_round": 2},
        "train": {"epochs": 1},
        "model_options": {"hidden": [8]},
    }
    small |= {"device": "cpu", "rounds": 6, "checkpoint": {"every": 1}, "topology": {"interval": 2}, **settings}
    whole = fedrts.run(out=tmp_path / "whole", **small)
    fedrts.run(out=tmp_path / "cut", **small)
    newest, earlier = sorted((tmp_path / "cut" / "checkpoint").glob("*.safetensors"), reverse=True)
    newest.unlink()
    for name in ("summary.json", "model.safetensors"):
        (tmp_path / "cut" / name).unlink()
    resumed = fedrts.resume(tmp_path / "cut")
    assert int(earlier.name[:8]) == 5
    assert (tmp_path / "cut" / "model.safetensors").read_bytes() == (tmp_path / "whole" / "model.safetensors").read_bytes()
    assert resumed.summary["upload_bytes"] == whole.summary["upload_bytes"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"wire": {"feedback": True}}, "wire.value_type"),
        ({"method": "feddst", "wire": FED}, "masks of their own"),
        ({"method": "fedpaq", "wire": FED}, "its own way"),
        ({"wire": FED, "privacy": {"clip": 1.0}}, r"\[privacy\]"),
        ({"method": "fedtopk", "privacy": {"clip": 1.0}}, r"\[privacy\]"),
    ],
)
def test_what_cannot_be_had_together_is_refused(toy, settings, words):
    with pytest.raises(InputError, match=words):
        toy(**{"method": "random", "model": "mlp", **settings})


def test_much_memory_is_said(toy, monkeypatch, recwarn):
    monkeypatch.setattr("fedrts.runs.feedback._MUCH", 100)
    toy("random", "mlp", wire=FED)
    assert "GiB of memory" in str(recwarn.pop().message)
