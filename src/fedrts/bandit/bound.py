"""The theorem's upper bound on the regret of TSAdj, with its constants.

Reg(T) ≤ Σ_{s≠s*_1} max_{k: s∉S*_k} 6 Δ_s^max L² log T / (Δ_{s,k} − 2LKε)²  +  (2K + 4N + (K·U + 8Kε⁴)/ε⁶) Δ_max

for every ε with Δ_{s,k} > 2LKε throughout. S* = (s*_1, …, s*_K) is the greedy action in the order of Algorithm 3,
Δ_{s,k} = r(S*_k, μ) − r(S*_{k−1} ∪ {s}, μ), and U a universal constant that the paper does not give. The theorem is printed without L²,
its proof with it: the proof's form is taken (the two agree for L = 1).
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedrts.bandit.environment import Reward, greedy_order, total

ENUMERABLE = 100_000
"""Actions up to which Δ_max of a reward of one's own is found by trying them all."""


@dataclass(frozen=True)
class Gaps:
    """The quantities of a bandit that the theorem needs."""

    marginal: np.ndarray
    """min_{k: s∉S*_k} Δ_{s,k} of every arm s ≠ s*_1, `[N−1]`."""
    largest: np.ndarray
    """Δ_s^max of the same arms, `[N−1]`."""
    widest: float
    """Δ_max."""
    arms: int
    pick: int


@dataclass(frozen=True)
class Bound:
    """logarithmic · log T + constant, for one ε."""

    logarithmic: float
    constant: float
    epsilon: float
    widest: float

    def after(self, steps: float) -> float:
        return self.logarithmic * math.log(steps) + self.constant

    def trivial(self, steps: float) -> float:
        """The bound that holds for any policy: T · Δ_max."""
        return steps * self.widest

    def vacuous(self, steps: float) -> bool:
        return not self.after(steps) < self.trivial(steps)

    def speaks_from(self) -> float:
        """The power of ten of steps from which the bound is below the trivial one; infinite if it never is, or exceeds all floats."""
        return next((power for power in range(sys.float_info.max_10_exp + 1) if not self.vacuous(10.0**power)), math.inf)


def gaps(means: Sequence[float] | np.ndarray, pick: int, reward: Reward = total) -> Gaps:
    """Compute the gaps of a bandit with means μ `[N]`."""
    mu = torch.from_numpy(np.array(means, dtype=np.float64))  # a copy: torch takes no array that is read backwards
    order = greedy_order(reward, mu, pick)
    first = int(order[0])
    others = [arm for arm in range(len(mu)) if arm != first]
    marginal, largest = _linear(mu, order, pick) if reward is total else _searched(mu, order, pick, reward)
    return Gaps(marginal[others].numpy(), largest[others].numpy(), float(largest.max()), len(mu), pick)


def bound(gaps: Gaps, steps: int, lipschitz: float = 1.0, universal: float = 1.0, epsilon: float | None = None) -> Bound:
    """Compute the bound at `steps` for the given ε, or the smallest over 2,000 values of ε; infinite if no ε is allowed."""
    limit = float(gaps.marginal.min()) / (2 * lipschitz * gaps.pick) if len(gaps.marginal) else math.inf
    limit = min(limit, 1.0)
    if limit <= 0 or (epsilon is not None and epsilon >= limit):
        return Bound(math.inf, math.inf, math.nan if epsilon is None else epsilon, gaps.widest)
    tried = limit * np.linspace(0, 1, 2002)[1:-1] if epsilon is None else np.array([epsilon])
    candidates = [_at(gaps, float(value), lipschitz, universal) for value in tried]
    return min(candidates, key=lambda candidate: candidate.after(steps))


def asymptotic_slope(means: Sequence[float] | np.ndarray, pick: int) -> float:
    """Σ_{s∉S*} (μ_K − μ_s) / kl(μ_s, μ_K): the least factor of log T for Bernoulli arms and the linear reward.

    No uniformly good policy grows more slowly (Anantharam et al., 1987); Thompson sampling attains it (Komiyama et al., 2015).
    """
    ordered = np.sort(np.asarray(means, dtype=np.float64))[::-1]
    last, others = ordered[pick - 1], ordered[pick:]
    others = others[others < last]
    with np.errstate(divide="ignore", invalid="ignore"):
        failing = np.where(others < 1, (1 - others) * np.log((1 - others) / (1 - last)), 0.0)
        kl = np.where(others > 0, others * np.log(others / last), 0.0) + failing
    return float(((last - others) / kl).sum())


def _at(gaps: Gaps, epsilon: float, lipschitz: float, universal: float) -> Bound:
    """Evaluate the theorem's right-hand side for one allowed ε; infinite if it exceeds all floats."""
    k, e = gaps.pick, np.float64(epsilon)
    with np.errstate(over="ignore", divide="ignore"):
        margin = gaps.marginal - 2 * lipschitz * k * e
        logarithmic = (6 * gaps.largest * np.float64(lipschitz) ** 2 / margin**2).sum()
        constant = (2 * k + 4 * gaps.arms + (k * universal + 8 * k * e**4) / e**6) * gaps.widest
    return Bound(float(logarithmic), float(constant), epsilon, gaps.widest)


def _linear(mu: Tensor, order: Tensor, pick: int) -> tuple[Tensor, Tensor]:
    """Return min_k Δ_{s,k} and Δ_s^max of every arm `[N]` for r = Σ μ_i, where Δ_{s,k} = μ_{s*_k} − μ_s."""
    weakest = torch.full_like(mu, float(mu[order[-1]]))  # an arm outside S* is compared with all of it,
    weakest[order[1:]] = mu[order[:-1]]  # s*_j with those before it
    ascending = mu.sort().values
    worst = ascending[: pick - 1].sum()
    company = torch.where(mu <= ascending[pick - 1], ascending[:pick].sum(), worst + mu)  # s and the K − 1 worst others
    return weakest - mu, mu[order].sum() - company


def _searched(mu: Tensor, order: Tensor, pick: int, reward: Reward) -> tuple[Tensor, Tensor]:
    """Return the same for any reward: over all actions if they are few, otherwise Δ ≤ r(S*), which holds for rewards ≥ 0."""
    arms = len(mu)
    one_more = torch.eye(arms, dtype=torch.bool)
    before = torch.zeros(arms, dtype=torch.bool)
    marginal = torch.full((arms,), torch.inf, dtype=torch.float64)
    for arm in order:
        after = before | one_more[arm]
        gap = reward(after, mu) - reward(before | one_more, mu.expand(arms, arms))
        marginal = torch.where(after, marginal, torch.minimum(marginal, gap))
        before = after
    best = reward(before, mu)
    if math.comb(arms, pick) > ENUMERABLE:
        return marginal, best.expand(arms).clone()
    largest = torch.zeros(arms, dtype=torch.float64)
    for action in itertools.combinations(range(arms), pick):
        chosen = torch.zeros(arms, dtype=torch.bool)
        chosen[list(action)] = True
        largest[chosen] = largest[chosen].clamp(min=float(best - reward(chosen, mu)))
    return marginal, largest
