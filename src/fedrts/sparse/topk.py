"""The k largest of every layer, as an indicator: h(i, x, κ) of the paper (Eq. 4, 5) for all layers at once."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from fedrts.sparse.arms import Layers
from fedrts.sparse.layout import starts

_MANY = 1 << 22
"""Scores from which on threads pay: layers are then divided among them."""
_SHORT = (torch.float16, torch.bfloat16)
"""Types that numpy lacks or is slow with; float32 holds their numbers exactly."""


def top(scores: Tensor, k: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """Indicator `bool [..., S]` of the `k[l]` largest `scores [..., S]` in each layer; layer l spans `sizes[l]` entries.

    Exactly k[l] entries per layer, also with ties (the lowest index wins) and NaN (counts as −∞). Finds a
    threshold by selection instead of sorting. Where `sizes` are of grouped links, the largest arms: those of the largest norm, or of the
    largest of `scores [..., U]`; as many as k[l] links have room for.
    """
    layers = Layers.of(sizes)
    return layers.spread(top_arms(scores, k, layers)) if layers.grouped else _top(scores, k, sizes)


def top_arms(scores: Tensor, k: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """The same as an indicator of arms, `bool [..., U]`."""
    layers = Layers.of(sizes)
    return _top(layers.scored(scores), layers.in_arms(k), layers.arms)


def top_arms_of_all(scores: Tensor, number: int, sizes: Sequence[int]) -> Tensor:
    """Indicator of arms `bool [..., U]` of the largest `scores` of all layers together, with `number` links or, where whole arms leave
    room that none fits in, with fewer. Arms of score −∞ come last, and only fill up where every link is an arm.
    """
    layers = Layers.of(sizes)
    scores = layers.scored(scores)
    if not layers.grouped:
        return _top(scores, [number], [scores.shape[-1]])
    each = layers.links_of_arms.to(scores.device)
    rows = [_fitting(row, number, each) for row in scores.reshape(-1, scores.shape[-1])]
    return torch.stack(rows).view(scores.shape)


def _fitting(scores: Tensor, number: int, each: Tensor) -> Tensor:
    """Return the best arms, by `scores [U]` with `each [U]` links, until one does not fit; then the best that still fit."""
    order = scores.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).argsort(descending=True, stable=True)
    order = order[scores[order] > -torch.inf]
    sizes = each[order]
    chosen = sizes.cumsum(0) <= number
    for size in sizes.unique().flip(0).tolist():
        room = (number - int(sizes[chosen].sum())) // size
        chosen[(~chosen & (sizes == size)).nonzero().squeeze(-1)[:room]] = True
    found = torch.zeros_like(scores, dtype=torch.bool)
    found[order[chosen]] = True
    return found


def _top(scores: Tensor, k: Sequence[int], sizes: Sequence[int]) -> Tensor:
    if scores.shape[-1] != sum(sizes) or len(k) != len(sizes):
        raise ValueError(f"{scores.shape[-1]} scores and {len(k)} counts do not fit layers of {list(sizes)}")
    begin = starts(sizes)
    if scores.device.type != "cpu":
        return _largest_on_device(scores, k, sizes)
    if scores.dtype in _SHORT:
        scores = scores.float()
    values = scores.detach().numpy()
    chosen = np.empty(scores.shape, dtype=np.bool_)

    def choose(layer: int) -> None:
        part = (..., slice(begin[layer], begin[layer + 1]))
        _largest(values[part], k[layer], chosen[part])

    if values.size < _MANY:
        list(map(choose, range(len(k))))
    else:
        with ThreadPoolExecutor(torch.get_num_threads()) as threads:
            list(threads.map(choose, range(len(k))))
    return torch.from_numpy(chosen)


def top_indices(scores: Tensor, k: Sequence[int], mask: Tensor, sizes: Sequence[int]) -> Tensor:
    """Ascending flat indices `[sum k]` of the `k[l]` largest `scores [S]` of each layer among the entries where `mask [S]` is true.

    Layers with k = 0 contribute nothing; a k above the number of candidates is an error. Where links are grouped, the links of the
    largest arms, which `scores [U]` may be of; the mask has whole arms.
    """
    layers = Layers.of(sizes)
    if not layers.grouped:
        return top_among(scores, k, mask.nonzero().squeeze(-1), by_layer(mask, sizes))
    return layers.spread(top_arms_among(scores, k, mask, layers)).nonzero().squeeze(-1)


def top_arms_among(scores: Tensor, k: Sequence[int], mask: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return `top_indices` as an indicator of arms, `bool [U]`."""
    layers = Layers.of(sizes)
    arms = layers.picked(mask)
    chosen = torch.zeros_like(arms)
    named = top_among(layers.scored(scores), layers.in_arms(k), arms.nonzero().squeeze(-1), by_layer(arms, layers.arms))
    return chosen.index_fill_(0, named, True)


def top_among(scores: Tensor, k: Sequence[int], candidates: Tensor, available: Sequence[int]) -> Tensor:
    """Choose the same of `scores [..., S]` among ascending `candidates [C]`, with `available[l]` of them in each layer."""
    if any(wanted > there for wanted, there in zip(k, available, strict=True)):
        raise ValueError(f"cannot choose {list(k)} of {list(available)} candidates")
    chosen = top(scores.index_select(-1, candidates), k, available)
    return candidates.expand(chosen.shape)[chosen].view(*scores.shape[:-1], sum(k))


def by_layer(bits: Tensor, sizes: Sequence[int]) -> tuple[int, ...]:
    """Return how many of the `bits [S]` are set in each layer, waiting for the device once."""
    parts = [part.count_nonzero() for part in bits.split(list(sizes))]
    return tuple(torch.stack(parts).tolist()) if parts else ()


def _largest(scores: np.ndarray, k: int, chosen: np.ndarray) -> None:
    """Write the indicator of the k largest of the last axis into `chosen`. numpy selects several times faster here than torch."""
    size = scores.shape[-1]
    if k <= 0 or k >= size:
        chosen[...] = k > 0
        return
    threshold = np.partition(scores, size - k, axis=-1)[..., size - k, None]
    np.greater_equal(scores, threshold, out=chosen)
    for row in np.ndindex(scores.shape[:-1]):
        if np.count_nonzero(chosen[row]) != k:
            _settle_ties(scores[row], threshold[row], k, chosen[row])


def _settle_ties(scores: np.ndarray, threshold: np.ndarray, k: int, chosen: np.ndarray) -> None:
    """Return the k largest of `scores [S]` if several equal the threshold, or some are NaN."""
    if np.isnan(scores).any():
        _largest(np.where(np.isnan(scores), -np.inf, scores), k, chosen)
        return
    np.greater(scores, threshold, out=chosen)
    missing = k - np.count_nonzero(chosen)
    chosen[np.flatnonzero(scores == threshold)[:missing]] = True


@lru_cache(maxsize=32)
def _held(sizes: tuple[int, ...], k: tuple[int, ...], device: torch.device) -> Tensor:
    """`[2, layers]`: sizes and counts on the device. To bring them there is to wait for it, and clients of a round have the same ones."""
    return torch.tensor([sizes, k], dtype=torch.int64).to(device)


def _largest_on_device(scores: Tensor, k: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """The same for all layers at once in torch operations: sorted by score, then by layer; the first of each layer are the largest."""
    device, layers = scores.device, len(sizes)
    size, wanted = _held(tuple(sizes), tuple(max(count, 0) for count in k), device)
    layer = torch.arange(layers, dtype=torch.int16, device=device).repeat_interleave(size, output_size=sum(sizes))
    number = scores.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    order = number.sort(dim=-1, descending=True, stable=True).indices
    order = order.gather(-1, layer[order].sort(dim=-1, stable=True).indices)
    first = torch.arange(len(layer), device=device) < (size.cumsum(0) - size + wanted)[layer.long()]
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order, first.expand_as(order))
