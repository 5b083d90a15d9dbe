"""Arms with known means, rewards of actions, and the greedy optimal action (the paper's Algorithm 3).

An action is a set of K arms, an indicator `bool [..., N]`. Its expected reward depends on the action and the means alone: r(S, μ).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedrts.sparse.topk import top

Reward = Callable[[Tensor, Tensor], Tensor]
"""r(S, μ): an action `bool [..., N]` and means `float64 [..., N]` to rewards `[...]`. Leading dimensions are a batch."""


def total(action: Tensor, means: Tensor) -> Tensor:
    """The linear reward r(S, μ) = Σ_{i∈S} μ_i: the best action is the top K."""
    return (action * means).sum(-1)


def any_success(action: Tensor, means: Tensor) -> Tensor:
    """r(S, μ) = 1 − Π_{i∈S} (1 − μ_i), the probability that at least one arm succeeds. Submodular, 1-continuous."""
    return 1 - torch.where(action, 1 - means, 1.0).prod(-1)


def greedy_action(reward: Reward, means: Tensor, pick: int) -> Tensor:
    """Return S* of Algorithm 3: add K times the arm that raises r(S ∪ {i}, μ) most. `means [..., N]` to `bool [..., N]`.

    Ties: the largest mean, then the lowest index. Costs K·N rewards. For the linear reward this is the top K, found by selection.
    """
    if reward is total:
        return top(means, [pick], [means.shape[-1]])
    action = torch.zeros(means.shape, dtype=torch.bool)
    for arm in greedy_order(reward, means, pick).unbind(-1):
        action.scatter_(-1, arm[..., None], True)
    return action


def greedy_order(reward: Reward, means: Tensor, pick: int) -> Tensor:
    """Return (s*_1, …, s*_K), int64 `[..., K]`: the arms of the greedy action in the order in which they are added.

    Optimistic means may be above 1: infinite ones come first, and a reward, which is one of probabilities, sees the others as 1.
    """
    if reward is total:
        return torch.argsort(means, dim=-1, descending=True, stable=True)[..., :pick]
    arms = means.shape[-1]
    one_more = torch.eye(arms, dtype=torch.bool)
    action = torch.zeros(means.shape, dtype=torch.bool)
    chances = means.clamp(max=1)[..., None, :].expand(*means.shape, arms)
    order = []
    for _ in range(pick):
        raised = reward(action[..., None, :] | one_more, chances).masked_fill(means.isinf(), torch.inf).masked_fill(action, -torch.inf)
        most = raised == raised.amax(-1, keepdim=True)
        best = means.masked_fill(~most, -torch.inf).argmax(-1, keepdim=True)
        action = action.scatter(-1, best, True)
        order.append(best)
    return torch.cat(order, -1)


def banded_means(arms: int, pick: int, gap: float) -> np.ndarray:
    """`[N]` descending: the K best spread evenly upwards from 0.5 + gap/2, the others downwards from 0.5 − gap/2.

    All differ, as the theorem asks: equal means among the best K make its bound infinite.
    """
    spread = (1 - gap) / 3
    best = np.linspace(0.5 + gap / 2 + spread, 0.5 + gap / 2, pick)
    others = np.linspace(0.5 - gap / 2, 0.5 - gap / 2 - spread, arms - pick) if arms > pick else np.empty(0)
    return np.concatenate([best, others])


@dataclass(frozen=True)
class Environment:
    """R independent repetitions of one bandit with the same means, permuted in each repetition so that an index reveals nothing."""

    means: Tensor
    """μ, float64 `[R, N]`."""
    pick: int
    reward: Reward = total
    clients: int = 1
    """An outcome is the mean of this many Bernoulli draws: 1 in the theory, one a client in a federation (Eq. 3 with γ = 0)."""

    @classmethod
    def shuffled(
        cls, means: np.ndarray, pick: int, repetitions: int, rng: np.random.Generator, reward: Reward = total, clients: int = 1
    ) -> Environment:
        return cls(torch.from_numpy(np.stack([rng.permutation(means) for _ in range(repetitions)])), pick, reward, clients)

    def best(self) -> Tensor:
        """The reward r(S*, μ) of every repetition, float64 `[R]`."""
        return self.reward(greedy_action(self.reward, self.means, self.pick), self.means)

    def outcomes(self, at: Tensor, rng: np.random.Generator) -> Tensor:
        """Draw outcomes X of the arms with the flat indices `at [m]`, float32 `[m]` in [0, 1]."""
        means = self.means.view(-1)[at].numpy()
        if self.clients == 1:
            return torch.from_numpy((rng.random(len(means)) < means).astype(np.float32))
        return torch.from_numpy((rng.binomial(self.clients, means) / self.clients).astype(np.float32))
