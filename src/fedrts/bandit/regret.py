"""Playing a policy, its cumulative regret, and how that grows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from fedrts.bandit.environment import Environment, greedy_action
from fedrts.bandit.policies import Policy

GROWTHS: dict[str, Callable[[np.ndarray], np.ndarray]] = {"log t": np.log, "√t": np.sqrt, "t": lambda t: t}
"""Laws that a regret is held against: Reg(t) ≈ a + b·g(t)."""

_REPORT_EVERY = 50


def checkpoints(steps: int, count: int = 200) -> np.ndarray:
    """Return steps from 1 to the last, evenly spaced on a logarithmic axis."""
    return np.unique(np.geomspace(1, steps, count).round().astype(int))


def play(
    policy: Policy,
    environment: Environment,
    steps: int,
    at: np.ndarray,
    rng: np.random.Generator,
    report: Callable[[int], None] = lambda _: None,
) -> np.ndarray:
    """Compute the cumulative regret Σ_{τ≤t} Δ_{S_τ} of every repetition after the steps `at [C]`, `[R, C]`.

    Of expectations, not of outcomes: it never falls.
    """
    best = environment.best()
    regret = best.new_zeros(len(best))
    kept = np.empty((len(best), len(at)))
    column = 0
    for step in range(1, steps + 1):
        estimate = policy.estimate(step, rng).view(environment.means.shape)
        action = greedy_action(environment.reward, estimate, environment.pick)
        regret += (best - environment.reward(action, environment.means)).clamp_(min=0)
        played = torch.from_numpy(np.flatnonzero(action.numpy()))
        policy.learn(environment.outcomes(played, rng), played)
        if step == at[column]:
            kept[:, column] = regret
            column += 1
        if step % _REPORT_EVERY == 0 or step == steps:
            report(step)
    return kept


@dataclass(frozen=True)
class Fit:
    """A fit Reg(t) ≈ a + b·g(t) by least squares."""

    slope: float
    intercept: float
    r2: float


def fits(at: np.ndarray, regret: np.ndarray, start: int) -> dict[str, Fit]:
    """Fit each law of `GROWTHS` to the mean regret `[C]` after the steps `at [C]`, from step `start` on."""
    late = at >= start
    t, y = at[late].astype(float), regret[late]
    spread = float(((y - y.mean()) ** 2).sum())
    result = {}
    for name, growth in GROWTHS.items():
        slope, intercept = np.polyfit(growth(t), y, 1)
        missed = float(((y - intercept - slope * growth(t)) ** 2).sum())
        result[name] = Fit(float(slope), float(intercept), 1 - missed / spread if spread > 0 else 1.0)
    return result


def doubling(at: np.ndarray, regret: np.ndarray) -> float:
    """Return (Reg(T) − Reg(T/2)) / (Reg(T/2) − Reg(T/4)) of a mean regret `[C]`: 1 for a logarithm, √2 for √t, 2 for a line."""
    last, half, quarter = np.interp(at[-1] / np.array([1, 2, 4]), at, regret)
    return float((last - half) / (half - quarter)) if half > quarter else float("nan")
