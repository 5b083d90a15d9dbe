"""The theorem's bound against a computation by hand, and against its definition over all actions."""

import itertools
import math

import numpy as np
import pytest
import torch

from fedrts.bandit import bound as theorem
from fedrts.bandit.environment import any_success, total


def byhand(mu, pick, steps, lipschitz, universal, epsilon, reward):
    """The theorem as printed in the appendix, every maximum over everything that it ranges over."""
    arms, mu = len(mu), torch.tensor(mu, dtype=torch.float64)

    def r(chosen):
        action = torch.zeros(arms, dtype=torch.bool)
        action[list(chosen)] = True
        return float(reward(action, mu))

    greedy: list[int] = []
    for _ in range(pick):
        greedy.append(max((i for i in range(arms) if i not in greedy), key=lambda i: r([*greedy, i])))
    gap = {chosen: max(r(greedy) - r(chosen), 0.0) for chosen in itertools.combinations(range(arms), pick)}
    value = 0.0
    for s in range(arms):
        if s == greedy[0]:
            continue
        largest = max(amount for chosen, amount in gap.items() if s in chosen)
        terms = []
        for k in range(1, pick + 1):
            if s not in greedy[:k]:
                marginal = r(greedy[:k]) - r([*greedy[: k - 1], s])
                assert marginal > 2 * lipschitz * pick * epsilon
                terms.append(6 * largest * lipschitz**2 * math.log(steps) / (marginal - 2 * lipschitz * pick * epsilon) ** 2)
        value += max(terms)
    widest = max(gap.values())
    return value + (2 * pick + 4 * arms + (pick * universal + 8 * pick * epsilon**4) / epsilon**6) * widest


def test_two_arms_by_hand():
    # one arm of two, 0.7 and 0.3: Δ = 0.4 everywhere; ε = 0.1, so Δ − 2ε = 0.2
    found = theorem.bound(theorem.gaps([0.3, 0.7], 1), steps=1000, universal=2.0, epsilon=0.1)
    assert found.logarithmic == pytest.approx(6 * 0.4 / 0.2**2)  # 60
    assert found.constant == pytest.approx((2 + 8 + (2 + 8e-4) / 1e-6) * 0.4)  # 800,324
    assert found.after(1000) == pytest.approx(60 * math.log(1000) + 800_324)
    assert found.trivial(1000) == pytest.approx(400)
    assert found.vacuous(1000)
    assert not found.vacuous(10**7)
    assert found.speaks_from() == 7


@pytest.mark.parametrize("reward", [total, any_success])
@pytest.mark.parametrize("pick", [1, 2, 3])
def test_the_bound_is_the_theorem(reward, pick):
    mu = [0.31, 0.92, 0.55, 0.13, 0.71]
    epsilon = 1e-4
    found = theorem.bound(theorem.gaps(mu, pick, reward), 500, lipschitz=1.5, universal=3.0, epsilon=epsilon)
    assert found.after(500) == pytest.approx(byhand(mu, pick, 500, 1.5, 3.0, epsilon, reward), rel=1e-9)


def test_the_chosen_epsilon_is_at_least_as_good_as_any_other():
    gaps = theorem.gaps([0.9, 0.6, 0.2, 0.1], 2)
    limit = 0.3 / 4
    best = theorem.bound(gaps, 10_000)
    assert 0 < best.epsilon < limit
    for epsilon in np.linspace(0.01, 0.99, 99) * limit:
        assert best.after(10_000) <= theorem.bound(gaps, 10_000, epsilon=float(epsilon)).after(10_000) * 1.001


def test_equal_means_leave_no_epsilon():
    found = theorem.bound(theorem.gaps([0.7, 0.7, 0.2], 2), 1000)  # s*_2 is as good as s*_1
    assert math.isinf(found.after(1000))
    assert found.vacuous(1000)
    assert math.isinf(found.speaks_from())
    assert math.isinf(theorem.bound(theorem.gaps([0.7, 0.2], 1), 1000, epsilon=0.25).after(1000))


@pytest.mark.parametrize("extreme", [{"epsilon": 1e-60}, {"lipschitz": 1e60}, {"lipschitz": 1e200}, {"universal": 1e308}])
def test_a_bound_beyond_all_floats_is_infinite(extreme):
    found = theorem.bound(theorem.gaps([0.9, 0.6, 0.2, 0.1], 2), 1000, **extreme)
    assert math.isinf(found.after(1000))
    assert found.vacuous(1000)
    assert math.isinf(found.speaks_from())


def test_a_bound_that_speaks_after_more_steps_than_a_float_counts():
    assert math.isinf(theorem.Bound(1.0, 1e305, 0.1, 1e-9).speaks_from())


def test_many_actions_are_bounded_by_the_best_reward():
    mu = np.linspace(0.9, 0.1, 40)
    few = theorem.gaps(mu[:10], 3, any_success)
    many = theorem.gaps(mu, 10, any_success)  # 8.5e8 actions
    assert few.widest < 1
    assert many.widest == pytest.approx(1 - np.prod(1 - mu[:10]))


def test_the_least_slope_by_hand():
    # (0.7 − 0.3) / kl(0.3, 0.7), and the arms among the best do not count
    kl = 0.3 * math.log(0.3 / 0.7) + 0.7 * math.log(0.7 / 0.3)
    assert theorem.asymptotic_slope([0.9, 0.3, 0.7], 2) == pytest.approx(0.4 / kl)
    assert theorem.asymptotic_slope([0.5, 0.0], 1) == pytest.approx(0.5 / math.log(2))
    assert theorem.asymptotic_slope([0.5, 0.5], 1) == 0


@pytest.mark.parametrize("reward", [total, any_success])
def test_arrays_may_be_read_backwards(reward):
    """A view with negative strides, which torch refuses, has the gaps of the same numbers in a list; and is left as it was."""
    means = np.array([0.2, 0.5, 0.7, 0.4])
    found, expected = theorem.gaps(means[::-1], 2, reward), theorem.gaps(means[::-1].tolist(), 2, reward)
    assert found.marginal.tolist() == expected.marginal.tolist()
    assert found.largest.tolist() == expected.largest.tolist()
    assert found.widest == expected.widest
    assert means.tolist() == [0.2, 0.5, 0.7, 0.4]
