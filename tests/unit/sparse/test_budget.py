import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from fedrts.errors import InputError
from fedrts.sparse import budget
from fedrts.sparse.layout import Layout


def resnet18_shapes() -> dict[str, tuple[int, ...]]:
    """The convolutions of torchvision's resnet18."""
    shapes: dict[str, tuple[int, ...]] = {"conv1": (64, 3, 7, 7)}
    for stage, width in enumerate((64, 128, 256, 512), start=1):
        before = width if stage == 1 else width // 2
        for block in (0, 1):
            shapes[f"layer{stage}.{block}.conv1"] = (width, before if block == 0 else width, 3, 3)
            shapes[f"layer{stage}.{block}.conv2"] = (width, width, 3, 3)
        if stage > 1:
            shapes[f"layer{stage}.0.downsample"] = (width, before, 1, 1)
    return shapes


def test_erk_of_resnet18_has_the_published_check_values():
    shapes = resnet18_shapes()
    prunable, everything, dense = 11_166_912, 11_181_642, 14_730
    assert sum(math.prod(shape) for shape in shapes.values()) == prunable
    kept = math.floor(0.2 * everything) - dense
    assert kept / prunable == pytest.approx(0.198945, abs=1e-6)
    counts = dict(zip(shapes, budget.erk(list(shapes.values()), kept), strict=True))
    density = {name: counts[name] / math.prod(shape) for name, shape in shapes.items()}
    assert sum(counts.values()) == kept
    saturated = {name for name in shapes if density[name] == 1}
    assert saturated == {name for name in shapes if name.startswith(("conv1", "layer1")) or "downsample" in name}
    expected = {
        "layer2.0.conv1": 0.7484,
        "layer2": 0.4951,
        "layer3.0.conv1": 0.3685,
        "layer3": 0.2447,
        "layer4.0.conv1": 0.1828,
        "layer4": 0.1217,
    }
    for name in set(shapes) - saturated:
        assert density[name] == pytest.approx(expected.get(name, expected[name[:6]]), abs=5e-5), name


shape = st.lists(st.integers(1, 7), min_size=1, max_size=4).map(tuple)


@given(st.lists(shape, min_size=1, max_size=6), st.floats(0, 1), st.sampled_from(sorted(budget.BUDGETS)))
def test_budgets_are_exact_and_within_every_layer(shapes, share, kind):
    sizes = [math.prod(s) for s in shapes]
    kept = len(sizes) + round(share * (sum(sizes) - len(sizes)))
    counts = budget.BUDGETS[kind](shapes, kept)
    assert sum(counts) == kept
    assert all(1 <= count <= size for count, size in zip(counts, sizes, strict=True))
    if kept == sum(sizes):
        assert counts == sizes


def test_only_the_current_maximum_saturates_in_a_pass():
    # raw densities 0.9, 0.2, 0.02 over 10, 100, 1000 weights and 300 to keep: saturating the first alone is enough
    densities = budget.densities([(10,), (100,), (1000,)], 100, [0.9, 0.2, 0.02])
    assert densities[0] == 1.0
    assert 0 < densities[2] < densities[1] < 1
    assert sum(d * n for d, n in zip(densities, (10, 100, 1000), strict=True)) == pytest.approx(100)


def test_er_ignores_kernels_and_uniform_is_uniform():
    wide, narrow = budget.er([(8, 8, 3, 3), (8, 8, 1, 1)], 100)
    assert wide / (8 * 8 * 9) == pytest.approx(narrow / (8 * 8), abs=0.02)
    assert budget.uniform([(10, 10), (20, 10)], 60) == [20, 40]


def layout() -> Layout:
    return Layout.of(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)))


@given(st.floats(0.001, 1.0))
def test_density_counts_all_parameters(density):
    ours = layout()
    dense = ours.parameters - ours.links
    wanted = math.floor(density * ours.parameters) - dense
    if wanted >= len(ours.layers):
        assert budget.links_to_keep(ours, density) == wanted
    else:
        with pytest.raises(InputError, match="infeasible"):
            budget.links_to_keep(ours, density)


def test_an_infeasible_density_names_the_smallest_feasible_one_and_it_is():
    ours = layout()
    with pytest.raises(InputError, match=r"smallest feasible density is (0\.\d+).*prune_output=true.*budget='prunable'") as caught:
        budget.links_to_keep(ours, 0.05)
    smallest = float(str(caught.value).split("smallest feasible density is ")[1].split(";")[0])
    assert budget.links_to_keep(ours, smallest) >= len(ours.layers)
    with pytest.raises(InputError):
        budget.links_to_keep(ours, (ours.parameters - ours.links + 1) / ours.parameters)
    assert budget.links_to_keep(ours, 0.05, "prunable") == math.floor(0.05 * ours.links)


def test_a_model_without_prunable_weights_is_refused():
    with pytest.raises(InputError, match="no prunable weights"):
        budget.links_to_keep(Layout.of(nn.Linear(3, 3)), 0.5)


@example(29, 50)  # 0.58 · 50 is 28.999…
@example(57, 100)
@given(st.integers(0, 10**6), st.integers(1, 10**6))
def test_the_density_that_an_error_names_suffices(needed, total):
    needed = min(needed, total)
    assert math.floor(budget._smallest_density(needed, total) * total) >= needed
