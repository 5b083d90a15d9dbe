"""The k largest of every layer, as an indicator: h(i, x, κ) of the paper (Eq. 4, 5) for all layers at once."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import torch
from torch import Tensor

from fedrts.sparse.layout import starts

_WORTH_A_THREAD = 1 << 18


def top(scores: Tensor, k: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """Indicator `bool [..., S]` of the `k[l]` largest `scores [..., S]` in each layer; layer l spans `sizes[l]` entries.

    Exactly k[l] entries per layer, also with ties (the lowest index wins) and NaN (ranks below everything). Finds a
    threshold by selection instead of sorting.
    """
    if scores.shape[-1] != sum(sizes) or len(k) != len(sizes):
        raise ValueError(f"{scores.shape[-1]} scores and {len(k)} counts do not fit layers of {list(sizes)}")
    chosen = torch.empty(scores.shape, dtype=torch.bool, device=scores.device)
    begin = starts(sizes)

    def fill(layer: int) -> None:
        span = slice(begin[layer], begin[layer + 1])
        chosen[..., span] = _largest(scores[..., span], k[layer])

    layers = range(len(sizes))
    if scores.device.type == "cpu" and scores.numel() > _WORTH_A_THREAD and len(sizes) > 1:
        list(_threads().map(fill, sorted(layers, key=lambda layer: -sizes[layer])))
    else:
        for layer in layers:
            fill(layer)
    return chosen


def top_indices(scores: Tensor, k: Sequence[int], mask: Tensor, sizes: Sequence[int]) -> Tensor:
    """Ascending flat indices `[sum k]` of the `k[l]` largest `scores [S]` of each layer among the entries where `mask [S]` is true.

    Layers with k = 0 contribute nothing; a k above the number of candidates is an error.
    """
    candidates = mask.nonzero().squeeze(-1)
    available = [int(part.count_nonzero()) for part in mask.split(list(sizes))]
    if any(wanted > there for wanted, there in zip(k, available, strict=True)):
        raise ValueError(f"cannot choose {list(k)} of {available} candidates")
    return candidates[top(scores[candidates], k, available)]


def _largest(scores: Tensor, k: int) -> Tensor:
    size = scores.shape[-1]
    if k <= 0 or k >= size:
        return torch.full_like(scores, k > 0, dtype=torch.bool)
    threshold = _kth_largest(scores, k)
    chosen = scores >= threshold
    if _all_count(chosen, k):
        return chosen
    above, equal = scores > threshold, scores == threshold
    missing = k - above.sum(-1, keepdim=True)
    chosen = above | (equal & (equal.cumsum(-1) <= missing))
    if _all_count(chosen, k):
        return chosen
    if not scores.isnan().any():
        raise AssertionError("top-k lost count")  # pragma: no cover - would be a defect of the lines above
    order = torch.argsort(scores.masked_fill(scores.isnan(), -torch.inf), dim=-1, descending=True, stable=True)
    return torch.zeros_like(chosen).scatter(-1, order[..., :k], True)


def _kth_largest(scores: Tensor, k: int) -> Tensor:
    """`[..., 1]`: the k-th largest entry of the last axis."""
    if scores.device.type == "cpu":  # six times faster here than torch.kthvalue, twelve times than torch.topk
        position = scores.shape[-1] - k
        return torch.from_numpy(np.partition(scores.numpy(), position, axis=-1)[..., position, None])
    return torch.topk(scores, k, dim=-1, sorted=False).values.amin(-1, keepdim=True)


def _all_count(chosen: Tensor, k: int) -> bool:
    return bool((chosen.sum(-1) == k).all()) if chosen.dim() > 1 else int(chosen.count_nonzero()) == k


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="fedrts-top")
