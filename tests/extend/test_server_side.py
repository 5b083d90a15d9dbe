"""A reducer and a server optimiser of one's own: one file beside the experiment, no registration, and everything knows them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fedrts
from fedrts.errors import InputError
from fedrts.server import rounds
from fedrts.server.optimizer import Averaging
from helping import ask
from outside import TINY, Beside, assert_compared_and_reported, command

MINE = '''
import torch

from fedrts.server.optimizer import FedAdam
from fedrts.server.reducers import Reducer


class Krum(Reducer):
    """The weights of the client whose nearest neighbours are nearest (Blanchard et al., 2017)."""

    def __init__(self):
        self.held = []

    def add(self, weights, weight):
        self.held.append(weights)

    def result(self):
        held = torch.stack(self.held)
        near = torch.cdist(held, held).topk(max(len(held) - 2, 1), largest=False).values.sum(1)
        return held[near.argmin()]


class Yogi(FedAdam):
    """The second moment moves by additions alone (Zaheer et al., 2018)."""

    default_rate = 0.02

    def moments(self, change, before):
        square = change.square()
        second = before["second"] - (1 - self.beta2) * square * torch.sign(before["second"] - square)
        return {**super().moments(change, before), "second": second}


number = 3
'''


@pytest.fixture(autouse=True)
def mine(beside: Beside) -> None:
    beside("mine", MINE)


@pytest.mark.parametrize(("key", "usual", "own"), [("guard.reducer", "mean", "mine:Krum"), ("train.server_optimizer", "adam", "mine:Yogi")])
def test_it_runs_and_is_compared_and_reported(key: str, usual: str, own: str):
    assert_compared_and_reported(key, usual, own)


def test_the_result_is_what_the_reducer_says(toy):
    run = toy("random", "mlp", guard={"reducer": "mine:Krum"}, clients={"total": 5, "per_round": 4})
    state = run.method.begin(run.setup)
    after = rounds.play_round(run.plan, state, 1).state
    replies = ask(run, run.plan.exchanges(run.plan.round(1, state.mask))[0], state, 1, run.plan.sample(1))
    assert sum(torch.equal(after.values, reply.message["weights"]) for reply in replies) == 1


def test_the_step_is_the_optimisers(toy):
    run = toy("fedavg", "mlp", train={"server_optimizer": "mine:Yogi", "server_tau": 0.01})
    assert run.experiment.train.server_lr == run.plan.optimizer.rate == 0.02
    state, n = run.method.begin(run.setup), run.layout.parameters
    after = rounds.play_round(run.plan, state, 1).state
    change = (rounds.play_round(replace(run.plan, optimizer=Averaging()), state, 1).state.weights - state.weights)[:n]
    second = 0.01**2 - 0.01 * change**2 * torch.sign(0.01**2 - change**2)
    expected = state.weights[:n] + 0.02 * 0.1 * change / (second.sqrt() + 0.01)
    torch.testing.assert_close(after.weights[:n], expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(after["server_second"], second, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize(
    ("assignment", "words"),
    [
        ("guard.reducer=bulyan", r"guard\.reducer must be 'aligned', 'centred_clip', 'clip', .* or an import path .*\(got 'bulyan'\)"),
        ("train.server_optimizer=yogi", r"train\.server_optimizer must be 'adam', 'momentum', 'sgd' or an import path .*\(got 'yogi'\)"),
        ("guard.reducer=mine:number", "the reducer 'mine:number' is 3"),
        ("guard.reducer=mine:Yogi", r"'mine:Yogi' is no reducer: it must be a subclass of fedrts\.server\.reducers\.Reducer"),
        ("train.server_optimizer=mine:Krum", r"'mine:Krum' is no server optimiser: .* fedrts\.server\.optimizer\.ServerOptimizer"),
        ("guard.reducer=absent:Krum", "cannot import the reducer 'absent:Krum'"),
    ],
)
def test_a_name_that_is_none_is_one_line(assignment: str, words: str):
    code, said = command("run", *TINY, "--set", assignment, "--out", "run")
    assert (code, said.count("\n")) == (2, 1), said
    assert re.search(words, said)
    assert not Path("run").exists()


def test_what_a_reducer_needs_others_are_told(toy):
    """It carries what they ask: Ray's actors cannot merge it, and methods whose clients have masks of their own cannot have it."""
    with pytest.raises(InputError, match=r"guard\.reducer = 'mine:Krum' needs every client's weights .*use 'clip' or 'mean', or"):
        toy("random", engine="ray", guard={"reducer": "mine:Krum"})
    with pytest.raises(InputError, match=r"guard\.reducer = 'mine:Krum' needs weights on one mask; .*: use 'mean'$"):
        fedrts.run(data="digits", method="feddst", rounds=1, guard={"reducer": "mine:Krum"}, device="cpu", out="run")
