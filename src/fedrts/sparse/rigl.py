"""The RigL step: drop the weakest links, grow the most promising ones (Evci et al., 2020)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fedrts.sparse.mask import Mask
from fedrts.sparse.topk import top, top_indices


def step(strength: Tensor, promise: Tensor, mask: Mask, quota: Sequence[int], outgoing: Sequence[int] | None = None) -> tuple[Mask, Mask]:
    """(kept, new): drop the `outgoing[l]` active links of least `strength [P]` in each layer, then grow `quota[l]`; by default as many.

    Grown are those of most `promise [P]` (or `[U]`, of arms) among all links inactive after the drop, the just dropped ones included.
    Weights off `kept` start at 0, also those of a link that was dropped and grown again. Ties go to the lowest index.
    """
    kept = weakest_dropped(strength, mask, quota if outgoing is None else outgoing)
    grown = kept.bits.clone()
    grown[top_indices(promise, quota, ~kept.bits, mask.sizes)] = True
    return kept, Mask(grown, mask.sizes)


def weakest_dropped(strength: Tensor, mask: Mask, quota: Sequence[int]) -> Mask:
    """Return `mask` without the `quota[l]` active links of smallest `strength [P]` in each layer."""
    remaining = [active - q for active, q in zip(mask.counts, quota, strict=True)]
    kept = mask.bits.clone()
    kept[mask.active] = top(strength[mask.active], remaining, mask.counts)
    return Mask(kept, mask.sizes)
