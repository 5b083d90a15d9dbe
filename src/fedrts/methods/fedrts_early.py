"""An earlier FedRTS: exactly Q^l links of a layer are dropped by a draw and Q^l grown by another, and posteriors live for one interval.

Inferred from a branch of the authors' library (January 2025, AdaFedPruning); the paper does not have it. v_i = 1 − X_i (Eq. 3, 4) is the
share of votes to drop an active link, u_i = γ·[i among the Q^l largest |Σ p_k g|] + (1 − γ)·Σ p_k [i ∈ I^k] that to grow an inactive one.

Every round, active links: (α_i, β_i) ← (α_i + λ·v_i, β_i + λ·(1 − v_i)); both start at Q^l / K^l in the first round after an outer one.
Outer rounds: the Q^l largest draws from Beta(α, β) among active links go. Of the n links of a layer that are inactive then, the Q^l largest
draws are grown, from Beta(λ·u_i + Q/n, Q/n) where u_i > 0 and from Beta(Q/n, Q/n + λ·(1 − Q/n)) where nobody voted. W ← W^agg ⊙ m, and
everything that was learned is forgotten.

Design decisions: clients send the gradients of the links they name, as in FedTiny (the branch sends all gradients), so Σ p_k g counts
a link as 0 if a client did not name it. Q^l is the capped quota of all methods.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from fedrts.methods import register
from fedrts.methods.bandit import Bandit, Outcome
from fedrts.methods.contract import Means, Rng, Round, Setup, State
from fedrts.sparse import posterior, random
from fedrts.sparse.mask import Mask
from fedrts.sparse.topk import top_arms_among, top_indices
from fedrts.wire.fields import Indices, Message, Selection, carried


@register("fedrts_early")
class FedRTSEarly(Bandit):
    """FedRTS as it was in January 2025: a quota of links is dropped by one draw and grown by another, with posteriors of one interval."""

    topology: ClassVar[str] = "drop the Q largest draws of votes against active links, grow the Q largest of votes for inactive ones"
    learned: ClassVar[tuple[str, ...]] = ("alpha", "beta")

    scale: Annotated[float, Field(gt=0, allow_inf_nan=False, description="λ: how much one observation counts")] = 10.0

    def begin(self, setup: Setup) -> State:
        nothing = torch.zeros(setup.layout.arms, dtype=torch.float32, device=setup.weights.device)
        return super().begin(setup).remember(alpha=nothing, beta=nothing.clone())  # 0: nothing is known yet

    def votes(self, round: Round) -> Indices:
        return Indices(of="gradient", k=round.quota, values=True)

    def contribution(self, message: Message, state: State, round: Round) -> Message:
        told = super().contribution(message, state, round)
        if not round.outer:
            return told
        named = carried(message["votes"], Selection)
        return {**told, "votes": named.names, "gradient": named}

    def learn(self, state: State, updated: State, outcome: Outcome, round: Round, rng: Rng) -> State:
        active, sizes = state.mask.arms.active, state.mask.arms.sizes
        alpha, beta = state["alpha"], state["beta"]
        prior = torch.where(alpha + beta > 0, 0.0, each(share(round.outgoing, round.counts), sizes, alpha))[active]
        kept = (outcome.values if outcome.at is not None else outcome.values[active]).to(alpha.dtype)
        alpha = alpha.index_add(0, active, prior + self.scale * (1 - kept))
        beta = beta.index_add(0, active, prior + self.scale * kept)
        return updated.remember(alpha=alpha, beta=beta)

    def update(self, state: State, mean: Means, round: Round, rng: Rng) -> State:
        updated = super().update(state, mean, round, rng)
        if not round.outer:
            return updated
        kept = self.dropped(updated, round, rng)
        new = self.grown(state.mask, kept, mean, round, rng)
        nothing = torch.zeros_like(state["alpha"])
        return updated.with_mask(new).remember(alpha=nothing, beta=nothing.clone())

    def dropped(self, state: State, round: Round, rng: Rng) -> Mask:
        """Return the mask without the Q^l active links whose samples favour dropping most (more of them if the density falls)."""
        mask, active = state.mask, state.mask.arms.active
        against = torch.zeros(len(mask.arms.bits), dtype=torch.float64, device=active.device)
        against[active] = drawn(state["alpha"][active], state["beta"][active], rng, "drop")
        kept = mask.bits.clone()
        kept[top_indices(against, round.outgoing, mask.bits, mask.sizes)] = False
        return Mask(kept, mask.sizes)

    def grown(self, mask: Mask, kept: Mask, mean: Means, round: Round, rng: Rng) -> Mask:
        """Return `kept` with the Q^l inactive links whose samples favour growing most."""
        agreed = top_arms_among(mean["gradient"].abs(), round.quota, ~mask.bits, mask.sizes)
        support = self.gamma * agreed.to(mean["votes"].dtype) + (1 - self.gamma) * mean["votes"]  # u
        free = [size - count for size, count in zip(kept.sizes, kept.counts, strict=True)]
        few = each(share(round.quota, free), mask.arms.sizes, support)  # Q / n
        doubt = torch.where(support > 0, few, few + self.scale * (1 - few))
        promise = drawn(self.scale * support + few, doubt, rng, "grow")
        new = kept.bits.clone()
        new[top_indices(promise, round.quota, ~kept.bits, mask.sizes)] = True
        return Mask(new, mask.sizes)


def drawn(alpha: Tensor, beta: Tensor, rng: Rng, purpose: str) -> Tensor:
    """Sample from Beta(α, β), float64; ties after rounding are broken at random, because many are 1 where β is small."""
    chance = random.uniform(rng(f"{purpose}, ties"), len(alpha), alpha.device)
    return posterior.draw(alpha, beta, rng(purpose)).double() + 1e-9 * chance.double()


def share(quota: Sequence[int], of: Sequence[int]) -> list[float]:
    """Return Q^l as a share of this many links, layer by layer."""
    return [q / max(count, 1) for q, count in zip(quota, of, strict=True)]


def each(values: Sequence[float], sizes: Sequence[int], like: Tensor) -> Tensor:
    """Return the value of each arm's layer, for every arm `[U]`."""
    return torch.tensor(values, dtype=like.dtype, device=like.device).repeat_interleave(torch.tensor(sizes, device=like.device))
