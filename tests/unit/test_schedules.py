"""Learning rates over rounds, by hand; and that a client trains with them."""

import pytest
import torch

from fedrts.client import schedules
from fedrts.client.training import LocalTraining
from fedrts.config import resolve
from fedrts.errors import InputError
from fedrts.methods.contract import Exchange, Train
from fedrts.wire.fields import Values
from helping import ask

HALF = 0.5**0.5

BY_HAND = {
    "constant": [1, 1, 1, 1, 1],
    "cosine": [1, 0.1 + 0.45 * (1 + HALF), 0.55, 0.1 + 0.45 * (1 - HALF), 0.1],
    "step": [1, 1, 0.1**0.5, 0.1, 0.1],
    "exponential": [1, 0.1**0.25, 0.1**0.5, 0.1**0.75, 0.1],
}


@pytest.mark.parametrize("schedule", BY_HAND)
def test_shares_of_five_rounds(schedule):
    training = LocalTraining(lr=2.0, schedule=schedule, lr_end=0.1, schedule_rounds=5)
    assert [training.rate(index) / 2 for index in range(5)] == pytest.approx(BY_HAND[schedule], rel=1e-12)
    assert training.rate(-1) == training.rate(0) == 2.0, "the set-up trains like round 0"
    assert LocalTraining(lr=2.0, schedule=schedule, lr_end=0.1, schedule_rounds=1).rate(0) == 2.0


def test_steps_come_after_a_half_and_three_quarters():
    shares = [schedules.share("step", index, 100, 0.01) for index in range(100)]
    assert shares == pytest.approx([1.0] * 50 + [0.1] * 25 + [0.01] * 25)


def test_the_experiment_knows_every_schedule():
    assert set(BY_HAND) == set(schedules.names())
    with pytest.raises(InputError, match=r"train\.schedule must be .*'cosine'.*linear"):
        resolve({"train": {"schedule": "linear"}})
    with pytest.raises(InputError, match=r"train\.lr_end must be a number > 0 and ≤ 1"):
        resolve({"train": {"lr_end": 0.0}})


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_client_trains_with_the_rate_of_its_round(toy, optimizer):
    """Round 3 of 7 under a cosine that ends at 0.2 is a round at 0.6 of the rate."""
    exchange = Exchange(down={"weights": Values()}, steps=(Train(),), up={"weights": Values(on="all")})
    common = {"epochs": 1, "batch_size": 8, "optimizer": optimizer}
    falling = toy("random", train={**common, "lr": 0.1, "schedule": "cosine", "lr_end": 0.2})
    steady = toy("random", train={**common, "lr": 0.06})
    (one,), (other,) = (ask(run, exchange, run.method.begin(run.setup), 3, [1]) for run in (falling, steady))
    torch.testing.assert_close(one.message["weights"], other.message["weights"])
    (first,) = ask(falling, exchange, falling.method.begin(falling.setup), 0, [1])
    (plain,) = ask(steady, exchange, steady.method.begin(steady.setup), 0, [1])
    assert not torch.allclose(first.message["weights"], plain.message["weights"], rtol=1e-3, atol=1e-4)
