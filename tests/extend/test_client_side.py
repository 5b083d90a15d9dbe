"""A local optimiser and a schedule of one's own: one file beside the experiment, and every command knows them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from helping import ask
from outside import TINY, Beside, assert_compared_and_reported, command

MINE = '''
from fedrts.client.optimizers import LocalOptimizer


class Lion(LocalOptimizer):
    """The sign of a mean gradient, and a decay of the weights themselves (Chen et al., 2023)."""

    @property
    def remembers(self):
        return ("mean",)

    def step(self, weights, gradient, rates, taken, past):
        direction = (0.9 * past["mean"] + 0.1 * gradient).sign()
        weights.mul_(1 - self.weight_decay * rates).addcmul_(direction, rates, value=-1)
        past["mean"].mul_(0.99).add_(gradient, alpha=0.01)


def linear(progress, end):
    return 1 + (end - 1) * progress


def broken(progress, end):
    return "fast"


number = 3
'''


@pytest.fixture(autouse=True)
def mine(beside: Beside) -> None:
    beside("mine", MINE)


@pytest.mark.parametrize(("key", "usual", "own"), [("train.optimizer", "adamw", "mine:Lion"), ("train.schedule", "cosine", "mine:linear")])
def test_it_runs_and_is_compared_and_reported(key: str, usual: str, own: str):
    assert_compared_and_reported(key, usual, own)


@pytest.mark.parametrize("engine", ["serial", "batched"])
def test_a_client_steps_as_the_optimiser_says(toy, engine: str):
    train = {"optimizer": "mine:Lion", "lr": 0.01, "weight_decay": 0.5, "batch_size": 24}
    run = toy("random", "mlp", engine=engine, train=train, clients={"total": 5, "per_round": 2})
    state, n = run.method.begin(run.setup), run.layout.parameters
    exchange = run.plan.exchanges(run.plan.round(1, state.mask))[0]
    replies = ask(run, exchange, state, 1, [1, 3])  # 24 samples each: one step
    for client, reply in zip([1, 3], replies, strict=True):
        module, rows = run.module, run.rows[client]
        run.layout.bind(module, state.weights.clone())
        module.zero_grad()
        run.data.task.loss(module, run.data.x[rows], run.data.y[rows]).backward()
        gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
        flat = torch.cat([gradients[entry.name].flatten() for entry in run.layout.parameter_entries])
        expected = state.weights[:n] * (1 - 0.5 * 0.01) - 0.01 * flat.sign()
        expected[: run.layout.links] *= state.mask.bits
        torch.testing.assert_close(state.mask.expand(reply.message["weights"])[:n], expected, rtol=1e-5, atol=1e-6)


def test_a_round_trains_with_the_rate_of_the_schedule(toy):
    run = toy("random", "mlp", train={"schedule": "mine:linear", "lr": 0.8, "lr_end": 0.25}, rounds=4, topology={"end": 2})
    assert [run.training.rate(index) for index in range(4)] == pytest.approx([0.8, 0.6, 0.4, 0.2])


@pytest.mark.parametrize(
    ("assignment", "words"),
    [
        ("train.optimizer=lion", r"train\.optimizer must be 'adam', 'adamw', 'sgd' or an import path .*\(got 'lion'\)"),
        (
            "train.schedule=linear",
            r"train\.schedule must be 'constant', 'cosine', 'exponential', .* or an import path .*\(got 'linear'\)",
        ),
        ("train.optimizer=mine:number", "the local optimiser 'mine:number' is 3"),
        ("train.optimizer=mine:linear", r"'mine:linear' is no local optimiser: .* fedrts\.client\.optimizers\.LocalOptimizer"),
        ("train.schedule=mine:absent", "cannot import the schedule 'mine:absent'"),
        ("train.schedule=mine:broken", r"train\.schedule = 'mine:broken' gives no number for \(0, 0.01\)"),
    ],
)
def test_a_name_that_is_none_is_one_line(assignment: str, words: str):
    code, said = command("run", *TINY, "--set", assignment, "--out", "run")
    assert (code, said.count("\n")) == (2, 1), said
    assert re.search(words, said)
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["train.momentum=0.9", "train.optimizer=adam"], r"train\.momentum belongs to train\.optimizer = 'sgd' \(got 'adam'\)"),
        (["train.amsgrad=true"], r"train\.amsgrad belongs to train\.optimizer = 'adam' or 'adamw' \(got 'sgd'\)"),
        (["train.momentum=0.9", "train.optimizer=mine:Lion"], r"train\.momentum belongs to train\.optimizer = 'sgd' \(got 'mine:Lion'\)"),
    ],
)
def test_an_option_that_an_optimiser_would_ignore_is_a_mistake(settings: list[str], words: str):
    code, said = command("run", *TINY, *(f"--set={setting}" for setting in settings), "--out", "run")
    assert (code, said.count("\n")) == (2, 1), said
    assert re.search(words, said)
