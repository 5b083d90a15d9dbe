"""How many links each layer may keep: uniform, Erdős–Rényi (ER) and Erdős–Rényi-kernel (ERK) budgets.

Budgets are exact: the counts `K^l` sum to the number of links to keep, with 1 ≤ K^l ≤ n^l. Where links are grouped (`sparse.arms`),
counts are of whole arms, one at least, and sum to at most that number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from fedrts.errors import InputError
from fedrts.sparse.arms import Layers
from fedrts.sparse.layout import Layout, Shape

_HALVINGS = 60
"""Bisections of an interval, until no float lies between its ends."""


def links_to_keep(layout: Layout, density: float, count: str = "all") -> int:
    """How many prunable weights may stay so that `density` holds: floor(d'·N_all) − N_dense.

    `count="prunable"` counts d' over the prunable weights alone. An infeasible request names the smallest feasible density.
    """
    if not layout.layers:
        raise InputError("the model has no prunable weights: use a dense method, or set model_options.prune_output=true")
    least, dense = sum(layout.sizes.each), layout.parameters - layout.links
    total, spared = (layout.links, 0) if count == "prunable" else (layout.parameters, dense)
    kept = math.floor(density * total) - spared
    if kept < least:
        smallest = _smallest_density(least + spared, total)
        hint = "" if count == "prunable" else "; or set model_options.prune_output=true or topology.budget='prunable'"
        hint += "; or a smaller topology.unit" if layout.sizes.grouped else ""
        raise InputError(
            f"density {density:g} is infeasible: {spared:,} of {total:,} parameters are dense and each of {len(layout.layers)} layers "
            f"keeps at least one {'arm' if layout.sizes.grouped else 'link'}; the smallest feasible density is {smallest:g}{hint}"
        )
    return min(kept, layout.links)


def _smallest_density(needed: int, total: int) -> float:
    """Return the smallest density with few digits for which floor(density · total) ≥ needed."""
    for digits in range(2, 16):
        step = 10.0**-digits
        density: float = round(math.ceil(needed / total / step) * step, digits)
        if math.floor(density * total) >= needed and density <= 1:
            return density
    return 1.0


def uniform(shapes: Sequence[Shape], kept: int) -> list[int]:
    """The same density in every layer."""
    sizes = [math.prod(shape) for shape in shapes]
    return _whole([kept / sum(sizes)] * len(sizes), sizes, kept)


def er(shapes: Sequence[Shape], kept: int) -> list[int]:
    """Erdős–Rényi: density ∝ (in + out) / (in · out), kernels ignored."""
    return _scaled(shapes, kept, lambda shape: sum(shape[:2]) / math.prod(shape[:2]))


def erk(shapes: Sequence[Shape], kept: int) -> list[int]:
    """Erdős–Rényi-kernel (RigL): density ∝ sum(shape) / prod(shape)."""
    return _scaled(shapes, kept, lambda shape: sum(shape) / math.prod(shape))


def proportional(sizes: Sequence[int], kept: int, raw: Sequence[float]) -> list[int]:
    """Return densities in the proportions of `raw`, as far as no layer exceeds 1."""
    return _whole(densities([(size,) for size in sizes], kept, raw), sizes, kept)


BUDGETS = {"erk": erk, "er": er, "uniform": uniform}


def layer_counts(layout: Layout, density: float, count: str = "all", kind: str = "erk") -> list[int]:
    """Return K^l of a model at this density, by the named budget."""
    kept = links_to_keep(layout, density, count)
    counts = BUDGETS[kind]([entry.shape for entry in layout.layers], kept)
    return _in_whole_arms(counts, layout.sizes.each, layout.sizes, layout.sizes, kept) if layout.sizes.grouped else counts


def between(wanted: Sequence[int], least: Sequence[int], most: Sequence[int], sizes: Sequence[int] = ()) -> list[int]:
    """`wanted` counts within bounds: where a layer cannot have its own, the others share the difference in proportion.

    The sum stays, as far as `most` lets it, and whole arms of layers of these `sizes` do; `least` must leave room for it.
    """
    kept = min(sum(wanted), sum(most))

    def times(factor: float) -> list[float]:
        return [min(max(factor * w, low), high) for w, low, high in zip(wanted, least, most, strict=True)]

    few, many = 0.0, max(high / w for w, high in zip(wanted, most, strict=True))
    factor = 1.0
    for _ in range(_HALVINGS):
        total = sum(times(factor))
        if total == kept:
            break
        few, many = (factor, many) if total < kept else (few, factor)
        factor = (few + many) / 2
    layers = Layers.of(sizes)
    return _in_whole_arms(times(factor), least, most, layers, kept) if layers.grouped else _rounded(times(factor), least, most, kept)


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
    return _whole(densities(shapes, kept, [raw(shape) for shape in shapes]), sizes, kept)


def _whole(fractions: Sequence[float], sizes: Sequence[int], kept: int) -> list[int]:
    """Return density·n^l as counts in [1, n^l] that sum to `kept`."""
    wanted, layers = [fraction * size for fraction, size in zip(fractions, sizes, strict=True)], Layers.of(sizes)
    if layers.grouped:
        return _in_whole_arms(wanted, layers.each, layers, layers, kept)
    return _rounded(wanted, layers.each, layers, kept)


def _in_whole_arms(wanted: Sequence[float], least: Sequence[int], most: Sequence[int], layers: Layers, kept: int) -> list[int]:
    """Counts of whole arms within [least, most] that sum to at most `kept`: each rounded down, then up by the largest remainders that fit.

    `least` and `most` are of whole arms. Where the least of some layers is above what is wanted the others give way, as far as they can.
    """
    each = layers.each
    counts = [min(max(math.floor(w / g) * g, low), high) for w, g, low, high in zip(wanted, each, least, most, strict=True)]
    while sum(counts) > kept:
        room = [i for i in range(len(counts)) if counts[i] > least[i]]
        if not room:
            break
        fullest = max(room, key=lambda i: counts[i] - wanted[i])
        counts[fullest] -= each[fullest]
    while room := [i for i in range(len(counts)) if counts[i] < min(wanted[i], most[i]) and sum(counts) + each[i] <= kept]:
        emptiest = max(room, key=lambda i: (wanted[i] - counts[i]) / each[i])
        counts[emptiest] += each[emptiest]
    return counts


def _rounded(wanted: Sequence[float], least: Sequence[int], most: Sequence[int], kept: int) -> list[int]:
    """Largest-remainder rounding to counts within [least, most] that sum to `kept`."""
    if not sum(least) <= kept <= sum(most):
        raise ValueError(f"{kept} links do not fit into {len(most)} layers with {sum(least)} to {sum(most)} links in all")
    counts = [min(max(math.floor(w), low), high) for w, low, high in zip(wanted, least, most, strict=True)]
    while (missing := kept - sum(counts)) != 0:
        step = 1 if missing > 0 else -1
        room = [i for i in range(len(most)) if (counts[i] < most[i] if step > 0 else counts[i] > least[i])]
        room.sort(key=lambda i: step * (counts[i] - wanted[i]))  # the farthest below (above) its wanted count first
        for i in room[: abs(missing)]:
            counts[i] += step
    return counts
