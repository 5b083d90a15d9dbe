"""How many links each layer may keep: uniform, Erdős–Rényi (ER) and Erdős–Rényi-kernel (ERK) budgets.

Budgets are exact: the counts `K^l` sum to the number of links to keep, with 1 ≤ K^l ≤ n^l.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from fedrts.errors import InputError
from fedrts.sparse.layout import Layout, Shape


def links_to_keep(layout: Layout, density: float, count: str = "all") -> int:
    """How many prunable weights may stay so that `density` holds: floor(d'·N_all) − N_dense.

    `count="prunable"` counts d' over the prunable weights alone. An infeasible request names the smallest feasible density.
    """
    if not layout.layers:
        raise InputError("the model has no prunable weights: use a dense method, or set model_options.prune_output=true")
    least, dense = len(layout.layers), layout.parameters - layout.links
    total, spared = (layout.links, 0) if count == "prunable" else (layout.parameters, dense)
    kept = math.floor(density * total) - spared
    if kept < least:
        smallest = _smallest_density(least + spared, total)
        hint = "" if count == "prunable" else "; or set model_options.prune_output=true or topology.budget='prunable'"
        raise InputError(
            f"density {density:g} is infeasible: {spared:,} of {total:,} parameters are dense and each of {least} layers keeps "
            f"at least one link; the smallest feasible density is {smallest:g}{hint}"
        )
    return min(kept, layout.links)


def _smallest_density(needed: int, total: int) -> float:
    """The smallest density of few digits with floor(density · total) ≥ needed."""
    for digits in range(2, 16):
        step = 10.0**-digits
        density: float = round(math.ceil(needed / total / step) * step, digits)
        if math.floor(density * total) >= needed and density <= 1:
            return density
    return 1.0


def uniform(shapes: Sequence[Shape], kept: int) -> list[int]:
    """The same density in every layer."""
    sizes = [math.prod(shape) for shape in shapes]
    return _rounded([kept / sum(sizes)] * len(sizes), sizes, kept)


def er(shapes: Sequence[Shape], kept: int) -> list[int]:
    """Erdős–Rényi: density ∝ (in + out) / (in · out), kernels ignored."""
    return _scaled(shapes, kept, lambda shape: sum(shape[:2]) / math.prod(shape[:2]))


def erk(shapes: Sequence[Shape], kept: int) -> list[int]:
    """Erdős–Rényi-kernel (RigL): density ∝ sum(shape) / prod(shape)."""
    return _scaled(shapes, kept, lambda shape: sum(shape) / math.prod(shape))


def proportional(sizes: Sequence[int], kept: int, raw: Sequence[float]) -> list[int]:
    """Densities in the proportions of `raw`, as far as no layer exceeds 1."""
    return _rounded(densities([(size,) for size in sizes], kept, raw), sizes, kept)


BUDGETS = {"erk": erk, "er": er, "uniform": uniform}


def densities(shapes: Sequence[Shape], kept: int, raw: Sequence[float]) -> list[float]:
    """Layer densities ε·raw(l), where layers that would exceed 1 are saturated one maximum at a time.

    Per pass only the layers attaining the current maximum saturate, not every layer above 1; see RigL.
    """
    sizes = [math.prod(shape) for shape in shapes]
    target = kept / sum(sizes)
    saturated: set[int] = set()
    while len(saturated) < len(sizes):
        free = [i for i in range(len(sizes)) if i not in saturated]
        room = sum(target * sizes[i] for i in free) - sum((1 - target) * sizes[i] for i in saturated)
        epsilon = room / sum(raw[i] * sizes[i] for i in free)
        largest = max(raw[i] for i in free)
        if epsilon * largest <= 1:
            return [1.0 if i in saturated else epsilon * raw[i] for i in range(len(sizes))]
        saturated.update(i for i in free if raw[i] == largest)
    return [1.0] * len(sizes)


def _scaled(shapes: Sequence[Shape], kept: int, raw: Callable[[Shape], float]) -> list[int]:
    sizes = [math.prod(shape) for shape in shapes]
    return _rounded(densities(shapes, kept, [raw(shape) for shape in shapes]), sizes, kept)


def _rounded(fractions: Sequence[float], sizes: Sequence[int], kept: int) -> list[int]:
    """Largest-remainder rounding of density·n^l to counts in [1, n^l] that sum to `kept`."""
    if not len(sizes) <= kept <= sum(sizes):
        raise ValueError(f"{kept} links do not fit into {len(sizes)} layers with 1 to {sum(sizes)} links in all")
    wanted = [fraction * size for fraction, size in zip(fractions, sizes, strict=True)]
    counts = [min(max(math.floor(w), 1), size) for w, size in zip(wanted, sizes, strict=True)]
    while (missing := kept - sum(counts)) != 0:
        step = 1 if missing > 0 else -1
        room = [i for i in range(len(sizes)) if (counts[i] < sizes[i] if step > 0 else counts[i] > 1)]
        room.sort(key=lambda i: step * (counts[i] - wanted[i]))  # the farthest below (above) its wanted count first
        for i in room[: abs(missing)]:
            counts[i] += step
    return counts
