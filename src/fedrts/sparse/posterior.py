"""One Beta posterior per link, the memory of Thompson sampling (Eq. 2 and 6)."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from fedrts.sparse import fresh, random

_CHUNK = 1 << 16
"""Links drawn from one random stream: fixed, so that a draw does not depend on the number of threads."""

_EPSILON = float(np.finfo(np.float32).eps)


def observe(alpha: Tensor, beta: Tensor, outcome: Tensor, scale: float, at: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Eq. 6: (α, β) ← (α + λX, β + λ(1−X)) at the observed links.

    `alpha`, `beta` `[P]`; `outcome` in [0, 1] of every link `[P]`, or `[m]` of the links with the indices `at [m]`: the
    others are unobserved (X = None) and keep theirs. Posteriors stay in the precision that they have.
    """
    outcome = outcome.to(alpha.dtype)
    missed = torch.sub(torch.ones((), dtype=outcome.dtype), outcome, out=fresh.empty(outcome.shape, outcome))
    if at is None:
        seen = torch.add(alpha, outcome, alpha=scale, out=fresh.empty(alpha.shape, alpha))
        return seen, torch.add(beta, missed, alpha=scale, out=missed)
    return fresh.copy(alpha).index_add_(0, at, outcome, alpha=scale), fresh.copy(beta).index_add_(0, at, missed, alpha=scale)


def faded(alpha: Tensor, beta: Tensor, keep: float, at: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(α, β) ← (1 + ρ(α−1), 1 + ρ(β−1)) at the links `at [m]` (None: all): keeps a share ρ = `keep` of the observations."""
    if keep == 1:
        return alpha, beta
    if at is None:
        return 1 + keep * (alpha - 1), 1 + keep * (beta - 1)
    return alpha.index_copy(0, at, 1 + keep * (alpha[at] - 1)), beta.index_copy(0, at, 1 + keep * (beta[at] - 1))


def mean(alpha: Tensor, beta: Tensor) -> Tensor:
    """E[P_i] = α / (α + β), `[P]`."""
    return alpha / (alpha + beta)


def draw(alpha: Tensor, beta: Tensor, key: int) -> Tensor:
    """ξ_i ~ Beta(α_i, β_i), independent, float32 `[P]` in (0, 1); a pure function of its arguments on one type of device.

    As the ratio of two Gamma variates: `torch.distributions.Beta` takes no generator.
    """
    if alpha.device.type == "cpu":
        return torch.from_numpy(_betas(alpha.numpy(), beta.numpy(), key))
    generator = torch.Generator(alpha.device).manual_seed(random.seed(key))
    a, b = (torch._standard_gamma(shape, generator=generator) for shape in (alpha, beta))
    return a.div_(b.add_(a)).clamp_(_EPSILON, 1 - _EPSILON)


def _betas(alpha: np.ndarray, beta: np.ndarray, key: int) -> np.ndarray:
    """Draw Beta variates, float32, in fixed-size chunks with a stream each, spread over the cores."""
    out = np.empty(alpha.shape, dtype=np.float32)

    def fill(start: int) -> None:
        stream = np.random.Generator(np.random.SFC64(random.key(key, start)))
        part = slice(start, start + _CHUNK)
        a, b = (stream.standard_gamma(shape[part], dtype=np.float32) for shape in (alpha, beta))
        np.clip(a / (a + b), _EPSILON, 1 - _EPSILON, out=out[part])

    chunks = range(0, len(out), _CHUNK)
    if len(chunks) <= 1:
        list(map(fill, chunks))
    else:
        with ThreadPoolExecutor(os.cpu_count() or 1) as threads:
            list(threads.map(fill, chunks))
    return out
