"""FedRTS in a running federation: what the posteriors remember, and what travels."""

import itertools

import torch

from fedrts.methods.contract import ProbeGradient
from fedrts.server import rounds
from fedrts.wire.fields import Selection
from helping import ask


def test_each_observation_adds_the_scale_and_inner_rounds_skip_inactive_links(toy):
    run = toy("fedrts", "cnn")
    state = run.plan.method.begin(run.setup)
    observed = torch.zeros(run.layout.links)
    for step in rounds.play(run.plan, state, -1):
        before, after = state, step.state
        if step.record.round < run.plan.schedule.end:
            observed += 1 if step.record.outer else before.mask.bits
        torch.testing.assert_close(after["alpha"] + after["beta"] - 2, 10 * observed)
        assert after["alpha"].min() >= 1
        assert after["beta"].min() >= 1
        state = after
    assert run.method.belief(state).shape == (run.layout.links,)


def test_uploads_name_inactive_links_and_carry_no_gradients(toy):
    run = toy("fedrts")
    state = run.plan.method.begin(run.setup)
    for index, names in ((0, {"weights", "votes"}), (1, {"weights"})):
        current = run.plan.round(index, state.mask)
        (exchange,) = run.method.exchanges(current)
        assert any(isinstance(step, ProbeGradient) for step in exchange.steps) == current.outer
        for reply in ask(run, exchange, state, index, [0, 1, 2]):
            assert set(reply.message) == names
            if current.outer:
                votes = reply.message["votes"]
                assert isinstance(votes, Selection)
                assert votes.values is None
                assert not state.mask.bits[votes.indices].any()
                bounds = torch.tensor([0, *run.layout.sizes]).cumsum(0)
                per_layer = [int(((votes.indices >= a) & (votes.indices < b)).sum()) for a, b in itertools.pairwise(bounds)]
                assert tuple(per_layer) == current.quota


def test_votes_are_the_largest_gradients_after_training(toy):
    run = toy("fedrts", "mlp")
    state = run.plan.method.begin(run.setup)
    current = run.plan.round(0, state.mask)
    (exchange,) = run.method.exchanges(current)
    (reply,) = ask(run, exchange, state, 0, [2])
    # again by hand: the trained weights, the batch after the last epoch, a plain backward pass
    from fedrts.client.job import Job
    from fedrts.sparse import random

    bench = run.plan.engine.bench
    rows = run.plan.engine.rows[2]
    job = Job(bench, {}, state.mask, rows, random.key(run.experiment.seed, "client", 0, 2))
    batch = next(job.batches(run.training.epochs)).rows
    module = run.module
    run.layout.bind(module, state.mask.expand(reply.message["weights"]))
    module.train()
    bench.data.task.loss(module, bench.data.x[batch], bench.data.y[batch]).backward()
    flat = torch.cat([dict(module.named_parameters())[e.name].grad.flatten() for e in run.layout.layers]).abs()
    expected, start = [], 0
    for size, quota in zip(run.layout.sizes, current.quota, strict=True):
        off = [i for i in range(start, start + size) if not state.mask.bits[i]]
        expected += sorted(sorted(off, key=lambda i: -float(flat[i]))[:quota])
        start += size
    assert reply.message["votes"].indices.tolist() == expected
