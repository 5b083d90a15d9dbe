"""One client's work against plain PyTorch."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from fedrts.client.job import Job
from fedrts.engines.serial import SerialEngine
from fedrts.methods.contract import Exchange, ProbeGradient, Train
from fedrts.server import rounds
from fedrts.sparse import random
from fedrts.sparse.mask import Mask
from fedrts.wire.fields import OnOwnMask, Values
from helping import ask

EVERYTHING = Exchange(down={"weights": Values()}, steps=(Train(),), up={"weights": Values(on="all")})


def job_of(run, client):
    return Job(
        run.plan.engine.bench,
        {},
        Mask.full(run.layout.sizes),
        run.plan.engine.rows[client],
        random.key(run.experiment.seed, "client", 0, client),
    )


@pytest.mark.parametrize("model", ["mlp", "cnn", "tiny_gpt"])
@pytest.mark.parametrize(
    "train",
    [
        {"lr": 0.1, "epochs": 2},
        {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1},
        {"lr": 0.01, "optimizer": "adam", "weight_decay": 0.05},
        {"lr": 0.01, "optimizer": "adam", "amsgrad": True},
        {"lr": 0.01, "optimizer": "adamw", "weight_decay": 5.0},
        {"lr": 0.1, "clip": 0.05},
        {"lr": 0.1, "smoothing": 0.3},
    ],
)
def test_training_is_a_plain_loop_with_a_mask_on_the_gradients(toy, model, train):
    run = toy("random", model, train=train)
    state = run.method.begin(run.setup)
    (reply,) = ask(run, EVERYTHING, state, 0, [1])

    module, data = run.module, run.data
    masks = run.layout.by_name(state.mask.bits)
    module.load_state_dict(run.layout.state_dict(state.weights))
    settings = run.training
    make = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[settings.optimizer]
    extra = {"momentum": settings.momentum} if settings.optimizer == "sgd" else {"amsgrad": settings.amsgrad}
    optimizer = make(module.parameters(), lr=settings.lr, weight_decay=settings.weight_decay, **extra)
    module.train()
    for epoch in range(settings.epochs):
        for rows in (batch.rows for batch in job_of(run, 1).batches(epoch)):
            optimizer.zero_grad()
            output, target = module(data.x[rows]), data.y[rows]
            F.cross_entropy(output.flatten(0, -2), target.flatten(), label_smoothing=settings.smoothing).backward()
            for name, parameter in module.named_parameters():
                if name in masks:
                    parameter.grad *= masks[name]
            if settings.clip:
                assert torch.nn.utils.clip_grad_norm_(module.parameters(), settings.clip) > settings.clip, "it does something"
            optimizer.step()
    expected = run.layout.flatten(module.state_dict())
    torch.testing.assert_close(reply.message["weights"], expected, rtol=1e-5, atol=1e-6)


def test_one_client_and_one_step_is_sgd(toy):
    run = toy("fedavg", "mlp", clients={"total": 1, "per_round": 1}, train={"batch_size": 120})
    from fedrts.server import rounds

    state = run.method.begin(run.setup)
    after = rounds.play_round(run.plan, state, 1).state
    module = run.module
    module.load_state_dict(run.layout.state_dict(state.weights))
    module.zero_grad()
    run.data.task.loss(module, run.data.x, run.data.y).backward()
    flat = torch.cat([dict(module.named_parameters())[e.name].grad.flatten() for e in run.layout.layers + run.layout.dense])
    torch.testing.assert_close(after.weights, state.weights - 0.1 * flat)


def test_the_probe_changes_nothing_but_its_own_tensor(toy):
    run = toy("random", "cnn")
    state = run.method.begin(run.setup)
    probing = replace(EVERYTHING, steps=(Train(), ProbeGradient()), up={**EVERYTHING.up, "gradient": Values(of="gradient", on="links")})
    (with_probe,) = ask(run, probing, state, 0, [1])
    (without,) = ask(run, EVERYTHING, state, 0, [1])
    assert torch.equal(with_probe.message["weights"], without.message["weights"]), "BatchNorm statistics included"
    gradient = with_probe.message["gradient"]
    assert gradient.shape == (run.layout.links,)
    assert gradient[~state.mask.bits].count_nonzero() > 0, "the gradient is not masked"
    # training after a probe sees the same data as without one
    (late,) = ask(run, replace(EVERYTHING, steps=(ProbeGradient(), Train())), state, 0, [1])
    assert torch.equal(late.message["weights"], without.message["weights"])


def test_the_probe_is_the_gradient_on_the_batch_after_the_last_epoch(toy):
    run = toy("random", "cnn")
    state = run.method.begin(run.setup)
    probing = replace(EVERYTHING, steps=(Train(), ProbeGradient()), up={**EVERYTHING.up, "gradient": Values(of="gradient", on="links")})
    (reply,) = ask(run, probing, state, 0, [1])
    module = run.module
    module.load_state_dict(run.layout.state_dict(reply.message["weights"]))
    module.train()
    module.zero_grad()
    rows = next(job_of(run, 1).batches(run.training.epochs)).rows
    run.data.task.loss(module, run.data.x[rows], run.data.y[rows]).backward()
    flat = torch.cat([dict(module.named_parameters())[e.name].grad.flatten() for e in run.layout.layers])
    torch.testing.assert_close(reply.message["gradient"], flat, rtol=1e-4, atol=1e-6)


def test_a_frozen_layer_loses_the_links_that_its_client_drops(toy):
    """A user's rule may make it prunable: it keeps its values, but none off the client's own mask."""
    run = toy("feddst", "mlp", train={"epochs": 2, "weight_decay": 0.1})
    next(run.module.parameters()).requires_grad_(False)
    run = replace(run, plan=replace(run.plan, engine=SerialEngine(replace(run.bench), run.rows, 64)))
    state = run.method.begin(run.setup)
    (exchange,) = run.method.exchanges(run.plan.round(0, state.mask))
    exchange = replace(exchange, up={"weights": Values(on="all"), "own": OnOwnMask()})
    (reply,) = ask(run, exchange, state, 0, [1])
    frozen = run.layout.sizes[0]
    received, weights, own = state.weights[:frozen], reply.message["weights"][:frozen], reply.message["own"].mask.bits[:frozen]
    assert bool((own != state.mask.bits[:frozen]).any()), "links were exchanged"
    assert not bool(weights[~own].any())
    assert not bool(weights[weights != received].any()), "as received, or gone"


@pytest.mark.parametrize(("rows", "sizes"), [(20, [8, 8]), (8, [8]), (5, [5]), (1, [1])])
def test_short_batches_only_where_there_is_nothing_else(toy, rows, sizes):
    run = toy("fedavg", "mlp")
    job = Job(run.plan.engine.bench, {}, Mask.full(run.layout.sizes), torch.arange(rows), key=1)
    batches = list(job.batches(0))
    assert [len(batch) for batch in batches] == sizes
    assert len(torch.cat([batch.rows for batch in batches]).unique()) == sum(sizes)
    assert run.training.samples(rows) == sum(sizes) * run.training.epochs


def test_a_single_sample_is_skipped_under_batchnorm(toy):
    run = toy("fedavg", "cnn")
    job = Job(run.plan.engine.bench, {}, Mask.full(run.layout.sizes), torch.arange(1), key=1)
    assert list(job.batches(0)) == []
    run.plan.engine.rows = [torch.arange(1)]
    state = run.method.begin(run.setup)
    (reply,) = ask(run, EVERYTHING, state, 0, [0])
    assert torch.equal(reply.message["weights"], state.weights)
    assert reply.samples == 1


def test_epochs_rounds_and_clients_have_orders_of_their_own(toy):
    run = toy("fedavg")
    bench, mask, rows = run.plan.engine.bench, Mask.full(run.layout.sizes), torch.arange(40)
    orders = {
        tuple(torch.cat([batch.rows for batch in Job(bench, {}, mask, rows, random.key(0, "client", t, client)).batches(epoch)]).tolist())
        for t in (0, 1)
        for client in (0, 1)
        for epoch in (0, 1)
    }
    assert len(orders) == 8


def test_dropout_in_a_users_model_is_reproducible_and_leaves_the_global_generator_alone(toy):
    run = toy("fedavg", "mlp")
    run.module[2] = torch.nn.Sequential(run.module[2], torch.nn.Dropout(0.5))
    state = run.method.begin(run.setup)
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    (first,) = ask(run, EVERYTHING, state, 0, [1])
    assert torch.equal(before, torch.random.get_rng_state())
    torch.manual_seed(2)
    (second,) = ask(run, EVERYTHING, state, 0, [1])
    (plain,) = ask(toy("fedavg", "mlp"), EVERYTHING, state, 0, [1])
    assert torch.equal(first.message["weights"], second.message["weights"])
    assert not torch.equal(first.message["weights"], plain.message["weights"])


@pytest.mark.parametrize(
    ("method", "index", "seen", "flops"),
    [
        ("random", 1, 300, lambda f, d: 3 * f * 300),
        ("fedrts", 0, 350, lambda f, d: 3 * f * 300 + (f + 2 * d) * 50),
        ("feddst", 0, 350, lambda f, d: 3 * f * 300 + (f + 2 * d) * 50),
        ("prunefl", 0, 300, lambda f, d: (f + 2 * d) * 300),
        ("snip", -1, 100, lambda f, d: 3 * d * 100),
        ("grasp", -1, 200, lambda f, d: 3 * d * 100 + 6 * d * 100),
        ("fedtiny", -1, 5 * (5 * 100 + 120), None),
    ],
)
def test_flops_follow_the_samples_that_the_model_sees(toy, method, index, seen, flops):
    """120 rows in batches of 50 are 100 an epoch; evaluation takes all of them."""
    alone = {"total": 1, "per_round": 1}
    run = toy(method, "cnn", clients=alone, train={"epochs": 3, "batch_size": 50}, eval={"every": 100}, rounds=20)
    passed = []
    run.module.register_forward_hook(lambda module, inputs, output: passed.append(len(inputs[0])))
    state = run.method.begin(run.setup)
    record = rounds.play_round(run.plan, state, index).record
    assert sum(passed) == seen
    macs = run.bench.macs
    if flops is None:
        pool = [Mask(bits, state.mask.sizes) for bits in state["pool"]]
        assert record.flops == pytest.approx(620 * sum(map(macs.forward, pool)))
    else:
        assert record.flops == pytest.approx(flops(macs.forward(state.mask), macs.dense))
