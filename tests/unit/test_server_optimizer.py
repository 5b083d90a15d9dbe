"""The server's optimiser, number by number."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedrts import config
from fedrts.errors import InputError
from fedrts.methods.contract import State
from fedrts.server import optimizer as optimizers
from fedrts.sparse.mask import Mask

LINKS, DENSE, STATISTICS = 4, 2, 1
KINDS = ["sgd", "momentum", "adam"]


def state_of(bits, values):
    mask = Mask(torch.tensor(bits, dtype=torch.bool), [LINKS])
    return State(mask.compact(torch.tensor([*values])), mask)


@st.composite
def journeys(draw):
    """What a method makes of four rounds: masks of two links, weights on them (0 where it starts a link anew), the rest, a statistic."""
    number = st.floats(-2, 2, width=32).filter(lambda x: abs(x) > 1e-3)
    steps = []
    for _ in range(4):
        on = draw(st.permutations([True, True, False, False]))
        anew = draw(st.lists(st.booleans(), min_size=LINKS, max_size=LINKS))
        links = [draw(number) if active and not fresh else 0.0 for active, fresh in zip(on, anew, strict=True)]
        steps.append((on, [*links, draw(number | st.just(0.0)), draw(number), draw(number)]))
    return steps


@given(journeys(), st.sampled_from(KINDS), st.sampled_from([0.1, 0.5, 1.0]), st.sampled_from([0.0, 0.5, 0.9]), st.sampled_from([0.5, 0.99]))
def test_every_number_by_hand(journey, kind, rate, beta, beta2):
    optimizer = optimizers.get(kind)(rate, beta, beta2, tau=0.01)
    state = state_of([1, 1, 0, 0], [0.5, -0.5, 0.0, 0.0, 1.0, -1.0, 2.0])
    at = state.weights.tolist()
    first, second = [0.0] * (LINKS + DENSE), [0.01**2] * (LINKS + DENSE)
    for bits, made in journey:
        after = state_of(bits, made)
        after = State(after.values, after.mask, state.memory)
        state = optimizer.step(state, after, LINKS + DENSE)
        for i in range(LINKS + DENSE):
            if i < LINKS and made[i] == 0.0:  # dropped, or started anew: no past
                at[i], first[i], second[i] = 0.0, 0.0, 0.01**2
                continue
            change = made[i] - at[i]
            if kind == "sgd":
                at[i] += rate * change
            elif kind == "momentum":
                first[i] = beta * first[i] + change
                at[i] += rate * first[i]
            else:
                first[i] = beta * first[i] + (1 - beta) * change
                second[i] = beta2 * second[i] + (1 - beta2) * change**2
                at[i] += rate * first[i] / (math.sqrt(second[i]) + 0.01)
        at[-1] = made[-1]  # a statistic is the average
        assert state.weights.tolist() == pytest.approx(at, rel=1e-4, abs=1e-5)
        assert state.weights[:LINKS][~state.mask.bits].count_nonzero() == 0
        assert state.mask == after.mask
    assert set(state.memory) == {"sgd": set(), "momentum": {"server_first"}, "adam": {"server_first", "server_second"}}[kind]


def test_a_rate_of_one_is_the_average_itself():
    before, after = state_of([1, 1, 0, 0], [0.1] * 7), state_of([0, 1, 1, 0], [0.3] * 7)
    assert optimizers.get("sgd")(1.0).step(before, after, 6) is after


@pytest.mark.parametrize(("train", "rate"), [({}, 1.0), ({"server_optimizer": "momentum"}, 1.0), ({"server_optimizer": "adam"}, 0.01)])
def test_the_rate_of_the_server_is_decided_and_written_down(train, rate, tmp_path):
    assert config.resolve({"train": train}).train.server_lr == rate
    assert config.resolve({"train": {**train, "server_lr": 0.3}}).train.server_lr == 0.3
    resolved = config.resolve({"train": train}).model_dump(exclude_none=True)
    assert config.resolve(resolved).train.server_lr == rate, "an experiment that was written down stays as it is"


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("server_optimizer", "adagrad", ["train.server_optimizer", "'sgd'", "'momentum'", "'adam'", "adagrad"]),
        ("server_lr", 0.0, ["train.server_lr", "> 0"]),
        ("server_lr", -1.0, ["train.server_lr", "> 0"]),
        ("server_lr", math.nan, ["train.server_lr"]),
        ("server_lr", "fast", ["train.server_lr"]),
        ("server_momentum", 1.0, ["train.server_momentum", "< 1"]),
        ("server_momentum", -0.1, ["train.server_momentum", "≥ 0"]),
        ("server_beta2", 1.0, ["train.server_beta2", "< 1"]),
        ("server_tau", 0.0, ["train.server_tau", "> 0"]),
        ("proximal", -0.1, ["train.proximal", "≥ 0"]),
        ("proximal", math.inf, ["train.proximal"]),
        ("server_rate", 0.1, ["unknown key 'train.server_rate'", "did you mean"]),
    ],
)
def test_bad_settings_are_one_line(key, value, words):
    with pytest.raises(InputError) as caught:
        config.resolve({"train": {key: value}})
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words), message
