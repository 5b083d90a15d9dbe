"""Policies against loops written out from the paper, the greedy oracle against all actions, and regret's growth."""

import itertools
import json
import math

import numpy as np
import pytest
import torch

from fedrts.bandit import policies, regret
from fedrts.bandit.environment import Environment, any_success, banded_means, greedy_action, greedy_order, total
from fedrts.bandit.study import Settings, names, reward_of, study
from fedrts.errors import InputError


def weighted(action, means):
    """A reward of one's own: means at even places count double, and the more there is the less more of it helps."""
    worth = means * torch.where(torch.arange(means.shape[-1]) % 2 == 0, 2.0, 1.0)
    return torch.sqrt((action * worth).sum(-1))


def all_actions(arms, pick):
    for chosen in itertools.combinations(range(arms), pick):
        yield torch.zeros(arms, dtype=torch.bool).index_fill(0, torch.tensor(chosen), True)


@pytest.mark.parametrize("reward", [total, any_success])
@pytest.mark.parametrize("seed", range(5))
def test_the_greedy_action_is_the_best_of_all(reward, seed):
    means = torch.rand(8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    best = max(all_actions(8, 3), key=lambda action: float(reward(action, means)))
    assert torch.equal(greedy_action(reward, means, 3), best)


def test_the_oracle_takes_the_arm_that_helps_most_step_by_step():
    means = torch.tensor([0.5, 0.9, 0.2, 0.95, 0.44], dtype=torch.float64)  # doubled at even places: 1.0, 0.9, 0.4, 0.95, 0.88
    assert greedy_order(weighted, means, 3).tolist() == [0, 3, 1]
    batch = torch.stack([means, means.flip(0)])
    assert greedy_order(weighted, batch, 2).tolist() == [[0, 3], [4, 1]]
    assert greedy_action(weighted, batch, 2).sum(-1).tolist() == [2, 2]


def test_the_general_oracle_and_the_selection_agree_on_the_linear_reward():
    def linear(action, means):
        return (action * means).sum(-1)

    means = torch.rand(4, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert torch.equal(greedy_action(linear, means, 7), greedy_action(total, means, 7))
    assert torch.equal(greedy_order(linear, means, 7), greedy_order(total, means, 7))


def byhand_cucb(outcomes, pick):
    """The paper's appendix, one arm at a time; `outcomes [T, N]`. Returns the arms played in every step."""
    arms = len(outcomes[0])
    mean, played, history = [0.0] * arms, [0] * arms, []
    for t, x in enumerate(outcomes, start=1):
        bound = [mean[i] + math.sqrt(3 * math.log(max(t, 2)) / (2 * played[i])) if played[i] else 1e6 for i in range(arms)]
        chosen = sorted(sorted(range(arms), key=lambda i: (-bound[i], i))[:pick])
        for i in chosen:
            played[i] += 1
            mean[i] = (mean[i] * (played[i] - 1) + x[i]) / played[i]
        history.append(chosen)
    return history


def byhand_greedy(outcomes, pick):
    arms = len(outcomes[0])
    alpha, beta, history = [1.0] * arms, [1.0] * arms, []
    for x in outcomes:
        chosen = sorted(sorted(range(arms), key=lambda i: (-alpha[i] / (alpha[i] + beta[i]), i))[:pick])
        for i in chosen:
            alpha[i], beta[i] = alpha[i] + x[i], beta[i] + 1 - x[i]
        history.append(chosen)
    return history


@pytest.mark.parametrize(("policy", "byhand"), [(policies.CUCB, byhand_cucb), (policies.Greedy, byhand_greedy)])
def test_deterministic_policies_play_as_written_out(policy, byhand):
    outcomes = (np.random.default_rng(3).random((60, 6)) < [0.2, 0.9, 0.5, 0.7, 0.1, 0.6]).astype(np.float32)
    player, rng, history = policy(6), np.random.default_rng(0), []
    for step, x in enumerate(outcomes, start=1):
        at = greedy_action(total, player.estimate(step, rng), 2).nonzero().squeeze(-1)
        player.learn(torch.from_numpy(x)[at], at)
        history.append(at.tolist())
    assert history == byhand(outcomes.tolist(), 2)


@pytest.mark.parametrize("reward", [any_success, weighted])
def test_arms_never_played_come_first_under_any_reward(reward):
    player, rng = policies.CUCB(6), np.random.default_rng(0)
    player.learn(torch.tensor([0.0, 1.0, 1.0]), torch.tensor([0, 2, 4]))
    assert set(greedy_order(reward, player.estimate(2, rng), 4).tolist()[:3]) == {1, 3, 5}
    assert greedy_action(reward, player.estimate(2, rng), 3).tolist() == [False, True] * 3


def test_optimism_above_certainty_does_not_mislead_the_oracle():
    """A chance above 1 would make a further arm count against the others."""
    estimate = torch.tensor([[1.5, 1.4, 1.3, 0.2, 0.1, 0.3]])
    assert greedy_action(any_success, estimate, 2).tolist() == [[True, True, False, False, False, False]]
    certain = torch.tensor([0.2, 1.0, 0.1, 0.9], dtype=torch.float64)  # after the second arm none raises the reward
    assert greedy_order(any_success, certain, 3).tolist() == [1, 3, 0]


@pytest.mark.parametrize("scale", [1.0, 10.0])
def test_thompson_sampling_learns_of_what_it_played_alone_and_draws_from_its_posterior(scale):
    player = policies.TSAdj(4, scale)
    player.learn(torch.tensor([1.0, 0.0]), torch.tensor([1, 3]))
    player.learn(torch.tensor([0.5]), torch.tensor([1]))
    assert player.alpha.tolist() == [1, 1 + 1.5 * scale, 1, 1]
    assert player.beta.tolist() == [1, 1 + 0.5 * scale, 1, 1 + scale]
    rng = np.random.default_rng(0)
    drawn = torch.stack([player.estimate(1, rng) for _ in range(2000)])
    a, b = player.alpha.double(), player.beta.double()
    mean, variance = a / (a + b), a * b / ((a + b) ** 2 * (a + b + 1))
    assert ((drawn.mean(0) - mean).abs() < 5 * (variance / 2000).sqrt()).all()
    torch.testing.assert_close(drawn.var(0).double(), variance, rtol=0.2, atol=0)


def test_outcomes_have_the_means_of_the_arms_and_the_spread_of_the_clients():
    means = np.array([0.1, 0.8])
    for clients in (1, 10):
        world = Environment.shuffled(means, 1, 2, np.random.default_rng(0), clients=clients)
        at = torch.arange(4).repeat(5000)
        seen = world.outcomes(at, np.random.default_rng(1)).view(5000, 4)
        mu = world.means.view(-1)
        torch.testing.assert_close(seen.mean(0).double(), mu, atol=0.03, rtol=0)
        torch.testing.assert_close(seen.var(0).double(), mu * (1 - mu) / clients, atol=0.01, rtol=0.1)


def test_regret_is_that_of_the_expected_rewards_and_never_falls():
    world = Environment(torch.tensor([[0.9, 0.5, 0.1], [0.1, 0.9, 0.5]], dtype=torch.float64), pick=1)

    class RoundRobin(policies.RandomPolicy):
        def estimate(self, step, rng):
            return torch.nn.functional.one_hot(torch.tensor([(step - 1) % 3] * 2), 3).float().view(-1)

    found = regret.play(RoundRobin(6), world, 6, np.arange(1, 7), np.random.default_rng(0))
    np.testing.assert_allclose(found, [[0, 0.4, 1.2, 1.2, 1.6, 2.4], [0.8, 0.8, 1.2, 2.0, 2.0, 2.4]], atol=1e-12)
    for policy in (policies.TSAdj(6, 1.0), policies.CUCB(6)):
        curve = regret.play(policy, world, 50, np.arange(1, 51), np.random.default_rng(0))
        assert (np.diff(curve, axis=1) >= 0).all()
        assert (curve >= 0).all()


@pytest.mark.parametrize("law", regret.GROWTHS)
def test_a_law_is_recognised(law):
    at = regret.checkpoints(10_000)
    fits = regret.fits(at, 3 + 2 * regret.GROWTHS[law](at.astype(float)), start=1000)
    assert max(fits, key=lambda name: fits[name].r2) == law
    assert fits[law].slope == pytest.approx(2)
    assert fits[law].intercept == pytest.approx(3)
    ratio = regret.doubling(at, 3 + 2 * regret.GROWTHS[law](at.astype(float)))
    assert ratio == pytest.approx({"log t": 1, "√t": math.sqrt(2), "t": 2}[law], rel=0.01)


@pytest.fixture(scope="module")
def small():
    return study(Settings(arms=20, pick=4, steps=2000, repetitions=20))


def test_thompson_sampling_grows_like_a_logarithm(small):
    curve = small.curves["TSAdj λ=1"]
    assert curve.law == "log t"
    assert curve.fits["log t"].r2 > 0.98
    assert curve.fits["t"].r2 < 0.95
    assert 0.5 * small.slope < curve.fits["log t"].slope < 2 * small.slope
    assert curve.doubling < 1.25


def test_the_order_of_the_policies(small):
    last = {name: curve.mean[-1] for name, curve in small.curves.items()}
    assert list(last) == names(small.settings) == ["TSAdj λ=1", "TSAdj λ=10", "CUCB", "greedy", "random"]
    assert last["TSAdj λ=1"] < last["CUCB"] < last["random"] / 5
    assert small.curves["random"].law == "t"
    assert last["TSAdj λ=1"] < last["greedy"]  # which locks good arms out


def test_a_regret_that_ends_has_no_law():
    found = study(Settings(arms=6, pick=2, steps=2000, repetitions=3, scales=(50.0,), clients=50, gap=0.9))
    curve = found.curves["TSAdj λ=50"]
    assert curve.law == "stopped"
    assert found.summary()["policies"]["TSAdj λ=50"]["law"] == "stopped"
    json.dumps(found.summary(), allow_nan=False)


def test_a_study_is_a_function_of_its_settings():
    settings = Settings(arms=10, pick=2, steps=100, repetitions=3, scales=(1.0,))
    first, again, other = study(settings), study(settings), study(Settings(**{**vars(settings), "seed": 1}))
    for name, curve in first.curves.items():
        assert np.array_equal(curve.mean, again.curves[name].mean)
    assert not np.array_equal(first.curves["TSAdj λ=1"].mean, other.curves["TSAdj λ=1"].mean)


def test_a_failing_report_stops_every_policy():
    def fail(name, step):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        study(Settings(arms=10, pick=2, steps=100_000, repetitions=2), fail)


def test_means_have_their_gap_and_all_differ():
    means = banded_means(50, 7, 0.4)
    assert means[6] - means[7] == pytest.approx(0.4)
    assert len(set(means)) == 50
    assert (np.diff(means) < 0).all()
    assert 0 <= means.min() < means.max() <= 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"arms": 1},
        {"pick": 0},
        {"pick": 1000},
        {"steps": 9},
        {"scales": (0.0,)},
        {"scales": (float("nan"),)},
        {"scales": (1.0, 1.0)},
        {"repetitions": 1},
        {"gap": 1.0},
        {"universal": -1.0},
        {"epsilon": 0.0},
        {"clients": 0},
    ],
)
def test_settings_that_make_no_sense(wrong):
    with pytest.raises(InputError):
        Settings(**wrong)


def whole(actions, means):
    return actions.sum(-1)


def of_tables(actions, means):
    assert actions.dim() == 2
    return means.sum(-1)


def endless(actions, means):
    return means.sum(-1) / 0


def test_rewards_of_ones_own_are_tried_before_they_are_played():
    for name, words in (("of_tables", r"fails on actions and means \[2, 4, 3\]"), ("endless", "must be finite")):
        with pytest.raises(InputError, match=words):
            reward_of(f"{__name__}:{name}")
    found = study(Settings(arms=6, pick=2, steps=20, repetitions=2, reward=f"{__name__}:whole"))
    assert all(curve.mean[-1] == 0 for curve in found.curves.values()), "every two arms are as good"


def test_scales_that_look_alike_are_two_policies():
    assert names(Settings(scales=(1.0, 1.0000001)))[:2] == ["TSAdj λ=1", "TSAdj λ=1.0000001"]


def test_more_clients_than_can_be_counted():
    with pytest.raises(InputError, match=r"--clients must be at least 1 and less than 2⁶³"):
        Settings(clients=10**20)
