"""Stored images in a run: clients train on augmented batches, the server chooses by the validation set."""

import copy
import json
from typing import Any

import pytest
import torch

import fedrts
from fedrts import config, data
from fedrts.client.job import Job
from fedrts.data.contract import Data
from fedrts.data.pixels import Pixels
from fedrts.runs.build import assemble
from fedrts.runs.summary import summarise
from fedrts.server.client_records import ClientRecords
from fedrts.server.rounds import play_round
from fedrts.sparse import random
from fedrts.sparse.mask import Mask
from helping import ask


@pytest.fixture
def stored():
    """A registered data set of uint8 images with every augmentation; gone after the test."""

    def toy_pixels(augment: str = "crop+flip+cutout") -> Data:
        x = torch.randint(0, 256, (120, 3, 20, 20), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
        y = torch.arange(120) % 3
        x[:, 0] = (x[:, 0] // 2) + (60 * y).view(-1, 1, 1).to(torch.uint8)
        return Data(x[:90], y[:90], x[90:], y[90:], 3, view=Pixels.of((0.4, 0.5, 0.5), (0.2, 0.25, 0.25), augment))

    data.register("toy_pixels")(toy_pixels)
    yield "toy_pixels"
    data.data._known.pop("toy_pixels")


def assembled(name, **keywords):
    base = {
        "recipe": "paper",
        "data": name,
        "model": "cnn",
        "model_options": {"width": 4},
        "rounds": 4,
        "method": "fedavg",
        "clients": {"total": 3, "per_round": 2, "partition": "iid"},
        "train": {"epochs": 2, "batch_size": 8, "lr": 0.1},
    }
    return assemble(config.resolve(config.merged(base, keywords)))


def test_a_client_trains_on_augmented_normalised_batches(stored):
    run = assembled(stored)
    state = run.method.begin(run.setup)
    (reply,) = ask(run, exchange_of(run, state), state, 3, [1])
    module = copy.deepcopy(run.module)
    run.layout.bind(module, state.weights.clone())
    module.train()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    key, rows, held = random.key(run.experiment.seed, "client", 3, 1), run.rows[1], run.data
    for epoch in range(2):
        order = rows[random.permutation(random.key(key, "order", epoch), len(rows))]
        for index in range(len(order) // 8):
            batch = order[index * 8 : index * 8 + 8]
            u = random.uniform(random.key(key, "augment", epoch, index), 8 * 5).view(8, 5)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(module(held.view.augment(held.x[batch], u)), held.y[batch]).backward()
            optimizer.step()
    expected = run.layout.flatten(module.state_dict())
    torch.testing.assert_close(reply.message["weights"], expected, rtol=1e-5, atol=1e-6)


def exchange_of(run, state):
    (exchange,) = run.method.exchanges(run.plan.round(3, state.mask, 0))
    return exchange


def test_augmentation_changes_what_is_learned_and_can_be_turned_off(stored):
    def learned(**options):
        run = assembled(stored, data_options=options)
        state = run.method.begin(run.setup)
        (reply,) = ask(run, exchange_of(run, state), state, 0, [0])
        return reply.message["weights"]

    assert torch.equal(learned(), learned())
    assert not torch.equal(learned(), learned(augment=""))


def test_every_batch_has_a_key_of_its_own(stored):
    run = assembled(stored)
    mask = Mask.full(run.layout.sizes)
    jobs = [Job(run.plan.engine.bench, {}, mask, run.rows[0], random.key(0, "client", t, client)) for t in (0, 1) for client in (0, 1)]
    keys = [batch.key for job in jobs for epoch in (0, 1, 2) for batch in job.batches(epoch)]
    assert len(set(keys)) == len(keys) == 4 * 3 * 3
    again = Job(run.plan.engine.bench, {}, mask, run.rows[0], random.key(0, "client", 0, 0))
    assert [batch.key for batch in again.batches(1)] == keys[3:6]


def test_a_model_is_chosen_by_the_validation_set(stored, tmp_path):
    options: dict[str, Any] = {
        "model": "cnn",
        "model_options": {"width": 4},
        "rounds": 12,
        "lr": 0.1,
        "epochs": 1,
        "batch_size": 8,
        "clients": 3,
    }
    result = fedrts.run(data=stored, data_options={"validation": 0.2}, out=tmp_path / "run", eval={"every": 2}, **options)
    evaluated = [line for line in result.history if line["accuracy"] is not None]
    assert len({line["valid_accuracy"] for line in evaluated}) > 1
    assert all(("valid_accuracy" in line) == (line["accuracy"] is not None) for line in result.history)
    best = max(evaluated, key=lambda line: line["valid_accuracy"])
    assert result.summary["best_accuracy"] == best["accuracy"]
    assert sum(client["samples"] for client in json.loads((tmp_path / "run" / "clients.json").read_text())) == 72
    plain = fedrts.run(data=stored, out=tmp_path / "plain", **options)
    assert "valid_accuracy" not in plain.history[-1]
    assert plain.summary["best_accuracy"] == max(line["accuracy"] for line in plain.history if line["accuracy"] is not None)


def test_the_best_round_is_that_of_the_validation_set(stored):
    run = assembled(stored, data_options={"validation": 0.2})
    state = run.method.begin(run.setup)
    played = play_round(run.plan, state, 0)
    lines = [{**played.record.as_dict(), "accuracy": a, "valid_accuracy": v} for a, v in ((0.9, 0.1), (0.6, 0.8), (0.7, 0.5))]
    unseen = {key: value for key, value in lines[0].items() if key != "valid_accuracy"} | {"accuracy": None}
    ledger = ClientRecords.of(run.plan.guard)
    ledger.messages = 4
    assert summarise(run, played.state, ledger, [unseen, *lines])["best_accuracy"] == 0.6


def test_counting_operations_reads_normalised_inputs(stored):
    assert assembled(stored).plan.engine.bench.macs.dense > 0
