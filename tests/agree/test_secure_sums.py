"""Secure sums: what the server opens is the sum of the rounded values, and a method goes on from the means that it comes to."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fedrts import config, methods
from fedrts.client.figures import FigureForm
from fedrts.errors import InputError
from fedrts.methods.contract import State
from fedrts.server import rounds
from fedrts.server.aggregate import RingSums
from fedrts.server.collect import Question, add_up
from fedrts.server.rounds import play
from fedrts.sparse import random
from fedrts.testing.agreement import agree, both
from fedrts.testing.federations import toy
from helping import order_of
from parties import opened_among

SECURE = {"aggregation": True}
SUMMED = {"fedrts", "fedrts_gamma0", "fedrts_gamma1", "fedcucb", "random", "fedavg", "fedpaq", "synflow"}
"""What their clients upload are sums on one mask."""
PAGES = Path(__file__).parents[2] / "docs" / "methods"
NAMES = [name for name in methods.names() if (PAGES / f"{name}.md").exists()]  # not one that is being written, such as the guide's


def secured(method="fedrts", model="cnn", clients=5, **keywords):
    federation = {"total": clients, "per_round": clients, "partition": "quantity"} if isinstance(clients, int) else clients
    keywords = {"clients": federation, "rounds": 4, "topology": {"interval": 2, "end": 4}, **keywords}
    return toy(method, model, secure={**SECURE, **keywords.pop("secure", {})}, engine={"name": "serial"}, **keywords)


def question_of(run, index):
    """The order of a round, as rounds put it to clients."""
    state = run.method.begin(run.setup)
    (exchange,) = run.plan.exchanges(run.plan.round(index, state.mask))
    order, samples = order_of(run, exchange, state, index), dict(enumerate(run.plan.samples))
    known = State(state.values, state.mask)
    sums = {"summing": run.plan.summing, "most_samples": max(run.plan.samples)}
    return Question(order, known, run.method, run.plan.guard, samples, list(samples), len(samples), **sums)


def by_hand(run, question, replies):
    """Σ of rounded changes and counts of indicators, one client and one number after the other."""
    order, table = question.order, run.experiment.secure
    most, o = max(question.samples.values()), 2 ** (table.bits - 1) - 1
    statistics = order.frame.statistics
    core, votes = 0, torch.zeros(run.layout.links, dtype=torch.int64)
    total = torch.zeros(len(order.reference), dtype=torch.int64)
    for reply in replies:
        change = reply.message["weights"].double() - order.reference.double()
        clips = torch.full_like(change, table.clip)
        clips[len(clips) - statistics :] = table.statistic_clip
        units = (change / clips * (reply.samples / most)).clamp(-1, 1) * o
        own = random.key(random.key(run.experiment.seed, "client", order.round.index, reply.client), "ring")
        total = total + torch.floor(units + random.uniform_halves(own, len(units)).double()).clamp(-o, o).long()
        core = core + run.method.core(reply.message, order.round).long()
        if "votes" in reply.message:
            announced = run.plan.summing.announced(order.round.index, order.frame.mask)
            named = reply.message["votes"].indices
            votes[named[torch.isin(named, announced)]] += 1
    change = total.double() / o * clips * (most / sum(reply.samples for reply in replies))
    return total, core, votes, (order.values.double() + change).float()


@pytest.mark.parametrize("index", [0, 1], ids=["outer", "inner"])
@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_what_is_opened_is_the_sum_of_the_rounded_values_exactly(model, index):
    run = secured(model=model)
    question = question_of(run, index)
    replies = list(run.plan.engine.run(question.order, [0, 2, 3, 4]))
    found = add_up(question, replies)
    assert isinstance(found.sums, RingSums)
    total, core, votes, weights = by_hand(run, question, replies)
    levels, counts, beyond = found.sums.form.ring.decoded(found.sums._total, 4)
    assert beyond == 0
    assert (torch.from_numpy(levels) == total).all()
    assert counts[0] == 4  # all are finite
    assert counts[1:].sum() == core.sum() + votes.sum()
    mean = found.sums.mean()
    assert (mean.clients, mean.samples) == (4, sum(reply.samples for reply in replies))
    assert torch.equal(mean["core"], (core.double() / 4).float())
    parameters = len(weights) - question.order.frame.statistics
    assert torch.equal(mean["weights"][:parameters], weights[:parameters])
    torch.testing.assert_close(mean["weights"], weights, rtol=0, atol=1e-4)
    if index == 0:
        assert torch.equal(mean["votes"], (votes.double() / 4).float())
        assert votes.sum() > 0
    assert found.upload_bytes == 4 * (20 + found.sums.form.ring.size)


@pytest.mark.parametrize("gone", [(), (1,)])
def test_masks_change_nothing(gone):
    """The very words, summed by the protocol among clients of which one is lost, come to the same bits."""
    run = secured()
    question = question_of(run, 0)
    here = [client for client in range(5) if client not in gone]
    replies = list(run.plan.engine.run(question.order, here))
    plain = add_up(question, replies).sums
    assert isinstance(plain, RingSums)
    words = {}
    for reply in replies:
        sums = plain
        key = run.plan.summing.key(0, reply.client)
        words[reply.client] = sums.form.words(question.contribution(reply.message), question.order, reply.samples / sums.most_samples, key)
    hidden = question.sums()
    hidden.add(opened_among(words, plain.form.ring, 5, 4), len(here), sum(reply.samples for reply in replies))
    for name, tensor in plain.mean().items():
        assert torch.equal(hidden.mean()[name], tensor)


def test_means_are_those_of_open_sums_but_for_the_rounding():
    run = secured(secure={"votes_among": 1.0})
    question = question_of(run, 0)
    replies = list(run.plan.engine.run(question.order, range(5)))
    open_ = add_up(replace(question, summing=None), replies).sums.mean()
    mean = add_up(question, replies).sums.mean()
    parameters = len(mean["weights"]) - question.order.frame.statistics
    step = run.experiment.secure.clip / (2**17 - 1) * max(run.plan.samples) / (sum(run.plan.samples) / 5)
    assert float((mean["weights"] - open_["weights"])[:parameters].abs().max()) <= step
    named = sum((r.message["votes"].indices[:, None] == torch.arange(run.layout.links)).any(0).int() for r in replies)
    assert torch.equal(mean["votes"], (named.double() / 5).float())  # by clients, where open sums go by samples


def test_clients_vote_for_announced_links_alone_and_for_as_many():
    run = secured("fedrts", "mlp")
    question = question_of(run, 0)
    mask = question.order.frame.mask
    announced = run.plan.summing.announced(0, mask)
    assert not mask.bits[announced].any()
    share = len(announced) / len(mask.inactive)
    assert abs(share - 0.1) < 4 * math.sqrt(0.09 / len(mask.inactive))
    assert not torch.equal(announced, run.plan.summing.announced(2, mask))
    (reply,) = run.plan.engine.run(question.order, [1])
    named = reply.message["votes"].indices
    layers = torch.bucketize(named, mask.bounds[1:], right=True)
    of_announced = torch.bucketize(announced, mask.bounds[1:], right=True)
    for layer, quota in enumerate(question.order.round.quota):
        here = named[layers == layer]
        among = announced[of_announced == layer]
        assert int(torch.isin(here, among).sum()) == min(quota, len(among))


def test_a_large_change_is_cut_off_at_the_clip():
    run = secured("fedavg", "mlp", secure={"clip": 0.001})
    question = question_of(run, 1)
    replies = list(run.plan.engine.run(question.order, range(5)))
    assert max(float((reply.message["weights"] - question.order.reference).abs().max()) for reply in replies) > 0.002
    mean = add_up(question, replies).sums.mean()["weights"]
    most = 0.001 * 5 * max(run.plan.samples) / sum(run.plan.samples)
    assert float((mean - question.order.values).abs().max()) <= most * (1 + 1e-3)


def test_a_client_that_does_not_keep_to_the_ring_moves_a_sum_by_no_more_than_all_could():
    run = secured("fedavg", "mlp")
    question = question_of(run, 1)
    honest = add_up(question, list(run.plan.engine.run(question.order, range(4)))).sums
    assert isinstance(honest, RingSums)
    honest.add(np.full(honest.form.ring.words, 1_200_000 | 1 << honest.form.ring.value_width, np.uint32), 1, run.plan.samples[4])
    with pytest.warns(UserWarning, match="larger than 5 clients can make them, and were cut to that"):
        mean = honest.mean()["weights"]
    most = run.experiment.secure.clip * 5 * max(run.plan.samples) / sum(run.plan.samples)
    assert float((mean - question.order.values).abs().max()) <= most * (1 + 1e-6)


def test_a_client_whose_weights_are_not_finite_counts_as_no_change():
    """As on nodes, of which the server does not learn whose they were."""
    run = secured("fedavg", "mlp")
    question = question_of(run, 1)
    replies = list(run.plan.engine.run(question.order, range(5)))
    broken, still = replies[2].message["weights"].clone(), question.order.reference.clone()
    broken[3] = math.nan

    def mean(weights):
        found = add_up(question, [replace(reply, message={"weights": weights}) if reply.client == 2 else reply for reply in replies])
        assert (found.counted, found.rejected, found.blamed) == ([0, 1, 2, 3, 4], [], [])
        return found.sums.mean()["weights"]

    with pytest.warns(UserWarning, match="round 1: 1 of 5 updates were not finite and count as no change"):
        without = mean(broken)
    assert torch.equal(without, mean(still))


@pytest.mark.parametrize("change", ["shorter", "another type"])
def test_a_reply_of_another_form_is_rejected_all_the_same(change):
    run = secured("fedavg", "mlp")
    question = question_of(run, 1)
    (reply,) = run.plan.engine.run(question.order, [0])
    weights = reply.message["weights"][:-1] if change == "shorter" else reply.message["weights"].double()
    found = add_up(question, [replace(reply, message={"weights": weights})])
    assert found.counted == []
    assert "was asked for" in found.rejected[0]["reason"]


@pytest.mark.parametrize("method", ["fedrts", "fedcucb", "fedpaq", "random"])
def test_a_run_keeps_its_invariants(method):
    run = secured(method, "cnn", clients=5)
    states = [played.state for played in play(run.plan, run.method.begin(run.setup), 0)]
    again = [played.state for played in play(run.plan, run.method.begin(run.setup), 0)]
    for state, other in zip(states, again, strict=True):
        assert torch.equal(state.values, other.values)
        assert state.values.isfinite().all()
        assert state.mask.counts == states[0].mask.counts
    assert not torch.equal(states[0].values, states[-1].values)


def test_the_batched_engine_gives_the_serial_one_s_sums():
    first, second = both(secured("fedrts", "mlp", clients=6))
    assert [played.record.clients for played in first] == [played.record.clients for played in second]
    agree(first, second)


def test_a_simulated_loss_of_clients_is_summed_without_them():
    run = secured("fedrts", "mlp", clients={"total": 8, "per_round": 8, "dropout": 0.2}, rounds=6)
    records = [played.record for played in play(run.plan, run.method.begin(run.setup), 0)]
    assert min(len(record.clients) for record in records) < 8
    assert all(len(record.clients) >= 6 for record in records)


def test_fewer_than_the_threshold_are_no_round():
    run = secured("fedrts", "mlp", clients={"total": 5, "per_round": 5, "dropout": 0.9}, guard={"attempts": 2, "quorum": 0.2})
    assert run.experiment.guard.quorum == 0.8
    with pytest.raises(rounds.TooFewError, match="fewer than 4 usable replies"):
        list(play(run.plan, run.method.begin(run.setup), 0))


@pytest.mark.parametrize("method", NAMES)
def test_methods_whose_uploads_are_no_sums_are_refused_in_one_line(method):
    if method in SUMMED:
        secured(method)
        return
    with pytest.raises(InputError, match=f"secure.aggregation is not for '{method}': its (clients|rounds)") as refused:
        secured(method)
    assert "\n" not in str(refused.value)


def test_a_method_may_be_fit_or_not_by_its_options():
    secured("fedrts_no_ts", method_options={"score": "outcome"})
    with pytest.raises(InputError, match="'squares', numbers without a bound"):
        secured("fedrts", method_options={"score": "fisher"})


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"clients": {"total": 2, "per_round": 2}}, "must be at least 3"),
        ({"secure": {"threshold": 2}}, "secure.threshold = 2 must be above half of clients.per_round = 5: 3 to 5"),
        ({"secure": {"threshold": 6}}, "secure.threshold = 6 must be above half"),
        ({"secure": {"bits": 24}, "clients": {"total": 1000, "per_round": 1000}}, "do not fit into words of 32 bits"),
        ({"guard": {"reducer": "median"}}, "needs every client's weights, and secure.aggregation shows sums alone: use 'mean'"),
        ({"guard": {"over_select": 0.5}}, "guard.over_select"),
        ({"wire": {"value_type": "int4", "feedback": True}}, "wire.feedback"),
    ],
)
def test_settings_that_sums_cannot_have_are_refused(settings, why):
    given = {"method": "fedrts", "clients": {"total": 5, "per_round": 5}, **settings}
    with pytest.raises(InputError, match=why):
        config.resolve({**given, "secure": {**SECURE, **settings.get("secure", {})}})


def test_what_is_resolved_says_the_threshold_and_nothing_where_it_is_off():
    on = config.resolve({"clients": {"total": 10, "per_round": 10}, "secure": SECURE})
    assert (on.secure.threshold, on.guard.quorum) == (7, 0.7)
    off = config.resolve({"clients": {"total": 10, "per_round": 10}})
    assert off.secure.threshold is None
    assert off.guard.quorum == 0.3


def test_the_rounding_is_right_on_average_over_clients():
    run = secured("fedavg", "mlp", secure={"bits": 8})
    question = question_of(run, 1)
    (reply,) = run.plan.engine.run(question.order, [0])
    form = question.form
    found = np.mean([_levels(form, question, reply, key) for key in range(200)], axis=0)
    exact = (reply.message["weights"].double() - question.order.reference.double()).numpy() * form.ring.most
    assert np.abs(found - exact).max() < 6 * 0.5 / math.sqrt(200)
    assert np.abs(found - exact).mean() < 0.05


def _levels(form, question, reply, key):
    words = form.words(question.contribution(reply.message), question.order, 1.0, key)
    return form.ring.decoded(words, 1)[0]


def test_a_metric_at_its_end_stays_there_whatever_way_clients_round():
    """All sites are right on all rows: rounded up, their sum is a little beyond, and no accuracy of anybody who lies."""
    samples, most = [36, 48, 60], 60
    form = FigureForm((("accuracy", 1.0), ("score", 1000.0)), 3)
    for seed in range(20):
        words = [form.words([1.0, -1000.0], count / most, 100 * seed + client) for client, count in enumerate(samples)]
        found = form.means(np.stack(words).sum(0, dtype=np.uint32), 3, sum(samples), most)
        assert 1 - 1e-6 < found["accuracy"] <= 1
        assert -1000 <= found["score"] < -1000 + 1e-3
    lie = form.words([1.0, 1000.0], 1.0, 1)  # for more samples than it has
    assert form.means(np.stack([*words[1:], lie]).sum(0, dtype=np.uint32), 3, sum(samples), most)["accuracy"] > 1.1
